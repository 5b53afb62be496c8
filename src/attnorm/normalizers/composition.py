"""Build a normalizer from parts: logit rules, selections, a map and a sink.

compose("entmax15", scale="ssmax")                       # length-aware and sparse
compose("softmax", scale=get("ssmax", heads=12), select=TopK("sqrt"), sink=Sink(heads=12))
mixture("softmax", "sparsemax", heads=12)                # learned per head

Command lines, plans, recipes and saved models take text only. For them there are two normalizers:

composed:scale=ssa:map=entmax15:sink=sink                # compose, with parts given by name
tempered:temperature=0.5:map=sparsemax                   # logits divided by a temperature T, fixed or learned

The Jacobian of `tempered` is the map's divided by T: at most 1/(2T) behind softmax, where T of 1 is softmax itself.
"""

import inspect
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
from attnorm.normalizers.declaration import HEADS, LayerFacts, Options, Row, WarmStart, declare, heads_if_learned
from attnorm.normalizers.entmax import entmax_row
from attnorm.normalizers.registry import entries, get, resolve
from attnorm.normalizers.softmax import Softmax, Temperature, softmax_row
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
    )


NameOrNormalizer = str | Normalizer

EXAMPLES = {"scale": "ssmax", "select": "topk"}


def compose(
    map: NameOrNormalizer | Map = "softmax",
    *,
    scale: NameOrNormalizer | LogitRule | Iterable[NameOrNormalizer | LogitRule] = (),
    select: NameOrNormalizer | Selection | Iterable[NameOrNormalizer | Selection] = (),
    sink: NameOrNormalizer | Sink | None = None,
    name: str = "custom",
) -> Normalizer:
    """Build a normalizer from parts. Each is an object, or a normalizer (or its name) that has only this part.

    Args:
        map: Turns the logits into weights.
        scale: Logit rules, applied in this order before the map.
        select: Selections, which hide keys from the map.
        sink: One more logit without a value, whose weight is dropped.
        name: Name of the result in tables and reports.

    >>> compose("entmax15", scale="ssmax", select="topk", sink="sink")
    """
    return Normalizer(
        map if isinstance(map, Map) else _map_of(map),
        scale=_rules_of(scale),
        select=_selections_of(select),
        sink=sink if sink is None or isinstance(sink, Sink) else _sink_of(sink),
        name=name,
    )


def add_rule(rule: LogitRule, map: NameOrNormalizer, *, name: str) -> Normalizer:
    """Return a normalizer with one more logit rule, which is applied after its own rules.

    map: a normalizer or its name, which may have options as in kneemax+knee=0.1.
    """
    if not isinstance(map, str | Normalizer) or map == name:
        raise ValueError(f"expected another row normalizer as map, got {map!r}. Write e.g. map='entmax15'.")
    inner = _as_row_normalizer(resolve_part(map))
    check_plain_class(inner)
    return Normalizer(inner.map, scale=[*inner.rules, rule], select=inner.selections, sink=inner.sink, name=name)


def resolve_part(part: NameOrNormalizer) -> Normalizer | Mechanism:
    """Resolve an option that names a normalizer; it may have options of its own, as in kneemax+knee=0.1."""
    if isinstance(part, str) and "+" in part:
        name, options = parse_part(part)
        return get(name, **options)
    return resolve(part)


def mixture(
    first: NameOrNormalizer, second: NameOrNormalizer, *, share: float = 0.5, heads: int | None = None
) -> Normalizer:
    """Build share * first + (1 - share) * second. The share is learned, one per head if `heads` is given."""
    return Normalizer(
        Mixture(_as_row_normalizer(first), _as_row_normalizer(second), share=share, heads=heads), name="mixture"
    )


def _as_row_normalizer(part: NameOrNormalizer | Mechanism) -> Normalizer:
    normalizer = resolve(part)
    if isinstance(normalizer, Mechanism):
        raise TypeError(
            f"{normalizer.name!r} is a mechanism, which needs q, k and v and cannot be part of a composition. "
            "Use a row normalizer."
        )
    return normalizer


def _map_of(part: NameOrNormalizer) -> Map:
    normalizer = _as_row_normalizer(part)
    _check_no_other_parts(normalizer, "map", normalizer.scale, normalizer.select, normalizer.sink)
    return normalizer.map


def _rules_of(part: NameOrNormalizer | LogitRule | Iterable[NameOrNormalizer | LogitRule]) -> list[LogitRule]:
    if isinstance(part, LogitRule):
        return [part]
    if not isinstance(part, str | Normalizer):
        return [rule for item in _as_iterable(part, "scale") for rule in _rules_of(item)]
    normalizer = _as_row_normalizer(part)
    _check_no_other_parts(
        normalizer, "scale rule", normalizer.select, normalizer.sink, not isinstance(normalizer.map, Softmax)
    )
    return normalizer.rules


def _selections_of(part: NameOrNormalizer | Selection | Iterable[NameOrNormalizer | Selection]) -> list[Selection]:
    if isinstance(part, Selection):
        return [part]
    if not isinstance(part, str | Normalizer):
        return [selection for item in _as_iterable(part, "select") for selection in _selections_of(item)]
    normalizer = _as_row_normalizer(part)
    _check_no_other_parts(
        normalizer, "selection", normalizer.scale, normalizer.sink, not isinstance(normalizer.map, Softmax)
    )
    if not normalizer.selections:
        raise ValueError(f"{normalizer.name!r} selects no keys. Use 'topk', 'local' or a Selection object.")
    return normalizer.selections


def _as_iterable(parts: Any, option: str) -> Iterable[Any]:
    if isinstance(parts, Iterable):
        return parts
    raise TypeError(
        f"{option}=: expected a name such as {EXAMPLES[option]!r}, an object, or several of them, got {parts!r}."
    )


def _sink_of(part: NameOrNormalizer) -> Sink:
    normalizer = _as_row_normalizer(part)
    _check_no_other_parts(
        normalizer, "sink", normalizer.scale, normalizer.select, not isinstance(normalizer.map, Softmax)
    )
    if normalizer.sink is None:
        raise ValueError(f"{normalizer.name!r} has no sink. Use 'sink', 'softmax1' or a Sink object.")
    return normalizer.sink


def check_plain_class(normalizer: Normalizer) -> None:
    """Raise ValueError if the class overrides methods, which a composition of its parts would ignore."""
    if not normalizer.known_to_engines:
        raise ValueError(
            f"expected a Normalizer, got a {type(normalizer).__name__}, which overrides prepare or weights; a "
            "composition uses the parts only and would ignore that. Override forward of an attnorm.Map instead."
        )


def _check_no_other_parts(normalizer: Normalizer, part_name: str, *others: object) -> None:
    """Raise ValueError if the normalizer has other parts than the wanted one, which would be lost."""
    check_plain_class(normalizer)
    lost = [other for other in others if (len(other) > 0 if hasattr(other, "__len__") else bool(other))]
    if not lost:
        return
    options = _compose_options(normalizer)
    if len(options) == 1:
        raise ValueError(
            f"{normalizer.name!r} is more than a {part_name}. Write compose({options[0]}={normalizer.name!r})"
        )
    raise ValueError(f"{normalizer.name!r} is more than a {part_name}. Pass the {part_name} object itself.")


def _compose_options(normalizer: Normalizer) -> list[str]:
    """Return the options of compose() that take the parts in which a normalizer differs from softmax."""
    parts = {
        "map": not isinstance(normalizer.map, Softmax),
        "scale": len(normalizer.scale) > 0,
        "select": len(normalizer.select) > 0,
        "sink": normalizer.sink is not None,
    }
    return [name for name, present in parts.items() if present]


def _build_part(spec: str | None, option: str, **shared: int | None) -> Normalizer | None:
    if spec is None:
        return None
    name, options = parse_part(spec) if isinstance(spec, str) else (spec, {})
    if not isinstance(name, str) or name == "composed":
        raise ValueError(f"expected {option} as the name of a normalizer, got {spec!r}. Write e.g. {option}='ssmax'.")
    registered = entries()
    takes = inspect.signature(registered[name].factory()).parameters if name in registered else {}
    shared_options = {key: value for key, value in shared.items() if value is not None and key in takes}
    if "learned" in takes and not options.get("learned", takes["learned"].default):
        shared_options.pop("heads", None)  # what is not learned is the same for all heads
    built = get(name, **(shared_options | options))
    if not isinstance(built, Normalizer):
        raise ValueError(f"expected {option} as a row normalizer, got the mechanism {name!r}.")
    return built


def _composed_reference(
    row: Row,
    map: str = "softmax",
    scale: str | None = None,
    sink: str | None = None,
    heads: int | None = None,
    **_: Any,
) -> Tensor:
    z = row.z
    if scale == "ssa":
        z = z * (1 + torch.exp(-torch.exp(row.value("scale.0.beta", 2.0))) * math.log(row.n))
    if sink is not None:
        z = torch.cat([row.value("sink.logit", 0.0).to(z.dtype)[None], z])
    weights = entmax_row(z, 1.5) if map == "entmax15" else softmax_row(z)
    return weights[1:] if sink is not None else weights


def _composed_start(layer: LayerFacts, given_options: Options) -> dict[str, Any]:
    return {"heads": layer.heads, "train_length": layer.length}


@declare(
    reference=_composed_reference,
    examples=[{}, {"scale": "ssa", "map": "entmax15", "sink": "sink", "heads": HEADS}],
    warm_start=WarmStart(
        "softmax without parts; each part starts as its paper has it", options=_composed_start, safe=True
    ),
)
def composed(
    map: str = "softmax",
    *,
    scale: str | None = None,
    select: str | None = None,
    sink: str | None = None,
    heads: int | None = None,
    train_length: int | None = None,
) -> Normalizer:
    """A scale rule, a selection, a map and a sink, each taken from the normalizer of that name.

    A part may have options: map="kneemax+knee=0.25".

    For command lines, plans, recipes and saved models: composed:scale=ssa:map=entmax15:sink=sink. The promises are
    those of the parts. In Python: attnorm.compose.
    """
    shared = {"heads": heads, "train_length": train_length}
    parts = {"scale": scale, "select": select, "sink": sink}
    built = {option: _build_part(name, option, **shared) for option, name in parts.items()}
    first = _build_part(map, "map", **shared)
    assert first is not None
    return compose(first, **{key: part for key, part in built.items() if part is not None}, name="composed")


def _tempered_reference(row: Row, map: str = "softmax", temperature: float = 1.0, **_: Any) -> Tensor:
    z = row.z / row.value("scale.0.log_temperature", math.log(temperature)).exp().to(row.z.dtype)
    return softmax_row(z) if map == "softmax" else get(map)(z[None])[0]


@declare(
    reference=_tempered_reference,
    examples=[{}, {"map": "sparsemax", "temperature": 0.37}, {"temperature": 2.0, "learned": True, "heads": HEADS}],
    warm_start=WarmStart("T = 1 in front of softmax; as far as its map otherwise", options=heads_if_learned, safe=True),
)
def tempered(
    map: str = "softmax", *, temperature: float = 1.0, learned: bool = False, heads: int | None = None
) -> Normalizer:
    """softmax(z / T), or another map of z / T, with a fixed or a learned temperature T.

    As in tempered:map=entmax15:temperature=0.5. The promises are those of the map.
    """
    return add_rule(Temperature(temperature, learned=learned, heads=heads), map, name="tempered")
