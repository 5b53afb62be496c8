"""Separability of rows, and of the same weights permuted at random, without GPU synchronization."""

from functools import lru_cache

import torch
from torch import Tensor

from attnorm.engines.device_sync import sent_to
from attnorm.theory.selection import near_one, relative_weights


@lru_cache(maxsize=8)
def random_scores(rows: int, keys: int, device: torch.device) -> Tensor:
    """A random number for each key of each row, the same at every step."""
    generator = torch.Generator().manual_seed(0)
    return sent_to(device, torch.rand(rows, keys, generator=generator, dtype=torch.float64, device="cpu"))


def separability_and_null(
    weights: Tensor, visible: Tensor, x: Tensor, scores: Tensor, top_n: int, log_weights: Tensor | None = None
) -> Tensor:
    """(2, h, r) from weights (h, r, w), visibility (1 or h, r, w) and vectors (g, w, E); NaN where n <= N.

    theory.geometry.separability of the rows and of their permuted weights at once, without GPU synchronization.
    log_weights (h, r, w): log a_i up to a constant per row, where weights >= 0 may underflow.
    """
    heads, rows, width = weights.shape
    sources = _sources(visible, scores).expand(heads, 2, rows, width)

    def for_both(tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(1).expand(sources.shape)

    groups = (len(x), -1, width)
    heaviest = _heaviest(weights if log_weights is None else log_weights, visible, top_n)
    outside = visible & ~heaviest
    permuted = (
        relative_weights(weights, visible, log_weights),
        relative_weights(weights, outside, log_weights),
        heaviest,
    )
    a, factors, chosen = (for_both(t).gather(-1, sources).view(groups) for t in permuted)
    hidden = ~for_both(visible).reshape(groups)
    x = near_one(x.masked_fill(hidden.all(-2).unsqueeze(-1), 0.0))  # keys that no row sees may hold anything
    along = (a * chosen) @ x @ x.mT
    closeness = factors * torch.sub(a * x.square().sum(-1).unsqueeze(-2), along, alpha=2).neg_()
    nearest = closeness.masked_fill(chosen | hidden, -torch.inf).amax(-1, keepdim=True)
    shares = (chosen & (closeness >= nearest)).sum(-1, dtype=a.dtype) / top_n
    shares = shares.masked_fill(~closeness.masked_fill(hidden, 0.0).sum(-1).isfinite(), torch.nan)
    undefined = ~weights.sum(-1).isfinite() | (visible.sum(-1) <= top_n)
    return shares.view(heads, 2, rows).transpose(0, 1).masked_fill(undefined, torch.nan)


def _heaviest(weights: Tensor, visible: Tensor, top_n: int) -> Tensor:
    """True at the N heaviest visible keys, ties to the earlier key."""
    weights = weights.masked_fill(~visible, -torch.inf)
    least = weights.topk(min(top_n, weights.shape[-1]), dim=-1).values[..., -1:]
    heavier, tied = weights > least, weights == least
    return heavier | (tied & (tied.cumsum(-1) <= top_n - heavier.sum(-1, keepdim=True)))


def _sources(visible: Tensor, scores: Tensor) -> Tensor:
    """The key whose weight each key gets, (1 or h, 2, r, w): itself, and a random visible key."""
    own = torch.arange(visible.shape[-1], device=visible.device).expand(visible.shape)
    at_random = scores.expand(visible.shape).masked_fill(~visible, torch.inf).argsort(-1)
    other = at_random.gather(-1, (visible.cumsum(-1) - 1).clamp(min=0))
    return torch.stack([own, torch.where(visible, other, own)], 1)
