"""SOFT's exact kernel: weights exp(-scale ||q_i - k_j||^2 / 2), scale 1/sqrt(D), with no sum over the row.

Lu et al. 2021, https://arxiv.org/abs/2110.11945 (there with K = Q). `normalised=True` divides by the row's sum.
Quadratic in time; `soft` is the linear-time approximation. On a GPU the squared distance becomes a scaled dot product
of longer vectors, so that the one-pass kernels compute it.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnorm.engines import one_pass
from attnorm.engines.blocked import blocked
from attnorm.engines.inputs import Inputs, validate_inputs, without_autocast
from attnorm.normalizers.block import Block, Positions, is_exporting
from attnorm.normalizers.contract import KernelForm, Map, Mechanism, Normalizer, Properties
from attnorm.normalizers.declaration import WarmStart, declare
from attnorm.normalizers.softmax import Softmax


class Exp(Map):
    """exp(z) of z <= 0, not divided by anything."""

    properties = Properties(row_sum="free", shift_invariant=False)

    def forward(self, block: Block) -> Tensor:
        return block.hide(torch.exp(block.logits))

    def kernel_form(self) -> KernelForm:
        return KernelForm("exp")


def gaussian_logits(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """-scale ||q_i - k_j||^2 / 2, by the expanded square; rounding cannot make it positive.

    Distances do not change when all points move: with a key at the origin the squares stay small even where all points
    share a large offset.
    """
    origin = _origin(k)
    q, k = q - origin, k - origin
    squares = q.square().sum(-1)[..., :, None] + k.square().sum(-1)[..., None, :]
    return -0.5 * scale * (squares - 2 * q @ k.transpose(-1, -2)).relu()


def _origin(k: Tensor) -> Tensor:
    """Return the first key that is not 0: padding is 0 here, and a later key would change the rounding of earlier rows.

    Keys that are not finite count as 0: queries that do not see them must not notice.
    """
    finite = k.detach().nan_to_num(0.0, 0.0, 0.0)
    first = finite.ne(0).any(-1).to(torch.uint8).argmax(-1)[..., None, None]
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
        return self._attend(inputs).reshape(*q.shape[:-1], v.shape[-1])

    def _attend(self, inputs: Inputs) -> Tensor:
        # Squares of queries and keys may exceed the range of float16. With a negative scale the kernel of exp, which
        # takes no positive logits, would be wrong.
        in_range = inputs.q_BHQD.dtype != torch.float16 and inputs.scale >= 0
        if in_range and not is_exporting() and one_pass.applies(inputs, self.normalizer):
            products = as_dot_products(inputs)
            if one_pass.applies(products, self.normalizer):  # not if they are too wide
                return one_pass.one_pass(products, self.normalizer)
        return blocked(inputs, self.normalizer, scores=lambda q, k: gaussian_logits(q, k, inputs.scale))
