"""Closed formulas of the theory in plain arithmetic, at values where no factor is 1 and no power is neutral."""

import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from attnorm.theory import dispersion, distance, geometry, gradient
from attnorm.theory.selection import SelectedRows, select
from attnorm_lab.errata import frontier

TEMPERATURES = (0.07, 0.3, 1.0, 2.5)
DISTANCES = (0.0, 0.004, 0.5, 3.0)


def close(found: Tensor | float, expected: float, rel: float = 1e-9) -> None:
    assert float(found) == pytest.approx(expected, rel=rel, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("T", TEMPERATURES)
def test_lipschitz_constants_of_softmax_at_any_temperature(T: float) -> None:
    close(gradient.corollary3_printed(T), min(1 / (4 * T), math.sqrt(2)))
    close(gradient.corollary3_corrected(T), 1 / (2 * T))
    for eps in (0.01, 0.7, 9.0):
        close(gradient.finite_difference_corrected(eps, T), min(1 / (2 * T), math.sqrt(2) / eps))


@pytest.mark.parametrize("T", TEMPERATURES)
@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
@pytest.mark.parametrize("weights", [[1.0], [0.2, 0.8], [0.5, 0.5], [0.0, 1.0], [0.5, 0.2, 0.3], [0.1, 0.0, 0.7, 0.2]])
def test_norms_and_brackets_of_threshold_maps(weights: list[float], alpha: float, T: float) -> None:
    row = torch.tensor([weights], dtype=torch.float64)
    u = [w ** (2 - alpha) if w > 0 else 0.0 for w in weights]
    matrix = torch.diag(torch.tensor(u)) - torch.outer(torch.tensor(u), torch.tensor(u)) / sum(u)
    norm = float(torch.linalg.matrix_norm(matrix.double(), 2)) / T
    assert float(gradient.entmax_jacobian_norm(row, alpha, T)) == pytest.approx(norm, rel=1e-5, abs=1e-6)
    low, high = gradient.entmax_norm_bracket(row, alpha, T)
    ordered = sorted([*u, 0.0], reverse=True)
    close(low, ordered[1] / T)
    close(high, min(ordered[0], max(2 * x * (1 - x / sum(u)) for x in u)) / T)
    if alpha == 1:
        close(gradient.corollary3_local(row, T), max(2 * w * (1 - w) for w in weights) / T)


@pytest.mark.parametrize("hidden", [0, 1, 2])
def test_bounds_of_kernels(hidden: int) -> None:
    F, slopes = [2.0, 0.7, 1.3, 3.1], [0.4, -1.7, 0.2, 0.9]
    mask = torch.tensor([[True] * (4 - hidden) + [False] * hidden])
    seen, slopes_seen = F[: 4 - hidden], [abs(s) for s in slopes[: 4 - hidden]]
    n, total, least = len(seen), sum(seen), min(seen)
    given = (torch.tensor([F], dtype=torch.float64), torch.tensor([slopes], dtype=torch.float64), mask)
    printed = max(slopes_seen) * (1 / (n * least) + max(seen) / (n * least) ** 2)
    close(gradient.lemma2_printed(*given), min(printed, math.sqrt(2)))
    size = math.hypot(*(f / total for f in seen))
    close(gradient.lemma2_corrected(*given), max(slopes_seen) * math.sqrt(n) * size / total)
    flat = [0.01 * one for one in given[1]]
    close(gradient.lemma2_printed(given[0], torch.stack(flat), mask), 0.01 * printed)
    one = torch.tensor([[True, False, False, False]])
    close(gradient.lemma2_corrected(*given[:2], one), 0.0)
    none = torch.zeros(1, 4, dtype=torch.bool)
    assert gradient.lemma2_printed(*given[:2], none).isnan()


@pytest.mark.parametrize("T", TEMPERATURES)
@pytest.mark.parametrize("d", DISTANCES)
@pytest.mark.parametrize("n", [1, 2, 3, 50])
def test_dispersion_of_rows_of_this_spread(d: float, n: int, T: float) -> None:
    x = d / T
    for found, reach in (
        (dispersion.lemma21_bounds(d, n, T), x),
        (dispersion.corollary1_bounds(0.5 * d, 0.7, n, T), 0.7 * x),
    ):
        close(found.lower, math.exp(-reach) / n)
        close(found.upper, math.exp(reach) / n)
    sharp = dispersion.sharp_weight_bounds(d, n, T)
    close(sharp.lower, 1 / (1 + (n - 1) * math.exp(x)))
    close(sharp.upper, 1 / (1 + (n - 1) * math.exp(-x)))
    for w in (0.2, 0.5, 0.9):
        close(dispersion.horizon(d, T, w), 1 + math.exp(x) * (1 - w) / w)
    close(dispersion.horizon(d, T), 1 + math.exp(x))

    def entropy(k: int) -> float:
        weights = [math.exp(x)] * k + [1.0] * (n - k)
        return -sum(w / sum(weights) * math.log(w / sum(weights)) for w in weights)

    floor = min((entropy(k) for k in range(1, n)), default=0.0)
    assert float(dispersion.entropy_floor(d, n, T)) == pytest.approx(floor, rel=1e-6, abs=1e-9)
    for k in range(1, min(n, 4)):
        close(dispersion.two_level_entropy(x, n, k), entropy(k), rel=1e-7)
    if x > 0.05:
        c = x / (1 - math.exp(-x))
        assert float(dispersion.entropy_floor_deficit(d, T)) == pytest.approx(c - 1 - math.log(c), rel=1e-6)


@pytest.mark.parametrize("d", [1e-9, 1e-4, 0.003, 0.0099, 0.0101, 0.04])
def test_the_deficit_of_a_small_spread_keeps_its_digits(d: float) -> None:
    """c - 1 = d/2 + d^2/12 - d^4/720 + d^6/30240 - ..., and c - 1 - log c = x^2/2 - x^3/3 + ..."""
    x = Fraction(d) / 2 + Fraction(d) ** 2 / 12 - Fraction(d) ** 4 / 720 + Fraction(d) ** 6 / 30240
    spread = torch.tensor(d, dtype=torch.float64)
    assert float(dispersion._c_minus_one(spread)) == pytest.approx(float(x), rel=1e-12)
    deficit = sum((-1) ** k * x**k / k for k in range(2, 12))
    assert float(dispersion.entropy_floor_deficit(spread)) == pytest.approx(float(deficit), rel=1e-9, abs=1e-17)


@pytest.mark.parametrize("low", [-1.0, 0.3])
def test_constants_of_lemma_1(low: float) -> None:
    close(dispersion.lemma1_constants(0.5, 4.0)[0], 0.125)
    close(dispersion.lemma1_constants(0.5, 4.0)[1], 8.0)
    found = dispersion.lemma1_bounds(0.5, 4.0, 5)
    close(found.lower, 0.025)
    close(found.upper, 1.6)
    for bad in ((0.0, 1.0), (-1.0, 1.0), (2.0, 1.0)):
        with pytest.raises(ValueError, match="F_min"):
            dispersion.lemma1_constants(*bad)
    least, most = dispersion.range_on_interval(lambda x: (x - 0.7).square() + 1, low, 2.0)
    close(least, 1.0)
    close(most, 1 + max((low - 0.7) ** 2, 1.3**2))


@pytest.mark.parametrize("n", [2, 3, 10])
@pytest.mark.parametrize("w", [0.5, 0.7, 0.99])
def test_the_frontier(n: int, w: float) -> None:
    rest = (1 - w) / (n - 1)
    close(frontier.frontier_effort(n, w), (n * w - 1) / (n - 1))
    close(frontier.frontier_weight(n, 0.3), min(1.0, 1 / n + 0.3 * (n - 1) / n))
    assert frontier.frontier_weight(n, 5.0) == 1.0
    close(frontier.softmax_gap(w, n), math.log(w / rest))
    for alpha in (1.0, 1.3, 2.0):
        power = alpha - 1
        gap = math.log(w / rest) if power == 0 else (w**power - rest**power) / power
        close(frontier.entmax_gap(w, n, alpha), gap)
    for share in (1.0, 0.4, 3.0):
        k = share / n
        a, b = (p + k if p >= k else 2 * math.sqrt(k * p) for p in (w, rest))
        close(frontier.kneemax_gap(w, n, share), 2 * (a - b))
    close(frontier.kneemax_weight(frontier.kneemax_gap(w, n), n), w)
    assert frontier.kneemax_weight(2 + 2 / n, n) == 1.0
    close(frontier.kneemax_weight(0.0, n), 1 / n)
    (point,) = frontier.frontier([frontier.FrontierContender("x", lambda w, n: 3.0 * w, lambda n: 0.5 * n)], [n], [w])
    close(point.effort, 1.5 * w * n)
    if point.least_effort:
        close(point.excess, 1.5 * w * n * (n - 1) / (n * w - 1))
    (least,) = frontier.frontier([frontier.FrontierContender("x", lambda w, n: 0.0, lambda n: 1.0)], [n], [1 / n])
    assert (least.least_effort, least.excess) == (0.0, 1.0)


def test_limits_of_the_frontier() -> None:
    assert frontier.softmax_gap(1.0, 2) == math.inf
    for call in (
        lambda: frontier.frontier_effort(1, 1.0),
        lambda: frontier.frontier_weight(1, 1.0),
        lambda: frontier.kneemax_weight(1.0, 1),
    ):
        with pytest.raises(ValueError, match="got 1"):
            call()
    for weight in (0.4999, 1.0001):
        with pytest.raises(ValueError, match=str(weight)):
            frontier.frontier_effort(2, weight)
    for bad in (lambda: frontier.frontier_weight(2, -0.1), lambda: frontier.kneemax_weight(-0.1, 2)):
        with pytest.raises(ValueError, match=r"-0\.1"):
            bad()
    assert frontier.frontier_weight(2, 0.0) == 0.5


def selected(top_n: int, seed: int = 0) -> tuple[SelectedRows, list[list[float]], Tensor, Tensor]:
    """Two rows of five keys, of which the second sees four; weights, vectors and visible keys."""
    generator = torch.Generator().manual_seed(seed)
    visible = torch.tensor([[True] * 5, [True, False, True, True, True]])
    weights = torch.where(visible, torch.rand(2, 5, generator=generator, dtype=torch.float64), 0.0)
    weights = weights / weights.sum(-1, keepdim=True)
    vectors = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    return select(weights, vectors, top_n, visible), weights.tolist(), vectors, visible


def each_row(top_n: int) -> Any:
    rows, weights, vectors, visible = selected(top_n)
    for row in range(2):
        keys = [key for key in range(5) if visible[row, key]]
        inside = sorted(keys, key=lambda key: -weights[row][key])[:top_n]
        outside = [key for key in keys if key not in inside]
        yield rows, row, weights[row], {key: weights[row][key] * vectors[key] for key in keys}, inside, outside


@pytest.mark.parametrize("top_n", [1, 2, 3])
def test_distances_of_the_keys_left_out(top_n: int) -> None:
    for rows, row, a, y, inside, outside in each_row(top_n):
        n, s = len(y), sum(y[key] for key in inside)
        size = float(s.norm())
        total = sum(float((y[key] - s).norm()) for key in outside)
        close(distance.d_tilde(rows)[row], total)
        close(distance.relative_distance(rows)[row], total / ((n - top_n) * size))
        e = sum(float(y[key].norm()) for key in outside) / ((n - top_n) * size)
        close(distance.relative_distance_bounds(rows).lower[row], max(0.0, 1 - e))
        close(distance.relative_distance_bounds(rows).upper[row], 1 + e)
        A = sum(a[key] for key in inside)
        x = {key: y[key] / a[key] for key in y}
        tight = sum(a[k] * float((x[k] - s / A).norm()) + abs(A - a[k]) * size / A for k in outside)
        close(distance.theorem1_fixed_tight(rows)[row], tight)
        d1 = max(float((x[i] - x[j]).norm()) for i in outside for j in inside)
        longest = max(float(x[key].norm()) for key in inside)
        close(distance.theorem1_fixed_printed(rows)[row], (1 - A) * d1 + longest * (A * (n - top_n) - (1 - A)))


@pytest.mark.parametrize("top_n", [1, 2, 3])
def test_distances_of_random_sets(top_n: int) -> None:
    for rows, row, a, y, _, _ in each_row(top_n):
        n, lengths = len(y), sum(float(v.norm()) for v in y.values())
        close(distance.corollary2_printed(rows)[row], lengths)
        N = top_n
        c = (N - 1) * (n - 1 + N) / ((N - 1) * (n - 1) + N * n)
        found = distance.corollary2_bounds(rows)
        close(found.lower[row], c * (1 - N / n) * lengths)
        close(found.upper[row], (N + 1) * (1 - N / n) * lengths)
        share, output = N / (n - 1), sum(y.values())
        printed = sum(float(((a[k] + share) * y[k] / a[k] - output).norm()) for k in y)
        close(distance.theorem1_random_printed(rows)[row], (n - N) / n * printed)
        every = []
        for chosen in itertools.combinations(y, N):
            s = sum(y[key] for key in chosen)
            every.append(sum(float((y[key] - s).norm()) for key in y if key not in chosen))
        exact = sum(every) / len(every)
        close(distance.random_set_exact(rows)[row], exact)
        for heaviest in (0, 1, 2):
            bounds = distance.theorem1_random_bounds(rows, heaviest)
            assert float(bounds.lower[row]) <= exact * (1 + 1e-9)
            assert float(bounds.upper[row]) >= exact * (1 - 1e-9)
        assert distance.random_set_exact(rows, math.comb(5, N))[row] == distance.random_set_exact(rows)[row]
        with pytest.raises(ValueError, match=str(math.comb(5, N))):
            distance.random_set_exact(rows, math.comb(5, N) - 1)


@pytest.mark.parametrize("top_n", [1, 2, 3])
def test_balls_around_the_context(top_n: int) -> None:
    r, M, delta = 0.6, 1.7, 0.8
    for rows, row, a, y, inside, outside in each_row(top_n):
        s = sum(y[key] for key in inside)
        close(geometry.nearest_outsider(rows)[row], min(float((y[key] - s).norm()) for key in outside))
        sizes = []
        for i in inside:
            others = [a[key] for key in inside if key != i]
            squares, fourth = sum(w**2 for w in others), sum(w**4 for w in others)
            pairs = sum(b * c for b, c in itertools.combinations(others, 2))
            sizes.append(math.sqrt(M**2 * squares + 2 * (M**2 - delta**2 / 2) * pairs))
            place = inside.index(i)
            close(geometry.xi(rows, M, delta)[row, place], sizes[-1])
            mean, variance = geometry.isotropic_moments(rows, M)
            close(mean[row, place], M**2 * squares)
            close(variance[row, place], 2 / 3 * M**4 * (squares**2 - fourth))
        printed = geometry.theorem2_printed(rows, r, M, delta)
        close(printed.lower[row], 1 - sum(sizes) / len(sizes) / r)
        close(printed.upper[row], sum(math.exp(-((r - x) ** 2) / (16 * M**2)) for x in sizes) / len(sizes))
        in_ball = [float((y[key] - s).norm()) <= r for key in inside]
        close(geometry.separability(rows, r)[row], sum(in_ball) / top_n)


@pytest.mark.parametrize(
    ("mean", "variance", "radius"), [(2.0, 0.5, 1.0), (2.0, 0.5, 1.7), (2.0, 9.0, 3.0), (0.4, 0.1, 0.9)]
)
def test_bounds_from_mean_and_variance(mean: float, variance: float, radius: float) -> None:
    found = geometry.cantelli_bounds(*(torch.tensor(value, dtype=torch.float64) for value in (mean, variance, radius)))
    excess = radius**2 - mean
    cantelli = variance / (variance + excess**2)
    close(found.lower, 1 - min(cantelli, mean / radius**2) if excess > 0 else 0.0)
    close(found.upper, cantelli if excess < 0 else 1.0)


def test_means_of_draws_and_their_errors() -> None:
    numbers = [1.0, 4.0, -2.0, 0.5]
    drawn = iter(numbers)
    found = distance.monte_carlo(lambda: torch.tensor(next(drawn), dtype=torch.float64), 4)
    mean = sum(numbers) / 4
    close(found.mean, mean)
    close(found.standard_error, math.sqrt(sum((x - mean) ** 2 for x in numbers) / 3 / 4))
    assert found.draws == 4
    with pytest.raises(ValueError, match="got 1"):
        distance.monte_carlo(lambda: torch.zeros(()), 1)
    assert distance.monte_carlo(lambda: torch.zeros(()), 2).standard_error == 0


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_the_spread_that_weight_matrices_allow(heads: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    W_Q, W_K, y, x = draw(heads, 3, 5), draw(2, 3, 4), draw(2, 5), draw(6, 4)
    b_Q, b_K = draw(heads, 3), draw(2, 3)
    mask = torch.tensor([[1, 0, 1, 1, 0, 1], [1, 1, 0, 0, 0, 1]]).bool() if masked else None
    for biases in (False, True):
        given = {"query_bias": b_Q, "key_bias": b_K} if biases else {}
        found = dispersion.proposition31_bound(W_Q, W_K, y, x, scaling=-0.7, mask=mask, **given)
        for head, query in itertools.product(range(heads), range(2)):
            group = head // (heads // 2)
            matrices = [W_Q[head], W_K[group]]
            inputs = [y[query], *(x[key] for key in range(6) if mask is None or mask[query, key])]
            if biases:
                matrices = [
                    torch.cat([m, b[:, None]], 1) for m, b in zip(matrices, (b_Q[head], b_K[group]), strict=True)
                ]
                inputs = [torch.cat([v, torch.ones(1, dtype=torch.float64)]) for v in inputs]
            sizes = [float(torch.linalg.matrix_norm(matrix, 2)) for matrix in matrices]
            reach = float(inputs[0].norm()) * max(float(v.norm()) for v in inputs[1:])
            close(found[head, query], 2 * 0.7 * sizes[0] * sizes[1] * reach)
    plain = dispersion.proposition31_bound(W_Q, W_K, y, x)
    torch.testing.assert_close(plain, dispersion.proposition31_bound(W_Q, W_K, y, x, scaling=1.0))
    tight = dispersion.proposition31_tight(W_Q, W_K, y, x, scaling=-0.7, mask=mask)
    for head, query in itertools.product(range(heads), range(2)):
        product = float(torch.linalg.matrix_norm(W_Q[head].T @ W_K[head // (heads // 2)], 2))
        seen = [key for key in range(6) if mask is None or bool(mask[:, key].any())]
        own = [key for key in seen if mask is None or mask[query, key]]
        center = sum(x[key] for key in seen) / len(seen)
        reach = min(max(float((x[key] - c).norm()) for key in own) for c in (torch.zeros(4), center))
        close(tight[head, query], 2 * 0.7 * product * float(y[query].norm()) * reach)


def test_lines_through_points() -> None:
    x = torch.tensor([[0.0, 1.0, 2.0, 4.0], [1.0, 1.0, 1.0, 1.0], [0.0, 3.0, 9.0, 9.0]], dtype=torch.float64)
    y = torch.tensor([[1.0, 2.5, 2.0, 7.0], [1.0, 2.0, 3.0, 4.0], [2.0, -4.0, 0.0, 0.0]], dtype=torch.float64)
    used = torch.tensor([[True] * 4, [True] * 4, [True, True, False, False]])
    line = dispersion.least_squares_line(x, y, used)
    mean_x, mean_y = 1.75, 3.125
    sxx = sum((a - mean_x) ** 2 for a in x[0].tolist())
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x[0].tolist(), y[0].tolist(), strict=True)) / sxx
    rest = sum((b - mean_y - slope * (a - mean_x)) ** 2 for a, b in zip(x[0].tolist(), y[0].tolist(), strict=True))
    close(line.slope[0], slope)
    close(line.intercept[0], mean_y - slope * mean_x)
    close(line.slope_standard_error[0], math.sqrt(rest / 2 / sxx))
    assert line.slope[1].isnan()
    close(line.slope[2], -2.0)
    close(line.intercept[2], 2.0)
    assert line.slope_standard_error[2].isnan()
    assert line.points.tolist() == [4, 4, 2]


@pytest.mark.parametrize("T", [0.3, 2.0])
def test_effective_gaps(T: float) -> None:
    z = torch.tensor([[0.5, 2.0, -1.0, 0.0], [1.0, 3.0, 3.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    for row, keys in ((0, [0, 1, 2, 3]), (1, [0, 1])):
        weights = [math.exp(float(z[row, key]) / T) for key in keys]
        others = sum(weights) - max(weights)
        gap = math.log(max(weights) / others) + math.log(len(keys) - 1)
        close(dispersion.effective_gap_from_logits(z, mask, T)[row], gap)
        close(dispersion.effective_gap_from_logits(z, mask, torch.tensor([T, T], dtype=torch.float64))[row], gap)
        weighed = torch.where(mask, torch.exp(z / T), 0.0)
        close(dispersion.effective_gap(3 * weighed, mask)[row], gap)
        p = [w / sum(weights) for w in weights]
        close(dispersion.entropy_nats(0.3 * weighed, mask)[row], -sum(w * math.log(w) for w in p))
    alone = torch.tensor([[True, False, False, False]] * 2)
    assert dispersion.effective_gap(z, alone).isnan().all()
    assert dispersion.effective_gap_from_logits(z, alone).isnan().all()
    assert dispersion.entropy_nats(-z.abs()).isnan().all()
    assert dispersion.entropy_nats(torch.zeros(1, 3)).isnan().all()


def test_resolution_and_power_laws() -> None:
    close(distance.ks_resolution(144), math.sqrt(-math.log(0.005) / 144))
    close(distance.ks_resolution(7, 0.2), math.sqrt(-math.log(0.1) / 7))
    for heads, level in ((0, 0.5), (1, 0.0), (1, 1.0)):
        with pytest.raises(ValueError, match=f"{heads}, level = {level}"):
            distance.ks_resolution(heads, level)
    lengths = torch.tensor([2.0, 4.0, 8.0, 16.0])
    law = distance.fit_power_law(lengths, 3 * lengths.double() ** 0.7)
    close(law.coefficient, 3.0)
    close(law.exponent, 0.7)
    assert law.confidence == 0.95
    for length in (2, 6, 7):
        rows = distance.no_collapse_example(length)
        N = length // 2
        close(distance.d_tilde(rows), (length - N) * (N - 1) / length)


# Without options: softmax at temperature 1, vectors of length 1, half of the weight, and so on.
DEFAULTS = {
    "temperature": {1.0}, "alpha": {1.0}, "share": {1.0}, "near": {1.0}, "sphere_radius": {1.0}, "scaling": {1.0},
    "weight": {0.5}, "confidence": {0.95}, "level": {0.01}, "tolerance": {1e-6, 1e-9}, "draws": {200, 1000},
    "points": {4097, 25}, "rounds": {3}, "widest": {32.0}, "samples": {1}, "keys": {16}, "iterations": {200},
    "heaviest": {0}, "most_sets": {200_000}, "budget_seconds": {60.0}, "seed": {0}, "first_rounds": {9},
}  # fmt: skip
