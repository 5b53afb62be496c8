"""Figure 4 of Mudarisov et al. 2025: sensitivity of attention weights to their logits against the temperature.

    g(T, eps) = || softmax((l + eps d)/T) - softmax(l/T) || / eps,   ||d|| = 1

The paper's T divides the raw products q.k, so its models run at T = sqrt(d). The same holds here. Logits are float64:
at T = 1e-3 the rounding of a float32 logit moves the weights more than eps = 1e-3 does. The paper specifies neither
rows nor directions: here they are the longest rows of every head, and one random direction for each.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from attnorm.figures import CORRECTED, DASHED, INK, MEASURED, PRINTED, note, tidy
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.normalized import MODEL
from attnorm.metrics.sensitivity import measure_sensitivity
from attnorm.theory.gradient import corollary3_corrected, corollary3_printed, finite_difference_corrected
from attnorm_lab.experiments.experiment import (
    Experiment,
    ExperimentFinding,
    ExperimentSubject,
    Floats,
    Outcome,
    ProgressCallback,
    judge,
)
from attnorm_lab.experiments.model_runs import longest_rows, run_forward_pass

LENGTHS, QUICK_LENGTH = (256, 512, 1024), 256  # the longest that there is text for
EPSILONS = (1e-3, 1e-1, 10.0)
LOWEST, HIGHEST = -3.0, 1.5  # powers of ten of the temperature, as in the paper
TWO_ORDERS = 50.0  # reads as a factor of 100 on a logarithmic axis
AT_THE_BOUND = 0.8
ROUNDING = 1e-9  # relative tolerance of a bound
SHADES = ("#0b3d66", "#3f8fcf", "#9cc3e4")
MARKERS = ("v", "D", "s")


@dataclass(frozen=True)
class Sensitivity:
    """The largest value over the sampled rows: (heads, temperatures), and g with one more axis in front for eps."""

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    temperatures: Floats
    norm: Floats
    gain: Floats
    trained_temperature: float  # at which the model runs


def measure(
    subject: ExperimentSubject, progress: ProgressCallback, length: int, rows: int, temperatures: Floats
) -> Sensitivity:
    generator = torch.Generator().manual_seed(subject.seed)
    layers: list[int] = []
    heads: list[int] = []
    norms: list[Floats] = []
    gains: list[Floats] = []
    scales: list[float] = []

    def on_call(call: AttentionCall) -> None:
        raw = replace(call, query_BHQD=call.query_BHQD.double(), key_BGKD=call.key_BGKD.double(), scale=1.0)
        row_indices = longest_rows(call, rows)
        measured = measure_sensitivity(raw, [None], row_indices, temperatures.tolist(), EPSILONS, generator)[MODEL]
        count = call.query_BHQD.shape[1]
        layers.extend([call.layer] * count)
        heads.extend(range(count))
        norms.append(measured["jacobian_norm"].amax((0, 2)).cpu().numpy())
        gains.append(np.stack([measured[f"gain_{eps:g}"].amax((0, 2)).cpu().numpy() for eps in EPSILONS]))
        scales.append(call.scale)

    run_forward_pass(subject, length, on_call, progress, "sensitivity of every head")
    return Sensitivity(
        layers=tuple(layers),
        heads=tuple(heads),
        temperatures=temperatures,
        norm=np.concatenate(norms),
        gain=np.concatenate(gains, axis=1),
        trained_temperature=1 / float(np.median(scales)),
    )


def run(subject: ExperimentSubject, progress: ProgressCallback, parts: Path) -> Outcome:
    length = subject.longest_length(LENGTHS, QUICK_LENGTH)
    rows = 4 if subject.quick else 8
    temperatures = np.logspace(LOWEST, HIGHEST, 10 if subject.quick else 19)
    sensitivity = measure(subject, progress, length, rows, temperatures)
    findings = judge_claims(sensitivity)
    about = (
        f"{subject.model_and_text()}; {len(sensitivity.heads)} heads, {length:,} tokens, "
        f"{rows} of the longest rows each"
    )
    return Outcome(
        summary=_summary(sensitivity, findings),
        findings=findings,
        figures={"fig4": figure(sensitivity, about)},
        tables={"fig4": table(sensitivity)},
        parameters={
            "length": length,
            "rows": rows,
            "temperatures": temperatures.tolist(),
            "epsilons": EPSILONS,
            "directions": "one random direction per row, the same for every temperature and eps",
            "logits": "q.k, not scaled, float64",
            "trained_temperature": sensitivity.trained_temperature,
            "seed": subject.seed,
        },
    )


def judge_claims(sensitivity: Sensitivity) -> tuple[ExperimentFinding, ...]:
    T = sensitivity.temperatures
    largest, norm = sensitivity.gain.max(1), sensitivity.norm.max(0)
    printed, corrected = (bound(T) for bound in (_printed_bound, _corrected_bound))
    slopes = [_slope(T, curve, T <= 0.1) for curve in (*largest, norm)]
    follows = [abs(slope + 1) < 0.25 for slope in slopes[:-1]]
    at_bound = (norm >= AT_THE_BOUND * corrected)[T <= 0.1]
    above = [int((curve > printed * (1 + ROUNDING)).sum()) for curve in (*largest, norm)]
    finite = np.stack([finite_difference_corrected(eps, torch.from_numpy(T)).numpy() for eps in EPSILONS])
    broken = int(
        (sensitivity.gain > finite[:, None] * (1 + ROUNDING)).sum()
        + (sensitivity.norm > corrected * (1 + ROUNDING)).sum()
    )
    drop = [float(curve[T <= 0.1].max() / curve[T >= 1].max()) for curve in largest]
    nearest = int(np.abs(np.log(T / sensitivity.trained_temperature)).argmin())
    return (
        ExperimentFinding(
            claim="For T < 0.1 the curves follow the 1/T trend (section 3.3, Fig. 4)",
            ours="slopes of log g on log T for T <= 0.1: "
            + ", ".join(f"{slope:+z.2f} (eps = {eps:g})" for slope, eps in zip(slopes, EPSILONS, strict=False))
            + f"; of the exact norm {slopes[-1]:+z.2f}, at least {AT_THE_BOUND:.0%} of 1/(2T) at {int(at_bound.sum())} "
            f"of {len(at_bound)} such temperatures",
            verdict=judge(all(follows), partly=any(follows) or at_bound.mean() > 0.5),
            why="1/T is a ceiling, reached only by rows with two nearly tied winners, and g cannot exceed sqrt(2)/eps; "
            "the largest g depends on few rows and their random directions, so other seeds have other slopes",
        ),
        ExperimentFinding(
            claim="g is bounded by min{1/(4T), sqrt 2} (Corollary 3, dashed in Fig. 4)",
            ours=f"of {len(T)} temperatures the largest g lies above it at "
            + ", ".join(f"{count} (eps = {eps:g})" for count, eps in zip(above, EPSILONS, strict=False))
            + f", the exact norm at {above[-1]}",
            verdict="does not" if max(above) else "reproduces",
            why="two equal logits have norm 1/(2T), and sqrt 2 bounds the difference of two rows, never a derivative; "
            f"min{{1/(2T), sqrt(2)/eps}} was exceeded {broken} times",
        ),
        ExperimentFinding(
            claim="Smaller eps yields larger gradients (section 3.3)",
            ours="largest g over all T: "
            + ", ".join(f"{curve.max():.3g} (eps = {eps:g})" for curve, eps in zip(largest, EPSILONS, strict=True)),
            verdict="reproduces" if bool(np.all(np.diff(largest.max(1)) <= 0)) else "partly",
            why=_describe_cap(largest.max(1)),
        ),
        ExperimentFinding(
            claim="Once T >= 1 all curves collapse and drop by two orders of magnitude (section 3.3)",
            ours="largest g for T <= 0.1 over largest g for T >= 1: "
            + ", ".join(f"{ratio:.3g} (eps = {eps:g})" for ratio, eps in zip(drop, EPSILONS, strict=True)),
            verdict=judge(min(drop) >= TWO_ORDERS, partly=max(drop) >= TWO_ORDERS),
            why=f"at T = {T[nearest]:.3g}, next to the model's own {sensitivity.trained_temperature:.3g}, the exact "
            f"norm is {norm[nearest]:.3g}, {norm[nearest] / corrected[nearest]:.0%} of its worst case 1/(2T)",
        ),
    )


def _describe_cap(largest: Floats) -> str:
    """Return in words for which eps the cap sqrt(2)/eps decides."""
    shares = [float(value * eps / 2**0.5) for value, eps in zip(largest, EPSILONS, strict=True)]
    capped = [f"{eps:g}" for eps, share in zip(EPSILONS, shares, strict=True) if share >= AT_THE_BOUND]
    free = [f"{eps:g} ({share:.1%} of it)" for eps, share in zip(EPSILONS, shares, strict=True) if share < AT_THE_BOUND]
    phrases = []
    if capped:
        phrases.append(f"for eps = {' and '.join(capped)} the cap sqrt(2)/eps decides, whatever the logits are")
    if free:
        phrases.append(
            f"for eps = {' and '.join(free)} it does not: g is the slope averaged over a step of eps, and at low T a "
            "larger step may raise it, where it reaches a tie, or lower it, where it passes one"
        )
    return "; ".join(phrases)


def table(sensitivity: Sensitivity) -> pa.Table:
    """One row per head and temperature."""
    heads, temperatures = len(sensitivity.heads), len(sensitivity.temperatures)
    T = np.tile(sensitivity.temperatures, heads)
    columns = {
        "layer": np.repeat(sensitivity.layers, temperatures),
        "head": np.repeat(sensitivity.heads, temperatures),
        "temperature": T,
        "jacobian_norm": sensitivity.norm.ravel(),
        **{f"gain_{eps:g}": gain.ravel() for eps, gain in zip(EPSILONS, sensitivity.gain, strict=True)},
        "printed_bound": _printed_bound(T),
        "corrected_bound": _corrected_bound(T),
    }
    return pa.table(columns)


def _printed_bound(T: Floats) -> Floats:
    return corollary3_printed(torch.from_numpy(T)).numpy()


def _corrected_bound(T: Floats) -> Floats:
    return corollary3_corrected(torch.from_numpy(T)).numpy()


def _slope(T: Floats, curve: Floats, where: NDArray[np.bool_]) -> float:
    used = where & (curve > 0)
    return float(np.polyfit(np.log(T[used]), np.log(curve[used]), 1)[0]) if used.sum() > 2 else float("nan")


def _summary(sensitivity: Sensitivity, findings: tuple[ExperimentFinding, ...]) -> str:
    bound = findings[1]
    largest = float((sensitivity.norm * 2 * sensitivity.temperatures).max())
    return (
        f"The largest Jacobian norm over {len(sensitivity.heads)} heads reaches {largest:.0%} of 1/(2T), so the "
        f"printed bound 1/(4T) {'fails' if bound.verdict == 'does not' else 'happens to hold'} on this model. A random "
        "direction, as used here (the paper does not specify it), shows only a part of the norm; and with "
        "eps = 10 the curve is flat because no step can move two rows of weights further apart than sqrt 2."
    )


EXPERIMENT = Experiment(
    name="fig4",
    title="Gradient sensitivity against temperature",
    source="Mudarisov et al. 2025, Figure 4 and Corollary 3",
    question="Does the sensitivity of attention to its logits grow as 1/T, and under which bound?",
    run=run,
    tokens=(LENGTHS[0], QUICK_LENGTH),
)


def figure(sensitivity: Sensitivity, about: str) -> Figure:
    drawing = Figure(figsize=(6.6, 5.4))
    axes = drawing.add_axes((0.105, 0.14, 0.865, 0.725))
    T = sensitivity.temperatures
    bare = {"marker": None}
    axes.plot(T, _corrected_bound(T), **{**CORRECTED, **bare}, label="correct bound 1/(2T)")
    axes.plot(T, _printed_bound(T), **{**PRINTED, **bare}, label="printed bound min{1/(4T), √2}")
    axes.plot(T, sensitivity.norm.max(0), **{**MEASURED, "markersize": 3.5}, label="exact norm, largest over heads")
    for eps, curve, color, marker in zip(EPSILONS, sensitivity.gain.max(1), SHADES, MARKERS, strict=True):
        label = f"g(T, ε), ε = {eps:g}, largest over heads"
        axes.plot(
            T, curve, color=color, marker=marker, markersize=3.8, linewidth=1.2, markeredgecolor=INK,
            markeredgewidth=0.4, label=label,
        )  # fmt: skip
        cap = math.sqrt(2) / eps
        if cap < corollary3_corrected(T[0]):
            axes.axhline(cap, color=color, linewidth=0.8, linestyle=(0, (1, 2)))
            axes.text(T[-1], cap * 1.12, f"√2/ε, ε = {eps:g}", fontsize=7, ha="right", color=INK)
    axes.axvline(sensitivity.trained_temperature, **DASHED)
    axes.text(
        sensitivity.trained_temperature * 1.06, 0.985, "T = √d:\nas trained", fontsize=7, color=INK, va="top",
        transform=axes.get_xaxis_transform(),
    )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=(T[0] * 0.9, T[-1] * 1.12))
    drawn = np.concatenate([sensitivity.gain.max(1).ravel(), sensitivity.norm.max(0)])
    axes.set(ylim=(max(float(drawn[drawn > 0].min()) / 2, 1e-6), 1e3))
    axes.set(xlabel="temperature T on the raw logits q·k", ylabel="change of the weights per change of the logits")
    drawing.legend(loc="upper left", bbox_to_anchor=(0.095, 0.995), fontsize=7.5, ncols=2)
    tidy(axes)
    note(drawing, about)
    return drawing
