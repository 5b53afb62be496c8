"""Build the normalizer for one layer of a trained model: with a warm start close to softmax, for all or some heads.

The file of each normalizer declares its warm start (WarmStart). Options that the user gives override it.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attnorm.normalizers.block import Block
from attnorm.normalizers.composition import common_properties
from attnorm.normalizers.contract import Map, Mechanism, Normalizer
from attnorm.normalizers.declaration import LayerFacts, Options, WarmStart, warm_start_of
from attnorm.normalizers.registry import entries, get
from attnorm.normalizers.softmax import Softmax

# Training length for configs that do not state one; also the default of ssmax.
USUAL_LENGTH = 1024
# Options that describe the layer; they are set without a warm start too.
FACTS = ("heads", "train_length")
# Attributes of attention modules that may hold the number of heads.
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")


def build(name: str, given: Options, layer: LayerFacts, *, warm: bool) -> tuple[Normalizer | Mechanism, dict[str, Any]]:
    """Build a normalizer for one layer; return it with all options it was built with."""
    registered = entries().get(name)
    entry = WarmStart("unknown") if registered is None else warm_start_of(registered.factory())
    start = entry.options(layer, given)
    if not warm:
        start = {option: value for option, value in start.items() if option in FACTS}
    options = {**start, **given}
    normalizer = get(name, **options)
    if warm:
        state = normalizer.state_dict()  # parameters if learned, buffers if fixed
        for key, value in entry.values(layer, given, options).items():
            state[key].copy_(torch.as_tensor(value, dtype=torch.float32).detach().cpu())
    return normalizer, options


def trained_length(config: Any) -> int:
    """Return the context length a model was trained for, before any extension of its rotary embedding."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [part for part in rope.values() if isinstance(part, Mapping)]
    candidates = [
        *(part.get("original_max_position_embeddings") for part in (rope, *by_layer_type)),
        getattr(config, "max_position_embeddings", None),
        getattr(config, "n_positions", None),
        getattr(config, "max_target_positions", None),
    ]
    return next((int(length) for length in candidates if isinstance(length, int) and length > 2), USUAL_LENGTH)


class ByHead(Map):
    """A map with one normalizer (`chosen`) for the given heads and another one (`others`) for the rest.

    Dimension -3 of the logits holds the heads.
    """

    def __init__(self, chosen: Normalizer, heads: Sequence[int], others: Normalizer | None = None) -> None:
        super().__init__()
        self.chosen = chosen
        self.others = others or Normalizer(Softmax(), name="softmax")
        self.heads = tuple(heads)
        self.properties = common_properties(self.chosen.properties, self.others.properties)

    def forward(self, block: Block) -> Tensor:
        count = block.logits.shape[-3]
        rest = [head for head in range(count) if head not in self.heads]
        chosen = self.chosen.weights(_select_heads(block, self.heads))
        others = self.others.weights(_select_heads(block, rest))
        order = [*self.heads, *rest]  # of the heads in the concatenation
        return torch.cat([chosen, others], dim=-3)[..., [order.index(head) for head in range(count)], :, :]

    def lipschitz(self, n: int) -> float | None:
        bounds = self.chosen.lipschitz(n), self.others.lipschitz(n)
        return None if bounds[0] is None or bounds[1] is None else max(bounds[0], bounds[1])

    def extra_repr(self) -> str:
        return f"heads={self.heads}"


def restrict_to_heads(normalizer: Normalizer | Mechanism, heads: tuple[int, ...] | None) -> Normalizer | Mechanism:
    """Return a normalizer that applies to these heads only, with softmax for the others. None: all heads."""
    if heads is None:
        return normalizer
    if isinstance(normalizer, Mechanism):
        raise ValueError(f"{normalizer.name!r} is a mechanism of all heads of a layer; leave the heads out")
    return Normalizer(ByHead(normalizer, heads), name=normalizer.name)


def head_count(module: nn.Module) -> int:
    """Return the number of query heads of an attention module."""
    for holder in (module, module.config):
        for name in HEADS:
            count = getattr(holder, name, None)
            if isinstance(count, int):
                return count
    projection, width = getattr(module, "q_proj", None), getattr(module, "head_dim", None)
    if isinstance(projection, nn.Linear) and isinstance(width, int):  # RF-DETR
        return projection.out_features // width
    raise ValueError(
        f"{type(module).__name__} does not say how many heads it has (expected one of {', '.join(HEADS)}); patch a "
        "part of the model without it, e.g. patch(model.get_decoder(), ...), or leave its layer out with layers="
    )


def as_integer(value: Any) -> int:
    """Convert an integer of any type, also NumPy's, to int; raise TypeError for anything else, also for bool."""
    if isinstance(value, bool):
        raise TypeError(f"expected a whole number, got {value!r}")
    return operator.index(value)


def validate_heads(heads: Any, module: nn.Module, path: str) -> tuple[int, ...]:
    """Return head indices as a tuple; raise ValueError unless they are different heads of the module."""
    count = head_count(module)
    try:
        head_indices = tuple(map(as_integer, heads if isinstance(heads, Iterable) else [heads]))
    except TypeError:
        head_indices = ()
    if not head_indices or not all(0 <= head < count for head in head_indices):
        raise ValueError(f"{path} has the heads 0 to {count - 1}; got {heads!r}")
    if len({*head_indices}) < len(head_indices):
        raise ValueError(f"{path}: name each of the heads once; got {heads!r}")
    return head_indices


def check_fit(normalizer: Normalizer | Mechanism, module: nn.Module, path: str) -> None:
    """Raise ValueError if the normalizer has parameters for another number of heads: run it on two keys per head."""
    if isinstance(normalizer, Mechanism):
        return
    any_value = next((value for value in normalizer.state_dict().values()), torch.empty(0))
    logits = torch.zeros(1, head_count(module), 1, 2, device=any_value.device)
    try:
        with torch.no_grad():
            normalizer(logits)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"{normalizer.name!r} does not fit {path}, which has {head_count(module)} heads: {error}"
        ) from None


def _select_heads(block: Block, heads: Sequence[int]) -> Block:
    mask = block.mask
    if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
        mask = mask[..., list(heads), :, :]
    return replace(block, logits=block.logits[..., list(heads), :, :], mask=mask)
