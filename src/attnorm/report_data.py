"""What a report shows of an analysis: plain tables, and what judging them gave.

`report` reads nothing else, so it stands below `analysis`, which judges and calls it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from attnorm.text import count_words

Row = Mapping[str, Any]  # of the table of heads
Tables = Mapping[str, pa.Table]  # by name: heads, by_length, top_n, sensitivity, coverage, reads, tokens
KEY = ("text", "length", "normalizer", "kind", "layer", "head")  # columns that identify a row of the table of heads

# The inputs whose tokens queries and keys are, by the kind of attention.
INPUT = "input"  # the side of a model with one stack; a model with two has encoder and decoder
SIDES = {"decoder": ("decoder", "decoder"), "encoder": ("encoder", "encoder"), "cross": ("decoder", "encoder")}

# The first verdict that applies is the verdict of the head; all that apply are its flags. The order: a silent head has
# no other flag, since it does not matter where tiny weights lie; a head that is frozen on its first key is called
# sink-dominated; and a dispersed head selects nothing that could be judged further.
MEANING: dict[str, str] = {
    "broken": "logits or weights that are not finite",
    "silent": "the weights sum to almost 0, so the head reads no key",
    "sink-dominated": "most of the weight is on the first key (in a sliding window: the first key of the window)",
    "frozen": "one key has almost all of the weight, and almost no gradient reaches the logits",
    "dispersed-forced": "the weight is spread over the context; at this length the logits let no key have half of it",
    "dispersed-by-choice": "the weight is spread over the context, although the logits would let one key have half "
    "of it",
    "dispersed": "the weight is spread over the context; how sharp this normalizer could be on the logits is not known",
    "sensitive": "on many rows the Jacobian norm is near its worst case: small changes of the logits matter most",
    "healthy": "no other verdict applies: the head selects, or it is broad but keeps up with the length",
    "undecided": "too close to a threshold: other windows of the text, or other images, may give another verdict",
    "differs": "different texts or images give different verdicts",
}
VERDICTS: tuple[str, ...] = tuple(MEANING)


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """The median of a quantity over some heads: as they were judged (Advice.baseline), and with a change."""

    change: str  # a normalizer, "top 100 instead of top 20", "T = 0.5"
    quantity: str
    before: float
    after: float
    heads: int


@dataclass(frozen=True, kw_only=True)
class Advice:
    title: str
    text: str
    heads: int  # number of heads that the advice is about
    what_if: tuple[WhatIf, ...] = ()
    command: str | None = None  # command that measures missing numbers
    caution: bool = False  # True: what not to expect. False: something to try
    baseline: str = "now"  # what the numbers before a change belong to: the model as it runs, or "with NORMALIZER"

    @property
    def heading(self) -> str:
        """Title with the number of heads."""
        return f"{self.title} ({count_words(self.heads, 'head')})" if self.heads else self.title

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


METRICS = (
    "entropy_ratio", "effective_keys", "max_weight", "gap_slope", "sink_mass", "entropy_ratio_without_sink",
    "horizon", "jacobian_norm",
)  # fmt: skip
CHANGE_METRICS = ("entropy_ratio", "max_weight", "sink_mass")  # from 0 to 1, so that changes are comparable


@dataclass(frozen=True, kw_only=True)
class Side:
    label: str
    normalizer: str
    headline: str
    longest: int  # keys of the longest rows
    heads: int
    counts: dict[str, int]
    quartiles: dict[str, tuple[float, float, float] | None]  # over heads; None if not measured


@dataclass(frozen=True, kw_only=True)
class Change:
    """One head on the first side and on another side."""

    label: str  # of the other side
    kind: str
    layer: int
    head: int
    verdicts: tuple[str | None, str | None]
    numbers: dict[str, tuple[float, float]]
    size: float  # the largest change of CHANGE_METRICS


@dataclass(frozen=True, kw_only=True)
class Comparison:
    sides: list[Side]
    matched: list[str]  # labels of the sides with the same heads as the first
    changes: list[Change]  # largest first
    changed_verdicts: dict[str, int]  # number of heads per matched side
    notes: list[str]  # differences that limit the comparison

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class ReportData(NamedTuple):
    tables: Tables
    manifest: Mapping[str, Any]
    headline: str
    counts: Mapping[str, int]  # heads per verdict
    sentences: Sequence[str]
    advice: Sequence[Advice]
    rows: Sequence[Row]  # one per head: those that the headline counts
    threshold_sentences: Sequence[str]  # about thresholds that differ from the defaults
    default_thresholds: Mapping[str, float]


def number(row: Row, name: str) -> float | None:
    """Return a number of the median row; None if it is not finite."""
    value = row.get(name)
    return None if value is None or not math.isfinite(value) else float(value)


def input_word(manifest: Mapping[str, Any]) -> str:
    """Return what an input of the run is called in sentences: "image" if a model of images was run, else "text"."""
    sizes = [str(text.get("size")) for text in manifest.get("texts", [])]
    images = [size.startswith("pixel_values ") and "input_ids" not in size for size in sizes]
    return "image" if images and all(images) else "text"
