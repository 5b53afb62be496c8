"""Rows of logits of every head, kept whole: what experiments need that try several maps on the same logits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from attnorm.experiments.experiment import Subject, Tell
from attnorm.experiments.observed import look_at
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.logits import logit_blocks
from attnorm.metrics.sampling import rows_to_measure


@dataclass(frozen=True)
class SampledRows:
    """M rows of up to L keys: the same rows of every head, heads one after the other."""

    logits: Tensor  # (M, L), 0 where hidden; scaled as the model runs them
    visible: Tensor  # (M, L), boolean
    layer: Tensor  # (M,)
    head: Tensor  # (M,)

    @property
    def n(self) -> Tensor:
        return self.visible.sum(-1)

    def where(self, chosen: Tensor) -> "SampledRows":
        return SampledRows(self.logits[chosen], self.visible[chosen], self.layer[chosen], self.head[chosen])


def sample_rows(subject: Subject, tell: Tell, length: int, rows: int) -> SampledRows:
    """`rows` rows of every head, spread over the lengths of contexts up to `length`."""
    logits: list[Tensor] = []
    visible: list[Tensor] = []
    layers: list[Tensor] = []
    heads: list[Tensor] = []

    def look(call: AttentionCall) -> None:
        chosen = rows_to_measure(rows, call.query_BHQD.shape[-2], causal=call.causal)
        for block in logit_blocks(call, chosen.to(call.query_BHQD.device), all_heads=True):
            count, taken, width = block.logits.shape
            seen = block.visible.expand(block.logits.shape)
            own = block.logits.new_zeros(count, taken, length)
            own[..., block.first_key : block.first_key + width] = torch.where(seen, block.logits, 0.0)[..., :length]
            mask = seen.new_zeros(count, taken, length)
            mask[..., block.first_key : block.first_key + width] = seen[..., :length]
            logits.append(own.flatten(0, 1).cpu())
            visible.append(mask.flatten(0, 1).cpu())
            layers.append(torch.full((count * taken,), call.layer))
            heads.append(torch.arange(count).repeat_interleave(taken))

    look_at(subject, length, look, tell, "rows of every head")
    return SampledRows(torch.cat(logits), torch.cat(visible), torch.cat(layers), torch.cat(heads))
