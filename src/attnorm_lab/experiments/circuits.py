"""Circuits against length: do induction, previous-token and retrieval heads keep their key as the context grows?

Velickovic et al. 2024 open with circuits that are believed to work on inputs of any size. Here the heads are found on
the model itself (analysis/circuits.py), and the weight on the key that they need is followed over octaves of length.
Other normalizers are applied to the same logits: they show what the scores allow, not what a patched model would do.
ssmax and log_scaled start at the shortest length, as attnorm.patch starts them, and rescale the logits by log n.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnorm.analysis.circuits import SEQUENCES, SHORTEST, circuit_columns, measure_circuits, probe_lengths
from attnorm.analysis.settings import named_normalizers, started_at_length
from attnorm.analysis.verdicts.reach import CIRCUITS, NAMED_FROM, SHARP, circuit_of
from attnorm.figures import CORRECTED, DASHED, INK, MEASURED, NULL, PALE, PRINTED, note, panel
from attnorm.files import atomic_replace
from attnorm.models.describe import longest_context
from attnorm.text import format_keys
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

LOOKS: dict[str, dict[str, Any]] = {"induction": CORRECTED, "previous_token": PRINTED, "retrieval": MEASURED}
WORDS = {"induction": "induction", "previous_token": "previous token", "retrieval": "retrieval"}
WHAT_IF_LOOKS: dict[str, dict[str, Any]] = {
    "model": MEASURED,
    "ssmax": CORRECTED,
    "log_scaled": {**NULL, "color": "#3b8f5a"},
    "entmax15": PRINTED,
    "hard": {**NULL, "color": "#7a4fa3", "marker": "x", "linestyle": ":"},
}
ROOM = {"left": 0.075, "right": 0.97, "top": 0.94, "bottom": 0.115, "wspace": 0.24, "hspace": 0.42}
LONGEST, QUICK_LONGEST = 2048, 128
WHAT_IFS = ("model", "ssmax", "log_scaled", "entmax15", "hard")
FEW = 0.05  # share of heads below which Wu et al. call retrieval heads sparse


@dataclass(frozen=True)
class NamedHead:
    """A head with a circuit, and its curves: one value per length."""

    layer: int
    head: int
    circuit: str
    reach: float
    n: Floats
    gap: Floats  # of the model
    weights: Mapping[str, Floats]  # by normalizer

    @property
    def name(self) -> str:
        return f"L{self.layer}H{self.head}"

    def sharp(self, normalizer: str = "model") -> np.ndarray:
        return self.weights[normalizer] >= SHARP

    def slope(self, last: int | None = None) -> float:
        """Slope of the gap of the right key on log n; 1 keeps its weight, 0 disperses as theory predicts.

        last: index of the last length to use, that of the model's limit. Beyond it positions fail as well.
        """
        known = np.isfinite(self.gap)
        known[len(self.n) if last is None else last + 1 :] = False
        return float(np.polyfit(np.log(self.n[known]), self.gap[known], 1)[0]) if known.sum() > 1 else float("nan")


@dataclass(frozen=True)
class ModelLimit:
    """The number of tokens that a model was made for, among the lengths that were measured."""

    tokens: int | None  # None: unlimited
    hard: bool  # it cannot run on more
    lengths: Sequence[int]

    @property
    def index(self) -> int | None:
        """Index of the last length within the limit; None if no length is beyond it, or all are."""
        within = sum(self.tokens is None or length <= self.tokens for length in self.lengths)
        return within - 1 if 0 < within < len(self.lengths) else None


def lengths_of(subject: ExperimentSubject) -> list[int]:
    """Return octaves to --longest; by default to 2,048 tokens, and at most to twice the model's limit.

    Raises:
        ValueError: --longest exceeds the positions of a model that has no others.
    """
    loaded = subject.loaded()
    limit, hard = longest_context(loaded.model)
    if subject.longest is not None:
        if hard and limit is not None and subject.longest > limit:
            raise ValueError(
                f"{loaded.name} has {limit:,} positions: expected --longest of at most {limit}, got "
                f"{subject.longest}. Use a smaller one, or a model with rotary positions."
            )
        return probe_lengths(subject.longest)
    longest = QUICK_LONGEST if subject.quick else LONGEST
    return probe_lengths(longest if limit is None else min(longest, limit if hard else 2 * limit))


def run(subject: ExperimentSubject, progress: ProgressCallback, parts: Path) -> Outcome:
    loaded = subject.loaded()
    names = WHAT_IFS
    normalizers = started_at_length(named_normalizers(names), names, SHORTEST)
    lengths = lengths_of(subject)
    text = str(subject.passages()[0].content) if subject.texts else None
    tables = []
    for number, length in enumerate(lengths):
        path = parts / f"{length}.parquet"
        if path.is_file():
            tables.append(pa.parquet.read_table(path))
            continue
        progress(f"{length:,} tokens", number, len(lengths))
        tables.append(measure_circuits(loaded, normalizers, [length], seed=subject.seed, text=text))
        parts.mkdir(parents=True, exist_ok=True)
        with atomic_replace(path) as temporary:
            pa.parquet.write_table(tables[-1], temporary)
    table = pa.concat_tables(tables)
    heads = named_heads(table)
    total = len({(row["layer"], row["head"]) for row in table.select(["layer", "head"]).to_pylist()})
    limit = ModelLimit(*longest_context(loaded.model), lengths)
    about = f"{loaded.name}, {total} heads, {lengths[0]} to {lengths[-1]:,} tokens, seed {subject.seed}"
    return Outcome(
        summary=summary(heads, total, limit),
        findings=judge_claims(heads, total, limit),
        figures={"circuits": figure(heads, about, limit)},
        tables={"curves": table, "heads": heads_table(heads, limit)},
        parameters={
            "lengths": lengths, "made_for": limit.tokens, "sequences": SEQUENCES, "normalizers": names,
            "named_from": NAMED_FROM, "sharp": SHARP, "seed": subject.seed,
        },
    )  # fmt: skip


def named_heads(table: pa.Table) -> list[NamedHead]:
    """Return the heads that belong to a circuit in the model as it runs, the sharpest first."""
    curves: dict[tuple[int, int, str, str], list[tuple[float, float, float]]] = {}
    for row in sorted(table.to_pylist(), key=lambda row: row["length"]):
        key = row["layer"], row["head"], row["circuit"], row["normalizer"]
        curves.setdefault(key, []).append((row["n"], row["weight"], row["gap"]))
    heads = []
    normalizers = list(dict.fromkeys(table["normalizer"].to_pylist()))
    for (normalizer, layer, head), numbers in circuit_columns(table).items():
        circuit = circuit_of(numbers) if normalizer == "model" else None
        if circuit is None:
            continue
        n, _, gap = np.array(curves[layer, head, circuit, "model"]).T
        weights = {name: np.array(curves[layer, head, circuit, name])[:, 1] for name in normalizers}
        heads.append(NamedHead(layer, head, circuit, numbers["circuit_reach"], n, gap, weights))
    return sorted(heads, key=lambda head: (-head.reach, -float(head.weights["model"].max())))


def judge_claims(heads: Sequence[NamedHead], total: int, limit: ModelLimit) -> tuple[ExperimentFinding, ...]:
    by = {name: [head for head in heads if head.circuit == name] for name in CIRCUITS}
    return (
        ExperimentFinding(
            claim="Language models contain induction heads, fed by previous-token heads (Olsson et al. 2022)",
            ours=f"{_count(by['induction'], total)} induction heads, {_count(by['previous_token'], total)} "
            f"previous-token heads: mean weight on the right key of at least {NAMED_FROM:g} at some length",
            verdict="reproduces"
            if by["induction"] and by["previous_token"]
            else "partly"
            if by["induction"] or by["previous_token"]
            else "does not",
            why="found by their weights on repeated random tokens, which no text can teach",
        ),
        ExperimentFinding(
            claim="Retrieval heads are sparse, fewer than 5 % of the heads (Wu et al. 2024)",
            ours=f"{_count(by['retrieval'], total)} heads give a needle's next token their largest score",
            verdict="not decided" if not by["retrieval"] else "reproduces" if len(by["retrieval"]) < FEW * total
            else "does not",
            why="" if by["retrieval"] else "no head of this model copies from a needle",
        ),
        _judge_lost_heads(heads),
        _judge_beyond(heads, limit),
        _judge_slopes(heads, limit),
        *(_judge_what_if(heads, name) for name in WHAT_IFS if name != "model" and heads),
    )  # fmt: skip


def _judge_lost_heads(heads: Sequence[NamedHead]) -> ExperimentFinding:
    at_first = [head for head in heads if head.sharp()[0]]
    lost = [head for head in at_first if not head.sharp()[-1]]
    verdict: Verdict = "not decided"
    ours = "no head is sharp at the shortest length"
    if at_first:
        share = len(lost) / len(at_first)
        verdict = judge(share > 0.5, partly=lost)
        reaches = [head.reach for head in lost]
        n = at_first[0].n
        ours = (
            f"of {len(at_first)} heads with half of the weight on their key at {n[0]:.0f} keys, {len(lost)} have lost "
            f"it at {n[-1]:,.0f}"
            + (f" (they are sharp to {format_keys(float(np.median(reaches)))} keys in the median)" if lost else "")
        )
    return ExperimentFinding(
        claim="Sharp circuits lose their focus as the input grows (Velickovic et al. 2024, introduction)",
        ours=ours,
        verdict=verdict,
        why="a head keeps its key only while the key's logit rises with log n above the others",
    )


def _judge_beyond(heads: Sequence[NamedHead], limit: ModelLimit) -> ExperimentFinding:
    claim = "Circuits work on inputs of any size (the belief that Velickovic et al. 2024 start from)"
    if limit.index is None:
        return ExperimentFinding(claim, "no length is beyond the model's limit", "not tested", _why_not_beyond(limit))
    sharp = [head for head in heads if head.sharp()[limit.index]]
    kept = sum(bool(head.sharp()[-1]) for head in sharp)
    tokens = f"{limit.lengths[limit.index]:,} tokens, within the model's limit of {limit.tokens:,}"
    verdict: Verdict = "not decided" if not sharp else judge(kept == len(sharp), partly=2 * kept > len(sharp))
    return ExperimentFinding(
        claim=claim,
        ours=f"of {len(sharp)} heads with half of the weight on their key at {tokens}, {kept} have it at "
        f"{limit.lengths[-1]:,} tokens",
        verdict=verdict,
        why="" if sharp else "no head is sharp at the limit",
    )


def _why_not_beyond(limit: ModelLimit) -> str:
    if limit.tokens is None:
        return "the model has no fixed context length"
    if limit.hard:
        return f"the model has no positions beyond {limit.tokens:,}"
    return f"the model was made for {limit.tokens:,} tokens: use --longest {2 * limit.tokens}"


def _judge_slopes(heads: Sequence[NamedHead], limit: ModelLimit) -> ExperimentFinding:
    slopes = np.array([head.slope(limit.index) for head in heads])
    slopes = slopes[np.isfinite(slopes)]
    if not len(slopes):
        return ExperimentFinding(
            "The gap of the right key does not grow with the length (Lemma 2.1)", "", "not decided"
        )
    middle = float(np.median(slopes))
    return ExperimentFinding(
        claim="The gap of the right key does not grow with the length (Lemma 2.1: bounded logits)",
        ours=f"it grows by {middle:.2f} per e-fold of n in the median of {len(slopes)} heads, quartiles "
        f"{np.quantile(slopes, 0.25):.2f} to {np.quantile(slopes, 0.75):.2f}"
        + (f", up to the model's limit of {limit.tokens:,} tokens" if limit.index is not None else ""),
        verdict=judge(middle < 0.25, partly=middle < 0.9),
        why="slope 1 keeps the weight at every length, slope 0 disperses as fast as bounded logits allow",
    )


def _judge_what_if(heads: Sequence[NamedHead], name: str) -> ExperimentFinding:
    model, other = (sum(bool(head.sharp(normalizer)[-1]) for head in heads) for normalizer in ("model", name))
    middle = [float(np.median([head.weights[normalizer][-1] for head in heads])) for normalizer in ("model", name)]
    verdict: Verdict = "does not" if other <= model else "reproduces" if 2 * other >= len(heads) else "partly"
    return ExperimentFinding(
        claim=f"What if: {name} on the same logits keeps the key",
        ours=f"{other} of {len(heads)} heads are sharp at {heads[0].n[-1]:,.0f} keys, {model} with softmax; median "
        f"weight {middle[1]:.2f} against {middle[0]:.2f}",
        verdict=verdict,
        why="the scores already rank the key first in these rows" if name == "hard" and verdict == "reproduces" else "",
    )


def _count(heads: Sequence[NamedHead], total: int) -> str:
    return f"{len(heads)} of {total}"


def heads_table(heads: Sequence[NamedHead], limit: ModelLimit) -> pa.Table:
    ends = {"shortest": 0, **({} if limit.index is None else {"at_limit": limit.index}), "longest": -1}
    return pa.table(
        {
            "layer": [head.layer for head in heads],
            "head": [head.head for head in heads],
            "circuit": [head.circuit for head in heads],
            "sharp_to_keys": [head.reach for head in heads],
            "gap_slope": [head.slope(limit.index) for head in heads],
            **{
                f"weight_{name}_{end}": [float(head.weights[name][index]) for head in heads]
                for name in (heads[0].weights if heads else ())
                for end, index in ends.items()
            },
        }
    )


def summary(heads: Sequence[NamedHead], total: int, limit: ModelLimit) -> str:
    if not heads:
        return (
            f"None of the {total} heads puts {NAMED_FROM:g} of its weight on the key of an induction, previous-token "
            f"or retrieval circuit at any of the lengths {limit.lengths[0]} to {limit.lengths[-1]:,}."
        )
    parts = []
    for name, words in CIRCUITS.items():
        members = [head for head in heads if head.circuit == name]
        if members:
            best = members[0]
            still = _count_sharp(members, -1)
            if limit.index is not None:
                still = f"{_count_sharp(members, limit.index)} within the model's limit, {still}"
            word = f"{words.split(' ', 1)[1]}{'s' * (len(members) != 1)}"
            parts.append(f"{len(members)} {word}, {still} (best: {best.name}, sharp to {format_keys(best.reach)})")
    return f"Of {total} heads: {'; '.join(parts)}."


def _count_sharp(heads: Sequence[NamedHead], index: int) -> str:
    return f"{sum(bool(head.sharp()[index]) for head in heads)} sharp at {heads[0].n[index]:,.0f} keys"


def figure(heads: Sequence[NamedHead], about: str, limit: ModelLimit) -> Figure:
    drawing = Figure(figsize=(8.8, 6.6))
    panels = drawing.subplots(2, 2, gridspec_kw=ROOM)
    _draw_weights(panels[0, 0], heads)
    _draw_gaps(panels[0, 1], heads)
    _draw_sharp_shares(panels[1, 0], heads)
    _draw_kept_weights(panels[1, 1], heads)
    marked = limit.tokens is not None and limit.tokens <= limit.lengths[-1]
    if marked:
        for axes in panels.flat[:3]:
            axes.axvline(limit.tokens, ymax=0.8, color=INK, linewidth=1, linestyle=(0, (1, 2)))  # below the legend
    note(
        drawing,
        f"{about}; every line is a head with at least 0.3 of the weight on its key at some length"
        + "; dotted: the model's limit" * marked,
    )
    return drawing


def _by_circuit(heads: Sequence[NamedHead]) -> dict[str, list[NamedHead]]:
    heads_by_circuit = {name: [head for head in heads if head.circuit == name] for name in LOOKS}
    return {name: members for name, members in heads_by_circuit.items() if members}


def _draw_weights(axes: Axes, heads: Sequence[NamedHead]) -> None:
    for name, members in _by_circuit(heads).items():
        for head in members:
            axes.plot(head.n, head.weights["model"], color=LOOKS[name]["color"], linewidth=0.7, alpha=0.35)
        middle = np.median([head.weights["model"] for head in members], axis=0)
        axes.plot(members[0].n, middle, **LOOKS[name], label=f"{WORDS[name]}, median of {len(members)}")
    axes.axhline(0.5, **DASHED)
    _format_share_axis(axes, "weight on the right key")
    _format_key_axis(axes)
    panel(axes, "a", "As the model runs; dashed: sharp")
    axes.legend(loc="upper left", fontsize=7, ncols=2) if heads else None


def _draw_gaps(axes: Axes, heads: Sequence[NamedHead]) -> None:
    for name, members in _by_circuit(heads).items():
        gaps = np.array([head.gap for head in members])
        axes.plot(members[0].n, np.median(gaps, axis=0), **LOOKS[name], label=WORDS[name])
        low, high = np.quantile(gaps, (0.25, 0.75), axis=0)
        axes.fill_between(members[0].n, low, high, color=LOOKS[name]["color"], alpha=0.12, linewidth=0)
    if heads:
        n = heads[0].n
        axes.plot(n, np.log(n - 1), color=PALE, linestyle=(0, (4, 3)), linewidth=1, label="half of the weight")
        axes.legend(loc="upper left", fontsize=7, ncols=2)
        axes.set_ylim(top=axes.get_ylim()[1] + 2)
    axes.set_ylabel("gap of the right key, nats")
    _format_key_axis(axes)
    panel(axes, "b", "A constant gap falls below the dashed line")


def _draw_sharp_shares(axes: Axes, heads: Sequence[NamedHead]) -> None:
    names = list(heads[0].weights) if heads else []
    for name in names:
        sharp = np.mean([head.weights[name] >= 0.5 for head in heads], axis=0)
        axes.plot(heads[0].n, sharp, **WHAT_IF_LOOKS.get(name, NULL), label=_label(name))
    _format_share_axis(axes, "share of these heads that are sharp")
    _format_key_axis(axes)
    panel(axes, "c", "Other normalizers on the same logits")
    axes.legend(loc="upper left", fontsize=7, ncols=3) if names else None


def _draw_kept_weights(axes: Axes, heads: Sequence[NamedHead]) -> None:
    for name, members in _by_circuit(heads).items():
        look = {key: value for key, value in LOOKS[name].items() if key not in ("linestyle", "linewidth")}
        first, last = ([head.weights["model"][index] for head in members] for index in (0, -1))
        axes.plot(first, last, **{**look, "markersize": 5}, linestyle="none", label=WORDS[name])
    axes.plot([0, 1], [0, 1], color=PALE, linewidth=0.8)
    axes.axhline(0.5, **DASHED)
    axes.set(xlim=(0, 1.02), ylim=(0, 1.02))
    axes.set(
        xlabel=f"weight on the right key, {heads[0].n[0]:.0f} keys" if heads else "weight, shortest length",
        ylabel=f"... and at {heads[0].n[-1]:,.0f} keys" if heads else "weight, longest length",
    )
    panel(axes, "d", "Below the diagonal: lost with length")
    axes.legend(loc="upper left", fontsize=7) if heads else None


def _label(name: str) -> str:
    return "as the model runs" if name == "model" else name


def _format_share_axis(axes: Axes, label: str) -> None:
    axes.set_ylim(0, 1.25)  # the legend stands above 1
    axes.set(yticks=np.linspace(0, 1, 6), ylabel=label)


def _format_key_axis(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("visible keys n")


EXPERIMENT = Experiment(
    name="circuits",
    title="Circuits against length",
    source="Velickovic et al. 2024, introduction; Olsson et al. 2022; Wu et al. 2024",
    question="Do heads with a known task keep the right key as the context grows?",
    run=run,
)
