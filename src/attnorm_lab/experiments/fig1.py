"""Figure 1: tokens on a circle, scaled by attention, and the ball around the selected keys; a toy and a real head.

The paper's figure is two-dimensional; a head's vectors are not. The real head is drawn so that the decisive quantities
are exact: on the left directions in a plane, in the middle the length of every a_i x_i, on the right its distance from
s, and so which keys are inside the ball. The plane is spanned by s and the direction in which the selected keys differ
most.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from torch import Tensor

from attnorm.figures import INK, PALE, note
from attnorm.theory.geometry import distinguishable, nearest_outsider, on_sphere, separability, separability_null
from attnorm.theory.selection import SelectedRows, select
from attnorm_lab.experiments.experiment import (
    Experiment,
    ExperimentFinding,
    ExperimentSubject,
    Floats,
    Outcome,
    ProgressCallback,
    judge,
)
from attnorm_lab.experiments.model_runs import LastRows, last_rows

LENGTH = 48  # tokens: as many as a figure can show
TOP_N = 5
TOY_TOKENS = 24
DRAWS = 20
OTHER: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 3.2, "color": INK, "alpha": 0.75}
SELECTED: dict[str, Any] = {"linestyle": "none", "marker": "*", "markersize": 9.5, "markeredgecolor": INK}
MAGENTA = "#d81b79"


@dataclass(frozen=True)
class Scene:
    """One row as the figure shows it; arrays by key."""

    title: str
    directions: Floats  # angle of x_i in the plane
    lengths: Floats  # ||a_i x_i||
    context: tuple[float, float]  # s in the plane
    from_context: Floats  # angle of a_i x_i - s in the plane
    distances: Floats  # ||a_i x_i - s||, exact
    radius: float
    chosen: Floats  # 1 where selected
    inside: Floats  # 1 where selected and distinguishable
    dimension: int

    def table(self) -> pa.Table:
        numbers = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return pa.table({"scene": [self.title] * len(self.lengths), "key": np.arange(len(self.lengths)), **numbers})


def scene(rows: SelectedRows, title: str) -> Scene:
    """Compute the scene of one row: weights (1, 1, L) and vectors (1, L, d)."""
    y = rows.weights[0, 0, :, None] * rows.vectors[0]
    s = rows.context[0, 0]
    plane = _plane(s, y[rows.chosen[0, 0]])
    apart, directions = (y - s) @ plane.T, rows.vectors[0] @ plane.T
    return Scene(
        title=title,
        directions=_array(torch.atan2(directions[:, 1], directions[:, 0])),
        lengths=_array(torch.linalg.vector_norm(y, dim=-1)),
        context=(float((s @ plane.T)[0]), float((s @ plane.T)[1])),
        from_context=_array(torch.atan2(apart[:, 1], apart[:, 0])),
        distances=_array(rows.distances[0, 0]),
        radius=float(nearest_outsider(rows)[0, 0]),
        chosen=_array(rows.chosen[0, 0]),
        inside=_array(distinguishable(rows)[0, 0]),
        dimension=rows.vectors.shape[-1],
    )


def _array(values: Tensor) -> Floats:
    return np.asarray(values.double().numpy(), dtype=np.float64)


def _plane(s: Tensor, selected: Tensor) -> Tensor:
    """Return two orthonormal directions (2, d): that of s, and the one in which the selected keys differ most."""
    if s.shape[-1] == 2:
        return torch.eye(2, dtype=s.dtype)
    first = s / torch.linalg.vector_norm(s).clamp(min=1e-12)
    residual = selected - (selected @ first).unsqueeze(-1) * first
    second = torch.linalg.svd(residual - residual.mean(0), full_matrices=False).Vh[0]
    second = second - (second @ first) * first
    return torch.stack([first, second / torch.linalg.vector_norm(second).clamp(min=1e-12)])


def toy(seed: int, tokens: int = TOY_TOKENS) -> SelectedRows:
    """Return the paper's toy: random tokens on a circle, softmax of random logits."""
    generator = torch.Generator().manual_seed(seed)
    angles = 2 * math.pi * torch.rand(tokens, generator=generator, dtype=torch.float64)
    logits = torch.randn(tokens, generator=generator, dtype=torch.float64)
    return _single_row(logits.softmax(0), torch.stack([angles.cos(), angles.sin()], -1))


def _single_row(weights: Tensor, vectors: Tensor) -> SelectedRows:
    return select(weights[None, None], vectors[None], TOP_N)


def typical(layers: list[LastRows]) -> tuple[int, int, SelectedRows]:
    """Return layer, head and row to draw: of those with the median N_s, the one whose top N mass is closest to 0.6."""
    candidates: list[tuple[float, float, int, int]] = []
    for index, layer in enumerate(layers):
        rows = layer.selected(TOP_N)
        per_group = layer.weights.shape[1]
        for group, row in np.ndindex(*layer.weights.shape[:2]):
            share, mass = float(separability(rows)[group, row]), float(rows.mass[group, row])
            candidates.append((share, mass, index, group * per_group + row))
    middle = float(np.median([candidate[0] for candidate in candidates]))
    nearest = min(abs(candidate[0] - middle) for candidate in candidates)
    likely = [candidate for candidate in candidates if abs(candidate[0] - middle) == nearest]
    _, _, index, head = min(likely, key=lambda candidate: abs(candidate[1] - 0.6))
    layer = layers[index]
    group, row = divmod(head, layer.weights.shape[1])
    return layer.layer, head, _single_row(layer.weights[group, row], layer.vectors[group])


def _run(subject: ExperimentSubject, progress: ProgressCallback, parts: Path) -> Outcome:
    (length,) = subject.lengths([LENGTH])
    layers = [layer.on_sphere() for layer in last_rows(subject, length, progress=progress) if layer.keys == length]
    if not layers:
        raise ValueError(
            f"expected a model in which a layer attends to all {length} tokens, as Figure 1 needs, got none. Use "
            "another model."
        )
    layer, head, rows = typical(layers)
    scenes = (
        scene(toy(subject.seed), "toy: random tokens on a circle"),
        scene(rows, f"{subject.loaded().name}, layer {layer}, head {head}"),
    )
    shares = torch.cat([separability(layer.selected(TOP_N)).flatten() for layer in layers]).numpy()
    chance = _mean_by_dimension(layers, subject, progress)
    finding = _finding(scenes, shares, chance)
    setting = f"{subject.passages()[0].name}; last of {length} tokens, vectors: values on the sphere"
    return Outcome(
        summary=_summary(scenes, shares, chance),
        findings=(finding,),
        figures={"fig1": figure(scenes, TOP_N, setting)},
        tables={"fig1": pa.concat_tables([scene.table() for scene in scenes])},
        parameters={
            "length": length,
            "top_n": TOP_N,
            "layer": layer,
            "head": head,
            "toy_tokens": TOY_TOKENS,
            "draws": DRAWS,
            "seed": subject.seed,
        },
    )


def _mean_by_dimension(
    layers: list[LastRows], subject: ExperimentSubject, progress: ProgressCallback
) -> dict[int, float]:
    """Return the mean N_s / N of the heads' weights on uniform directions, in two dimensions and in the model's."""
    generator = torch.Generator().manual_seed(subject.seed)
    mean_by_dimension = {}
    for dimension in (2, layers[0].vectors.shape[-1]):
        values = []
        for index, layer in enumerate(layers):
            normal = torch.randn(*layer.vectors.shape[:2], dimension, generator=generator, dtype=torch.float64)
            rows = LastRows(layer.layer, layer.weights, on_sphere(normal), layer.visible).selected(TOP_N)
            values.append(separability_null(rows, DRAWS, "isotropic", None, generator).mean.flatten())
            progress(f"uniform directions in {dimension} dimensions", index + 1, len(layers))
        mean_by_dimension[dimension] = float(torch.cat(values).mean())
    return mean_by_dimension


def _finding(scenes: tuple[Scene, ...], shares: Floats, chance: dict[int, float]) -> ExperimentFinding:
    plane, model = chance.items()
    phrases = [f"{scene.title}: {int(scene.inside.sum())} of {TOP_N} selected keys inside the ball" for scene in scenes]
    only_some = 0 < float((shares < 1).mean()) < 1
    return ExperimentFinding(
        "Only some of the selected tokens stay inside the ball (Fig. 1, an illustration)",
        "; ".join(phrases) + f"; over all {len(shares)} heads {shares.mean():.2f} of them, all {TOP_N} in "
        f"{(shares == 1).mean():.0%}",
        judge(only_some, partly=True),
        f"A plane misleads: the heads' weights on uniform directions keep {plane[1]:.2f} of the selected keys inside "
        f"in {plane[0]} dimensions and {model[1]:.2f} in {model[0]}.",
    )


def _summary(scenes: tuple[Scene, ...], shares: Floats, chance: dict[int, float]) -> str:
    drawn, real = scenes
    plane, model = chance.items()
    return (
        f"In the toy {int(drawn.inside.sum())} of the {TOP_N} selected tokens stay inside the ball, in the head drawn "
        f"beside it {int(real.inside.sum())}; over all {len(shares)} heads {shares.mean():.2f} of the selected keys "
        f"do, and {(shares == 1).mean():.0%} of the heads keep all of them. The picture is right as an "
        f"illustration; but uniform directions with the heads' own weights leave {plane[1]:.2f} inside in the plane "
        f"and {model[1]:.2f} in {model[0]} dimensions, where directions are nearly orthogonal."
    )


EXPERIMENT = Experiment(
    name="fig1",
    title="Figure 1: the geometry of selection",
    source="Mudarisov et al. 2025, Figure 1",
    question="What does it look like when a head selects, in the paper's toy and in a real head?",
    run=_run,
    tokens=(LENGTH, LENGTH),
)


def figure(scenes: tuple[Scene, ...], top_n: int, setting: str) -> Figure:
    drawn = Figure(figsize=(10.2, 3.35 * len(scenes) + 0.65))
    rows = drawn.subplots(
        len(scenes), 3, squeeze=False,
        gridspec_kw={"left": 0.09, "right": 0.99, "top": 0.9, "bottom": 0.1, "wspace": 0.24, "hspace": 0.36},
    )  # fmt: skip
    for axes, scene in zip(rows, scenes, strict=True):
        _draw_circle(axes[0], scene)
        _draw_scaled(axes[1], scene)
        _draw_ball(axes[2], scene)
        title = axes[0].annotate(
            scene.title, (-0.26, 0.5), xycoords="axes fraction", rotation=90, fontsize=9, ha="center", va="center",
        )  # fmt: skip
        title.set_parse_math(False)
        along, across = ("$x_1$", "$x_2$") if scene.dimension == 2 else ("along $s$", "across $s$ (widest direction)")
        for panel in axes:
            panel.set_xlabel(along, fontsize=8)
            panel.set_ylabel(across, fontsize=8, labelpad=1)
    handles, labels = rows[0][2].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="upper center", ncols=5, columnspacing=1.4, handletextpad=0.3)
    exact = "real head: lengths (middle) and distances from s (right) are exact, angles are those in a plane"
    note(drawn, f"{setting}, N = {top_n}; {exact}")
    return drawn


def _draw_circle(axes: Axes, scene: Scene) -> None:
    axes.add_patch(Circle((0, 0), 1, fill=False, color=PALE, linewidth=0.8))
    _draw_points(axes, scene, np.ones_like(scene.lengths), scene.directions, (0.0, 0.0))
    _set_frame(axes, 1.15, (0.0, 0.0))
    axes.set_title(r"tokens $x_i$ on the sphere", fontsize=9)


def _draw_scaled(axes: Axes, scene: Scene) -> None:
    _draw_points(axes, scene, scene.lengths, scene.directions, (0.0, 0.0))
    axes.plot(0, 0, "+", color=PALE, markersize=8)
    _set_frame(axes, 1.15 * float(scene.lengths.max()), (0.0, 0.0))
    axes.set_title(r"scaled by attention: $\alpha_i x_i$", fontsize=9)


def _draw_ball(axes: Axes, scene: Scene) -> None:
    s = scene.context
    axes.add_patch(Circle(s, scene.radius, facecolor="#e6e9ee", edgecolor=PALE, linewidth=0.9, label=r"ball $B_r(s)$"))
    _draw_points(axes, scene, scene.distances, scene.from_context, s)
    axes.plot(*s, "X", color="white", markeredgecolor=INK, markersize=8, label="context vector $s$")
    farthest = float(scene.distances[scene.chosen > 0].max())
    _set_frame(axes, 1.25 * max(farthest, scene.radius), s)
    axes.set_title(rf"inside the ball: {int(scene.inside.sum())} of {int(scene.chosen.sum())}", fontsize=9)


def _draw_points(axes: Axes, scene: Scene, radii: Floats, angles: Floats, center: tuple[float, float]) -> None:
    x, y = center[0] + radii * np.cos(angles), center[1] + radii * np.sin(angles)
    outside, lost, kept = scene.chosen == 0, (scene.chosen > 0) & (scene.inside == 0), scene.inside > 0
    axes.plot(x[outside], y[outside], label="not selected", **OTHER)
    axes.plot(x[lost], y[lost], label="selected, outside the ball", markerfacecolor="white", **SELECTED)
    axes.plot(x[kept], y[kept], label="selected, distinguishable", markerfacecolor=MAGENTA, **SELECTED)


def _set_frame(axes: Axes, half: float, center: tuple[float, float]) -> None:
    axes.set_aspect("equal")
    axes.set(xlim=(center[0] - half, center[0] + half), ylim=(center[1] - half, center[1] + half))
    axes.locator_params(nbins=4)
    axes.tick_params(labelsize=7)
