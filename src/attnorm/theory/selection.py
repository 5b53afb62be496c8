"""`SelectedRows`: rows of attention with their weights, vectors, N heaviest keys and the context vector of these keys.

Notation of Mudarisov et al. 2025, https://arxiv.org/abs/2508.17821: weights a_i and vectors x_i of the n visible keys,
y_i = a_i x_i, I the top-N set, A = sum of a_i over I, s = sum of y_i over I (the context vector).

Two layouts: weights (..., L) with vectors (..., L, d), one row for each set of vectors; or weights (..., Q, L) with
vectors (..., L, d) shared by the Q rows, as in attention. Nothing of size Q x L x d is formed.

Which keys lie nearer to s than others: ||y_i - s||^2 = ||s||^2 - q_i, so the keys are ordered by
q_i = 2 y_i.s - ||y_i||^2 = a_i (2 x_i.s - a_i ||x_i||^2). On a sharp row the distances of light keys agree to all
digits (they are ||s||), while their q_i differ by orders of magnitude. Only the order counts, so each factor a_i is
taken relative to a reference weight of its row: nothing overflows, and no weight other than 0 becomes 0.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnorm.engines.execution import runs_asynchronously

_OF_ALL_SETS = ("n", "squares", "norms", "output", "along_output")


@dataclass(frozen=True)
class SelectedRows:
    """Rows with their selected keys. Hidden keys have weight 0; rows with n <= N give NaN (not applicable)."""

    weights: Float[Tensor, "*rows L"]
    vectors: Float[Tensor, "*sets L d"]
    visible: Bool[Tensor, "*rows L"]
    indices: Int[Tensor, "*rows N"]
    one_row_per_set: bool
    log_weights: Float[Tensor, "*rows L"] | None = None
    """log a_i up to a constant per row, -inf at hidden keys: the order of weights >= 0 that underflow to 0"""

    @property
    def top_n(self) -> int:
        return self.indices.shape[-1]

    def double(self) -> "SelectedRows":
        logs = None if self.log_weights is None else self.log_weights.double()
        return replace(self, weights=self.weights.double(), vectors=self.vectors.double(), log_weights=logs)

    @cached_property
    def n(self) -> Tensor:
        """Number of visible keys of each row, in the dtype of the weights."""
        return self.visible.sum(-1, dtype=self.weights.dtype)

    @cached_property
    def chosen(self) -> Tensor:
        """True at the selected keys."""
        return torch.zeros_like(self.visible).scatter(-1, self.indices, True) & self.visible

    @cached_property
    def outside(self) -> Tensor:
        """True at the visible keys that are not selected."""
        return self.visible & ~self.chosen

    @cached_property
    def mass(self) -> Tensor:
        """A, the weight of the selected keys together."""
        return self.chosen_weights.sum(-1)

    @cached_property
    def context(self) -> Tensor:
        """s, the selected keys' part of the attention output."""
        return (self.weights * self.chosen) @ self.vectors

    @cached_property
    def output(self) -> Tensor:
        """x_bar, the attention output: the sum of all y_i."""
        return self.weights @ self.vectors

    @cached_property
    def squares(self) -> Tensor:
        """||x_i||^2."""
        return self.vectors.square().sum(-1)

    @cached_property
    def norms(self) -> Tensor:
        """||y_i||."""
        return self.weights.abs() * safe_sqrt(self.squares).unsqueeze(-2)

    @cached_property
    def along_context(self) -> Tensor:
        """x_i . s for every key."""
        return self.context @ self.vectors.mT

    @cached_property
    def along_output(self) -> Tensor:
        """x_i . x_bar for every key."""
        return self.output @ self.vectors.mT

    @cached_property
    def distances(self) -> Tensor:
        """||y_i - s|| for every key."""
        return self.distances_to(self.context, self.weights, self.along_context)

    def distances_to(self, points: Tensor, coefficients: Tensor, along: Tensor | None = None) -> Tensor:
        """Return ||c_i x_i - p|| for one point per row; along: x_i . p if known."""
        return scaled_distances(coefficients, self.vectors, points, self.squares, along)

    @cached_property
    def chosen_weights(self) -> Tensor:
        """The N selected weights, heaviest first; 0 where a row has fewer visible keys."""
        return self.weights.gather(-1, self.indices)

    @property
    def chosen_vectors(self) -> Tensor:
        """The N selected vectors of each row, heaviest first: (..., Q, N, d)."""
        *sets, queries, top_n = self.indices.shape
        all_vectors = self.vectors.expand(*sets, *self.vectors.shape[-2:]).reshape(-1, self.vectors.shape[-1])
        offsets = torch.arange(0, len(all_vectors), self.vectors.shape[-2], device=all_vectors.device)
        indices = self.indices.reshape(len(offsets), queries * top_n) + offsets.unsqueeze(-1)
        return all_vectors.index_select(0, indices.flatten()).reshape(*self.indices.shape, -1)

    @property
    def applies(self) -> Tensor:
        """True for rows with more visible keys than selected ones."""
        return self.n > self.top_n

    def with_indices(self, indices: Int[Tensor, "*rows N"]) -> "SelectedRows":
        """Return the same rows with another selected set (distinct visible keys)."""
        rows = replace(self, indices=indices)
        # Copy the cached properties that do not depend on the selected set.
        rows.__dict__.update({name: self.__dict__[name] for name in _OF_ALL_SETS if name in self.__dict__})
        return rows

    def per_row(self, value: Tensor, where: Tensor | None = None) -> Tensor:
        """Return one number per row in the caller's layout; NaN if the row has n <= N or `where` is False."""
        applies = self.applies if where is None else self.applies & where
        value = torch.where(applies, value, torch.nan)
        return value.squeeze(-1) if self.one_row_per_set else value

    def per_key(self, value: Tensor) -> Tensor:
        """Return one value per key (or selected key) of each row, in the caller's layout."""
        return value.squeeze(-2) if self.one_row_per_set else value

    def row_value(self, given: Tensor | float) -> Tensor:
        """Reshape a number per row from the caller's layout to that of this record."""
        value = torch.as_tensor(given, dtype=self.weights.dtype, device=self.weights.device)
        return value.unsqueeze(-1) if self.one_row_per_set and value.dim() else value


def select(
    weights: Float[Tensor, "*rows L"],
    vectors: Float[Tensor, "*sets L d"],
    top_n: int,
    mask: Bool[Tensor, "..."] | None = None,
    log_weights: Float[Tensor, "*rows L"] | None = None,
) -> SelectedRows:
    """Return rows with their top-N set: the N heaviest visible keys; of equal weights, the earlier key.

    log_weights: log a_i up to a constant per row (for softmax, its logits); they order keys whose weights underflow.
    """
    if top_n < 1:
        raise ValueError(f"top_n must be at least 1, got {top_n}")
    one_row_per_set = weights.dim() == vectors.dim() - 1
    if weights.dim() < vectors.dim() - 1:
        raise ValueError(
            f"weights {tuple(weights.shape)} do not fit vectors {tuple(vectors.shape)}; "
            "expected (..., L) or (..., queries, L) with (..., L, d)"
        )
    visible = visible_keys(weights, mask)
    if not bool((visible.sum(-1) > top_n).any()):
        raise ValueError(
            f"top_n = {top_n} leaves no key outside the top-N set: the longest row has "
            f"{int(visible.sum(-1).max()) if visible.numel() else 0} visible keys. Use a smaller top_n."
        )
    weights, vectors = at_least_float32(weights), at_least_float32(vectors)
    dtype = torch.promote_types(weights.dtype, vectors.dtype)
    weights, vectors = torch.where(visible, weights, 0.0).to(dtype), vectors.to(dtype)
    if log_weights is not None:
        log_weights = torch.where(visible, at_least_float32(log_weights), -torch.inf).to(dtype)
    if one_row_per_set:
        weights, visible = weights.unsqueeze(-2), visible.unsqueeze(-2)
        log_weights = None if log_weights is None else log_weights.unsqueeze(-2)
    if mask is not None:
        # Keys that no row sees may hold NaN, and 0 * NaN is NaN.
        vectors = torch.where(visible.any(-2).unsqueeze(-1), vectors, 0.0)
    heaviest = top_n_indices(weights if log_weights is None else log_weights, top_n, visible)
    return SelectedRows(weights, vectors, visible, heaviest, one_row_per_set, log_weights)


def visible_keys(weights: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mask, broadcast to the weights; all True without a mask."""
    if mask is None:
        return torch.ones_like(weights, dtype=torch.bool)
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be boolean with True = visible, got {mask.dtype}")
    try:
        return mask.expand(weights.shape)
    except RuntimeError:
        raise ValueError(f"mask {tuple(mask.shape)} does not broadcast to weights {tuple(weights.shape)}") from None


def top_n_indices(weights: Tensor, top_n: int, visible: Tensor) -> Tensor:
    """Return indices of the N heaviest visible keys, heaviest first, then by position; if n < N, also hidden keys."""
    weights = torch.where(visible, weights, -torch.inf)
    # On a GPU sorting all keys is faster than waiting to know whether there are ties.
    if runs_asynchronously(weights) or top_n >= weights.shape[-1]:
        return weights.sort(dim=-1, descending=True, stable=True).indices[..., :top_n]
    values, indices = weights.topk(min(top_n, weights.shape[-1]), dim=-1)
    # topk returns equal weights in any order.
    last = values[..., -1:]
    if bool(((weights == last).sum(-1) > (values == last).sum(-1)).any()):
        return weights.sort(dim=-1, descending=True, stable=True).indices[..., :top_n]
    by_key = indices.sort(dim=-1).values
    return by_key.gather(-1, weights.gather(-1, by_key).sort(dim=-1, descending=True, stable=True).indices)


def top_n_set(
    weights: Float[Tensor, "*rows L"], top_n: int, mask: Bool[Tensor, "..."] | None = None
) -> Bool[Tensor, "*rows L"]:
    """Return a mask of the N heaviest visible keys of each row (all if n <= N); of equal weights, the earlier key."""
    if top_n < 1:
        raise ValueError(f"top_n must be at least 1, got {top_n}")
    visible = visible_keys(weights, mask)
    return torch.zeros_like(visible).scatter(-1, top_n_indices(weights, top_n, visible), True) & visible


def scaled_distances(
    weights: Tensor, vectors: Tensor, points: Tensor, squares: Tensor | None = None, along: Tensor | None = None
) -> Tensor:
    """||a_i x_i - p|| for weights (..., Q, L), vectors (..., L, d) and points (..., Q, d): (..., Q, L).

    Uses inner products, so that no (Q, L, d) tensor is needed. Pairs so close that the subtraction would lose more than
    half of the digits are computed again from their difference. In float64 on a GPU they are not, because finding them
    would synchronize, and half of the digits are as many as float32 has. squares, along: ||x_i||^2 and x_i . p, if
    known.
    """
    squares = vectors.square().sum(-1) if squares is None else squares
    along = points @ vectors.mT if along is None else along
    apart = weights.square() * squares.unsqueeze(-2) + points.square().sum(-1, keepdim=True)  # if at a right angle
    squared = torch.addcmul(apart, weights, along, value=-2)
    if squared.dtype == torch.float64 and runs_asynchronously(squared):
        return safe_sqrt(squared)
    with torch.no_grad():
        close = (squared < torch.finfo(squared.dtype).eps ** 0.5 * apart).nonzero(as_tuple=True)
    if close[0].numel():
        *batch, row, key = close
        every_vector = vectors.expand(*squared.shape[:-2], *vectors.shape[-2:])
        every_weight = weights.expand(squared.shape)
        every_point = points.expand(*squared.shape[:-1], points.shape[-1])
        between = every_weight[close].unsqueeze(-1) * every_vector[(*batch, key)] - every_point[(*batch, row)]
        squared = squared.index_put(close, between.square().sum(-1))
    return safe_sqrt(squared)


def safe_sqrt(squared: Tensor) -> Tensor:
    """Return the square root, 0 for negative numbers, with gradient 0 at 0."""
    if not squared.requires_grad:
        return squared.clamp(min=0).sqrt()
    positive = ~(squared <= 0)
    return torch.where(positive, torch.where(positive, squared, 1.0).sqrt(), 0.0)


def sum_where(values: Tensor, where: Tensor) -> Tensor:
    """Return the sum of values, all finite, over the keys in `where`."""
    total: Tensor = torch.linalg.vecdot(values, where.to(values.dtype))
    return total


def at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def relative_weights(weights: Tensor, reference: Tensor, log_weights: Tensor | None = None) -> Tensor:
    """Return a_i over the largest |a_j| of the keys in `reference`, with a magnitude of at least `floor`.

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
    """Multiply the vectors of each set by a power of two, so that squares neither overflow nor underflow."""
    largest = vectors.abs().amax((-2, -1), keepdim=True) if vectors.numel() else vectors.sum()
    exponent = torch.frexp(torch.where(largest.isfinite(), largest, 1.0)).exponent.clamp(-120, 120)
    return vectors * torch.ldexp(torch.ones_like(largest), -exponent)


def closeness(rows: SelectedRows) -> Tensor:
    """Return q_i of every key in a unit of its row, (..., Q, L); NaN if a weight or vector is not finite."""
    x = near_one(rows.vectors)
    shares = relative_weights(rows.weights, rows.visible, rows.log_weights)
    along = (shares * rows.chosen) @ x @ x.mT
    factors = relative_weights(rows.weights, rows.outside, rows.log_weights)
    return factors * (2 * along - shares * x.square().sum(-1).unsqueeze(-2))


def as_near_as_outsiders(rows: SelectedRows) -> tuple[Tensor, Tensor]:
    """Return two masks: selected keys that are at least as close to s as every visible key outside; finite rows."""
    q = closeness(rows)
    nearest = q.masked_fill(~rows.outside, -torch.inf).amax(-1, keepdim=True)
    finite = q.masked_fill(~rows.visible, 0.0).sum(-1).isfinite()
    return rows.chosen & (q >= nearest), finite
