"""The verdict on a model, in words: which heads still select, is the ceiling binding, what to try.

Heads are judged in judge.py by the numbers in thresholds.py; here their verdicts are counted and told.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa

from attnorm.analysis.advice import advise
from attnorm.analysis.ceiling import FARTHEST, Ceiling, Rate, ceiling, rate
from attnorm.analysis.head_rows import Row, head_rows, keys
from attnorm.analysis.judge import judge
from attnorm.analysis.tables import HEAD_KEY
from attnorm.analysis.thresholds import MEANING, SELECTING, VERDICTS, Thresholds
from attnorm.analysis.what_if import Advice, WhatIf


@dataclass(frozen=True, kw_only=True)
class ModelVerdict:
    """What a person should know first."""

    headline: str
    counts: dict[str, int]  # heads per verdict, all verdicts named; one head counts once, whatever the number of texts
    sentences: list[str] = field(default_factory=list)
    advice: list[Advice] = field(default_factory=list)
    ceiling: Ceiling | None = None  # the numbers behind "is the ceiling binding?"
    rate: Rate | None = None  # the numbers behind the rate test

    def as_dict(self) -> dict[str, Any]:
        """For JSON: an infinite length, "never", becomes null."""
        plain = asdict(self)
        for part in ("ceiling", "rate"):
            for name, value in (plain[part] or {}).items():
                if isinstance(value, tuple):
                    plain[part][name] = [one if math.isfinite(one) else None for one in value]
        return plain


def model_verdict(
    tables: Mapping[str, pa.Table],
    manifest: Mapping[str, Any],
    thresholds: Thresholds = Thresholds(),  # noqa: B008  # frozen
) -> ModelVerdict:
    """`tables` as in analysis/tables.py, the heads judged. About the model as it runs, at the longest length."""
    all_heads = head_rows(tables["heads"])
    heads, changing = representative(all_heads)
    counts = Counter(row["verdict"] for row in heads)
    chosen = {tuple(row[name] for name, _ in HEAD_KEY) for row in heads}
    curves = [
        row
        for row in tables["by_length"].select(_CURVE).to_pylist()
        if tuple(row[name] for name, _ in HEAD_KEY) in chosen
    ]
    limit, slopes, runs = ceiling(heads, curves, thresholds), rate(heads), _runs(heads, manifest)
    rows = {name: tables[name].to_pylist() for name in ("top_n", "coverage", "sensitivity")}
    return ModelVerdict(
        headline=_headline(heads, counts, limit if runs == "softmax" else None),
        counts={name: counts.get(name, 0) for name in VERDICTS},
        sentences=[*_ceiling_sentences(limit, manifest, runs), *_rate_sentences(slopes), *_caveats(heads, changing)],
        advice=advise(heads, {"heads": all_heads, **rows}, manifest),
        ceiling=limit,
        rate=slopes,
    )


_SPREADS = ("logit_spread", "logit_spread_q50", "logit_spread_without_sink", "logit_spread_without_sink_q50")
_CURVE = [*(name for name, _ in HEAD_KEY), "n", *_SPREADS]


def representative(heads: Sequence[Row], normalizer: str | None = None) -> tuple[list[Row], int]:
    """One row per head, each text at its longest length, and how many heads the texts disagree on.

    With several texts a head has the verdict that most of them give it, the worse one if two are as frequent, and the
    numbers of the longest of those texts.
    normalizer None: the model as it runs, or the first measured where it was not.
    """
    if not heads:
        return [], 0
    names = [row["normalizer"] for row in heads]
    measured = normalizer or ("model" if "model" in names else names[0])
    longest: dict[str, int] = {}
    for row in heads:
        longest[row["text"]] = max(longest.get(row["text"], 0), row["length"] or 0)
    by_head: dict[tuple[Any, ...], list[Row]] = {}
    for row in heads:
        if row["normalizer"] == measured and (row["length"] or 0) == longest[row["text"]]:
            by_head.setdefault((row["kind"], row["layer"], row["head"]), []).append(row)
    chosen, changing = [], 0
    for rows in by_head.values():
        verdicts = Counter(row["verdict"] for row in rows)
        changing += len(verdicts) > 1
        most = max(verdicts, key=lambda name: (verdicts[name], -_rank(name)))
        chosen.append(max((row for row in rows if row["verdict"] == most), key=lambda row: row["n_high"] or 0))
    return chosen, changing


def _rank(verdict: str | None) -> int:
    return len(VERDICTS) if verdict is None else VERDICTS.index(verdict)


def _headline(heads: Sequence[Row], counts: Mapping[str | None, int], limit: Ceiling | None) -> str:
    if not heads:
        return "No head was measured."
    total, longest = len(heads), max(row["n_high"] or 0 for row in heads)
    select = sum(counts.get(name, 0) for name in SELECTING)
    inside = [f"{counts[name]} of them {name}" for name in ("frozen", "sensitive") if counts.get(name)]
    first = f"{select} of {total} heads still select among {longest:,} keys" + (
        f" ({', '.join(inside)})" if inside else ""
    )
    words = {"dispersed-by-choice": "dispersed by choice", "dispersed-forced": "dispersed by force"}
    others = ("dispersed-by-choice", "dispersed-forced", "sink-dominated", "saturated", "broken")
    rest = [f"{counts[name]} {words.get(name, name)}" for name in others if counts.get(name)]
    if counts.get(None):
        rest.append(f"{counts[None]} not judged")
    parts = [first, ", ".join(rest)] if rest else [first]
    if limit is not None:
        whom = "none" if not limit.beyond else "all" if limit.beyond == limit.heads else f"{limit.beyond}"
        parts.append(f"the ceiling binds for {whom}")
    return "; ".join(parts) + "."


def _runs(heads: Sequence[Row], manifest: Mapping[str, Any]) -> str | None:
    """The normalizer that the verdict is about; None where layers differ."""
    name: str | None = next((row["normalizer"] for row in heads), "model")
    runs: str | None = manifest.get("model", {}).get("runs", "softmax")
    return runs if name == "model" else name


def _ceiling_sentences(limit: Ceiling | None, manifest: Mapping[str, Any], runs: str | None) -> list[str]:
    if limit is None:
        return ["Whether the ceiling binds was not measured: no head has a horizon."]
    if runs != "softmax":
        what = "which not every layer runs" if runs is None else f"and this is {runs}"
        would = (
            f"The ceiling is that of softmax, {what}. With softmax on these logits {limit.beyond} of {limit.heads} "
            f"heads would be beyond their horizon at {limit.length:,} keys, the length after which it can give no key "
            "half of the weight."
        )
        return [would]
    now = {0: "No", limit.heads: "Yes"}.get(limit.beyond, "In part")
    sentence = (
        f"Is the ceiling binding at {limit.length:,} keys? {now}: {limit.beyond} of {limit.heads} heads are beyond "
        f"their horizon, the length after which softmax can give no key half of the weight."
    )
    when = (
        f"With the spread of the logits as it is now it binds for a tenth of the heads {_from(limit.horizons[0])}, for "
        f"half {_from(limit.horizons[1])}, for nine tenths {_from(limit.horizons[2])}"
    )
    growing = [_from(length) for length in limit.binding]
    if growing != [_from(length) for length in limit.horizons]:
        never = min(limit.binding) >= FARTHEST
        when += "; if it keeps growing with n as it does inside the text, "
        when += "for less than a tenth at any length in use" if never else ", ".join(growing)
    when += "."
    trained = manifest.get("model", {}).get("max_positions")
    made_for = f" The model was made for {trained:,} positions." if isinstance(trained, int) else ""
    return [sentence, when + made_for]


def _from(length: float) -> str:
    return f"beyond {keys(length)} keys" if length < FARTHEST else "beyond any length in use"


def _rate_sentences(slopes: Rate | None) -> list[str]:
    if slopes is None:
        return ["The rate test needs rows of several lengths; this run has none."]
    low, middle, high = slopes.quartiles
    sentence = (
        f"Rate test: the effective gap grows by {middle:.2f} per e-fold of n in the median head (quartiles {low:.2f} "
        f"to {high:.2f}); {slopes.keeping_up} of {slopes.heads} heads keep up with the context (0.9 or more), "
        f"{slopes.below_half} are nearer to dispersing as theory predicts (below 0.5)."
    )
    if slopes.without_sink is not None and abs(slopes.without_sink - middle) >= 0.1:
        sentence += f" Without the first key the median is {slopes.without_sink:.2f}."
    return [sentence]


def _caveats(heads: Sequence[Row], changing: int) -> list[str]:
    sentences = []
    if changing:
        sentences.append(f"{changing} heads get another verdict on another text; each is counted by its commonest.")
    missing = Counter(
        reason
        for row in heads
        for reason in ("saturated (no separability)", "sensitive (no Jacobian norm)", "frozen (no Jacobian norm)")
        if reason in (row["evidence"] or "")
    )
    for reason, count in missing.items():
        sentences.append(f"Not judged on {count} of {len(heads)} heads: {reason}.")
    return sentences


__all__ = [
    "MEANING",
    "VERDICTS",
    "Advice",
    "ModelVerdict",
    "Thresholds",
    "WhatIf",
    "judge",
    "model_verdict",
    "representative",
]
