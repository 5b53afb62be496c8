"""Stick-breaking attention: each key, from the last visible one back, takes the share sigmoid(z_j) of what is left.

    p_j = sigmoid(z_j) prod_{k > j} (1 - sigmoid(z_k)),   products over visible keys, in log space

Tan et al. 2024, https://arxiv.org/abs/2410.17980. Order replaces position encodings.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import Map, Normalizer, Properties
from attnorm.normalizers.declaration import Row, WarmStart, declare


class StickBreaking(Map):
    properties = Properties(
        row_sum="at most one", shift_invariant=False, permutation_equivariant=False, length="order of the keys"
    )

    def __init__(self, *, attend_current: bool = True) -> None:
        super().__init__()
        self.attend_current = attend_current

    def forward(self, block: Block) -> Tensor:
        log_rest = block.hide(logsigmoid(-block.logits))
        if self.attend_current:
            return block.hide(torch.exp(logsigmoid(block.logits) + _sum_after(log_rest)))
        current = block.positions.distance == 0
        log_rest = torch.where(current, 0.0, log_rest)
        weights = torch.exp(logsigmoid(block.logits) + _sum_after(log_rest))
        left = torch.exp(log_rest.sum(-1, keepdim=True))
        return block.hide(torch.where(current, left, weights))


def _sum_after(x: Tensor) -> Tensor:
    """Return for each key the sum over all later keys."""
    later = torch.cat([x[..., 1:], torch.zeros_like(x[..., :1])], dim=-1)
    return later.flip(-1).cumsum(-1).flip(-1)  # no subtraction: x may be far larger than what follows it


def _reference(row: Row, attend_current: bool = True) -> Tensor:
    left, weight_list = torch.ones((), dtype=row.z.dtype), []
    for z, distance in zip(row.z.flip(0), row.distance.flip(0), strict=True):
        if attend_current or distance != 0:
            weight_list.append(left / (1 + torch.exp(-z)))
            left = left / (1 + torch.exp(z))
        else:
            weight_list.append(torch.zeros_like(left))
    weights = torch.stack(weight_list[::-1])
    return weights if attend_current else weights + left * (row.distance == 0)


@declare(reference=_reference, examples=[{}, {"attend_current": False}], warm_start=WarmStart())
def stick_breaking(*, attend_current: bool = True) -> Normalizer:
    """sigmoid(z_j) times what later keys left over: each key takes a share; order replaces position encodings.

    The last visible key takes its share first. A distant best key loses its weight unless thousands of later keys learn
    small shares. attend_current=False, the paper's form: the query's own key takes no share and receives what is left.
    On CUDA the loop ends where less than 2^-160 is left.
    """
    return Normalizer(StickBreaking(attend_current=attend_current), name="stick_breaking")
