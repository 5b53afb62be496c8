"""The logit spread of real heads: the table of Velickovic et al. 2024 for any model, compared with Proposition 3.1.

The spread d = largest - smallest logit sets the ceiling: among n keys no weight exceeds 1/(1 + (n-1) e^-d). The paper's
table has one number per model; our source does not specify rows and length. So there are three readings: each head's
last row, the mean of its longest rows, and the last row without the first key. The spread grows with the length, so
several models are also compared at the longest context that all of them have.
"""

import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from numpy.typing import NDArray

from attnorm.figures import BARE, CORRECTED, INK, MODELS, NULL, PALE, letter, note, panel, tidy
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.normalized import MODEL
from attnorm.metrics.rows import measure_rows
from attnorm.models.dispatch import attention_sites
from attnorm.models.query_key_origin import projections
from attnorm.text import format_keys
from attnorm.theory.dispersion import horizon, proposition31_bound
from attnorm_lab.experiments.experiment import (
    Experiment,
    ExperimentFinding,
    ExperimentSubject,
    Floats,
    Outcome,
    ProgressCallback,
    Verdict,
    combine_verdicts,
    judge,
)
from attnorm_lab.experiments.model_runs import longest_rows, run_forward_pass


class PrintedRow(NamedTuple):
    """Over the heads of a model, in nats."""

    smallest: float
    largest: float
    mean: float
    deviation: float


# Velickovic et al. 2024.
PRINTED = {"Gemma 2B": PrintedRow(2.28, 14.78, 5.69, 2.05), "Gemma 7B": PrintedRow(0.09, 32.74, 5.82, 2.61)}
READINGS = {
    "last": "last row",
    "mean": "mean of the longest rows",
    "last_without_sink": "last row, first key left out",
}
FIRST = 16  # keys: the shortest context

LENGTHS, QUICK_LENGTH = (256, 512, 1024, 2048), 512  # the longest that there is text for
NEAR = 12.0  # nats: a horizon of 160,000 keys, contexts of today

SPREAD_TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
LENGTH_TICKS = (16, 64, 256, 1024, 4096, 16384)
BANDS = 3  # models: more would hide each other

LOWEST_PRINTED = min(row.mean - row.deviation for row in PRINTED.values())
HIGHEST_PRINTED = max(row.mean + row.deviation for row in PRINTED.values())
FAR_MORE = max(row.mean + 3 * row.deviation for row in PRINTED.values())
AS_PRINTED = " and ".join(f"{row.mean:.2f} ± {row.deviation:.2f} for {name}" for name, row in PRINTED.items())


@dataclass(frozen=True)
class Spreads:
    """One model: one number per head, and (heads, lengths) against the number of keys."""

    model: str
    text: str
    layer: Floats
    head: Floats
    readings: dict[str, Floats]
    bound: Floats  # Proposition 3.1 at the last row; NaN where the projections cannot be read
    n: Floats
    against_n: Floats

    @property
    def keys(self) -> int:
        """Number of keys of the last row."""
        return int(self.n[-1])

    @property
    def last(self) -> Floats:
        return self.readings["last"]

    @property
    def bound_ratio(self) -> Floats:
        """The bound over the spread, for heads with a known bound."""
        known = ~np.isnan(self.bound)
        return np.asarray(self.bound[known] / self.last[known])

    def at(self, keys: int) -> Floats:
        """Return the spread of every head with this many keys."""
        return np.asarray(self.against_n[:, self.n.tolist().index(keys)])


def run(subject: ExperimentSubject, progress: ProgressCallback, parts: Path) -> Outcome:
    rows = 16 if subject.quick else 64
    all_spreads, lengths = [], {}
    for model_subject in subject.each():
        length = model_subject.longest_length(LENGTHS, QUICK_LENGTH)
        all_spreads.append(measure(model_subject, progress, length, rows))
        lengths[all_spreads[-1].model] = length

    return Outcome(
        summary=summary(all_spreads),
        findings=judge_claims(all_spreads),
        figures={"spread": figure(all_spreads)},
        tables={"spread": spread_table(all_spreads), "heads": heads_table(all_spreads)},
        parameters={"length": lengths, "rows": rows, "readings": READINGS, "seed": subject.seed},
    )


EXPERIMENT = Experiment(
    name="spread",
    title="The logit spread of real heads",
    source="Velickovic et al. 2024, table of logit spreads and Proposition 3.1",
    question="How large is the logit spread in practice, and how far is it from what the weights allow?",
    run=run,
    tokens=(LENGTHS[0], QUICK_LENGTH),
)


def measure(subject: ExperimentSubject, progress: ProgressCallback, length: int, rows: int) -> Spreads:
    modules = [module for module, _ in attention_sites(subject.loaded().model).items()]
    numbered = {getattr(module, "layer_idx", None): module for module in modules}
    lengths = lengths_up_to(length)
    columns: dict[str, list[Floats]] = {name: [] for name in ("layer", "head", "bound", "against_n", *READINGS)}

    def on_call(call: AttentionCall) -> None:
        long = longest_rows(call, rows)
        row_indices = torch.unique(torch.cat([long, torch.from_numpy(lengths) - 1]))
        values = measure_rows(call, [None], row_indices, (1,))[MODEL].values
        spread, without_sink = (
            values[name][0].double().cpu().numpy() for name in ("logit_spread", "logit_spread_without_sink")
        )
        heads = len(spread)
        columns["layer"].append(np.full(heads, call.layer, dtype=np.float64))
        columns["head"].append(np.arange(heads, dtype=np.float64))
        columns["last"].append(spread[:, -1])
        columns["mean"].append(np.nanmean(spread[:, torch.isin(row_indices, long).numpy()], 1))
        columns["last_without_sink"].append(without_sink[:, -1])
        columns["against_n"].append(spread[:, torch.isin(row_indices, torch.from_numpy(lengths) - 1).numpy()])
        columns["bound"].append(_bound(call, numbered.get(call.layer, modules[min(call.layer, len(modules) - 1)])))

    name = subject.loaded().name
    run_forward_pass(subject, length, on_call, progress, f"spread of every head of {name}", inputs=True)
    joined = {name: np.concatenate(values) for name, values in columns.items()}
    return Spreads(
        model=name,
        text=subject.passages()[0].name,
        layer=joined["layer"],
        head=joined["head"],
        readings={name: joined[name] for name in READINGS},
        bound=joined["bound"],
        n=lengths.astype(np.float64),
        against_n=joined["against_n"],
    )


def lengths_up_to(length: int) -> NDArray[np.int64]:
    """Return lengths half an octave apart from a fixed start, so that models of different context share lengths."""
    steps = FIRST * 2 ** (np.arange(2 * np.log2(length / FIRST)) / 2)
    return np.unique([*steps.round().astype(np.int64), length])


def _bound(call: AttentionCall, module: Any) -> Floats:
    projected = projections(module, call)
    heads = call.query_BHQD.shape[1]
    if projected is None or call.inputs_BKC is None or call.bias is not None or call.softcap is not None:
        return np.full(heads, np.nan)
    x = call.inputs_BKC[0].float()
    bound = proposition31_bound(
        projected.query_weight, projected.key_weight, x[-1:], x, query_bias=projected.query_bias,
        key_bias=projected.key_bias,
        scaling=call.scale,
    )  # fmt: skip
    return bound[:, 0].double().cpu().numpy()


def judge_claims(all_spreads: Sequence[Spreads]) -> tuple[ExperimentFinding, ...]:
    growths = " and ".join(
        f"{_growth(spreads):.2f}" + (f" ({spreads.model})" if len(all_spreads) > 1 else "") for spreads in all_spreads
    )
    return (
        ExperimentFinding(
            claim=f"The logit spread of real heads is small: {AS_PRINTED} [V]",
            ours=_join_by_model(
                all_spreads, [_describe_readings(spreads, len(all_spreads) > 1) for spreads in all_spreads]
            ),
            verdict=combine_verdicts([_judge_size(spreads) for spreads in all_spreads]),
            why=f"it is no constant of a model: it grows by {growths} nats per e-fold of n, so a table without a "
            "length says little",
        ),
        _judge_proposition(all_spreads),
        ExperimentFinding(
            claim="... far below what floating point allows, so dispersion comes sooner than in the worst case (notes "
            "on [V])",
            ours=_join_by_model(all_spreads, [_describe_horizons(spreads) for spreads in all_spreads]),
            verdict=combine_verdicts(
                ["reproduces" if float(np.median(spreads.last)) < NEAR else "partly" for spreads in all_spreads]
            ),
            why="beyond the horizon 1 + e^spread no key can have half of the weight; below it the spread is no limit",
        ),
    )


def summary(all_spreads: Sequence[Spreads]) -> str:
    """Return the summary: the table in a sentence, then what decides its numbers."""
    phrases = ", ".join(
        f"the {len(spreads.last)} heads of {spreads.model} {_format_spread(spreads.last)} nats at {spreads.keys:,} keys"
        for spreads in all_spreads
    )
    growth = "; ".join(
        f"{np.nanmean(spreads.against_n[:, 0]):.1f} at {spreads.n[0]:.0f} keys to "
        f"{np.nanmean(spreads.against_n[:, -1]):.1f} at "
        f"{spreads.keys:,}" + (f" in {spreads.model}" if len(all_spreads) > 1 else "")
        for spreads in all_spreads
    )
    return (
        f"Logit spreads in the last row, mean ± deviation over heads: {phrases}; the paper has {AS_PRINTED}. The "
        f"spread grows with the context, as the extremes of more numbers do: from "
        f"{growth}.{_compare_at_common_keys(all_spreads)}"
    )


def _compare_at_common_keys(all_spreads: Sequence[Spreads]) -> str:
    if len(all_spreads) < 2:
        return ""
    same = common_keys(all_spreads)
    phrases = ", ".join(
        f"{spreads.model} {_format_spread(spreads.at(same))}"
        for spreads in sorted(all_spreads, key=lambda spreads: spreads.at(same).mean())
    )
    return f" At {same:,} keys, the most that all have: {phrases}."


def _join_by_model(all_spreads: Sequence[Spreads], phrases: Sequence[str]) -> str:
    """Join the phrases of all models, with their names if there are several."""
    if len(all_spreads) == 1:
        return phrases[0]
    return "; ".join(f"{spreads.model}: {text}" for spreads, text in zip(all_spreads, phrases, strict=True))


def _format_spread(values: np.ndarray) -> str:
    return f"{np.nanmean(values):.2f} ± {np.nanstd(values):.2f}"


def _describe_readings(spreads: Spreads, with_keys: bool) -> str:
    phrases = "; ".join(f"{_format_spread(spreads.readings[name])} ({meaning})" for name, meaning in READINGS.items())
    at_keys = f" at {spreads.keys:,} keys" if with_keys else ""
    return f"{phrases} nats{at_keys}; range {spreads.last.min():.2f} to {spreads.last.max():.2f}"


def _judge_size(spreads: Spreads) -> Verdict:
    mean = float(spreads.last.mean())
    return judge(LOWEST_PRINTED <= mean <= HIGHEST_PRINTED, partly=mean < FAR_MORE)


def _growth(spreads: Spreads) -> float:
    return float(np.polyfit(np.log(spreads.n), np.nanmean(spreads.against_n, 0), 1)[0])


def _describe_horizons(spreads: Spreads) -> str:
    mean, middle = (
        format_keys(float(horizon(float(value)))) for value in (spreads.last.mean(), np.median(spreads.last))
    )
    return f"the mean spread has its horizon at {mean} keys; half of the heads have theirs below {middle}"


def _judge_proposition(all_spreads: Sequence[Spreads]) -> ExperimentFinding:
    verdicts: list[Verdict] = []
    phrases = []
    for spreads in all_spreads:
        ratio = spreads.bound_ratio
        if not len(ratio):
            verdicts.append("not tested")
            phrases.append("not applicable: q and k of this model are not its input times a matrix")
            continue
        holds = int((ratio >= 1).sum())
        verdicts.append(judge(holds == len(ratio)))
        phrases.append(
            f"holds in {holds} of {len(ratio)} heads; the bound is {np.median(ratio):.0f} times the spread in the "
            f"median head (smallest {ratio.min():.1f}, largest {ratio.max():.0f})"
        )
    # One violation refutes a bound.
    verdict = "does not" if "does not" in verdicts else combine_verdicts(verdicts)
    why = "norms multiply what never points the same way; RoPE changes no norm, so the bound stays"
    claim = "Spread <= 2 smax(Q) smax(K) ||y|| max ||x|| (Proposition 3.1 [V])"
    return ExperimentFinding(
        claim, _join_by_model(all_spreads, phrases), verdict, why if verdict != "not tested" else ""
    )


def common_keys(all_spreads: Sequence[Spreads]) -> int:
    """Return the longest context at which all models were measured."""
    return int(max(set.intersection(*(set(spreads.n.tolist()) for spreads in all_spreads))))


def spread_table(all_spreads: Sequence[Spreads]) -> pa.Table:
    """Return the paper's rows as printed, then one per model; cells that the paper does not have are empty."""
    rows: list[dict[str, Any]] = [
        {"model": model, **row._asdict(), "horizon_of_mean": float(horizon(row.mean))} for model, row in PRINTED.items()
    ]
    rows += [_row(spreads, common_keys(all_spreads)) for spreads in all_spreads]
    return pa.Table.from_pylist([{name: row.get(name) for name in rows[-1]} for row in rows])


def _row(spreads: Spreads, common: int) -> dict[str, Any]:
    ratio = spreads.bound_ratio
    return {
        "model": spreads.model, "text": spreads.text, "keys": spreads.keys, "heads": len(spreads.head),
        "smallest": float(spreads.last.min()), "largest": float(spreads.last.max()),
        **_moments("", spreads.last), "horizon_of_mean": float(horizon(float(spreads.last.mean()))),
        **_moments("_longest_rows", spreads.readings["mean"]),
        **_moments("_without_first_key", spreads.readings["last_without_sink"]),
        "common_keys": common, **_moments("_at_common_keys", spreads.at(common)),
        "proposition31_heads": len(ratio), "proposition31_holds": int((ratio >= 1).sum()),
        "proposition31_median_ratio": float(np.median(ratio)) if len(ratio) else None,
    }  # fmt: skip


def _moments(reading: str, values: Floats) -> dict[str, float]:
    return {f"mean{reading}": float(np.nanmean(values)), f"deviation{reading}": float(np.nanstd(values))}


def heads_table(all_spreads: Sequence[Spreads]) -> pa.Table:
    """Return one row per head; lengths beyond a model's context are empty."""
    return pa.concat_tables([_heads(spreads) for spreads in all_spreads], promote_options="default")


def _heads(spreads: Spreads) -> pa.Table:
    return pa.table(
        {
            "model": [spreads.model] * len(spreads.head),
            "layer": spreads.layer.astype(np.int64), "head": spreads.head.astype(np.int64),
            **{f"spread_{name}": values for name, values in spreads.readings.items()},
            "proposition31_bound": spreads.bound,
            **{f"spread_at_{n:.0f}": spreads.against_n[:, index] for index, n in enumerate(spreads.n)},
        }
    )  # fmt: skip


@dataclass(frozen=True)
class SpreadRow:
    """One row of the table."""

    label: str
    range: tuple[float, float]
    middle: tuple[float, float]  # the thick bar: mean ± std as printed, quartiles where they are known
    median: float | None
    mean: float
    std: float
    style: dict[str, Any]


def figure(all_spreads: Sequence[Spreads]) -> Figure:
    rows = len(PRINTED) + (len(READINGS) if len(all_spreads) == 1 else len(all_spreads))
    height = max(3.7, 1.3 + 0.48 * rows)
    drawing = Figure(figsize=(11.4, height))
    left, middle, right = drawing.subplots(
        1, 3, gridspec_kw={"left": 0.175, "right": 0.965, "top": 1 - 0.37 / height, "bottom": 0.7 / height,
                           "wspace": 0.3, "width_ratios": (1.15, 1, 1)},
    )  # fmt: skip
    styles = list(itertools.islice(itertools.cycle(MODELS), len(all_spreads)))
    _draw_table(left, all_spreads, styles)
    _draw_growth(middle, all_spreads, styles)
    _draw_bound(right, all_spreads, styles)
    bars = "(a) thin: range; thick: mean ± std (printed), quartiles (ours); marker: mean; tick: median"
    note(drawing, f"{_about(all_spreads)}; {bars}")
    return drawing


def _about(all_spreads: Sequence[Spreads]) -> str:
    if len(all_spreads) == 1:
        (spreads,) = all_spreads
        return f"{spreads.model}, {spreads.text}, {spreads.keys:,} tokens, {len(spreads.head)} heads"
    models: dict[str, list[str]] = {}
    for spreads in all_spreads:
        models.setdefault(spreads.text, []).append(_short_name(spreads.model).replace("\n", ""))
    if len(models) == 1:
        return f"Last row of every head; text: {all_spreads[0].text}"
    texts = (f"{text} ({who[0] if len(who) == 1 else f'{len(who)} models'})" for text, who in models.items())
    return f"Last row of every head; texts: {', '.join(texts)}"


def _draw_table(axes: Axes, all_spreads: Sequence[Spreads], styles: Sequence[dict[str, Any]]) -> None:
    """Draw mean, standard deviation and range as in the paper's table; for ours, the quartiles.

    Mean - std of a skewed distribution may be negative, which a logarithmic axis cannot show.
    """
    rows = [
        SpreadRow(model, (low, high), (mean - std, mean + std), None, mean, std, NULL)
        for model, (low, high, mean, std) in PRINTED.items()
    ]
    for spreads, style in zip(all_spreads, styles, strict=True):
        # One model has a row per reading; several models have one row each.
        one_reading = {"last": f"{spreads.keys:,} keys, {len(spreads.head)} heads"}
        for reading, meaning in (READINGS if len(all_spreads) == 1 else one_reading).items():
            values = spreads.readings[reading]
            label = f"{_short_name(spreads.model)}:\n{meaning}"
            low, quarter, half, most, high = (float(value) for value in np.quantile(values, (0, 0.25, 0.5, 0.75, 1)))
            mean, std = float(values.mean()), float(values.std())
            rows.append(SpreadRow(label, (low, high), (quarter, most), half, mean, std, style))
    for index, row in enumerate(reversed(rows)):
        color = row.style["color"]
        axes.plot(row.range, [index, index], color=color, linewidth=0.9)
        axes.plot(row.middle, [index, index], color=color, linewidth=6, alpha=0.45, solid_capstyle="butt")
        if row.median is not None:
            axes.plot([row.median] * 2, [index - 0.13, index + 0.13], color=color, linewidth=1.6)
        axes.plot([row.mean], [index], color=color, marker=row.style["marker"], markersize=5, markerfacecolor="white")
        axes.text(row.mean, index + 0.2, f"{row.mean:.2f} ± {row.std:.2f}", ha="center", fontsize=7.5)
    axes.set_yticks(range(len(rows)), [row.label for row in reversed(rows)], fontsize=7.5, parse_math=False)
    axes.set(ylim=(-0.5, len(rows) - 0.3), xscale="log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("logit spread over heads (nats), mean ± std")
    panel(axes, "a", "The table: printed (pale) and ours")


def _draw_growth(axes: Axes, all_spreads: Sequence[Spreads], styles: Sequence[dict[str, Any]]) -> None:
    least, most = 2.0, 0.0
    for spreads, style in zip(all_spreads, styles, strict=True):
        low, center, high = np.nanquantile(spreads.against_n, (0.1, 0.5, 0.9), axis=0)
        if len(all_spreads) <= BANDS:
            axes.fill_between(spreads.n, low, high, color=style["color"], alpha=0.15, linewidth=0)
        label = "heads: median, 10 to 90 %" if len(all_spreads) == 1 else _short_name(spreads.model)
        axes.plot(spreads.n, center, **style, label=label)
        least, most = min(least, float(low.min())), max(most, float(high.max()))
    n = max((spreads.n for spreads in all_spreads), key=len)
    axes.plot(n, np.log(n), **{**CORRECTED, **BARE}, label="log n: below it the ceiling binds")
    axes.axhline(PRINTED["Gemma 2B"].mean, color=PALE, linestyle=(0, (4, 3)), linewidth=1, label="Gemma 2B as printed")
    axes.set_xscale("log", base=2)
    ticks = [tick for tick in LENGTH_TICKS if n[0] <= tick <= n[-1]]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yscale("log")
    axes.set_yticks(SPREAD_TICKS, [f"{value}" for value in SPREAD_TICKS])
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(least, most * 2.2 ** (1 + 0.25 * len(all_spreads)))  # room for the legend
    axes.set_xlabel("visible keys n")
    shown = ": median, 10 to 90 %" if len(all_spreads) <= BANDS else ": median of the heads"
    axes.set_ylabel("logit spread (nats)" + (shown if len(all_spreads) > 1 else ""))
    panel(axes, "b", "It grows with the context")
    axes.legend(loc="upper left", fontsize=7)


def _draw_bound(axes: Axes, all_spreads: Sequence[Spreads], styles: Sequence[dict[str, Any]]) -> None:
    letter(axes, "c", "Proposition 3.1")
    known = [
        (spreads, style, ~np.isnan(spreads.bound))
        for spreads, style in zip(all_spreads, styles, strict=True)
        if len(spreads.bound_ratio)
    ]
    if not known:
        axes.text(0.5, 0.5, "not applicable", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    for spreads, style, mask in known:
        last, bound = spreads.last[mask], spreads.bound[mask]
        if len(all_spreads) > 1:
            axes.scatter(
                last, bound, s=16, marker=style["marker"], facecolor="none", edgecolor=style["color"], linewidth=0.8,
                alpha=0.8, label=_short_name(spreads.model) if len(all_spreads) <= BANDS else None,  # more: as in (b)
            )  # fmt: skip
            continue
        dots = axes.scatter(last, bound, c=spreads.layer[mask], cmap="viridis", s=14, edgecolor=INK, linewidth=0.4)
        bar = axes.figure.colorbar(dots, ax=axes, pad=0.02)
        bar.set_label("layer", fontsize=8)
    ends = [
        min(float(spreads.last[mask].min()) for spreads, _, mask in known) * 0.8,
        max(float(spreads.last[mask].max()) for spreads, _, mask in known) * 4,
    ]
    axes.plot(ends, ends, **{**CORRECTED, **BARE}, label="bound = spread")
    axes.set(xscale="log", yscale="log")
    axes.set(xlabel="measured spread, last row (nats)", ylabel="bound of Proposition 3.1 (nats)")
    tidy(axes)
    axes.legend(loc="lower right", fontsize=7)


def _short_name(name: str) -> str:
    """Return a hub name without its owner, in lines that fit beside an axis."""
    return "\n".join(textwrap.wrap(name.rsplit("/", 1)[-1], 26)[:2]) or name
