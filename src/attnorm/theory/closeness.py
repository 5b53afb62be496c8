"""Which keys lie nearer to the context vector s than others, without the distances themselves.

||y_i - s||^2 = ||s||^2 - q_i with q_i = 2 y_i.s - ||y_i||^2 = a_i (2 x_i.s - a_i ||x_i||^2): q_i orders the keys.
On a sharp row the distances of light keys agree to all digits (they are ||s||), while their q_i differ by orders of
magnitude. Only the order counts, so each factor a_i is taken relative to a reference weight of its row: nothing
overflows, and no weight other than 0 becomes 0.
"""

import math

import torch
from torch import Tensor

from attnorm.theory.selection import SelectedRows


def relative_weights(weights: Tensor, reference: Tensor, log_weights: Tensor | None = None) -> Tensor:
    """a_i over the largest |a_j| of the keys where `reference` holds, with a magnitude of at least `floor`.

    A weight of 0 stays 0. log_weights: log a_i up to a constant per row, for weights >= 0. The magnitude is clamped
    from both sides: a ratio so extreme decides a comparison by the sign of the other factor alone.
    """
    floor = torch.finfo(weights.dtype).tiny ** 0.75
    if log_weights is None:
        largest = weights.abs().masked_fill(~reference, 0.0).amax(-1, keepdim=True)
        ratio = (weights / largest).abs().clamp(floor, 1 / floor).copysign(weights)
        return torch.where(weights == 0, 0.0, ratio)
    largest = log_weights.masked_fill(~reference, -torch.inf).amax(-1, keepdim=True)
    most = -math.log(floor)
    ratio = torch.exp((log_weights - largest).clamp(-most, most))
    return torch.where(log_weights == -torch.inf, 0.0, ratio)


def near_one(vectors: Tensor) -> Tensor:
    """The vectors of each set times a power of two, so that squares neither overflow nor underflow: no rounding."""
    largest = vectors.abs().amax((-2, -1), keepdim=True) if vectors.numel() else vectors.sum()
    exponent = torch.frexp(torch.where(largest.isfinite(), largest, 1.0)).exponent.clamp(-120, 120)
    return vectors * torch.ldexp(torch.ones_like(largest), -exponent)


def closeness(rows: SelectedRows) -> Tensor:
    """q_i of every key in units that are common to its row (..., Q, L); NaN where a weight or vector is not finite."""
    x = near_one(rows.vectors)
    shares = relative_weights(rows.weights, rows.visible, rows.log_weights)
    along = (shares * rows.chosen) @ x @ x.mT
    factors = relative_weights(rows.weights, rows.outside, rows.log_weights)
    return factors * (2 * along - shares * x.square().sum(-1).unsqueeze(-2))


def as_near_as_outsiders(rows: SelectedRows) -> tuple[Tensor, Tensor]:
    """True at the selected keys no farther from s than every visible key outside I; and at rows with finite numbers."""
    q = closeness(rows)
    nearest = q.masked_fill(~rows.outside, -torch.inf).amax(-1, keepdim=True)
    known = q.masked_fill(~rows.visible, 0.0).sum(-1).isfinite()
    return rows.chosen & (q >= nearest), known
