"""Threshold differential attention: [cos1 - tau]_+^p - lambda [cos2 - tau]_+^p, tau = beta sqrt(2 log n / d).

Huang et al. 2026, https://arxiv.org/abs/2601.12145; github.com/snap-research/TDA. cos1 and cos2 are cosines of q and k
in two views: query and key heads come in pairs (2h, 2h + 1), values have one head per pair: q (B, 2H, Q, D),
k (B, 2G, K, D), v (B, G, K, E) -> (B, H, Q, E). n is the number of visible keys: random unit vectors exceed tau rarely
at any length. Rows are not normalized over keys; an RMS norm per head follows. lambda starts at 1/2 and is learned.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import normalize, rms_norm

from attnorm.engines.inputs import validate_inputs
from attnorm.mechanisms.attend import attend
from attnorm.normalizers.block import Positions, check_mask
from attnorm.normalizers.contract import Mechanism, Normalizer, Properties, per_head_parameter
from attnorm.normalizers.threshold_relu import ThresholdRelu


class ThresholdDifferential(Mechanism):
    """Difference of two views of thresholded cosines: no sink, exact zeros, signed weights."""

    name = "tda"
    properties = Properties(
        row_sum="free", signed=True, exact_zeros=True, shift_invariant=False, length="threshold beta sqrt(2 log n / d)"
    )
    another_architecture = "takes the difference of paired heads that share their values"

    def __init__(
        self, *, beta: float = 1.0, power: float = 2.0, heads: int | None = None, head_norm: bool = True
    ) -> None:
        super().__init__()
        self.head_norm = head_norm
        self.logit = per_head_parameter(0.0, heads)
        self._view = Normalizer(ThresholdRelu(beta, power), name="tda")

    @property
    def share(self) -> Tensor:
        """lambda, of each output head or of all."""
        return torch.sigmoid(self.logit)

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
                "expected query and key heads in pairs and one value head per pair: q (B, 2H, Q, D), k (B, 2G, K, D), "
                f"v (B, G, K, E); got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}."
            )
        if scale is not None:
            raise ValueError(f"expected no scale, since cosines do not depend on one, got {scale}.")
        if mask is not None:
            check_mask(mask, torch.Size((*q.shape[:-1], k.shape[-2])))
        working, width = torch.promote_types(q.dtype, torch.float32), q.shape[-1]
        map_ = self._view.map
        assert isinstance(map_, ThresholdRelu)
        views: list[Tensor] = []
        for view in (0, 1):
            view_mask = mask[..., view::2, :, :] if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1 else mask
            query, key = (t[..., view::2, :, :].to(working) for t in (q, k))
            inputs = validate_inputs(
                query, key, v.to(working), mask=view_mask, causal=causal, scale=width**0.5, positions=positions
            )
            unit = [normalize(t, dim=-1) for t in (inputs.q_BHQD, inputs.k_BGKD)]
            # In logits sqrt(d) cos the threshold is beta sqrt(2 log n), and weights are d^(p/2) times as large.
            weighed = attend(replace(inputs, q_BHQD=unit[0], k_BGKD=unit[1]), self._view)
            views.append(weighed * float(width) ** (-map_.power / 2))
        share = self.share.to(working)
        output: Tensor = views[0] - (share if share.dim() == 0 else share[:, None, None]) * views[1]
        if self.head_norm:
            output = rms_norm(output, (output.shape[-1],), eps=1e-5)
        return output.to(q.dtype).reshape(*q.shape[:-3], q.shape[-3] // 2, q.shape[-2], v.shape[-1])
