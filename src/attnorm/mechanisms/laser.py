"""LASER: attention over exp(v), and the logarithm of the result: out = log(sum_j p_j exp(v_j - m)) + m, per channel.

Duvvuri & Dhillon 2024, https://arxiv.org/abs/2411.03493. A smooth maximum of the values: its gradient for a key with a
small weight and a large value is large, where that of the mean vanishes with the weight. m, the largest value of the
channel, cancels; it keeps the exponential finite and takes no gradient. Here e^m is rounded to a power of two. Values
more than 87 below m (708 in float64) count as the smallest number.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from attnorm.engines.inputs import Inputs, validate_inputs
from attnorm.mechanisms import attend
from attnorm.normalizers.block import Positions
from attnorm.normalizers.composition import resolve_part
from attnorm.normalizers.contract import Mechanism, Normalizer
from attnorm.normalizers.declaration import WarmStart, declare

LOG2E = math.log2(math.e)


@declare(warm_start=WarmStart("nothing to set: a smooth maximum of the values instead of their mean"))
class Laser(Mechanism):
    """log of attention over exp(v): a smooth maximum of the values, with any normalizer whose rows sum to 1.

    normalizer: an object or a name, which may have options as in kneemax+knee=0.1.

    Train from scratch, for larger gradients at small weights. Values more than 87 below the largest of their channel
    underflow, and that one may be a future token's.
    """

    name = "laser"

    def __init__(self, normalizer: str | Normalizer = "softmax") -> None:
        super().__init__()
        if not isinstance(normalizer, str | Normalizer):
            raise TypeError(f"expected normalizer as a name or a Normalizer, got {normalizer!r}.")
        resolved = resolve_part(normalizer)
        if not isinstance(resolved, Normalizer) or resolved.properties.row_sum != "one" or resolved.properties.signed:
            raise ValueError(
                f"expected a row normalizer whose rows sum to 1, got {resolved.name!r}. A row without weight "
                "would have no finite logarithm. Use 'softmax' or 'entmax15'."
            )
        self.normalizer = resolved
        self.properties = resolved.properties

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
        working = torch.promote_types(v.dtype, torch.float32)  # exp(v) would leave half precision soon
        inputs = validate_inputs(
            *(t.to(working) for t in (q, k, v)), mask=mask, causal=causal, scale=scale, positions=positions
        )
        # exp(v) = 2^(integer part + fraction). Shifted by whole powers of two nothing is rounded: although the largest
        # value may be that of a later token, no bit of an earlier row depends on it.
        bits = inputs.v_BGKE * LOG2E
        integer_part, seen_keys = torch.floor(bits.detach()), _seen_keys(inputs)
        shown = integer_part if seen_keys is None else integer_part.masked_fill(~seen_keys[..., None], -torch.inf)
        largest = shown.amax(-2, keepdim=True)
        largest = torch.where(largest.isfinite(), largest, 0.0)
        exponentials = torch.ldexp(torch.exp2(bits - integer_part), integer_part - largest)
        if seen_keys is not None:
            exponentials = torch.where(seen_keys[..., None], exponentials, 0.0)
        mean = attend(replace(inputs, v_BGKE=exponentials), self.normalizer).to(working)
        mean = mean.clamp(min=torch.finfo(working).tiny)
        exponent = torch.floor(torch.log2(mean.detach()))  # not frexp: torch 2.13 compiles it to C++ with type errors
        mantissa = torch.ldexp(mean, -exponent)
        power = exponent + largest.repeat_interleave(inputs.groups, dim=1)
        output = torch.where(inputs.n() > 0, torch.log(mantissa) + power / LOG2E, 0.0)
        return output.to(v.dtype).reshape(*q.shape[:-1], v.shape[-1])


def _seen_keys(inputs: Inputs) -> Tensor | None:
    """Return which keys a query of their group sees, (B or 1, G or 1, K); None without a mask."""
    if inputs.mask is None:
        return None
    seen_keys = inputs.seen()
    return seen_keys.unflatten(1, (-1, inputs.groups)).any(2) if seen_keys.shape[1] > 1 else seen_keys
