"""The papers' assumptions about the vectors that a head mixes, checked: do they point everywhere, are any two equal?"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attnorm.engines.device_sync import sent_to
from attnorm.theory.selection import at_least_float32

# Pairs are compared among this many vectors of each head, so that no K x K array arises.
PAIRED_VECTORS = 512
CHECKED_VECTORS = 8


@dataclass(frozen=True)
class Isotropy:
    """Per item and key/value head, (B, G); NaN with fewer than two visible vectors."""

    mean_cosine: Tensor  # between different vectors; 0 where they are isotropic
    effective_rank: Tensor  # (tr C)^2 / tr C^2 of the second moments C
    smallest_distance: Tensor  # between two of at most PAIRED_VECTORS vectors, over the mean norm of all


@torch.no_grad()
def isotropy(vectors: Tensor, visible: Tensor | None = None, *, seed: int = 0) -> Isotropy:
    """vectors (B, G, K, E); visible: boolean, broadcastable to (B, G, K). Zero vectors have no cosine."""
    vectors = at_least_float32(vectors)
    seen = torch.ones_like(vectors[..., 0], dtype=torch.bool)
    seen = seen if visible is None else seen & visible
    x = vectors if visible is None else torch.where(seen.unsqueeze(-1), vectors, 0.0)
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1)
    count = seen.sum(-1)
    enough = count > 1

    m = (norms > 0).sum(-1).to(x.dtype)
    sum_of_units = torch.where(norms > 0, 1 / norms, 0.0).unsqueeze(-2) @ x
    cosine = (sum_of_units.square().sum((-2, -1)) - m) / (m * (m - 1))
    moments = x.mT @ x
    trace = moments.diagonal(dim1=-2, dim2=-1).sum(-1)
    rank = trace.square() / moments.square().sum((-2, -1))
    mean_norm = norms.sum(-1) / count.clamp(min=1)
    smallest = _smallest_distance(x, seen, seed) / mean_norm
    cosine, rank, smallest = (torch.where(enough, value, torch.nan) for value in (cosine, rank, smallest))
    return Isotropy(torch.where(m > 1, cosine, torch.nan), rank, smallest)


def _smallest_distance(x: Tensor, seen: Tensor, seed: int) -> Tensor:
    keys = x.shape[-2]
    if keys > PAIRED_VECTORS:
        generator = torch.Generator().manual_seed(seed)
        some = sent_to(x.device, torch.randperm(keys, generator=generator)[:PAIRED_VECTORS].sort().values)
        x, seen = x[..., some, :], seen[..., some]
    squares = x.square().sum(-1)
    squared = squares.unsqueeze(-1) + squares.unsqueeze(-2) - 2 * x @ x.mT
    pairs = seen.unsqueeze(-1) & seen.unsqueeze(-2)
    pairs = pairs & ~torch.eye(x.shape[-2], dtype=torch.bool, device=x.device)
    nearest = torch.where(pairs, squared, torch.inf).amin(-1)
    # Inner products lose the digits of a small distance: the closest pairs are computed again from their difference.
    closest = nearest.topk(min(CHECKED_VECTORS, nearest.shape[-1]), largest=False).indices
    some = x.gather(-2, closest.unsqueeze(-1).expand(*closest.shape, x.shape[-1]))
    exact = torch.cdist(some, x, compute_mode="donot_use_mm_for_euclid_dist")
    pairs = pairs.gather(-2, closest.unsqueeze(-1).expand(*closest.shape, x.shape[-2]))
    return torch.where(pairs, exact, torch.inf).amin((-2, -1))
