"""SOFT: attention by a Gaussian kernel of q and k, without softmax: exact (`gaussian`), and in linear time (`soft`).

Lu et al. 2021, https://arxiv.org/abs/2110.11945 (there with K = Q).

gaussian: weights exp(-scale ||q_i - k_j||^2 / 2), scale 1/sqrt(D), with no sum over the row; `normalised=True` divides
by it. Quadratic in time. On a GPU the squared distance becomes a scaled dot product of longer vectors, so that the
one-pass kernels compute it.

soft: the same through m landmarks, S ~ P_q A^+ P_k^T; the normalised form (SOFT++, A^+ between D^-1/2, D = diag(A 1))
from https://arxiv.org/abs/2207.03341. P and A are Gaussian kernels of the tokens and landmarks with the landmarks; A^+
comes from Newton's iteration V <- 2V - V A V. By default a landmark is the mean of a segment of visible keys. On images
the papers share K = Q and sample landmarks by a learned convolution over squares of the grid: `stride` and
`convolution`. Theirs is followed by a layer norm and GELU; here the convolution starts as the mean of its square.

Landmarks that are computed from all keys show later tokens to earlier ones, so these forms are bidirectional only. With
learned points (`learned`) the sum over the keys up to a query is carried from chunk to chunk, as in linear attention:
causal, in linear time (docs/theory/causal-soft.md).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, conv2d, pad

from attnorm.engines import one_pass
from attnorm.engines.blocked import blocked
from attnorm.engines.execution import kernel_operator, runs_triton
from attnorm.engines.inputs import Inputs, product, under_transform, validate_inputs, without_autocast
from attnorm.mechanisms.linear import causal_sums, sum_over_tokens
from attnorm.normalizers.block import Block, Positions, is_exporting
from attnorm.normalizers.contract import KernelForm, Map, Mechanism, Normalizer, Properties
from attnorm.normalizers.declaration import WarmStart, declare
from attnorm.normalizers.softmax import Softmax

RIDGE = 0.01
NEWTON_STEPS = 20
LARGEST_IN_KERNEL = 64  # rows of a matrix that the registers of a program hold

Landmarks = Callable[[Tensor], Tensor]  # keys (B, H, L, D) -> landmarks (B, H, m, D)


class Exp(Map):
    """The map exp(z) without normalization, for logits z <= 0."""

    properties = Properties(row_sum="free", shift_invariant=False)

    def forward(self, block: Block) -> Tensor:
        return block.hide(torch.exp(block.logits))

    def kernel_form(self) -> KernelForm:
        return KernelForm("exp")


@declare(warm_start=WarmStart("nothing to set: no function of the logits"))
class Gaussian(Mechanism):
    """exp(-||q - k||^2 / (2 sqrt D)): SOFT's kernel on q and k, not normalised by default.

    Quadratic in time. Outputs grow with the number of near keys; normalised=True divides by the row sum. The papers
    share K = Q.
    """

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
        return self._attend(inputs).reshape(*q.shape[:-1], v.shape[-1])

    def _attend(self, inputs: Inputs) -> Tensor:
        products = self.kernel_products(inputs)
        if products is not None:
            return one_pass.one_pass(products, self.normalizer)
        return blocked(inputs, self.normalizer, scores=lambda q, k: gaussian_logits(q, k, inputs.scale))

    def kernel_products(self, inputs: Inputs) -> Inputs | None:
        """Return the call as scaled dot products for the one-pass kernels; None if they do not take it."""
        # Squares of queries and keys may exceed the range of float16. With a negative scale the kernel of exp, which
        # takes no positive logits, would be wrong.
        in_range = inputs.q_BHQD.dtype != torch.float16 and inputs.scale >= 0
        if not in_range or is_exporting() or not one_pass.applies(inputs, self.normalizer):
            return None
        products = as_dot_products(inputs)
        return products if one_pass.applies(products, self.normalizer) else None  # not if they are too wide


def gaussian_logits(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """-scale ||q_i - k_j||^2 / 2, by the expanded square; rounding cannot make it positive.

    Distances do not change when all points move: with a key at the origin the squares stay small even where all points
    share a large offset.
    """
    origin = _origin(k)
    q, k = q - origin, k - origin
    # With keepdim: torch.compile of torch 2.11 reads a sum without it at wrong places where L > 1,024
    # (https://github.com/pytorch/pytorch/issues/194281).
    squares = q.square().sum(-1, keepdim=True) + k.square().sum(-1, keepdim=True).transpose(-1, -2)
    return -0.5 * scale * (squares - 2 * product(q, k.transpose(-1, -2))).relu()


def _origin(k: Tensor) -> Tensor:
    """Return the first key that is not 0: padding is 0 here, and a later key would change the rounding of earlier rows.

    Keys that are not finite count as 0: queries that do not see them must not notice.
    """
    finite = k.detach().nan_to_num(0.0, 0.0, 0.0)
    first = finite.ne(0).any(-1, keepdim=True).to(torch.uint8).argmax(-2, keepdim=True)
    return finite.gather(-2, first.expand(*finite.shape[:-2], 1, finite.shape[-1]))


def as_dot_products(inputs: Inputs) -> Inputs:
    """Return the call with longer q and k, whose dot product is -||q - k||^2 / 2.

    That is <q, k> - ||q||^2 / 2 - ||k||^2 / 2: the squares become columns, with columns of ones on the other side. In
    bfloat16 a square takes three columns, which together have the digits of float32.
    """
    q, k = inputs.q_BHQD, inputs.k_BGKD
    if q.dtype == torch.float32:
        origin = _origin(k)
        q, k = q - origin.repeat_interleave(inputs.groups, dim=1), k - origin
    with without_autocast(q.device):
        of_q, of_k = _square_columns(q), _square_columns(k)
        q = _widen(q, of_q, torch.ones_like(of_q))
        k = _widen(k, torch.ones_like(of_k), of_k)
    return replace(inputs, q_BHQD=q, k_BGKD=k)


def _square_columns(x: Tensor) -> Tensor:
    """Return columns whose sum is -||x||^2 / 2 in float32. The gradient flows through the first one."""
    rest = -0.5 * x.float().square().sum(-1, keepdim=True)
    if x.dtype == torch.float32:
        return rest
    columns = []
    for _ in range(3):
        columns.append(rest.to(x.dtype))
        rest = rest.detach() - columns[-1].detach().float()
    return torch.cat(columns, dim=-1)


def _widen(x: Tensor, *columns: Tensor) -> Tensor:
    """Append columns, and zeros up to a power of two: the kernels then read whole tiles."""
    wide = torch.cat([x, *columns], dim=-1)
    return pad(wide, (0, 2 ** (wide.shape[-1] - 1).bit_length() - wide.shape[-1]))


class Unchanged(Map):
    """The map that returns the logits themselves as weights."""

    properties = Properties(row_sum="free", signed=True, shift_invariant=False)

    def forward(self, block: Block) -> Tensor:
        return block.hide(block.logits)


@declare(
    warm_start=WarmStart(
        "nothing to set: no function of the logits",
        options=lambda layer, given_options: {"heads": layer.heads} if "learned" in given_options else {},
    )
)  # fmt: skip
class Soft(Mechanism):
    """P A^+ P^T with Gaussian kernels and m landmarks: SOFT's linear-time attention; normalised=True for SOFT++.

    stride: for square images, one landmark for each square of stride x stride patches instead of `landmarks`; a class
    token is a landmark itself. convolution: width of a head; landmarks are then sampled by a learned convolution, which
    all heads share, instead of means. learned: width of a head; landmarks are then learned points, with which the
    attention can be causal. heads: number of heads, each with points of its own (default: all heads share them).

    A compiled torch.func.vmap over learned landmarks fails in torch (https://github.com/pytorch/pytorch/issues/129845,
    still in torch 2.13). Use vmap without torch.compile, under torch.no_grad(), or after `.requires_grad_(False)`.

    Bidirectional unless learned. Weights may be negative. Build it once with attnorm.get: learned points start at
    random.
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
        learned: int | None = None,
        heads: int | None = None,
    ) -> None:
        super().__init__()
        sizes = {
            "landmarks": landmarks, "stride": stride, "convolution": convolution, "learned": learned, "heads": heads,
        }  # fmt: skip
        for name, value in sizes.items():
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if convolution is not None and stride is None:
            raise ValueError(
                f"expected stride= with convolution={convolution}, got none. Pass the side of a square of patches."
            )
        if learned is not None and (stride is not None or not isinstance(landmarks, int)):
            raise ValueError(
                f"expected a number of landmarks and no stride= with learned={learned}, "
                f"got landmarks={landmarks!r} and stride={stride}."
            )
        if heads is not None and learned is None:
            raise ValueError(
                f"expected learned= with heads={heads}, got none. Remove heads: only learned landmarks differ "
                "between heads."
            )
        self.landmarks = landmarks
        self.normalised = normalised
        self.stride = stride
        self.points: nn.Parameter | None = None
        if learned is not None and isinstance(landmarks, int):
            # With the usual scale 1/sqrt(D), two points have a kernel of about exp(-2), a point and the origin exp(-1).
            self.points = nn.Parameter(math.sqrt(2) * learned**-0.25 * torch.randn(heads or 1, landmarks, learned))
        self._unchanged = Normalizer(Unchanged(), name="soft")
        self.sampling: nn.Parameter | None = None
        if convolution is not None and stride is not None:
            means = torch.eye(convolution)[:, :, None, None].expand(-1, -1, stride, stride) / stride**2
            self.sampling = nn.Parameter(means.clone())

    @property
    def no_causal_form(self) -> str:  # type: ignore[override]
        if self.points is not None:
            return ""
        advice = "give learned=WIDTH, the width of a head, or take 'gaussian', or an encoder"
        return f"has no causal form without learned landmarks; {advice}"

    def extra_repr(self) -> str:
        landmarks = self.landmarks if isinstance(self.landmarks, int) else "<function>"  # without its address
        parts = [f"landmarks={landmarks}"] if self.stride is None else [f"stride={self.stride}"]
        if self.sampling is not None:
            parts.append(f"convolution={self.sampling.shape[0]}")
        if self.points is not None:
            parts.append(_point_options(self.points))
        return ", ".join([*parts, "normalised=True"] if self.normalised else parts)

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
        if causal and self.points is None:
            raise ValueError(
                "expected causal=False for 'soft' with landmarks that pool all tokens, got causal=True. Use "
                f"causal=False, learned landmarks (learned={q.shape[-1]}) or 'gaussian'."
            )
        per_query = mask is not None and mask.dim() > 1 and mask.shape[-2] > 1
        if mask is not None and per_query and self.points is None:
            raise ValueError(
                "expected a mask of shape (B, 1, 1, keys) for 'soft' with landmarks that pool tokens, got "
                f"{tuple(mask.shape)}. Learned landmarks (learned={q.shape[-1]}) and 'gaussian' take any mask."
            )
        if mask is not None and self.stride is not None:
            raise ValueError(f"expected whole images with stride={self.stride}, got a mask. Use landmarks= with masks.")
        inputs = validate_inputs(q, k, v, mask=mask, causal=causal, scale=scale, positions=positions)
        if inputs.scale < 0:  # the kernel would grow with the distance, and its matrix has no inverse by Newton's steps
            raise ValueError(f"expected a scale of at least 0 for 'soft', got {inputs.scale}. 'gaussian' accepts any.")
        if per_query:  # in blocks: a sum over tokens has one value for all queries
            output = blocked(inputs, self._unchanged, scores=_Weights(self, inputs.scale))
        else:
            with without_autocast(q.device):
                output = self._attend(inputs)
        return output.to(q.dtype).reshape(*q.shape[:-1], v.shape[-1])

    def _attend(self, inputs: Inputs) -> Tensor:
        dtype = inputs.q_BHQD.dtype
        working = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        q, k, v = (t.to(working) for t in (inputs.q_BHQD, inputs.k_BGKD, inputs.v_BGKE))
        k, v = (t.repeat_interleave(inputs.groups, dim=1) for t in (k, v))
        visible = _visible_keys(inputs, k)
        centers = self._landmarks(k, visible)
        from_q = torch.exp(gaussian_logits(q, centers, inputs.scale))
        from_k = torch.where(visible, torch.exp(gaussian_logits(k, centers, inputs.scale)), 0.0)
        inverse = self.inverse_among(centers, inputs.scale)
        if inputs.causal:
            return causal_sums(product(from_q, inverse), from_k, v, inputs.offset)
        return product(from_q, product(inverse, sum_over_tokens(from_k, v)))

    def inverse_among(self, centers: Tensor, scale: float) -> Tensor:
        """Return A^+, between D^-1/2 in the normalised form, (..., m, m)."""
        among = torch.exp(gaussian_logits(centers, centers, scale))
        inverse = newton_inverse(among)
        if not self.normalised:
            return inverse
        root = among.sum(-1).rsqrt()
        return root[..., :, None] * inverse * root[..., None, :]

    def _landmarks(self, k: Tensor, visible: Tensor) -> Tensor:
        if self.points is not None:
            return self.points_for(k)
        if self.stride is not None:
            return patch_landmarks(k, self.stride, self.sampling)
        return segment_means(k, visible, self.landmarks) if isinstance(self.landmarks, int) else self.landmarks(k)

    def points_for(self, k: Tensor) -> Tensor:
        """Return the learned points, (1, H, m, D): the same for every sequence."""
        assert self.points is not None
        heads, _, width = self.points.shape
        if width != k.shape[-1] or heads not in (1, k.shape[1]):
            raise ValueError(
                f"expected learned={k.shape[-1]}, the width of a head, and heads={k.shape[1]} or none, got "
                f"{_point_options(self.points)}."
            )
        return self.points.to(k.dtype)[None]


def _point_options(points: Tensor) -> str:
    """Return learned= and heads= of these points; points that all heads share need no heads=."""
    heads, _, width = points.shape
    return f"learned={width}" if heads == 1 else f"learned={width}, heads={heads}"


class _Weights(nn.Module):
    """Compute P_q A^+ P_k^T with learned landmarks. A module, so that they are found as parameters."""

    def __init__(self, soft: Soft, scale: float) -> None:
        super().__init__()
        self.soft, self.scale = soft, scale

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        centers = self.soft.points_for(k)
        from_q, from_k = (torch.exp(gaussian_logits(t, centers, self.scale)) for t in (q, k))
        return product(product(from_q, self.soft.inverse_among(centers, self.scale)), from_k.transpose(-1, -2))


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


def square_means(patches: Tensor, squares: int) -> Tensor:
    """Means of squares x squares parts of a square image's patches (..., L, D), as adaptive_avg_pool2d has them.

    Neighboring parts overlap where `squares` does not divide the side. Written as a product: torch.compile of torch
    2.11 may read pooled windows at wrong places (https://github.com/pytorch/pytorch/issues/179931).
    """
    side = math.isqrt(patches.shape[-2])
    part, place = torch.arange(squares, device=patches.device)[:, None], torch.arange(side, device=patches.device)
    member = (place >= part * side // squares) & (place < ((part + 1) * side + squares - 1) // squares)
    share = member.to(patches.dtype) / member.sum(-1, keepdim=True)
    shares = (share[:, None, :, None] * share[:, None, :]).reshape(squares**2, side**2)
    return product(shares, patches)


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


def newton_inverse(a: Tensor, steps: int = NEWTON_STEPS) -> Tensor:
    """(A + ridge)^-1 of a kernel matrix A, to rounding for up to a few hundred landmarks.

    On a GPU one kernel computes all steps; elsewhere, and for more landmarks than it takes, torch does.
    """
    inverse: Tensor = _NewtonInverse.apply(a, steps)  # type: ignore[no-untyped-call]
    return inverse


class _NewtonInverse(torch.autograd.Function):
    """Inverse of symmetric A + ridge; its backward is the derivative of the inverse, not of the iteration."""

    @staticmethod
    def forward(a: Tensor, steps: int) -> Tensor:
        if _runs_kernel(a):
            on_gpu: Tensor = _newton_inverse_kernel(a, steps)
            return on_gpu
        unit = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        regular = a + RIDGE * unit
        # The authors start from a multiple of A. From a multiple of I the same steps reach the inverse even where
        # landmarks crowd or coincide, and only at the inverse is backward the derivative of forward.
        inverse = unit / regular.abs().sum(-1).amax(-1)[..., None, None]
        for _ in range(steps):  # written with the residual, which keeps the digits of 2V - V A V
            inverse = inverse + inverse @ (unit - regular @ inverse)
        return inverse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (inverse,) = ctx.saved_tensors
        transposed: Tensor = inverse.transpose(-1, -2)
        with without_autocast(inverse.device):
            return -transposed @ grads[0] @ transposed, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, None], a: Tensor, steps: int) -> tuple[Tensor, int | None]:
        matrices = a if in_dims[0] is None else a.movedim(in_dims[0], 0)
        return newton_inverse(matrices, steps), None if in_dims[0] is None else 0


def _runs_kernel(a: Tensor) -> bool:
    """Whether to use the kernel: only on a GPU, since Triton's interpreter is far slower than torch on a CPU."""
    return a.is_cuda and fits_kernel(a)


def fits_kernel(a: Tensor) -> bool:
    small = a.dtype == torch.float32 and a.shape[-1] <= LARGEST_IN_KERNEL
    return small and a.numel() > 0 and not is_exporting() and not under_transform() and runs_triton(a.device)


@kernel_operator("attnorm::newton_inverse")
def _newton_inverse_kernel(a: Tensor, steps: int) -> Tensor:
    from attnorm.kernels import linear_algebra  # loads Triton

    return linear_algebra.newton_inverse(a, steps, RIDGE)


@_newton_inverse_kernel.register_fake
def _(a: Tensor) -> Tensor:
    return torch.empty_like(a, memory_format=torch.contiguous_format)
