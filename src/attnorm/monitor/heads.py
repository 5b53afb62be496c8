"""Logged numbers of single heads: the requested heads, the worst head of each metric, and series over steps."""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from attnorm.monitor.measure import BROKEN, REPORTED

Layers = Mapping[str, Mapping[str, list[float]]]  # layer -> metric -> one number per head
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
