"""Coverage: how much of the context several heads select together.

Discussion of Mudarisov et al. 2025, https://arxiv.org/abs/2508.17821: H heads that each cover a share p should cover
1 - (1-p)^H together, so three heads at p = 0.8 reach 99 %. That needs independent heads. Without it the union lies
between the largest p and the sum of the p, and both ends occur; so it is measured. Proofs: docs/theory/coverage.md.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnorm.engines.execution import runs_asynchronously
from attnorm.theory.dispersion import Bounds
from attnorm.theory.selection import top_n_set


def independent_coverage(share: Tensor | float, heads: int) -> Tensor:
    """1 - (1-p)^H, the printed formula: what H independent heads cover that each cover a share p."""
    if heads < 1:
        raise ValueError(f"heads must be at least 1, got {heads}")
    share = _shares(torch.as_tensor(share, dtype=None if isinstance(share, Tensor) else torch.float64))
    # log1p and expm1 keep tiny shares and shares near 1 exact.
    return -torch.expm1(heads * torch.log1p(-share))


def independent_union(shares: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows"]:
    """1 - prod_h (1 - p_h): the same for heads that cover different shares."""
    return -torch.expm1(torch.log1p(-_shares(shares)).sum(-1))


def union_bounds(shares: Float[Tensor, "*rows H"]) -> Bounds:
    """max_h p_h <= union <= min(1, sum_h p_h): what holds for all heads, dependent or not. Both ends are attained."""
    shares = _shares(shares)
    return Bounds(shares.amax(-1), shares.sum(-1).clamp(max=1))


@dataclass(frozen=True)
class HeadCoverage:
    """Per row: the share of the reference keys that each head covers, that all cover together, and the prediction."""

    per_head: Tensor
    union: Tensor
    independent: Tensor


def union_coverage(covered: Bool[Tensor, "*rows H L"], reference: Bool[Tensor, "..."]) -> HeadCoverage:
    """Shares of the reference keys (..., L) covered by the heads' sets (..., H, L); NaN for rows that have none.

    The paper's reading: `covered` = the distinguishable keys of each head, `reference` = the keys the heads select.
    """
    reference = reference.expand(*covered.shape[:-2], covered.shape[-1])
    size = reference.sum(-1)
    if not bool((size > 0).any()):
        raise ValueError(f"no row of the reference {tuple(reference.shape)} has a key to cover")
    inside = covered & reference.unsqueeze(-2)
    per_head = inside.sum(-1, dtype=torch.float64) / size.unsqueeze(-1)
    union = inside.any(-2).sum(-1, dtype=torch.float64) / size
    predicted = -torch.expm1(torch.log1p(-per_head).sum(-1))
    return HeadCoverage(per_head, union, predicted)


def top_n_coverage(
    weights: Float[Tensor, "*rows H L"], top_n: int, mask: Bool[Tensor, "..."] | None = None
) -> HeadCoverage:
    """Return the coverage of the visible keys by the top-N sets of H heads. mask (..., L): the same for all heads."""
    visible = torch.ones_like(weights[..., 0, :], dtype=torch.bool)
    visible = visible if mask is None else visible & mask
    return union_coverage(top_n_set(weights, top_n, visible.unsqueeze(-2)), visible)


def _shares(shares: Tensor) -> Tensor:
    if not runs_asynchronously(shares) and bool(((shares < 0) | (shares > 1)).any()):
        raise ValueError(
            f"a share lies between 0 and 1, got values from {float(shares.min())} to {float(shares.max())}"
        )
    return shares
