"""Top-k and hard attention: weight for the largest logits of each row only.

Top-k keeps the k largest logits and normalizes over them: Gupta et al. 2021, https://arxiv.org/abs/2106.06899. k is a
number or a rule of the row's visible keys n ("sqrt", "log", or a function of a tensor of counts); rows with fewer than
k keys keep all. Keys tied with the k-th are all kept, so that the result does not depend on their order.

Hard attention gives all weight to the largest logit, and ties share it equally. The forward map is piecewise constant;
the gradient is declared, not its derivative: it is softmax's (straight-through estimator, Bengio, Leonard & Courville
2013, https://arxiv.org/abs/1308.3432).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import Map, Normalizer, Properties, Selection
from attnorm.normalizers.declaration import Row, WarmStart, declare
from attnorm.normalizers.softmax import Softmax, softmax_over, softmax_row

CountRule = Callable[[Tensor], Tensor]

RULES: dict[str, CountRule] = {
    "sqrt": lambda n: torch.ceil(torch.sqrt(n)),
    "log": lambda n: torch.ceil(torch.log2(n.clamp(min=1))) + 1,
}


class TopK(Selection):
    continuous = False

    def __init__(self, k: int | str | CountRule = 64) -> None:
        super().__init__()
        if isinstance(k, str) and k not in RULES:
            raise ValueError(f"expected k as a number, a function of n, or one of {sorted(RULES)}, got {k!r}.")
        if isinstance(k, bool) or (not isinstance(k, str | int) and not callable(k)):
            raise TypeError(f"k must be a whole number, a function of n, or one of {sorted(RULES)}, got {k!r}")
        if isinstance(k, int) and k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        self.k = k
        self.length = "" if isinstance(k, int) else f"k = {k if isinstance(k, str) else 'rule'}(n)"

    def forward(self, block: Block) -> Tensor:
        z = block.filled_low().detach()
        if isinstance(self.k, int):
            kth = z.topk(min(self.k, z.shape[-1]), dim=-1).values[..., -1:]
        else:
            count = self.counts(block.n)
            kth = z.sort(dim=-1, descending=True).values.gather(-1, (count - 1).expand(*z.shape[:-1], 1))
        # NaN compares as false: without this a NaN logit would be dropped and the row would look healthy.
        return (z >= kth) | z.isnan().any(-1, keepdim=True)

    def counts(self, n: Tensor) -> Tensor:
        """Return how many keys a row with n visible keys keeps: at least 1, at most n."""
        if isinstance(self.k, int):
            kept = torch.full_like(n, self.k)
        else:
            kept = (RULES[self.k] if isinstance(self.k, str) else self.k)(n)
        return kept.clamp(min=1).minimum(n.clamp(min=1)).long()

    def most(self, keys: int) -> int:
        """Return a bound on how many keys a row of at most `keys` visible keys keeps."""
        if isinstance(self.k, int):
            return self.k
        if self.k == "log" or (self.k == "sqrt" and keys <= 4096):
            return 64
        return keys

    def extra_repr(self) -> str:
        return f"k={self.k}"


def _reference(row: Row, k: int | str = 64) -> Tensor:
    """Keys tied with the k-th are kept."""
    by_rule = {"sqrt": math.ceil(math.sqrt(row.n)), "log": math.ceil(math.log2(row.n)) + 1}
    count = by_rule[k] if isinstance(k, str) else k
    z = row.z.detach()
    return softmax_over(row.z, z >= z.sort(descending=True).values[min(count, row.n) - 1])


@declare(
    reference=_reference,
    examples=[{}, {"k": 3}, {"k": "sqrt"}, {"k": "log"}],
    warm_start=WarmStart("nothing to set: the same for rows of at most k keys"),
)
def topk(k: int | str | CountRule = 64) -> Normalizer:
    """softmax over the k largest logits of each row; k a number or a rule of n.

    Drops the tail of a trained model. k: a number, "sqrt", "log" or a function of n; keys tied with the k-th are kept.
    It is discontinuous, so it has no Lipschitz constant.
    """
    return Normalizer(Softmax(), select=[TopK(k)], name="topk")


class Hard(Map):
    properties = Properties(row_sum="one", exact_zeros=True)

    def forward(self, block: Block) -> Tensor:
        z = block.filled_low()
        best = (z == z.amax(-1, keepdim=True)).to(z.dtype)
        hard = block.hide(best / best.sum(-1, keepdim=True))
        soft = block.hide(torch.softmax(z, dim=-1))
        return hard + (soft - soft.detach())


def _hard_reference(row: Row) -> Tensor:
    best = (row.z == row.z.max()).to(row.z.dtype)
    soft = softmax_row(row.z)
    return best / best.sum() + soft - soft.detach()


@declare(
    reference=_hard_reference,
    warm_start=WarmStart(),
    exceptions={
        "first_derivative": "piecewise constant; its gradient is declared to be softmax's (straight-through)",
    },
)
def hard() -> Normalizer:
    """1 at the largest logit, 0 elsewhere; softmax's gradient backward (straight-through).

    The limit of all sharpening. Tied keys share the weight. The gradient is not that of the map.
    """
    return Normalizer(Hard(), name="hard")
