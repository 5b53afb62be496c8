"""SOFT: the Gaussian kernel in linear time through m landmarks, S ~ P_q A^+ P_k^T, without softmax.

Lu et al. 2021, https://arxiv.org/abs/2110.11945; the normalised form (SOFT++, A^+ between D^-1/2, D = diag(A 1)) from
https://arxiv.org/abs/2207.03341. P and A are Gaussian kernels of the tokens and landmarks with the landmarks; A^+ comes
from Newton's iteration V <- 2V - V A V. By default a landmark is the mean of a segment of visible keys. On images the
papers share K = Q and sample landmarks by a learned convolution over squares of the grid: `stride` and `convolution`.
Theirs is followed by a layer norm and GELU; here the convolution starts as the mean of its square. Bidirectional only.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, conv2d

from attnorm.engines.inputs import Inputs, validate_inputs, without_autocast
from attnorm.mechanisms.gaussian import gaussian_logits
from attnorm.mechanisms.newton import newton_inverse
from attnorm.mechanisms.token_sums import sum_over_tokens
from attnorm.normalizers.block import Positions
from attnorm.normalizers.contract import Mechanism, Properties
from attnorm.normalizers.declaration import WarmStart, declare

Landmarks = Callable[[Tensor], Tensor]  # keys (B, H, L, D) -> landmarks (B, H, m, D)


@declare(warm_start=WarmStart("far", "nothing to set: no function of the logits"))
class Soft(Mechanism):
    """P A^+ P^T with Gaussian kernels and m landmarks: SOFT's linear-time attention; normalised=True for SOFT++.

    stride: for square images, one landmark for each square of stride x stride patches instead of `landmarks`; a class
    token is a landmark itself. convolution: width of a head; landmarks are then sampled by a learned convolution, which
    all heads share, instead of means.
    """

    name = "soft"
    properties = Properties(row_sum="free", signed=True, shift_invariant=False, permutation_equivariant=False)

    def __init__(
        self,
        landmarks: int | Landmarks = 49,
        *,
        normalised: bool = False,
        stride: int | None = None,
        convolution: int | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("landmarks", landmarks), ("stride", stride), ("convolution", convolution)):
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if convolution is not None and stride is None:
            raise ValueError(f"expected stride= with convolution={convolution}: the side of its square of patches")
        self.landmarks = landmarks
        self.normalised = normalised
        self.stride = stride
        self.sampling: nn.Parameter | None = None
        if convolution is not None and stride is not None:
            means = torch.eye(convolution)[:, :, None, None].expand(-1, -1, stride, stride) / stride**2
            self.sampling = nn.Parameter(means.clone())

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
        if causal:
            raise ValueError("soft has no causal form: its landmarks pool all tokens; use causal=False or 'gaussian'")
        if mask is not None and mask.dim() > 1 and mask.shape[-2] > 1:
            raise ValueError(
                f"soft can hide keys from all queries at once, mask (B, 1, 1, keys), but got {tuple(mask.shape)}; "
                "'gaussian' takes any mask"
            )
        if mask is not None and self.stride is not None:
            raise ValueError(f"expected whole images with stride={self.stride}, got a mask. Use landmarks= with masks.")
        inputs = validate_inputs(q, k, v, mask=mask, causal=False, scale=scale, positions=positions)
        with without_autocast(q.device):
            output = self._attend(inputs)
        return output.to(q.dtype).reshape(*q.shape[:-1], v.shape[-1])

    def _attend(self, inputs: Inputs) -> Tensor:
        dtype = inputs.q_BHQD.dtype
        working = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        q, k, v = (t.to(working) for t in (inputs.q_BHQD, inputs.k_BGKD, inputs.v_BGKE))
        k, v = (t.repeat_interleave(inputs.groups, dim=1) for t in (k, v))
        visible = _visible_keys(inputs, k)
        centres = self._landmarks(k, visible)
        from_q = torch.exp(gaussian_logits(q, centres, inputs.scale))
        from_k = torch.where(visible, torch.exp(gaussian_logits(k, centres, inputs.scale)), 0.0)
        among = torch.exp(gaussian_logits(centres, centres, inputs.scale))
        inverse = newton_inverse(among)
        if self.normalised:
            root = among.sum(-1).rsqrt()
            inverse = root[..., :, None] * inverse * root[..., None, :]
        return from_q @ (inverse @ sum_over_tokens(from_k, v))

    def _landmarks(self, k: Tensor, visible: Tensor) -> Tensor:
        if self.stride is not None:
            return patch_landmarks(k, self.stride, self.sampling)
        return segment_means(k, visible, self.landmarks) if isinstance(self.landmarks, int) else self.landmarks(k)


def _visible_keys(inputs: Inputs, k: Tensor) -> Tensor:
    if inputs.mask is None:
        return torch.ones_like(k[..., :1], dtype=torch.bool)
    return inputs.mask.transpose(-1, -2).expand(*k.shape[:-1], 1)


def segment_means(k: Tensor, visible: Tensor, count: int) -> Tensor:
    """Means of `count` equal segments of each row's visible keys, (B, H, m, D); fewer keys than that: one each."""
    order = visible.cumsum(-2) - 1
    total = visible.sum(-2, keepdim=True)
    segment = (order * count).div(total.clamp(min=1), rounding_mode="floor").clamp(0, count - 1)
    member = (segment == torch.arange(count, device=k.device)) & visible  # (B, H, L, m)
    size = member.sum(-2)[..., None]
    means = sum_over_tokens(member.to(k.dtype), k) / size.clamp(min=1)
    # With fewer keys than landmarks some segments are empty: they repeat the mean of all keys.
    overall = (visible * k).sum(-2, keepdim=True) / total.clamp(min=1)
    return torch.where(size > 0, means, overall)


def patch_landmarks(k: Tensor, stride: int, sampling: Tensor | None = None) -> Tensor:
    """One landmark per square of an image's patches, (B, H, m, D): their mean, or their convolution with `sampling`.

    Keys are the patches of a square image by rows, with or without a class token in front.
    """
    side = math.isqrt(k.shape[-2])
    extra = k.shape[-2] - side**2
    if extra > 1 or side % stride:
        raise ValueError(
            f"expected the patches of a square image whose side is a multiple of stride={stride}, and at most one "
            f"class token, got {k.shape[-2]} keys. Choose another stride, or landmarks= for other inputs."
        )
    if sampling is not None and sampling.shape[0] != k.shape[-1]:
        raise ValueError(f"expected convolution={k.shape[-1]}, the width of a head, got {sampling.shape[0]}.")
    grid = k[..., extra:, :].transpose(-1, -2).unflatten(-1, (side, side)).flatten(0, 1)
    pooled = avg_pool2d(grid, stride) if sampling is None else conv2d(grid, sampling.to(k.dtype), stride=stride)
    squares = pooled.flatten(-2).transpose(-1, -2).unflatten(0, k.shape[:2])
    return torch.cat([k[..., :extra, :], squares], dim=-2)
