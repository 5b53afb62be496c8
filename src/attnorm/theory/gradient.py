"""Gradient sensitivity: how far weights change with the logits. Printed and corrected bounds, exact norms in O(L).

Papers: Mudarisov et al. 2025, https://arxiv.org/abs/2508.17821 (Lemma 2, Corollary 3, section 2.3, Fig. 4) and Nair
2025, https://arxiv.org/abs/2510.23012 (softmax is 1/2-Lipschitz). Proofs: docs/theory/gradient.md.

||J|| is the spectral norm of the Jacobian d weights / d logits of one row. A row without a visible key has J = 0.

Over all rows of n keys, ||J|| of alpha-entmax with temperature T and 1 <= alpha <= 2 is at most max(lambda_2, lambda_n)
/ T, where

    lambda_m = m/(m-1) (m-1)^(alpha-1) / (1 + (m-1)^((alpha-1)/(3-alpha)))^(3-alpha)

is reached by one large weight and m-1 equal small ones. lambda_2 = 2^(alpha-2), so softmax has 1/(2T) and sparsemax 1/T
at every n; in between the constant 2^(alpha-2) holds only up to a length (47 for entmax15), after which the norm grows
with n towards 1/T.

Of an arbitrary row map, `linearize` gives products with J, and `jacobian_norm` its norm by power iteration. A row map
turns logits (..., L) into weights (..., L), each row by itself. Only its backward pass is needed: J^T w is linear in w,
so differentiating it once more with respect to w gives J v (the double-backward trick). This works for custom autograd
functions without a forward-mode rule, as long as their backward is itself differentiable.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnorm.normalizers.entmax import one_against_equals_norm
from attnorm.theory.dispersion import positive_temperature
from attnorm.theory.rank_one_eigenvalues import rank_one_eigenvalue
from attnorm.theory.rank_two_singular_values import rank_two_singular_value
from attnorm.theory.selection import at_least_float32, visible_keys

Number = Tensor | float
RowMap = Callable[[Tensor], Tensor]


def threshold_jacobian_norm(
    slopes: Float[Tensor, "*rows L"], temperature: Number = 1.0, mask: Bool[Tensor, "..."] | None = None
) -> Float[Tensor, "*rows"]:
    """||J|| for J = (diag(u) - u u^T / sum u) / T: any map p_j = phi(z_j/T - tau) with row sum 1, u = phi'(phi^-1(p)).

    Exact, in a fixed number of passes over the rows; 0 where fewer than two slopes are positive.
    """
    u = _hide(slopes, mask)
    if u.numel() and bool(u.amin() < 0):
        raise ValueError(
            f"expected slopes of at least 0, because a threshold map is increasing, got {u.min().item():.3g}."
        )
    return rank_one_eigenvalue(u) / positive_temperature(temperature)


def entmax_slopes(
    weights: Float[Tensor, "*rows L"], alpha: Number = 1.0, mask: Bool[Tensor, "..."] | None = None
) -> Float[Tensor, "*rows L"]:
    """Return u_j = a_j^(2-alpha) on the support, 0 elsewhere: softmax alpha = 1, entmax15, sparsemax alpha = 2.

    alpha may differ between rows: a tensor that broadcasts against (..., L).
    """
    weights = _distributions(weights, mask)
    alpha = torch.as_tensor(alpha, dtype=weights.dtype, device=weights.device)
    if bool(((alpha < 1) | (alpha > 2)).any()):
        raise ValueError(f"alpha must lie in [1, 2], got values from {alpha.min().item()} to {alpha.max().item()}")
    if bool((alpha == 1).all()):
        return weights
    support = weights > 0
    return torch.where(support, torch.where(support, weights, 1.0) ** (2 - alpha), 0.0)


def entmax_jacobian_norm(
    weights: Float[Tensor, "*rows L"],
    alpha: Number = 1.0,
    temperature: Number = 1.0,
    mask: Bool[Tensor, "..."] | None = None,
) -> Float[Tensor, "*rows"]:
    """Return ||J|| of alpha-entmax(z/T) at these weights, alpha in [1, 2]. Exact; differentiable where it is smooth.

    temperature broadcasts against the result, alpha against the weights. Relative error about 1e-15 in float64 and
    2e-7 in float32; lower precision is computed in float32.
    """
    return threshold_jacobian_norm(entmax_slopes(weights, alpha, mask), temperature)


def entmax_norm_bracket(
    weights: Float[Tensor, "*rows L"],
    alpha: Number = 1.0,
    temperature: Number = 1.0,
    mask: Bool[Tensor, "..."] | None = None,
) -> tuple[Float[Tensor, "*rows"], Float[Tensor, "*rows"]]:
    """Return cheap bounds of ||J||, from the sum and the two largest slopes.

    u_(2) <= T ||J|| <= min(u_(1), max_j 2 u_j (1 - u_j / sum u))
    """
    u = entmax_slopes(weights, alpha, mask)
    temperature = positive_temperature(temperature)
    largest, largest_index = u.max(-1, keepdim=True)
    second = u.scatter(-1, largest_index, 0.0).amax(-1)
    return second / temperature, torch.minimum(largest.squeeze(-1), _gershgorin(u)) / temperature


def kernel_jacobian_norm(
    F_values: Float[Tensor, "*rows L"], F_slopes: Float[Tensor, "*rows L"], mask: Bool[Tensor, "..."] | None = None
) -> Float[Tensor, "*rows"]:
    """||J|| of a = F(l) / sum F(l), J = (I - a 1^T) diag(F') / sum F, from F(l_j) and F'(l_j). Exact; no gradient."""
    F, slopes, total = _kernel_rows(F_values, F_slopes, mask)
    return rank_two_singular_value(F / total, slopes / total)


def lemma2_printed(
    F_values: Float[Tensor, "*rows L"], F_slopes: Float[Tensor, "*rows L"], mask: Bool[Tensor, "..."] | None = None
) -> Float[Tensor, "*rows"]:
    """Return Lemma 2's bound of ||J|| as printed; it is **false**, see lemma2_corrected.

    min{ max|F'| (1/(L F_min) + F_max/(L^2 F_min^2)), sqrt 2 }

    NaN where F reaches 0: there the printed form does not apply.
    """
    F, slopes, _ = _kernel_rows(F_values, F_slopes, mask)
    visible = visible_keys(F, mask)
    n = visible.sum(-1).to(F.dtype)
    smallest = torch.where(visible, F, torch.inf).amin(-1)
    first = slopes.abs().amax(-1) * (1 / (n * smallest) + F.amax(-1) / (n * smallest).square())
    return torch.where((n > 0) & (smallest > 0), first.clamp(max=math.sqrt(2)), torch.nan)


def lemma2_corrected(
    F_values: Float[Tensor, "*rows L"], F_slopes: Float[Tensor, "*rows L"], mask: Bool[Tensor, "..."] | None = None
) -> Float[Tensor, "*rows"]:
    """Return the corrected bound of Lemma 2 for F >= 0.

    ||J|| <= max|F'| sqrt(L) ||a|| / sum F; an equality if |F'| is the same at every key and L > 1.
    """
    F, slopes, total = _kernel_rows(F_values, F_slopes, mask)
    n = visible_keys(F, mask).sum(-1).to(F.dtype)
    bound = slopes.abs().amax(-1) * (n.sqrt() * torch.linalg.vector_norm(F / total, dim=-1)) / total.squeeze(-1)
    return torch.where(n > 1, bound, 0.0)


def corollary3_printed(temperature: Number) -> Tensor:
    """Return Corollary 3's bound as printed, min{1/(4T), sqrt 2}; **false**: two equal logits give 1/(2T)."""
    return (1 / (4 * positive_temperature(temperature))).clamp(max=math.sqrt(2))


def corollary3_corrected(temperature: Number) -> Tensor:
    """Return the corrected bound of Corollary 3: ||J|| <= 1/(2T) for softmax, attained by two equal logits."""
    return 1 / (2 * positive_temperature(temperature))


def corollary3_local(
    weights: Float[Tensor, "*rows L"], temperature: Number = 1.0, mask: Bool[Tensor, "..."] | None = None
) -> Float[Tensor, "*rows"]:
    """Return a bound of ||J|| of softmax from its weights: max_j 2 a_j (1 - a_j) / T.

    It is at most 1/(2T), and far less for flat or decided rows.
    """
    return _gershgorin(_distributions(weights, mask)) / positive_temperature(temperature)


def finite_difference_gain(
    row_map: RowMap,
    logits: Float[Tensor, "*rows L"],
    epsilon: float,
    *,
    temperature: Number = 1.0,
    directions: Float[Tensor, "k *rows L"] | None = None,
    samples: int = 1,
    mask: Bool[Tensor, "..."] | None = None,
    generator: torch.Generator | None = None,
) -> Float[Tensor, " k *rows"]:
    """g(T, eps) = ||map((l + eps d)/T) - map(l/T)|| / eps for unit directions d: given ones, or `samples` random ones.

    A random direction sees far less than the norm of the Jacobian (about a thirtieth at 1024 keys): report both.
    """
    if not epsilon > 0:
        raise ValueError(f"epsilon must be positive, got {epsilon}")
    scale = 1 / positive_temperature(temperature)
    scale = scale.unsqueeze(-1) if scale.dim() else scale
    if directions is None:
        directions = random_directions(logits, samples, mask, generator)
    norms = torch.linalg.vector_norm(directions, dim=-1, keepdim=True)
    if bool((norms == 0).any()):
        raise ValueError("expected directions of positive length, got a zero vector.")
    base = row_map(logits * scale)
    moved = torch.stack([row_map((logits + epsilon * d) * scale) for d in directions / norms])
    change: Tensor = torch.linalg.vector_norm(moved - base, dim=-1)
    return change / epsilon


def finite_difference_corrected(epsilon: float, temperature: Number = 1.0) -> Tensor:
    """Return the corrected bound of the finite-difference gain of softmax.

    g(T, eps) <= min{1/(2T), sqrt(2)/eps}: the Lipschitz constant, and the diameter of the simplex.
    """
    return corollary3_corrected(temperature).clamp(max=math.sqrt(2) / epsilon)


@dataclass(frozen=True)
class SwapExample:
    """Section 2.3: how far softmax weights move when the two largest logits a, a + eps become a + 2 eps, a."""

    logit_distance: float  # sqrt(5) eps
    weight_distance: float  # exact
    first_order: float  # exact ||J (l1 - l2)|| at the first row
    printed: float  # sqrt(2) eps/T
    corrected: float  # 3 sqrt(2)/4 eps/T, the limit of large a/T and small eps/T


def swap_example(a: float, epsilon: float, temperature: float = 1.0, keys: int = 16) -> SwapExample:
    """Compute the example of section 2.3 with `keys` - 2 further logits at 0."""
    if keys < 2:
        raise ValueError(f"the example needs at least two keys, got {keys}")
    T = float(positive_temperature(temperature))
    before, after = torch.zeros(2, keys, dtype=torch.float64)
    before[-2:] = torch.tensor([a, a + epsilon], dtype=torch.float64)
    after[-2:] = torch.tensor([a + 2 * epsilon, a], dtype=torch.float64)
    p = torch.softmax(before / T, dim=-1)
    move = after - before
    first_order = p * (move - p @ move) / T
    return SwapExample(
        logit_distance=float(torch.linalg.vector_norm(move)),
        weight_distance=float(torch.linalg.vector_norm(torch.softmax(after / T, dim=-1) - p)),
        first_order=float(torch.linalg.vector_norm(first_order)),
        printed=math.sqrt(2) * epsilon / T,
        corrected=0.75 * math.sqrt(2) * epsilon / T,
    )


def _gershgorin(u: Tensor) -> Tensor:
    """max_j 2 u_j (1 - u_j / sum u), the largest absolute row sum of diag(u) - u u^T / sum u."""
    largest, largest_index = u.max(-1, keepdim=True)
    others = u.scatter(-1, largest_index, 0.0)
    rest = others.sum(-1, keepdim=True)  # 1 - u_1/sum u as rest/total: no cancellation on decided rows
    total = largest + rest
    total = torch.where(total > 0, total, 1.0)
    return 2 * torch.maximum(largest * (rest / total), others * (1 - others / total)).amax(-1)


def _hide(rows: Tensor, mask: Tensor | None) -> Tensor:
    """The rows in at least float32, 0 at hidden keys."""
    rows = at_least_float32(rows)
    return rows if mask is None else torch.where(visible_keys(rows, mask), rows, 0.0)


def _distributions(weights: Tensor, mask: Tensor | None) -> Tensor:
    """The weights, 0 at hidden keys, checked to be non-negative with row sum 1 (or 0: a row without visible keys)."""
    # Rounding every weight to its dtype moves the sum by at most eps/2; the rest is for how the weights were computed.
    slack = torch.finfo(weights.dtype).eps + 1e-4
    weights = _hide(weights, mask)
    with torch.no_grad():
        total = weights.sum(-1)
        wrong = total[~((total - 1).abs() <= slack) & (total != 0)]  # NaN is wrong too
        if wrong.numel():
            raise ValueError(
                "expected weights that sum to 1 in every row (or are all 0), because this Jacobian is that of a "
                f"normalized map, got the sum {wrong[0].item():.6g}."
            )
        if weights.numel() and bool(weights.amin() < 0):
            raise ValueError(f"weights must not be negative, found {weights.min().item():.3g}")
    return weights


def _kernel_rows(F: Tensor, slopes: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """F and F', 0 at hidden keys, and the sum of F with 1 in place of 0 for rows without visible keys."""
    visible = visible_keys(F, mask)
    F = torch.where(visible, at_least_float32(F), 0.0)
    slopes = torch.where(visible, at_least_float32(slopes), 0.0)
    total = F.sum(-1, keepdim=True)
    has_keys = visible.any(-1, keepdim=True)
    if bool((F < 0).any()) or bool((total == 0).logical_and(has_keys).any()):
        raise ValueError(
            f"F must be non-negative with a positive sum in every row, found a minimum of {F.min().item():.3g}"
        )
    return F, slopes, torch.where(has_keys, total, 1.0)


def entmax_worst_norm(n: int, alpha: float, temperature: float = 1.0) -> float:
    """Return the Lipschitz constant of alpha-entmax(z/T): the largest ||J|| over all rows of n keys, attained."""
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    _check(n, alpha)
    if n == 1:
        return 0.0
    return max(one_against_equals_norm(2, alpha), one_against_equals_norm(n, alpha)) / temperature


def entmax_worst_weights(n: int, alpha: float) -> Float[Tensor, " n"]:
    """Return weights (float64) with that norm: two equal ones, or a large one and n-1 small ones.

    The ratio of the large one to the small ones is (n-1)^(2/(3-alpha)).

    Softmax reaches its two equal weights among n > 2 keys only in the limit of logits.
    """
    _check(n, alpha)
    weights = torch.zeros(n, dtype=torch.float64)
    if n <= 2 or one_against_equals_norm(2, alpha) >= one_against_equals_norm(n, alpha):
        weights[:2] = 1 / min(n, 2)
        return weights
    ratio = (n - 1) ** (2 / (3 - alpha))
    weights[:] = 1 / (ratio + n - 1)
    weights[0] = ratio / (ratio + n - 1)
    return weights


def longest_constant_length(alpha: float) -> int | None:
    """Return the largest n at which 2^(alpha-2)/T still bounds the norm; None if it does at every n (alpha 1 or 2)."""
    _check(2, alpha)
    if alpha in (1, 2):
        return None

    def exceeded(n: int) -> bool:
        return one_against_equals_norm(n, alpha) > one_against_equals_norm(2, alpha)

    # Once exceeded it stays so: the worst case cannot fall when keys are added.
    high = 4
    while not exceeded(high):
        high *= 2
        if math.log2(high) > 1000:
            raise ValueError(
                f"expected alpha for which such a length exists below 2^1000, got alpha = {alpha}, which is too "
                "close to 1."
            )
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if exceeded(middle) else (middle, high)
    return low


def _check(n: int, alpha: float) -> None:
    if n < 1:
        raise ValueError(f"a row needs at least one key, got n = {n}")
    if not 1 <= alpha <= 2:
        raise ValueError(
            f"alpha must lie in [1, 2] (1 = softmax, 2 = sparsemax), got {alpha}. Beyond 2 no bound exists."
        )


@dataclass(frozen=True)
class Linearization:
    """A row map at a point: its weights, and products with its Jacobian (one per row)."""

    weights: Float[Tensor, "*rows L"]
    jvp: Callable[[Tensor], Tensor]  # v -> J v
    vjp: Callable[[Tensor], Tensor]  # w -> J^T w


def linearize(row_map: RowMap, logits: Float[Tensor, "*rows L"]) -> Linearization:
    """Linearize the map at these logits: one forward pass, and one or two backward passes per product."""
    point = logits.detach().requires_grad_()
    with torch.enable_grad():
        weights = row_map(point)
        if weights.shape != point.shape:
            raise ValueError(
                f"expected weights of the shape {tuple(point.shape)} of the logits, got {tuple(weights.shape)}."
            )
        probe = torch.zeros_like(weights, requires_grad=True)
        pulled = _product(weights, point, probe, create_graph=True)

    def vjp(w: Tensor) -> Tensor:
        return _product(weights, point, w)

    def jvp(v: Tensor) -> Tensor:
        return _product(pulled, probe, v)

    return Linearization(weights.detach(), jvp, vjp)


def power_iteration_norm(
    row_map: "RowMap | Linearization",
    logits: Float[Tensor, "*rows L"],
    *,
    iterations: int = 200,
    tolerance: float = 1e-9,
    mask: Bool[Tensor, "..."] | None = None,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "*rows"]:
    """Return a lower bound of ||J|| of any row map: ||J v|| for v after repeated J^T J.

    Stops when no row gains more than `tolerance` (relative) in a step. Hidden keys (mask False) are not perturbed. The
    map may be given by its products with J at these logits.
    """
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    at = row_map if isinstance(row_map, Linearization) else linearize(row_map, logits)
    v = random_directions(logits, 1, mask, generator)[0]
    norm = torch.zeros_like(logits[..., 0])
    for _ in range(iterations):
        moved = at.jvp(v)
        previous, norm = norm, torch.maximum(norm, torch.linalg.vector_norm(moved, dim=-1))
        if bool((norm - previous <= tolerance * norm).all()):
            break
        v = _unit(torch.where(visible_keys(logits, mask), at.vjp(moved), 0.0))
    return norm


def random_directions(
    logits: Float[Tensor, "*rows L"],
    samples: int,
    mask: Bool[Tensor, "..."] | None = None,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "k *rows L"]:
    """Return random unit vectors, uniform on the sphere of the visible keys; zero in a row without any."""
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    noise = torch.randn((samples, *logits.shape), dtype=logits.dtype, device=logits.device, generator=generator)
    noise = torch.where(visible_keys(logits, mask), noise, 0.0)
    return _unit(noise)


def _unit(v: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    return v / length.clamp(min=torch.finfo(v.dtype).tiny)


def _product(outputs: Tensor, inputs: Tensor, vector: Tensor, create_graph: bool = False) -> Tensor:
    result = None
    if outputs.requires_grad:
        (result,) = torch.autograd.grad(
            outputs, inputs, vector, retain_graph=True, create_graph=create_graph, allow_unused=True
        )
    if result is None:
        raise ValueError(
            "the row map cannot be differentiated (twice, for J v): its autograd graph does not reach the "
            "logits. Write its backward pass with differentiable operations, or measure it by finite "
            "differences."
        )
    return result


FULL = 16  # keys up to which the whole Jacobian is formed
PROBES = 6  # steps of power iteration beyond


@torch.enable_grad()
def jacobian_norm(row_map: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    """Return ||J|| of each row (rows, L), or a lower bound for more than 16 keys, so that a violation is always real.

    A vector w gives ||J^T w|| / ||w|| <= ||J||; with full Jacobians all of them are at hand.
    """
    z = logits.detach().clone().requires_grad_()
    keys = z.shape[-1]
    weights = row_map(z)
    if not weights.requires_grad:
        return torch.zeros_like(logits[:, 0])
    if keys <= FULL:
        columns = [torch.autograd.grad(weights[:, j].sum(), z, retain_graph=True)[0] for j in range(keys)]
        norms: Tensor = torch.linalg.matrix_norm(torch.stack(columns, dim=1), ord=2)
        return norms
    # Start: one weight against the others, the worst direction of rows with one or two leaders.
    leader = torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    second = (logits - 1e300 * leader).argmax(-1, keepdim=True)
    norm = torch.zeros_like(logits[:, 0])
    for start in (leader - 1 / keys, leader.scatter(-1, second, -1.0)):
        direction = start
        for _ in range(PROBES // 2):
            left = direction / direction.norm(dim=-1, keepdim=True).clamp(min=1e-300)
            (direction,) = torch.autograd.grad(weights, z, left, retain_graph=True)
            norm = torch.maximum(norm, direction.norm(dim=-1))
    return norm
