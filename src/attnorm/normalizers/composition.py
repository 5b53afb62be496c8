"""Build a normalizer from parts: logit rules, selections, a map and a sink.

compose("entmax15", scale="ssmax")                       # length-aware and sparse
compose("softmax", scale=get("ssmax", heads=12), select=TopK("sqrt"), sink=Sink(heads=12))
mixture("softmax", "sparsemax", heads=12)                # learned per head
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import (
    LogitRule,
    Map,
    Mechanism,
    Normalizer,
    Properties,
    RowSum,
    Selection,
    Sink,
    per_head,
    per_head_parameter,
)
from attnorm.normalizers.registry import get, resolve
from attnorm.normalizers.softmax import Softmax
from attnorm.normalizers.spec import parse_part


class Mixture(Map):
    def __init__(self, first: Normalizer, second: Normalizer, *, share: float = 0.5, heads: int | None = None) -> None:
        super().__init__()
        if not 0 < share < 1:
            raise ValueError(f"share (the first normalizer's part) must lie strictly between 0 and 1, got {share}")
        self.first, self.second = first, second
        self.theta = per_head_parameter(math.log(share / (1 - share)), heads)
        self.properties = common_properties(first.properties, second.properties)

    def forward(self, block: Block) -> Tensor:
        share = torch.sigmoid(per_head(self.theta, block.logits).to(block.logits.dtype))
        return share * self.first.weights(block) + (1 - share) * self.second.weights(block)

    def lipschitz(self, n: int) -> float | None:
        bounds = self.first.lipschitz(n), self.second.lipschitz(n)
        return None if bounds[0] is None or bounds[1] is None else max(bounds[0], bounds[1])


def common_properties(a: Properties, b: Properties) -> Properties:
    """Return the properties that rows of a, rows of b and mixtures of both have in common."""
    order: tuple[RowSum, ...] = ("one", "at most one", "free")
    return Properties(
        row_sum=max(a.row_sum, b.row_sum, key=order.index),
        signed=a.signed or b.signed,
        exact_zeros=a.exact_zeros and b.exact_zeros,
        shift_invariant=a.shift_invariant and b.shift_invariant,
        permutation_equivariant=a.permutation_equivariant and b.permutation_equivariant,
        length=", ".join(dict.fromkeys(text for text in (a.length, b.length) if text)),
        swap_untrained=a.swap_untrained and b.swap_untrained,
    )


Part = str | Normalizer

EXAMPLES = {"scale": "ssmax", "select": "topk"}


def compose(
    map: Part | Map = "softmax",
    *,
    scale: Part | LogitRule | Iterable[Part | LogitRule] = (),
    select: Part | Selection | Iterable[Part | Selection] = (),
    sink: Part | Sink | None = None,
    name: str = "custom",
) -> Normalizer:
    """Build a normalizer from parts: each is an object, a normalizer that has only this part, or such a one's name."""
    return Normalizer(
        map if isinstance(map, Map) else _map_of(map),
        scale=_rules_of(scale),
        select=_selections_of(select),
        sink=sink if sink is None or isinstance(sink, Sink) else _sink_of(sink),
        name=name,
    )


def add_rule(rule: LogitRule, map: Part, *, name: str) -> Normalizer:
    """Return a normalizer with one more logit rule, which is applied after its own rules.

    map: a normalizer or its name, which may have options as in kneemax+knee=0.1.
    """
    if not isinstance(map, str | Normalizer) or map == name:
        raise ValueError(f"expected another row normalizer as map, got {map!r}. Write e.g. map='entmax15'.")
    inner = _as_row_normalizer(resolve_part(map))
    return Normalizer(inner.map, scale=[*inner.rules, rule], select=inner.selections, sink=inner.sink, name=name)


def resolve_part(part: Part) -> Normalizer | Mechanism:
    """Resolve an option that names a normalizer; it may have options of its own, as in kneemax+knee=0.1."""
    if isinstance(part, str) and "+" in part:
        name, options = parse_part(part)
        return get(name, **options)
    return resolve(part)


def mixture(first: Part, second: Part, *, share: float = 0.5, heads: int | None = None) -> Normalizer:
    """Build share * first + (1 - share) * second. The share is learned, one per head if `heads` is given."""
    return Normalizer(
        Mixture(_as_row_normalizer(first), _as_row_normalizer(second), share=share, heads=heads), name="mixture"
    )


def _as_row_normalizer(part: Part | Mechanism) -> Normalizer:
    normalizer = resolve(part)
    if isinstance(normalizer, Mechanism):
        raise TypeError(
            f"{normalizer.name!r} is an attention mechanism: it needs q, k, v and cannot be part of a composition"
        )
    return normalizer


def _map_of(part: Part) -> Map:
    normalizer = _as_row_normalizer(part)
    _check_no_other_parts(normalizer, "map", normalizer.scale, normalizer.select, normalizer.sink)
    return normalizer.map


def _rules_of(part: Part | LogitRule | Iterable[Part | LogitRule]) -> list[LogitRule]:
    if isinstance(part, LogitRule):
        return [part]
    if not isinstance(part, str | Normalizer):
        return [rule for item in _as_iterable(part, "scale") for rule in _rules_of(item)]
    normalizer = _as_row_normalizer(part)
    _check_no_other_parts(
        normalizer, "scale rule", normalizer.select, normalizer.sink, not isinstance(normalizer.map, Softmax)
    )
    return normalizer.rules


def _selections_of(part: Part | Selection | Iterable[Part | Selection]) -> list[Selection]:
    if isinstance(part, Selection):
        return [part]
    if not isinstance(part, str | Normalizer):
        return [selection for item in _as_iterable(part, "select") for selection in _selections_of(item)]
    normalizer = _as_row_normalizer(part)
    _check_no_other_parts(
        normalizer, "selection", normalizer.scale, normalizer.sink, not isinstance(normalizer.map, Softmax)
    )
    if not normalizer.selections:
        raise ValueError(f"{normalizer.name!r} selects no keys; use 'topk', 'local' or a Selection object")
    return normalizer.selections


def _as_iterable(parts: Any, option: str) -> Iterable[Any]:
    if isinstance(parts, Iterable):
        return parts
    raise TypeError(f"{option}= takes a name, e.g. {EXAMPLES[option]!r}, an object, or several of them; got {parts!r}")


def _sink_of(part: Part) -> Sink:
    normalizer = _as_row_normalizer(part)
    _check_no_other_parts(
        normalizer, "sink", normalizer.scale, normalizer.select, not isinstance(normalizer.map, Softmax)
    )
    if normalizer.sink is None:
        raise ValueError(f"{normalizer.name!r} has no sink; use 'sink', 'softmax1' or a Sink object")
    return normalizer.sink


def _check_no_other_parts(normalizer: Normalizer, part_name: str, *others: object) -> None:
    """Raise ValueError if the normalizer has other parts than the wanted one, which would be lost."""
    lost = [other for other in others if (len(other) > 0 if hasattr(other, "__len__") else bool(other))]
    if not lost:
        return
    options = _compose_options(normalizer)
    if len(options) == 1:
        raise ValueError(
            f"{normalizer.name!r} is more than a {part_name}; write compose({options[0]}={normalizer.name!r})"
        )
    raise ValueError(f"{normalizer.name!r} is more than a {part_name}; pass the {part_name} object itself")


def _compose_options(normalizer: Normalizer) -> list[str]:
    """Return the options of compose() that take the parts in which a normalizer differs from softmax."""
    parts = {
        "map": not isinstance(normalizer.map, Softmax),
        "scale": len(normalizer.scale) > 0,
        "select": len(normalizer.select) > 0,
        "sink": normalizer.sink is not None,
    }
    return [name for name, present in parts.items() if present]
