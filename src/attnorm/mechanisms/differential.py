"""Differential attention: the difference of two softmax maps, softmax(z1) - lambda softmax(z2), cancels common noise.

Ye et al. 2024, https://arxiv.org/abs/2410.05258. Query and key heads come in pairs (2h, 2h+1), values have one head per
pair: q (B, 2H, Q, D), k (B, 2G, K, D), v (B, G, K, E) -> (B, H, Q, E).

    lambda = exp(<lq1, lk1>) - exp(<lq2, lk2>) + lambda_init,   lambda_init = 0.8 - 0.6 exp(-0.3 depth)

followed by RMS norm per head and the factor 1 - lambda_init. Depth counts layers from 0.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from attnorm.engines.fused import fused
from attnorm.engines.inputs import validate_inputs
from attnorm.normalizers.block import Positions, check_mask
from attnorm.normalizers.contract import Mechanism, Normalizer, Properties
from attnorm.normalizers.softmax import Softmax


class Differential(Mechanism):
    """softmax(z1) - lambda softmax(z2), lambda learned per layer; signed weights."""

    name = "differential"
    properties = Properties(row_sum="free", signed=True)
    another_architecture = "takes the difference of paired heads that share their values"

    def __init__(self, *, width: int = 64, depth: int = 0, head_norm: bool = True) -> None:
        super().__init__()
        if depth < 0:
            raise ValueError(f"depth counts layers from 0, got {depth}")
        self.start = 0.8 - 0.6 * math.exp(-0.3 * depth)
        self.head_norm = head_norm
        # The four vectors lq1, lk1, lq2, lk2 of the key width, shared by the heads of a layer.
        self.vectors = nn.Parameter(torch.randn(4, width) * 0.1)
        self._softmax = Normalizer(Softmax(), name="differential")

    @property
    def share(self) -> Tensor:
        """lambda."""
        q1, k1, q2, k2 = self.vectors
        return torch.exp(q1 @ k1) - torch.exp(q2 @ k2) + self.start

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
        if q.dim() < 3 or q.shape[-3] % 2 or k.shape[-3] != 2 * v.shape[-3]:
            raise ValueError(
                "differential attention takes query and key heads in pairs and one value head per pair: "
                "q (B, 2H, Q, D), k (B, 2G, K, D), v (B, G, K, E); "
                f"got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
            )
        if mask is not None:
            check_mask(mask, torch.Size((*q.shape[:-1], k.shape[-2])))

        masks = [mask, mask]
        if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
            masks = [mask[..., of_pair::2, :, :] for of_pair in (0, 1)]
        first, second = (
            fused(
                validate_inputs(
                    q[..., of_pair::2, :, :], k[..., of_pair::2, :, :], v,
                    mask=masks[of_pair], causal=causal, scale=scale, positions=positions,
                ),
                self._softmax,
            )
            for of_pair in (0, 1)
        )  # fmt: skip
        working = torch.promote_types(q.dtype, torch.float32)  # a difference of rounded maps would keep few digits
        difference = first.to(working) - self.share.to(working) * second.to(working)
        if self.head_norm:
            difference = rms_norm(difference, (difference.shape[-1],), eps=1e-5) * (1 - self.start)
        return difference.to(q.dtype).reshape(*q.shape[:-3], q.shape[-3] // 2, q.shape[-2], v.shape[-1])
