"""Dispersion: bounds on the largest weight and the smallest entropy that bounded logits allow among n keys.

Papers: Mudarisov et al. 2025, https://arxiv.org/abs/2508.17821 (Lemma 1, Corollary 1) and Velickovic et al. 2024,
https://arxiv.org/abs/2410.01104 (Lemma 2.1, Theorem 2.2, Proposition 3.1). Proofs: docs/theory/dispersion.md.

Spread, temperature and n may be numbers or tensors that broadcast. Rows to which a statement does not apply (no visible
key, one key where two are needed) give NaN; input to which it applies nowhere is an error.

Lemma 1 is about weights F(l_i) / sum F(l) with a positive F that does not depend on the number of keys. Softmax is F =
exp; `kernel` declares its F; a temperature only changes the interval. It covers no other normalizer, each for its own
reason.

Proposition 3.1 bounds the logit spread of a head by its weight matrices: sharpness needs large weights. Shapes: H query
heads, K key heads (H a multiple of K), head size e, inputs y (..., Q, D) of the queries and x (..., L, C) of the keys,
W_Q (..., H, e, D), W_K (..., K, e, C).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnorm.engines.execution import runs_asynchronously
from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.kernel import FUNCTIONS, Kernel, PositiveFunction
from attnorm.normalizers.softmax import Softmax, Temperature
from attnorm.theory.selection import at_least_float32, visible_keys

Number = Tensor | float
ZOOMS = 8  # of a search for an extremum, each by a factor of 32


def positive_temperature(temperature: float | Tensor, like: Tensor | None = None) -> Tensor:
    """Return the temperature as a tensor like `like`; without `like`, a number becomes float64. Must be positive."""
    if like is not None:
        value = torch.as_tensor(temperature, dtype=like.dtype, device=like.device)
    elif isinstance(temperature, Tensor):
        value = temperature
    else:
        value = torch.tensor(temperature, dtype=torch.float64)
    if not runs_asynchronously(value) and not bool((value > 0).all()):
        raise ValueError(f"temperature must be positive, got {float(value.min()):g}")
    return value


class Bounds(NamedTuple):
    lower: Tensor
    upper: Tensor


def lemma1_constants(F_min: Number, F_max: Number) -> tuple[Tensor, Tensor]:
    """Return the constants C1 = F_min/F_max and C2 = F_max/F_min of Lemma 1.

    Then F(l_i) / sum F(l) lies in [C1/L, C2/L] for L keys. No better constants hold for all L.
    """
    F_min, F_max = _floats(F_min, F_max)
    if bool((F_min <= 0).any()) or bool((F_max < F_min).any()):
        raise ValueError(
            f"Lemma 1 needs 0 < F_min <= F_max, got F_min {_extreme(F_min, 'min')}, F_max "
            f"{_extreme(F_max, 'max')}. It does not cover maps that reach zero (sparsemax, entmax, ReLU, top-k)."
        )
    return F_min / F_max, F_max / F_min


def lemma1_bounds(F_min: Number, F_max: Number, n: Number) -> Bounds:
    """Return Lemma 1's bounds of a weight, as printed: C1/n <= a_i <= C2/n."""
    C1, C2 = lemma1_constants(F_min, F_max)
    n = _applicable(n, C1)
    return Bounds(C1 / n, C2 / n)


def observed_range(
    F_values: Float[Tensor, "*rows L"], mask: Bool[Tensor, "..."] | None = None
) -> tuple[Float[Tensor, "*rows"], Float[Tensor, "*rows"]]:
    """Return F_min and F_max over the visible keys of each row; with them Lemma 1 holds for that row exactly."""
    visible = visible_keys(F_values, mask)
    low = torch.where(visible, F_values, torch.inf).amin(-1)
    high = torch.where(visible, F_values, -torch.inf).amax(-1)
    has_keys = visible.any(-1)
    return torch.where(has_keys, low, torch.nan), torch.where(has_keys, high, torch.nan)


def range_on_interval(
    F: Callable[[Tensor], Tensor], low: float, high: float, *, points: int = 4097
) -> tuple[float, float]:
    """Return F_min and F_max of a continuous F on [low, high], monotone or not.

    A grid that contains both ends, then repeated zooms around its eight best points. Exact for monotone F; otherwise
    right to about 1e-12 unless F has extrema narrower than (high - low) / points.
    """
    if not low <= high:
        raise ValueError(f"expected low <= high, got the empty interval [{low}, {high}].")
    return -_maximum(lambda x: -F(x), low, high, points), _maximum(F, low, high, points)


def _maximum(F: Callable[[Tensor], Tensor], low: float, high: float, points: int) -> float:
    step = (high - low) / (points - 1)
    x = torch.linspace(low, high, points, dtype=torch.float64)
    values = F(x)
    best = float(values.max())
    centers = x[values.topk(min(8, points)).indices]
    window = torch.linspace(-1, 1, 65, dtype=torch.float64)
    for _ in range(ZOOMS):
        x = (centers[:, None] + step * window).clamp(low, high)
        values = F(x)
        best = max(best, float(values.max()))
        centers = x.gather(1, values.argmax(1, keepdim=True)).squeeze(1)
        step /= 32
    if not math.isfinite(best):
        raise ValueError(
            f"Lemma 1 needs a bounded F: expected finite values on [{low}, {high}], got {best}. Choose another F or "
            "interval."
        )
    return best


def corollary1_bounds(query_norm: Number, max_key_norm: Number, n: Number, temperature: Number = 1.0) -> Bounds:
    """Return Corollary 1's bounds of a weight: exp(-2D/T)/n <= a_i <= exp(2D/T)/n, D = ||q|| max ||k||.

    They are true, and far wider than those of Lemma 2.1.
    """
    query_norm, max_key_norm = _floats(query_norm, max_key_norm)
    return lemma21_bounds(2 * query_norm * max_key_norm, n, temperature)


def lemma21_bounds(spread: Number, n: Number, temperature: Number = 1.0) -> Bounds:
    """Return Lemma 2.1's bounds of a weight, as printed: exp(-d/T)/n <= a_i <= exp(d/T)/n for logits of spread d."""
    d = _scaled_spread(spread, temperature)
    n = _applicable(n, d)
    return Bounds(torch.exp(-d) / n, torch.exp(d) / n)


def sharp_weight_bounds(spread: Number, n: Number, temperature: Number = 1.0) -> Bounds:
    """Return the sharp bounds of a softmax weight for logits of spread d; both ends are attained.

    1/(1 + (n-1)e^{d/T}) <= a_i <= 1/(1 + (n-1)e^{-d/T})

    For a general F use spread = log(F_max/F_min).
    """
    d = _scaled_spread(spread, temperature)
    others = torch.log(_applicable(n, d) - 1)
    return Bounds(torch.sigmoid(-d - others), torch.sigmoid(d - others))


def horizon(spread: Number, temperature: Number = 1.0, weight: float = 0.5) -> Tensor:
    """Return the horizon: the number of keys beyond which no softmax weight can reach `weight`.

    1 + e^{d/T} (1 - w)/w for the weight w and logits of spread d; 1 + e^{d/T} for one half.
    """
    if not 0 < weight < 1:
        raise ValueError(f"weight must lie strictly between 0 and 1, got {weight}")
    return 1 + torch.exp(_scaled_spread(spread, temperature)) * ((1 - weight) / weight)


def entropy_nats(weights: Float[Tensor, "*rows L"], mask: Bool[Tensor, "..."] | None = None) -> Float[Tensor, "*rows"]:
    """Return the entropy of the row divided by its sum (rows need not sum to 1); NaN for negative weights or sum 0."""
    weights = at_least_float32(weights)
    weights = torch.where(visible_keys(weights, mask), weights, 0.0)
    mass = weights.sum(-1, keepdim=True)
    valid = (mass.squeeze(-1) > 0) & (weights >= 0).all(-1)
    p = weights / torch.where(mass > 0, mass, 1.0)
    positive = p > 0
    terms = torch.where(positive, p * torch.log(torch.where(positive, p, 1.0)), 0.0)
    return torch.where(valid, -terms.sum(-1), torch.nan)


def entropy_floor(spread: Number, n: Number, temperature: Number = 1.0) -> Tensor:
    """Return the smallest entropy (nats) that softmax over n logits of this spread can have.

    Reached by k logits at the top and n - k at the bottom; k is the better of the two integers around
    n (c - 1)/(e^d - 1), c = d/(1 - e^{-d}), within [1, n - 1].
    """
    d = _scaled_spread(spread, temperature).clamp(max=1e4)  # exp(-d) is 0 long before
    d, keys = torch.broadcast_tensors(d, _applicable(n, d))
    with torch.no_grad():
        k = keys * _c_minus_one(d) * torch.exp(-d) / torch.where(d > 0, -torch.expm1(-d), 1.0)
        k = torch.where(d > 0, k, keys / 2)
    lowest = torch.minimum(two_level_entropy(d, keys, k.floor()), two_level_entropy(d, keys, k.ceil()))
    return torch.where(keys == 1, 0.0, lowest)


def two_level_entropy(spread: Number, n: Number, k: Number) -> Tensor:
    """Return the entropy of k equal logits that are `spread` above n - k equal ones, k clamped to [1, n - 1]."""
    d, n, k = _floats(spread, n, k)
    k = torch.maximum(torch.minimum(k, n - 1), torch.ones_like(k))
    low = (n - k) * torch.exp(-d) / k
    return torch.log(k) + torch.log1p(low) + d * low / (1 + low)


def entropy_floor_deficit(spread: Number, temperature: Number = 1.0) -> Tensor:
    """c - 1 - log c: the floor lies at most this far below log n, whatever n."""
    excess = _c_minus_one(_scaled_spread(spread, temperature))
    return torch.where(excess.isinf(), excess, excess - torch.log1p(excess))


def _c_minus_one(d: Tensor) -> Tensor:
    small = d < 1e-2
    safe = torch.where(small, 1.0, d)
    return torch.where(small, d / 2 + d**2 / 12 - d**4 / 720, safe / -torch.expm1(-safe) - 1)


def effective_gap(weights: Float[Tensor, "*rows L"], mask: Bool[Tensor, "..."] | None = None) -> Float[Tensor, "*rows"]:
    """Return the effective gap: the log-odds of the largest weight against the mean of the others.

    G = logit(max a) + log(n - 1)

    From sums of the others, never 1 - max a, so it stays exact as max a -> 1 and needs no row sum of 1. Infinite where
    all others are exactly 0; NaN for one key or where the others sum to less than 0. Softmax with spread d has
    0 <= G <= d/T; G grows like log n only if the largest weight does not shrink.
    """
    weights = at_least_float32(weights)
    visible = visible_keys(weights, mask)
    winner = torch.where(visible, weights, -torch.inf).argmax(-1, keepdim=True)
    top = weights.gather(-1, winner).squeeze(-1)
    others = torch.where(visible.scatter(-1, winner, False), weights, 0.0).sum(-1)
    n = visible.sum(-1, dtype=weights.dtype)
    valid = (n > 1) & (top > 0) & (others >= 0)
    gap = torch.log(torch.where(valid, top, 1.0)) - torch.log(torch.where(valid, others, 1.0))
    return torch.where(valid, gap + torch.log((n - 1).clamp(min=1)), torch.nan)


def effective_gap_from_logits(
    logits: Float[Tensor, "*rows L"], mask: Bool[Tensor, "..."] | None = None, temperature: Number = 1.0
) -> Float[Tensor, "*rows"]:
    """Return the effective gap of softmax(logits/T), finite even if the weights round to 0 and 1."""
    logits = at_least_float32(logits)
    visible = visible_keys(logits, mask)
    n = visible.sum(-1, dtype=logits.dtype)
    winner = torch.where(visible, logits, -torch.inf).argmax(-1, keepdim=True)
    others = visible.scatter(-1, winner, False) & (n > 1).unsqueeze(-1)
    temperature = positive_temperature(temperature, logits)
    z = logits / (temperature.unsqueeze(-1) if temperature.dim() else temperature)  # one T for each row
    top = z.gather(-1, winner).squeeze(-1)
    # Rows without others are NaN below; a finite stand-in keeps their gradient 0 instead of NaN.
    stand_in = torch.where((n > 1).unsqueeze(-1), -torch.inf, 0.0)
    gap = top - torch.logsumexp(torch.where(others, z, stand_in), -1) + torch.log((n - 1).clamp(min=1))
    return torch.where(n > 1, gap, torch.nan)


@dataclass(frozen=True)
class LineFit:
    """Least squares y = intercept + slope x; the standard error takes the points as independent."""

    slope: Tensor
    intercept: Tensor
    slope_standard_error: Tensor
    points: Tensor


def least_squares_line(
    x: Float[Tensor, "*rows m"], y: Float[Tensor, "*rows m"], where: Bool[Tensor, "..."] | None = None
) -> LineFit:
    """Fit one line per row; NaN for fewer than two different x, NaN standard error for fewer than three points."""
    used = visible_keys(y, where)
    m = used.sum(-1, dtype=y.dtype)
    count = m.clamp(min=1).unsqueeze(-1)
    x, y = torch.where(used, x, 0.0), torch.where(used, y, 0.0)
    x_mean, y_mean = x.sum(-1, keepdim=True) / count, y.sum(-1, keepdim=True) / count
    dx, dy = torch.where(used, x - x_mean, 0.0), torch.where(used, y - y_mean, 0.0)
    sxx = dx.square().sum(-1)
    different = sxx > 1e-12 * x.square().sum(-1)
    safe = torch.where(different, sxx, 1.0)
    slope = torch.where(different, (dx * dy).sum(-1) / safe, torch.nan)
    residual = dy - slope.unsqueeze(-1) * dx
    variance = residual.square().sum(-1) / (m - 2).clamp(min=1)
    error = torch.where(m > 2, (variance / safe).sqrt(), torch.nan)
    return LineFit(slope, (y_mean.squeeze(-1) - slope * x_mean.squeeze(-1)), error, m)


def effective_gap_slope(gap: Float[Tensor, "*rows m"], n: Float[Tensor, "*rows m"]) -> LineFit:
    """Return the slope of the effective gap on log n.

    0 disperses as Theorem 2.2 predicts, 1 keeps the largest weight at every length.

    Points where G is NaN (not applicable) are left out; an infinite G (all others exactly 0) makes the slope NaN.
    """
    return least_squares_line(torch.log(n), gap, ~gap.isnan())


def _floats(*values: Number) -> list[Tensor]:
    """The numbers as floating tensors of one dtype: that of the floating tensors among them, else float64."""
    floating = [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]
    dtype = torch.float64
    if floating:
        dtype = at_least_float32(floating[0]).dtype
        for tensor in floating[1:]:
            dtype = torch.promote_types(dtype, tensor.dtype)
    device = next((v.device for v in values if isinstance(v, Tensor)), None)
    return [
        v.to(dtype=dtype, device=device) if isinstance(v, Tensor) else torch.full((), v, dtype=dtype, device=device)
        for v in values
    ]


def _scaled_spread(spread: Number, temperature: Number) -> Tensor:
    d, T = _floats(spread, temperature)
    if not runs_asynchronously(d) and bool((d < 0).any()):
        raise ValueError(f"expected a spread (largest minus smallest logit) of at least 0, got {_extreme(d, 'min')}")
    return d / positive_temperature(T, d)


def _applicable(n: Number, like: Tensor) -> Tensor:
    """n as a tensor with NaN where a row has no key; an error where no row has one."""
    n = torch.as_tensor(n, dtype=like.dtype, device=like.device)
    if not runs_asynchronously(n) and not bool((n >= 1).any()):
        raise ValueError(f"n must be at least 1 visible key, got {_extreme(n, 'max')}")
    return torch.where(n >= 1, n, torch.nan)


def _extreme(values: Tensor, reduction: str) -> float:
    return float(values.min() if reduction == "min" else values.max()) if values.numel() else math.nan


def not_covered(normalizer: Normalizer) -> str | None:
    """Return the reason why Lemma 1 does not apply to this normalizer; None if it does."""
    if type(normalizer.map) not in (Softmax, Kernel):
        return f"the map {type(normalizer.map).__name__} is not F(l) / sum F(l) with a positive F"
    if normalizer.selections:
        return "it hides keys, so that F is 0 for some"
    if normalizer.sink is not None:
        return "its sink takes part of the row"
    if not normalizer.has_known_parts():
        return "it computes by methods of its own"
    for rule in normalizer.rules:
        if not isinstance(rule, Temperature):
            return f"its scale depends on more than the logit ({rule.length or type(rule).__name__})"
    return None


def lemma1_constants_of(normalizer: Normalizer, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return C1 and C2 of a normalizer: C1/n <= a_i <= C2/n at every n, for logits between low and high."""
    reason = not_covered(normalizer)
    if reason is not None:
        raise ValueError(f"Lemma 1 does not cover {normalizer.name!r}: {reason}")
    scale = math.prod(rule.gain(1) or 0.0 for rule in normalizer.rules)
    F_min, F_max = range_on_interval(_function(normalizer).value, low * scale, high * scale)
    return lemma1_constants(F_min, F_max)


def _function(normalizer: Normalizer) -> PositiveFunction:
    return normalizer.map.function if isinstance(normalizer.map, Kernel) else FUNCTIONS["exp"]


def logit_spread(logits: Float[Tensor, "*rows L"], mask: Bool[Tensor, "..."] | None = None) -> Float[Tensor, "*rows"]:
    """Return the largest minus the smallest visible logit; NaN in rows that see no key."""
    low, high = observed_range(at_least_float32(logits), mask)
    return high - low


def proposition31_bound(
    query_weight: Float[Tensor, "... H e D"],
    key_weight: Float[Tensor, "... K e C"],
    query_inputs: Float[Tensor, "... Q D"],
    key_inputs: Float[Tensor, "... L C"],
    *,
    query_bias: Float[Tensor, "... H e"] | None = None,
    key_bias: Float[Tensor, "... K e"] | None = None,
    scaling: float = 1.0,
    mask: Bool[Tensor, "..."] | None = None,
) -> Float[Tensor, "... H Q"]:
    """Return Proposition 3.1's bound of the logit spread, per head and query, over the keys it may see.

    Spread <= 2 |scaling| smax(W_Q) smax(W_K) ||y|| max_i ||x_i||.

    A bias counts as one more column of its matrix and one more coordinate, 1, of its inputs. Rotations of q and k
    (RoPE) change no norm, so the bound stays. It says nothing about heads that normalise q and k (QK-norm) or add to
    the logits a term that depends on the key (ALiBi).
    """
    query_weight, query_inputs = _append_bias(query_weight, query_bias, query_inputs)
    key_weight, key_inputs = _append_bias(key_weight, key_bias, key_inputs)
    key_size = _for_each_head(_largest_singular(key_weight), query_weight.shape[-3], dim=-1)
    return _bound_spread(_largest_singular(query_weight) * key_size, query_inputs, key_inputs, scaling, mask)


def proposition31_tight(
    query_weight: Float[Tensor, "... H e D"],
    key_weight: Float[Tensor, "... K e C"],
    query_inputs: Float[Tensor, "... Q D"],
    key_inputs: Float[Tensor, "... L C"],
    *,
    query_bias: Float[Tensor, "... H e"] | None = None,
    scaling: float = 1.0,
    mask: Bool[Tensor, "..."] | None = None,
) -> Float[Tensor, "... H Q"]:
    """Return a tighter bound of the logit spread than Proposition 3.1.

    Spread <= 2 |scaling| smax(W_Q^T W_K) ||y|| max_i ||x_i - c||, c = 0 or the mean input, whichever gives less.

    Never above the printed bound, but only for heads that do not rotate q and k. A key bias, and a shift of all key
    inputs, move the logits of a row alike: neither can widen its spread.
    """
    query_weight, query_inputs = _append_bias(query_weight, query_bias, query_inputs)
    # With the QR factorisation W_Q^T = U R, W_Q^T W_K = U (R W_K) has the singular values of the small R W_K.
    product = torch.linalg.qr(query_weight.mT).R @ _for_each_head(key_weight, query_weight.shape[-3], dim=-3)
    seen_keys = torch.ones_like(key_inputs[..., 0], dtype=torch.bool) if mask is None else mask.any(-2)
    key_inputs = torch.where(seen_keys.unsqueeze(-1), key_inputs, 0.0)
    center = key_inputs.sum(-2, keepdim=True) / seen_keys.sum(-1).clamp(min=1)[..., None, None]
    size = _largest_singular(product)
    return torch.minimum(
        _bound_spread(size, query_inputs, key_inputs, scaling, mask),
        _bound_spread(size, query_inputs, key_inputs - center, scaling, mask),
    )


def _bound_spread(
    size: Tensor, query_inputs: Tensor, key_inputs: Tensor, scaling: float, mask: Tensor | None
) -> Tensor:
    """2 |scaling| size ||y|| max ||x_i|| over the keys that each query sees."""
    norms = torch.linalg.vector_norm(key_inputs, dim=-1).unsqueeze(-2)
    norms = norms.expand(*norms.shape[:-2], query_inputs.shape[-2], norms.shape[-1])
    reach: Tensor = torch.linalg.vector_norm(query_inputs, dim=-1) * observed_range(norms, mask)[1]
    return 2 * abs(scaling) * size.unsqueeze(-1) * reach.unsqueeze(-2)


def _append_bias(weight: Tensor, bias: Tensor | None, inputs: Tensor) -> tuple[Tensor, Tensor]:
    if bias is None:
        return weight, inputs
    return torch.cat([weight, bias.unsqueeze(-1)], -1), torch.cat([inputs, torch.ones_like(inputs[..., :1])], -1)


def _largest_singular(matrix: Tensor) -> Tensor:
    singular_values: Tensor = torch.linalg.svdvals(matrix)
    return singular_values[..., 0]


def _for_each_head(per_key_head: Tensor, heads: int, dim: int) -> Tensor:
    groups = per_key_head.shape[dim]
    if heads % groups:
        raise ValueError(f"expected a number of query heads that is a multiple of the {groups} key heads, got {heads}.")
    return per_key_head.repeat_interleave(heads // groups, dim)
