"""A normalizer for some heads of a layer: the others keep softmax."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import Map, Mechanism, Normalizer
from attnorm.normalizers.mixture import mixed
from attnorm.normalizers.softmax import Softmax


class ByHead(Map):
    """`chosen` on the given heads, counted along the third dimension from the right; `others` on the rest."""

    def __init__(self, chosen: Normalizer, heads: Sequence[int], others: Normalizer | None = None) -> None:
        super().__init__()
        self.chosen = chosen
        self.others = others or Normalizer(Softmax(), name="softmax")
        self.heads = tuple(heads)
        self.properties = mixed(self.chosen.properties, self.others.properties)

    def forward(self, block: Block) -> Tensor:
        every = block.logits.shape[-3]
        rest = [head for head in range(every) if head not in self.heads]
        grouped = [*self.heads, *rest]
        weights = [self.chosen.weights(_of_heads(block, self.heads)), self.others.weights(_of_heads(block, rest))]
        return torch.cat(weights, dim=-3)[..., [grouped.index(head) for head in range(every)], :, :]

    def lipschitz(self, n: int) -> float | None:
        bounds = self.chosen.lipschitz(n), self.others.lipschitz(n)
        return None if bounds[0] is None or bounds[1] is None else max(bounds[0], bounds[1])

    def extra_repr(self) -> str:
        return f"heads={self.heads}"


def on_heads(normalizer: Normalizer | Mechanism, heads: tuple[int, ...] | None) -> Normalizer | Mechanism:
    """The normalizer for these heads and softmax for the others; for all heads if None."""
    if heads is None:
        return normalizer
    if isinstance(normalizer, Mechanism):
        raise ValueError(f"{normalizer.name!r} is a mechanism of all heads of a layer; leave the heads out")
    return Normalizer(ByHead(normalizer, heads), name=normalizer.name)


def _of_heads(block: Block, heads: Sequence[int]) -> Block:
    mask = block.mask
    if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
        mask = mask[..., list(heads), :, :]
    return replace(block, logits=block.logits[..., list(heads), :, :], mask=mask)
