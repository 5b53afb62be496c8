"""Figure 3: how many of the N selected keys are geometrically distinguishable, compared with chance.

N_s counts the selected y_i = a_i x_i within r of the context vector s; r is the distance of the nearest key outside the
selection. The paper normalizes the vectors to a sphere; here they are also measured unchanged. The measured N_s / N is
compared with permuted weights, with random directions (Assumption 1, "isotropic"), and with the bounds of Theorem 2 as
printed and as corrected.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from attnorm.engines.execution import one_thread
from attnorm.figures import CORRECTED, INK, NULL, PALE, PRINTED, note, panel
from attnorm.theory.geometry import (
    minimum_separation,
    nearest_outsider,
    on_sphere,
    separability,
    theorem2_bounds,
    theorem2_printed,
    xi,
)
from attnorm.theory.selection import SelectedRows
from attnorm_lab.experiments.experiment import (
    Experiment,
    ExperimentFinding,
    ExperimentSubject,
    Floats,
    Outcome,
    ProgressCallback,
    Verdict,
    judge,
)
from attnorm_lab.experiments.model_runs import LastRows, last_rows

LENGTH, QUICK_LENGTH = 1024, 512
TOP_N = (2, 4, 8, 16, 32, 64, 128, 256)
TURN = 16  # the N up to which the paper sees a decline
SATURATED = (0.7, 0.85)
CLOSE = 0.05  # separabilities that differ by less are the same
IDEAL: dict[str, Any] = {
    "color": "#3d7d4c", "linestyle": (0, (3, 1, 1, 1)), "marker": "P", "markersize": 4.5, "linewidth": 1.2
}  # fmt: skip
LOWEST = -0.3


@dataclass(frozen=True)
class Separabilities:
    """Every head, (heads, len(top_n)): the measured share, its nulls, and Theorem 2."""

    top_n: tuple[int, ...]
    draws: int  # of each null
    measured: Floats
    permuted: Floats  # the weights permuted over the keys, r computed again
    isotropic: Floats  # random directions (Assumption 1), r computed again
    isotropic_fixed: Floats  # the same with r fixed at the measured one: what Theorem 2 is about
    fixed_error: Floats  # its standard error
    lower: Floats  # corrected bounds for that r
    upper: Floats
    printed_lower: Floats
    printed_upper: Floats
    certain: Floats  # 1 where r >= max xi: all N keys are inside, as they are for all vectors so far apart

    @property
    def slack(self) -> Floats:
        """Return the tolerance of the mean of the draws with r fixed; if all agree, by the rule of three."""
        return np.asarray(4 * self.fixed_error + 3 / (self.draws * np.array(self.top_n)))

    def table(self, vectors: str) -> pa.Table:
        heads, columns = self.measured.shape
        numbers = {name: value.ravel() for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return pa.table(
            {
                "vectors": [vectors] * (heads * columns),
                "head": np.repeat(np.arange(heads), columns),
                "top_n": np.tile(self.top_n, heads),
                **numbers,
            }
        )


@one_thread()
def measure(
    layers: Sequence[LastRows],
    top_n: tuple[int, ...],
    draws: int,
    generator: torch.Generator,
    progress: ProgressCallback,
    what: str,
) -> Separabilities:
    """Measure all layers; progress is called after each."""
    columns: dict[str, list[Floats]] = {}
    for index, layer in enumerate(layers):
        selection = layer.selected(max(top_n))
        radii = _measure_each_n(selection, top_n, nearest_outsider)
        numbers = {
            "measured": _measure_each_n(selection, top_n, separability),
            **_theorem2(layer, selection, top_n),
            **_nulls(layer, top_n, radii, draws, generator),
        }
        for name, value in numbers.items():
            columns.setdefault(name, []).append(np.asarray(value.flatten(0, -2).numpy(), dtype=np.float64))
        progress(f"separability of vectors {what}", index + 1, len(layers))
    return Separabilities(top_n, draws, **{name: np.concatenate(values) for name, values in columns.items()})


def _theorem2(layer: LastRows, selection: SelectedRows, top_n: tuple[int, ...]) -> dict[str, Tensor]:
    """Return both forms of the bounds, with the radius of each row treated as fixed in advance.

    They hold for a_i x_i with x_i on the unit sphere, so the length of a vector is moved into its weight.
    """
    unit, lengths = on_sphere(layer.vectors), torch.linalg.vector_norm(layer.vectors, dim=-1)
    selection = SelectedRows(
        selection.weights * lengths.unsqueeze(-2), unit, selection.visible, selection.indices, False
    )
    delta = minimum_separation(unit).unsqueeze(-1).expand(selection.weights.shape[:-1])
    columns = []
    for N in top_n:
        rows = selection.with_indices(selection.indices[..., :N])
        r = nearest_outsider(rows)
        certain = (r >= xi(rows, 1.0, delta).amax(-1)).double()
        columns.append(torch.stack([*theorem2_bounds(rows, r, 1.0), *theorem2_printed(rows, r, 1.0, delta), certain]))
    return dict(
        zip(("lower", "upper", "printed_lower", "printed_upper", "certain"), torch.stack(columns, -1), strict=True)
    )


def _measure_each_n(selection: SelectedRows, top_n: Sequence[int], number: Callable[[SelectedRows], Tensor]) -> Tensor:
    """Return a number of every row for each N, in the last dimension."""
    return torch.stack([number(selection.with_indices(selection.indices[..., :N])) for N in top_n], -1)


def _nulls(
    layer: LastRows, top_n: tuple[int, ...], radii: Tensor, draws: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return the nulls of theory.geometry.separability_null, with one draw for all N and both radii."""
    lengths = torch.linalg.vector_norm(layer.vectors, dim=-1, keepdim=True)
    permuted, isotropic, fixed = [], [], []
    for _ in range(draws):
        shuffled = layer.permuted(generator).selected(max(top_n))
        permuted.append(_measure_each_n(shuffled, top_n, separability))
        normal = torch.randn(layer.vectors.shape, generator=generator, dtype=torch.float64)
        drawn = replace(layer, vectors=on_sphere(normal) * lengths).selected(max(top_n))
        selections = [drawn.with_indices(drawn.indices[..., :N]) for N in top_n]
        isotropic.append(torch.stack([separability(rows) for rows in selections], -1))
        fixed.append(torch.stack([separability(rows, radii[..., index]) for index, rows in enumerate(selections)], -1))
    with_fixed = torch.stack(fixed)
    return {
        "permuted": torch.stack(permuted).mean(0),
        "isotropic": torch.stack(isotropic).mean(0),
        "isotropic_fixed": with_fixed.mean(0),
        "fixed_error": with_fixed.std(0) / math.sqrt(draws),
    }


def _run(subject: ExperimentSubject, progress: ProgressCallback, parts: Path) -> Outcome:
    length = subject.longest_length((LENGTH,), QUICK_LENGTH)
    draws = 4 if subject.quick else 40
    top_n = tuple(N for N in (TOP_N[:6] if subject.quick else TOP_N) if length > N)
    generator = torch.Generator().manual_seed(subject.seed)
    layers = [layer for layer in last_rows(subject, length, progress=progress) if layer.keys > max(top_n)]
    if not layers:
        raise ValueError(
            f"expected a model in which a layer attends to more than {max(top_n)} keys, as Figure 3 needs, got none. "
            "Use another model."
        )
    sphere = measure([layer.on_sphere() for layer in layers], top_n, draws, generator, progress, "on the sphere")
    raw = measure(layers, top_n, draws, generator, progress, "as they are")
    setting = f"{subject.model_and_text()}; last row of {len(raw.measured)} heads, L = {length}"
    return Outcome(
        summary=summary(sphere, raw),
        findings=findings(sphere, raw),
        figures={"fig3": figure(sphere, raw, setting)},
        tables={"fig3": pa.concat_tables([sphere.table("on the sphere"), raw.table("as they are")])},
        parameters={
            "length": length,
            "top_n": top_n,
            "rows": "last",
            "vectors": "values after the head's projection",
            "radius": "distance of the nearest key outside the top N",
            "draws": draws,
            "seed": subject.seed,
        },
    )


EXPERIMENT = Experiment(
    name="fig3",
    title="Figure 3: geometric separability",
    source="Mudarisov et al. 2025, Figure 3 and Theorem 2",
    question="Which share of the selected keys is distinguishable from the others, and is that more than chance?",
    run=_run,
    tokens=(LENGTH, QUICK_LENGTH),
)


def findings(sphere: Separabilities, raw: Separabilities) -> tuple[ExperimentFinding, ...]:
    return (
        _judge_decline(sphere, raw),
        _judge_level(sphere, raw),
        _judge_hard_limit(sphere, raw),
        _judge_printed_upper(sphere),
        _judge_printed_lower(sphere),
        _judge_assumption(sphere),
        _judge_chance(sphere, raw),
    )


def summary(sphere: Separabilities, raw: Separabilities) -> str:
    medians = _medians(sphere)
    last, null = sphere.top_n[-1], float(np.median(sphere.permuted[:, -1]))
    above = _share_above_null(sphere)
    return (
        f"On the sphere the median share of distinguishable keys goes from {medians[0]:.2f} at N = {sphere.top_n[0]} "
        f"to {_median_at(sphere, TURN):.2f} at N = {TURN} and {medians[-1]:.2f} at N = {last}; with the values as "
        f"they are it ends at {_medians(raw)[-1]:.2f}. Permuted weights give {null:.2f} at "
        f"N = {last}, uniform directions {np.median(sphere.isotropic[:, -1]):.2f}; at N = {TURN} {above:.0%} of the "
        f"heads separate clearly more keys than their own permutation. The level is no limit of attention: theory "
        "allows every value from 0 to 1. Compare each head with its own null."
    )


def _judge_decline(sphere: Separabilities, raw: Separabilities) -> ExperimentFinding:
    drop = _medians(sphere)[0] - _median_at(sphere, TURN)
    after = abs(_medians(sphere)[-1] - _median_at(sphere, TURN))
    verdict = judge(drop > CLOSE and after < 0.1, partly=drop > CLOSE)
    return ExperimentFinding(
        "N_s / N declines up to N of about 16, then saturates (Fig. 3)",
        f"median over heads, on the sphere: {_describe_curve(sphere)}; as they are: {_describe_curve(raw)}",
        verdict,
    )


def _judge_level(sphere: Separabilities, raw: Separabilities) -> ExperimentFinding:
    low, high = SATURATED
    phrases = []
    verdicts: list[Verdict] = []
    for name, separabilities in (("on the sphere", sphere), ("as they are", raw)):
        late = separabilities.measured[:, [N >= TURN for N in separabilities.top_n]]
        share = float(((late >= low) & (late <= high)).mean())
        quartiles = np.quantile(late, [0.25, 0.5, 0.75])
        near = low - CLOSE <= quartiles[1] <= high + CLOSE
        inside = low <= quartiles[1] <= high and share > 0.5
        verdicts.append(judge(inside, partly=near))
        phrases.append(
            f"{name} {quartiles[1]:.2f} (quartiles {quartiles[0]:.2f} to {quartiles[2]:.2f}), {share:.0%} inside"
        )
    return ExperimentFinding(
        "It saturates between 0.7 and 0.85 (Fig. 3)",
        f"heads at N >= {TURN}: " + "; ".join(phrases),
        verdicts[0],
        "The level is a number of a model, and heads differ widely: it is the median that lies there or does not.",
    )


def _judge_hard_limit(sphere: Separabilities, raw: Separabilities) -> ExperimentFinding:
    phrases = []
    for name, separabilities in (("on the sphere", sphere), ("as they are", raw)):
        at_turn = separabilities.measured[:, separabilities.top_n.index(TURN)]
        phrases.append(
            f"{name} {(at_turn > 0.8).mean():.0%} of the heads separate more than 80 %, {(at_turn == 1).mean():.0%} all"
        )
    broken = bool((sphere.measured[:, sphere.top_n.index(TURN)] > 0.8).any())
    return ExperimentFinding(
        "No more than about 80 % of the top N can be distinguished: a hard limit (contribution 2)",
        f"at N = {TURN}: " + "; ".join(phrases),
        judge(not broken),
        "Orthonormal vectors give N_s / N = 1 for every N: it is an observation about one model, not a theorem.",
    )


def _judge_printed_upper(sphere: Separabilities) -> ExperimentFinding:
    broken = (sphere.certain > 0) & (sphere.printed_upper < 1 - 1e-9)
    lowest = float(sphere.printed_upper.min())
    vacuous = float((sphere.printed_upper > 0.99).mean())
    return ExperimentFinding(
        "The exponential upper bound tracks the empirical maxima (Fig. 3, Theorem 2)",
        f"it lies between {lowest:.3f} and 1, above 0.99 in {vacuous:.0%} of the rows; the measured maxima are "
        f"{sphere.measured.max(0).min():.2f} to {sphere.measured.max():.2f}; in {broken.sum()} of {broken.size} rows "
        "all N keys are inside for certain, and it says less than 1",
        "does not" if broken.any() else "partly",
        "It is near 1 whatever a head does, and false where r >= max xi: all N keys are inside then, while it falls.",
    )


def _judge_printed_lower(sphere: Separabilities) -> ExperimentFinding:
    negative = float((sphere.printed_lower <= 0).mean())
    above = float((sphere.printed_lower > sphere.isotropic_fixed + sphere.slack).mean())
    return ExperimentFinding(
        "The lower bound holds and is conservative (Fig. 3, Theorem 2)",
        f"negative, so empty, in {negative:.0%} of the rows (median {np.median(sphere.printed_lower):.2f}); above the "
        f"draws in {above:.0%}",
        judge(above < 0.01),
        f"The corrected lower bound is above 0 in {(sphere.lower > 0).mean():.0%} of the rows.",
    )


def _judge_assumption(sphere: Separabilities) -> ExperimentFinding:
    """Judge the claim about Assumption 1 itself."""
    values = np.median(sphere.isotropic, axis=0)
    late = values[[N >= TURN for N in sphere.top_n]]
    low, high = SATURATED
    drawn, slack = sphere.isotropic_fixed, sphere.slack
    held = (drawn >= sphere.lower - slack) & (drawn <= sphere.upper + slack)
    return ExperimentFinding(
        "Even with idealized spherical embeddings no more than four fifths are separated (section 3.2)",
        "uniform directions with the heads' own weights, median: "
        + ", ".join(f"{value:.2f} at N = {N}" for N, value in zip(sphere.top_n, values, strict=True)),
        "does not" if bool((late > high).any()) else "reproduces" if bool((late >= low).all()) else "partly",
        f"The corrected bounds (for r fixed) hold in {held.mean():.1%} of the rows.",
    )


def _judge_chance(sphere: Separabilities, raw: Separabilities) -> ExperimentFinding:
    phrases = []
    for name, separabilities in (("on the sphere", sphere), ("as they are", raw)):
        turn = separabilities.top_n.index(TURN)
        difference = separabilities.measured[:, turn] - separabilities.permuted[:, turn]
        phrases.append(
            f"{name} {np.median(separabilities.measured[:, turn]):.2f} against "
            f"{np.median(separabilities.permuted[:, turn]):.2f} "
            f"({(difference > CLOSE).mean():.0%} of the heads above, {(difference < -CLOSE).mean():.0%} below)"
        )
    turn = sphere.top_n.index(TURN)
    medians = abs(float(np.median(sphere.measured[:, turn] - sphere.permuted[:, turn])))
    return ExperimentFinding(
        "A drop of N_s / N to 70-80 % means that the head has saturated its geometric capacity (Conclusions)",
        f"against permuted weights, N = {TURN}: " + "; ".join(phrases),
        "does not" if medians < 0.1 else "partly",
        f"Weights that are independent of the vectors fall as well, and {'as far' if medians < 0.1 else 'further'}: "
        "compare a head with its own null.",
    )


def _medians(separabilities: Separabilities) -> list[float]:
    return [float(value) for value in np.median(separabilities.measured, axis=0)]


def _median_at(separabilities: Separabilities, top_n: int) -> float:
    return _medians(separabilities)[separabilities.top_n.index(top_n)]


def _share_above_null(separabilities: Separabilities) -> float:
    turn = separabilities.top_n.index(TURN)
    return float((separabilities.measured[:, turn] - separabilities.permuted[:, turn] > CLOSE).mean())


def _describe_curve(separabilities: Separabilities) -> str:
    return ", ".join(
        f"{value:.2f} at N = {N}" for N, value in zip(separabilities.top_n, _medians(separabilities), strict=True)
    )


def figure(sphere: Separabilities, raw: Separabilities, setting: str) -> Figure:
    drawn = Figure(figsize=(11.4, 4.6))
    left, right = drawn.subplots(
        1, 2, sharey=True, gridspec_kw={"wspace": 0.06, "left": 0.055, "right": 0.99, "top": 0.79, "bottom": 0.14}
    )
    _draw_panel(left, sphere)
    panel(left, "a", "vectors on the sphere, as in the paper")
    _draw_panel(right, raw)
    panel(right, "b", "vectors as they are")
    left.set_ylabel("distinguishable share $N_s / N$")
    handles, labels = left.get_legend_handles_labels()
    drawn.legend(handles, labels, loc="upper left", bbox_to_anchor=(0.05, 0.995), ncols=3)
    note(drawn, f"{setting}; boxes: quartiles over heads, whiskers 5 to 95 %; lines: medians over heads")
    return drawn


def _draw_panel(axes: Axes, separabilities: Separabilities) -> None:
    positions = np.arange(len(separabilities.top_n), dtype=float)
    axes.axhspan(0.7, 0.85, color="#eceef1", linewidth=0, label="0.7 to 0.85 (the paper)")
    box: dict[str, Any] = {"color": INK, "linewidth": 0.9}
    axes.boxplot(
        [column[np.isfinite(column)] for column in separabilities.measured.T], positions=positions.tolist(),
        widths=0.42,
        whis=(5, 95), showfliers=False, patch_artist=True, boxprops={"facecolor": "#b9c4cf", **box},
        medianprops={"color": INK, "linewidth": 2}, whiskerprops=box, capprops=box, manage_ticks=False,
    )  # fmt: skip
    axes.plot([], [], marker="s", markersize=9, linestyle="none", markerfacecolor="#b9c4cf", markeredgecolor=INK,
              label="measured, over heads")  # fmt: skip
    axes.plot(positions, np.median(separabilities.permuted, 0), label="null: weights permuted", **NULL)
    axes.plot(
        positions, np.median(separabilities.isotropic, 0), label="null: uniform directions (Assumption 1)", **IDEAL
    )
    held = {**IDEAL, "markerfacecolor": "white", "linewidth": 0.9}
    axes.plot(positions, np.median(separabilities.isotropic_fixed, 0), label="the same with $r$ held fixed", **held)
    axes.fill_between(
        positions,
        np.median(separabilities.lower, 0),
        np.median(separabilities.upper, 0),
        color=CORRECTED["color"],
        alpha=0.13,
        linewidth=0,
    )
    axes.plot(
        positions, np.median(separabilities.lower, 0), label="Theorem 2 corrected, $r$ held fixed (band)", **CORRECTED
    )
    axes.plot(positions, np.median(separabilities.upper, 0), **CORRECTED)
    axes.plot(positions, np.median(separabilities.printed_upper, 0), label="Theorem 2 as printed", **PRINTED)
    printed = np.median(separabilities.printed_lower, 0)
    axes.plot(positions, np.where(printed >= LOWEST, printed, np.nan), **PRINTED)
    if (printed < LOWEST).any():
        outside = ", ".join(f"{value:.1f}" for value in printed[printed < LOWEST])
        text = f"printed lower bound, off the scale: {outside}"
        axes.text(0.99, 0.015, text, transform=axes.transAxes, fontsize=7.5, color=PRINTED["color"], ha="right")
    axes.axhline(0, color=PALE, linewidth=0.6)
    axes.set(ylim=(LOWEST, 1.06), yticks=[0, 0.2, 0.4, 0.6, 0.8, 1.0])
    axes.set_xticks(positions.tolist(), [str(N) for N in separabilities.top_n])
    axes.set(xlim=(-0.5, len(positions) - 0.5), xlabel="selected keys $N$")
