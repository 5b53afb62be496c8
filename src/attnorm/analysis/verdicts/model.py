"""The verdict on a model, in words: which heads select, is the ceiling binding, what to try.

Heads are judged in judge.py by the numbers in thresholds.py; here their verdicts are counted, sentences.py has the
words. The headline and the counts rest on what is always measured; saturation is a sentence of its own.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa

from attnorm.analysis.tables import HEAD_KEY
from attnorm.analysis.verdicts.advice import advise
from attnorm.analysis.verdicts.ceiling import Ceiling, Rate, ceiling, rate
from attnorm.analysis.verdicts.circuits import circuit_sentences
from attnorm.analysis.verdicts.rows import Row, by_view, head_rows, representative
from attnorm.analysis.verdicts.sentences import (
    caveats,
    ceiling_sentences,
    confidence_sentences,
    headline,
    length_sentences,
    rate_sentences,
    reading_sentences,
    saturation_sentences,
    text_sentences,
    threshold_sentences,
    too_short,
    window_sentences,
)
from attnorm.analysis.verdicts.thresholds import SATURATION, VERDICTS, Thresholds
from attnorm.analysis.verdicts.what_if import Advice


@dataclass(frozen=True, kw_only=True)
class ModelVerdict:
    """What a person should know first."""

    headline: str
    counts: dict[str, int]  # heads per verdict, all verdicts named; one head counts once, whatever the number of texts
    saturation: dict[str, int] = field(default_factory=dict)  # heads per answer
    texts: dict[str, str] = field(default_factory=dict)  # the headline of each text, where there are several
    sentences: list[str] = field(default_factory=list)
    advice: list[Advice] = field(default_factory=list)
    ceiling: Ceiling | None = None  # the numbers behind "is the ceiling binding?", of heads that see every key
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
    seeing_all, windowed = by_view(heads, all_heads)
    counts = Counter(row["verdict"] for row in heads)
    chosen = {tuple(row[name] for name, _ in HEAD_KEY) for row in seeing_all}
    curves = [
        row
        for row in tables["by_length"].select(_CURVE).to_pylist()
        if tuple(row[name] for name, _ in HEAD_KEY) in chosen
    ]
    runs, slopes = _runs(heads, manifest), rate(heads)
    limit = ceiling(seeing_all, curves if runs == "softmax" else (), thresholds)
    rows = {name: tables[name].to_pylist() for name in ("top_n", "coverage", "sensitivity")}
    texts = _by_text(all_heads, runs, thresholds)
    blurred = Counter(row.get("saturation") or "not judged" for row in heads)
    return ModelVerdict(
        headline=headline(seeing_all, windowed, limit, runs, thresholds, texts=len(texts)),
        counts={name: counts.get(name, 0) for name in VERDICTS},
        saturation={name: blurred.get(name, 0) for name in SATURATION},
        texts=texts,
        sentences=[
            *too_short(heads),
            *reading_sentences(manifest),
            *text_sentences(texts),
            *confidence_sentences(heads, manifest, thresholds),
            *ceiling_sentences(limit, manifest, runs),
            *window_sentences(windowed),
            *rate_sentences(slopes),
            *saturation_sentences(heads, manifest, thresholds),
            *circuit_sentences(heads),
            *((manifest.get("output") or {}).get("sentences") or ()),
            *length_sentences(all_heads, seeing_all, thresholds),
            *caveats(heads, changing, manifest),
            *threshold_sentences(thresholds, manifest),
        ],
        advice=advise(heads, {"heads": all_heads, **rows}, manifest, runs),
        ceiling=limit,
        rate=slopes,
    )


def _by_text(heads: Sequence[Row], runs: str | None, thresholds: Thresholds) -> dict[str, str]:
    """The headline of each text, where there are several."""
    texts = list(dict.fromkeys(row["text"] for row in heads))
    if len(texts) < 2:
        return {}
    found = {}
    for text in texts:
        own = [row for row in heads if row["text"] == text]
        chosen, _ = representative(own)
        seeing_all, windowed = by_view(chosen, own)
        found[text] = headline(seeing_all, windowed, None, runs, thresholds)
    return found


_SPREADS = ("logit_spread", "logit_spread_q50", "logit_spread_without_sink", "logit_spread_without_sink_q50")
_CURVE = [*(name for name, _ in HEAD_KEY), "n", *_SPREADS]


def _runs(heads: Sequence[Row], manifest: Mapping[str, Any]) -> str | None:
    """The normalizer that the verdict is about; None where layers differ."""
    name: str | None = next((row["normalizer"] for row in heads), "model")
    runs: str | None = manifest.get("model", {}).get("runs", "softmax")
    return runs if name == "model" else name
