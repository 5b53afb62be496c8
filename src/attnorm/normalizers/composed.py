"""`composed`: a composition given by names, for command lines, plans, recipes and saved models, which take text only.

    composed:scale=ssa:map=entmax15:sink=sink
    composed:scale=alibi:map=kneemax+knee=0.25

In Python, `compose` does the same with objects.
"""

import inspect
import math
from typing import Any

import torch
from torch import Tensor

from attnorm.normalizers.composition import compose
from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.declaration import HEADS, LayerFacts, Options, Row, WarmStart, declare
from attnorm.normalizers.entmax import entmax_row
from attnorm.normalizers.registry import entries, get
from attnorm.normalizers.softmax import softmax_row
from attnorm.normalizers.spec import parse_part


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


def _reference(
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


def _start(layer: LayerFacts, given_options: Options) -> dict[str, Any]:
    return {"heads": layer.heads, "train_length": layer.length}


@declare(
    reference=_reference,
    examples=[{}, {"scale": "ssa", "map": "entmax15", "sink": "sink", "heads": HEADS}],
    warm_start=WarmStart("the same", "softmax without parts; each part starts as its paper has it", options=_start),
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
    """
    shared = {"heads": heads, "train_length": train_length}
    parts = {"scale": scale, "select": select, "sink": sink}
    built = {option: _build_part(name, option, **shared) for option, name in parts.items()}
    first = _build_part(map, "map", **shared)
    assert first is not None
    return compose(first, **{key: part for key, part in built.items() if part is not None}, name="composed")
