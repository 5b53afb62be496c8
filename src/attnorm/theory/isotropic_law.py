"""The exact law of R = ||sum_j b_j u_j|| for independent uniform directions u_j on the sphere of R^d.

This is what Assumption 1 of Mudarisov et al. 2025, https://arxiv.org/abs/2508.17821, says about the selected keys. No
one formula serves all cases numerically, so each is used where it is well conditioned, with its own error bound:

- one or two vectors: closed form (incomplete beta function);
- three vectors, low d: one integral over the angle of two of them, split where the integrand has a kink;
- low d: the Hankel integral P(R <= r) = r int (rt/2)^v J_{v+1}(rt) / Gamma(v+1) prod_j Lambda_v(b_j t) dt, v = d/2 - 1,
  Lambda_v the characteristic function of the sphere. Its terms outgrow their sum like e^{0.07 d} (r/E R)^v, which is
  what a plain grid runs into at d = 768; here the loss is part of the error;
- high d: a recursion on the radius, which adds positive numbers only. With u(q) = P(||q e + the vectors so far|| <= r),
  adding a vector b takes the mean of u(sqrt(q^2 + b^2 + 2 q b c)) over the cosine c.

Proofs: docs/theory/geometry.md.
"""

import itertools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

Array = NDArray[np.float64]

CLOSED_FORM_ERROR = 1e-12
LOW_DIMENSION = 12
# Below this the law is too rough for the recursion's splines, and for an error estimated by refining them.
SMOOTH_DIMENSION = 5
MAX_HANKEL_NODES = 3_000_000
# Radii that the vectors still to come exceed with chance below e^-40 are left out of the recursion's grids.
TAIL = 40.0
RECURSION_SIZES = ((100, 8), (200, 12), (400, 18), (800, 27), (1600, 40))


@dataclass(frozen=True)
class IsotropicLaw:
    """P(R <= radius) with a bound on its numerical error; `reached`: whether that is within the tolerance."""

    probability: Array
    error: Array
    tolerance: float
    method: str

    @property
    def reached(self) -> bool:
        return not bool((self.error > self.tolerance).any())


def isotropic_norm_cdf(
    radius: ArrayLike, coefficients: ArrayLike, dimension: int, tolerance: float = 1e-6
) -> IsotropicLaw:
    """Return P(||sum_j b_j u_j|| <= r) for every radius r. Warns if the tolerance is missed (`reached` is False)."""
    r = np.asarray(radius, dtype=np.float64)
    b = np.sort(np.abs(np.asarray(coefficients, dtype=np.float64).ravel()))[::-1]
    if dimension < 2:
        raise ValueError(f"expected a dimension of at least 2 for directions on a sphere, got {dimension}")
    if not np.isfinite(b).all() or np.isnan(r).any() or tolerance <= 0:
        raise ValueError(
            f"expected finite coefficients, radii that are numbers and a tolerance above 0, got {tolerance}"
        )
    b = b[b > 0]
    largest = b.sum()
    smallest = max(0.0, 2 * b[0] - largest) if len(b) else 0.0
    # Outside the support, and everywhere for fewer than two vectors, R is certain.
    probability = np.where(r >= largest, 1.0, 0.0).reshape(-1)
    error = np.zeros_like(probability)
    inside = ((r > smallest) & (r < largest)).reshape(-1)
    method = "closed form"
    if inside.any() and len(b) > 1:
        method, value, bound = _inside_support(r.reshape(-1)[inside], b, dimension, tolerance)
        probability[inside], error[inside] = np.clip(value, 0.0, 1.0), bound
    law = IsotropicLaw(probability.reshape(r.shape), error.reshape(r.shape), tolerance, method)
    if not law.reached:
        warnings.warn(
            f"the isotropic law for {len(b)} vectors in dimension {dimension} is accurate to "
            f"{law.error.max():.1e}, which misses the requested tolerance {tolerance:.1e}",
            RuntimeWarning,
            stacklevel=2,
        )
    return law


def _inside_support(r: Array, b: Array, d: int, tolerance: float) -> tuple[str, Array, Array]:
    if len(b) == 2:
        return "closed form", two_vector_cdf(r, b[0], b[1], d), np.full_like(r, CLOSED_FORM_ERROR)
    if len(b) == 3 and d < LOW_DIMENSION:
        return "angle integral", *_angle_integral(r, b, d, tolerance)
    methods = [("Hankel integral", _hankel), ("radial recursion", _recursion)]
    if d >= LOW_DIMENSION:
        methods.reverse()
    tried = []
    for name, method in methods if d >= SMOOTH_DIMENSION else methods[:1]:
        value, error = method(r, b, d, tolerance)
        tried.append((name, value, error))
        if (error <= tolerance).all():
            break
    return min(tried, key=lambda attempt: float(attempt[2].max()))


def cosine_cdf(cosine: ArrayLike, dimension: int) -> Array:
    """Return P(<u, e> <= c) for u uniform on the sphere and e any unit vector."""
    half = (dimension - 1) / 2
    return np.asarray(special.betainc(half, half, (1 + np.clip(cosine, -1, 1)) / 2), dtype=np.float64)


def two_vector_cdf(r: ArrayLike, b: ArrayLike, q: ArrayLike, d: int) -> Array:
    """P(||q e + b u|| <= r) = P(cosine <= (r^2 - b^2 - q^2) / (2 b q)), without cancellation where b >> q or q >> b."""
    r, b, q = np.broadcast_arrays(np.asarray(r, dtype=np.float64), b, q)
    big, small = np.maximum(b, q), np.minimum(b, q)
    excess = (r - big) * (r + big) - small**2
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine = excess / (2 * big * small)
    return cosine_cdf(np.where(small > 0, cosine, np.where(excess >= 0, 1.0, -1.0)), d)


def _angle_integral(r: Array, b: Array, d: int, tolerance: float) -> tuple[Array, Array]:
    """Three vectors: the mean over the angle between the two smaller ones of the closed form for two."""
    from scipy.integrate import quad  # with half of SciPy behind it

    density = math.exp(math.lgamma(d / 2) - math.lgamma((d - 1) / 2)) / math.sqrt(math.pi)
    value, error = np.empty_like(r), np.empty_like(r)
    for i, radius in enumerate(r):

        def integrand(angle: float, radius: float = float(radius)) -> float:
            q = math.sqrt(max(b[1] ** 2 + b[2] ** 2 + 2 * b[1] * b[2] * math.cos(angle), 0.0))
            return float(two_vector_cdf(radius, b[0], q, d)) * math.sin(angle) ** (d - 2) * density

        cosines = [(q * q - b[1] ** 2 - b[2] ** 2) / (2 * b[1] * b[2]) for q in (radius - b[0], radius + b[0])]
        ends = [0.0, *sorted(math.acos(c) for c in cosines if -1 < c < 1), math.pi]
        parts = [
            quad(integrand, low, high, epsabs=tolerance / 20, epsrel=1e-13, limit=400)
            for low, high in itertools.pairwise(ends)
        ]
        value[i] = sum(part[0] for part in parts)
        error[i] = sum(part[1] for part in parts) + CLOSED_FORM_ERROR
    return value, error


def _hankel(r: Array, b: Array, d: int, tolerance: float) -> tuple[Array, Array]:
    """Gauss-Legendre on panels of one oscillation up to T; error = the bound on the rest + rounding of the terms."""
    v = d / 2 - 1
    fastest = float(r.max() + b.sum())
    T = 1 / b[0]
    while _hankel_tail(T, r, b, v).max() > tolerance / 4 and 2 * T * fastest * 16 / (2 * math.pi) < MAX_HANKEL_NODES:
        T *= 2
    panels = math.ceil(T * fastest / (2 * math.pi))
    nodes, node_weights = np.polynomial.legendre.leggauss(16)
    distinct, counts = np.unique(b, return_counts=True)
    value, size = np.zeros_like(r), np.zeros_like(r)
    for start in range(0, panels, 4096):
        left = np.arange(start, min(start + 4096, panels))[:, None]
        t = ((left + (nodes + 1) / 2) * (T / panels)).ravel()
        product = np.ones_like(t)
        for coefficient, count in zip(distinct, counts, strict=True):
            product *= special.hyp0f1(v + 1, -((coefficient * t) ** 2) / 4) ** count
        product *= np.tile(node_weights, len(left)) * (T / panels / 2)
        x = np.outer(r, t)
        terms = r[:, None] * (x / 2) ** v * special.jv(v + 1, x) / math.gamma(v + 1) * product
        value += terms.sum(1)
        # A Bessel function at x is off by about eps (1 + x) times its size.
        size += (np.abs(terms) * (4 * (len(b) + 4) + fastest * t)).sum(1)
    return value, _hankel_tail(T, r, b, v) + np.finfo(np.float64).eps * size


def _hankel_tail(T: float, r: Array, b: Array, v: float) -> Array:
    """A bound on the integral from T on, from J_m(x)^2 <= 2 / (pi sqrt(x^2 - m^2)) (and <= 2 / (pi x) for m <= 1/2)."""

    def log_bessel(order: float) -> float:
        return 0.5 * math.log(2 / math.pi) + (0.0 if order <= 0.5 else 0.25 * math.log(4 / 3))

    log_factor = math.lgamma(v + 1) + v * math.log(2) + log_bessel(v) - (v + 0.5) * np.log(b * T)
    used = (b * T >= 2 * v) & (log_factor < 0)
    bound_applies = r * T >= 2 * (v + 1)
    growth = np.where(bound_applies, v - 0.5, v)
    power = used.sum() * (v + 0.5) - growth
    log_kernel = np.log(r) + v * np.log(r * T / 2) - math.lgamma(v + 1)
    log_kernel = log_kernel + np.where(bound_applies, log_bessel(v + 1) - 0.5 * np.log(r * T), 0.0)
    log_tail = log_kernel + log_factor[used].sum() + math.log(T) - np.log(np.maximum(power - 1, 1e-300))
    return np.where(power > 1, np.exp(np.minimum(log_tail, 700.0)), np.inf)


def _recursion(r: Array, b: Array, d: int, tolerance: float) -> tuple[Array, Array]:
    """Finer and finer grids until they agree. Error: twice the last change, and at least an eighth of the one before,
    since halving the grid gains more than that; a single small change could be an accident."""
    grids = [_recursion_on_grid(r, b, d, *size) for size in RECURSION_SIZES[:2]]
    error = np.full_like(r, np.inf)
    for size in RECURSION_SIZES[2:]:
        grids.append(_recursion_on_grid(r, b, d, *size))
        last, before = np.abs(grids[-1] - grids[-2]), np.abs(grids[-2] - grids[-3])
        error = np.maximum(2 * last, before / 8) + len(b) * (math.exp(-TAIL) + CLOSED_FORM_ERROR)
        if (error <= tolerance).all():
            break
    return grids[-1], error


def _recursion_on_grid(r: Array, b: Array, d: int, points: int, angles: int) -> Array:
    """The largest vector first: u is then never sharper than the steps that still average over it."""
    cosines, chances = _gegenbauer(angles, d)
    u: Callable[[Array], Array] = lambda q: two_vector_cdf(r, b[0], q[..., None], d)  # noqa: E731
    for step in range(1, len(b) - 1):
        rest = b[step + 1 :]
        if len(rest) == 1:
            grid = rest
        else:
            # Hsu, Kakade and Zhang 2012 for sub-Gaussian vectors: ||W||^2 beyond this has chance at most e^-TAIL.
            reach = math.sqrt(float((rest**2).sum()) * (1 + 2 * math.sqrt(TAIL / d) + 2 * TAIL / d))
            grid = np.linspace(max(0.0, 2 * rest[0] - rest.sum()), min(float(rest.sum()), reach), points)
        squared = grid[:, None] ** 2 + b[step] ** 2 + 2 * grid[:, None] * b[step] * cosines
        values = np.einsum("gcr,c->gr", u(np.sqrt(np.maximum(squared, 0.0))), chances)
        if len(rest) == 1:
            return np.asarray(values[0], dtype=np.float64)
        u = _spline(grid, values)
    raise AssertionError("the recursion needs at least three vectors")


def _spline(grid: Array, values: Array) -> Callable[[Array], Array]:
    from scipy.interpolate import make_interp_spline

    spline = make_interp_spline(grid, values, k=5)
    return lambda q: np.asarray(spline(np.clip(q, grid[0], grid[-1])), dtype=np.float64)


@lru_cache(maxsize=64)
def _gegenbauer(angles: int, d: int) -> tuple[Array, Array]:
    """Gauss nodes and chances for the cosine of a uniform direction."""
    cosines, weights = special.roots_gegenbauer(angles, (d - 2) / 2)
    return cosines, weights / weights.sum()
