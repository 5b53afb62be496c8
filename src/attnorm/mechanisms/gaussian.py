"""SOFT's exact kernel: weights exp(-scale ||q_i - k_j||^2 / 2), scale 1/sqrt(D), with no sum over the row.

Lu et al. 2021, https://arxiv.org/abs/2110.11945 (there with K = Q). `normalised=True` divides by the row's sum.
Quadratic in time; `soft` is the linear-time approximation.
"""

import torch
from torch import Tensor

from attnorm.engines.blocked import blocked
from attnorm.engines.inputs import validate_inputs
from attnorm.normalizers.block import Block, Positions
from attnorm.normalizers.contract import Map, Mechanism, Normalizer, Properties
from attnorm.normalizers.declaration import WarmStart, declare
from attnorm.normalizers.softmax import Softmax


class Exp(Map):
    """exp(z), not divided by anything."""

    properties = Properties(row_sum="free", shift_invariant=False)

    def forward(self, block: Block) -> Tensor:
        return block.hide(torch.exp(block.logits))


def gaussian_logits(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """-scale ||q_i - k_j||^2 / 2, by the expanded square; rounding cannot make it positive.

    Distances do not change when all points move: with the first key, which every query may see, at the origin the
    squares stay small even where all points share a large offset.
    """
    origin = k[..., :1, :].detach()
    q, k = q - origin, k - origin
    squares = q.square().sum(-1)[..., :, None] + k.square().sum(-1)[..., None, :]
    return -0.5 * scale * (squares - 2 * q @ k.transpose(-1, -2)).relu()


@declare(warm_start=WarmStart("far", "nothing to set: no function of the logits"))
class Gaussian(Mechanism):
    """exp(-||q - k||^2 / (2 sqrt D)): SOFT's kernel on q and k, not normalised by default."""

    name = "gaussian"

    def __init__(self, *, normalised: bool = False) -> None:
        super().__init__()
        self.normalizer = Normalizer(Softmax() if normalised else Exp(), name="gaussian")
        self.properties = self.normalizer.properties

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        scale: float | None = None,
        positions: Tensor | Positions | None = None,
    ) -> Tensor:
        inputs = validate_inputs(q, k, v, mask=mask, causal=causal, scale=scale, positions=positions)
        output = blocked(inputs, self.normalizer, scores=lambda q, k: gaussian_logits(q, k, inputs.scale))
        return output.reshape(*q.shape[:-1], v.shape[-1])
