"""What a measurement in training says of heads and layers: numbers to log, series over steps, and alerts.

An alert is a state of a layer; every threshold is in `AlertThresholds`. Logged are the requested heads and the worst
head of each metric.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import pyarrow as pa

from attnorm.monitor.measure import BROKEN, REPORTED

MEANING: dict[str, str] = {
    "entropy_collapse": "attends to single keys, and hardly any gradient reaches the logits",
    "dispersion": "spreads over the whole context",
    "saturation": "distinguishes its top keys no better than if their weights were permuted at random",
    "exploding_logits": "has logits so large that half precision and the loss are in danger",
    "not_finite": "has logits or weights that are not finite",
}


class AttentionAlert(UserWarning):
    """A layer's attention went wrong in training."""


@dataclass(frozen=True, kw_only=True)
class AlertThresholds:
    """A head is in a state if its mean over the sampled rows passes a threshold; a layer, if enough of its heads are.

    parked_sink         mass on the first key from which a head is parked: common, harmless, and neither a collapse nor
                        a saturation.
    collapsed_entropy   nats up to which a head has collapsed. 0.05 is a largest weight of about 0.99.
    dispersed_entropy   entropy / log n from which a head is dispersed. Stricter than the verdict of analyze (0.7),
                        which also uses how the head behaves as n grows; untrained weights start at 0.95 and more.
    heads               share of a layer's heads that must be collapsed or dispersed; every model has single ones.
    separability        share of distinguishable top keys, mean over a layer's heads, below which it is saturated, if
                        the same weights permuted at random do no worse. On four texts SmolLM2's layers
                        lay between 0.48 and 0.88, half of them a little below chance.
    exploding_logit     largest logit of the rows measured, from which one head is enough. 100 is where Kimi K2's
                        QK-clip starts (https://arxiv.org/abs/2507.20534) ...
    logit_growth        ... and this many times its value at the first measurement. Trained models may have
                        large logits, of which softmax sees only the differences; growth is the danger.
    """

    parked_sink: float = 0.5
    collapsed_entropy: float = 0.05
    dispersed_entropy: float = 0.9
    heads: float = 0.5
    separability: float = 0.33
    exploding_logit: float = 100.0
    logit_growth: float = 2.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
                raise ValueError(f"expected threshold {field.name} of at least 0, got {value!r}.")
        if not 0 < self.heads <= 1:
            raise ValueError(f"expected threshold heads above 0 and at most 1, got {self.heads!r}.")


@dataclass(frozen=True, kw_only=True)
class State:
    """A state of a layer, and the number that decides it."""

    kind: str  # of MEANING
    value: float
    words: str


@dataclass(frozen=True, kw_only=True)
class Alert:
    step: int
    layer: str  # as in the keys: layer_03
    kind: str
    value: float
    words: str

    def __str__(self) -> str:
        return f"{self.layer} {MEANING[self.kind]} ({self.words})"


_COMPARED = ("separability", "separability_null")

Heads = Mapping[str, list[float]]  # by metric, one number per head


def states(heads: Heads, first_logit: float, thresholds: AlertThresholds) -> Iterator[State]:
    """The states that a layer is in. first_logit: its largest logit at the first measurement; NaN if unknown."""
    broken = max(heads["broken_rows"])
    if broken > 0:
        yield State(kind="not_finite", value=broken, words=f"up to {broken:.0%} of a head's rows")
    count = len(heads["entropy"])
    selecting = [head for head, mass in enumerate(heads["sink_mass"]) if not mass >= thresholds.parked_sink]
    collapsed = sum(heads["entropy"][head] <= thresholds.collapsed_entropy for head in selecting)
    dispersed = sum(ratio >= thresholds.dispersed_entropy for ratio in heads["entropy_ratio"])
    for kind, many in (("entropy_collapse", collapsed), ("dispersion", dispersed)):
        if many / count >= thresholds.heads:
            yield State(kind=kind, value=many / count, words=f"{many} of {count} heads")
    apart, chance = (_mean([heads[name][head] for head in selecting]) for name in _COMPARED)
    if apart < thresholds.separability and apart <= chance:
        yield State(kind="saturation", value=apart, words=f"{apart:.2f}, by chance {chance:.2f}")
    logit = largest_logit(heads)
    if logit >= thresholds.exploding_logit and not logit < thresholds.logit_growth * first_logit:
        yield State(kind="exploding_logits", value=logit, words=f"{logit:.3g}, at first {first_logit:.3g}")


def largest_logit(heads: Heads) -> float:
    return max((value for value in heads["largest_logit"] if not math.isnan(value)), default=math.nan)


def _mean(values: list[float]) -> float:
    """Mean without NaN; NaN where there is no number."""
    numbers = [value for value in values if not math.isnan(value)]
    return sum(numbers) / len(numbers) if numbers else math.nan


Layers = Mapping[str, Heads]  # by layer
PerHead = bool | Sequence[tuple[int, int] | tuple[str, int, int]]
KEPT = 1000  # measurements


@dataclass(frozen=True)
class Measurement:
    """All heads at one step."""

    step: int
    layers: Layers


class History(Sequence[Measurement]):
    """The last measurements, the oldest first, and the series of single heads in them."""

    def __init__(self, kept: int = KEPT) -> None:
        self._measurements: deque[Measurement] = deque(maxlen=kept)

    def add(self, step: int, layers: Layers) -> None:
        self._measurements.append(Measurement(step, layers))

    def __len__(self) -> int:
        return len(self._measurements)

    def __getitem__(self, index: Any) -> Any:
        return list(self._measurements)[index]

    def series(self, metric: str, layer: int, head: int, kind: str | None = None) -> list[tuple[int, float]]:
        """Return (step, value) of one head; NaN if no row had such a number."""
        if metric not in (*REPORTED, BROKEN):
            raise ValueError(f"expected a metric of {', '.join((*REPORTED, BROKEN))}; got {metric!r}.")
        points = []
        for measurement in self._measurements:
            for label, heads in measurement.layers.items():
                own_kind, own_layer = layer_of(label)
                if (own_kind, own_layer) == (kind, layer) and 0 <= head < len(heads[metric]):
                    points.append((measurement.step, heads[metric][head]))
        if self._measurements and not points:
            labels = ", ".join(self._measurements[-1].layers)
            raise KeyError(
                f"expected a head that was measured, got {kind or ''} layer {layer} head {head}; layers: {labels}"
            )
        return points

    def table(self) -> pa.Table:
        """One row per step and head: step, kind, layer, head and every metric."""
        columns: dict[str, list[Any]] = {name: [] for name in ("step", "kind", "layer", "head", *REPORTED, BROKEN)}
        for measurement in self._measurements:
            for label, heads in measurement.layers.items():
                kind, layer = layer_of(label)
                count = len(heads[BROKEN])
                columns["step"] += [measurement.step] * count
                columns["kind"] += [kind] * count
                columns["layer"] += [layer] * count
                columns["head"] += range(count)
                for name in (*REPORTED, BROKEN):
                    columns[name] += heads[name]
        key_types = {"step": pa.int64(), "kind": pa.string(), "layer": pa.int64(), "head": pa.int64()}
        return pa.table({name: pa.array(values, key_types.get(name, pa.float64())) for name, values in columns.items()})


def layer_of(label: str) -> tuple[str | None, int]:
    """Return kind and layer of a key: ("encoder", 3) for "encoder/layer_03"; the kind is None if there is only one."""
    kind, _, layer = label.rpartition("/")
    return kind or None, int(layer.removeprefix("layer_"))


def check_per_head(per_head: Any) -> bool | tuple[tuple[str | None, int, int], ...]:
    """True, False, or the heads as (kind or None, layer, head)."""
    if isinstance(per_head, bool):
        return per_head
    try:
        heads = [tuple(head) for head in per_head]
    except TypeError:
        heads = [()]
    full = [(None, *head) if len(head) == 2 else head for head in heads]
    if not full or not all(len(head) == 3 and _is_head(*head) for head in full):
        raise ValueError(
            f"expected per_head as True, False or a list of (layer, head), got {per_head!r}. Give e.g. [(3, 5)], or "
            "[('encoder', 3, 5)] in a model of two stacks."
        )
    return tuple(full)


def _is_head(kind: Any, layer: Any, head: Any) -> bool:
    numbers = all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in (layer, head))
    return numbers and (kind is None or isinstance(kind, str))


def worst_of_layer(values: Iterable[float], lowest: bool) -> tuple[int, float] | None:
    """Index and number of the worst head; None where no head has a number."""
    numbered = [(value, head) for head, value in enumerate(values) if not math.isnan(value)]
    if not numbered:
        return None
    value, head = min(numbered) if lowest else max(numbered, key=lambda entry: (entry[0], -entry[1]))
    return head, value


def head_keys(
    layers: Layers, per_head: bool | tuple[tuple[str | None, int, int], ...], prefix: str
) -> Iterator[tuple[str, float]]:
    """Return attn/layer_03/head_05/entropy and so on for the requested heads, without undefined numbers."""
    if per_head is False:
        return
    for label, heads in layers.items():
        kind, layer = layer_of(label)
        width = max(2, len(str(len(heads[BROKEN]) - 1)))
        for head in range(len(heads[BROKEN])):
            if per_head is True or (kind, layer, head) in per_head:
                for name in REPORTED:
                    if not math.isnan(heads[name][head]):
                        yield f"{prefix}{label}/head_{head:0{width}}/{name}", heads[name][head]


def worst_keys(layers: Layers, prefix: str) -> Iterator[tuple[str, float]]:
    """attn/worst/entropy_ratio with its _layer and _head, of all layers of a kind; the first of equal ones."""
    kinds = dict.fromkeys(layer_of(label)[0] for label in layers)
    for kind in kinds:
        start = f"{prefix}{kind}/worst/" if kind else f"{prefix}worst/"
        for name, metric in REPORTED.items():
            lowest = metric.worst == "min"
            candidates = [
                (worst[1] if lowest else -worst[1], layer_of(label)[1], worst[0])
                for label, heads in layers.items()
                if layer_of(label)[0] == kind and (worst := worst_of_layer(heads[name], lowest)) is not None
            ]
            if candidates:
                value, layer, head = min(candidates)
                yield f"{start}{name}", value if lowest else -value
                yield f"{start}{name}_layer", float(layer)
                yield f"{start}{name}_head", float(head)
