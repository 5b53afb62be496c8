"""Eigenvalues of diag(u) - u u^T / sum u, singular values of F / sum F and of softpick against dense matrices."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from attnorm.theory.rank_one_eigenvalues import (
    rank_one_eigenvalue,
    rank_one_root,
)
from attnorm.theory.rank_two_singular_values import rank_two_singular_value, softpick_singular_value
from tests.metrics.root_reference import improved_root, rank_one_root_of_moments

ROWS = {
    "one entry": [0.7],
    "two": [0.7, 0.3],
    "two equal": [0.5, 0.5],
    "one and a zero": [0.7, 0.0],
    "zeros": [0.0, 0.0, 0.0],
    "three": [0.2, 0.7, 0.1],
    "the largest twice": [0.4, 0.1, 0.4],
    "all equal": [0.25] * 4,
    "a zero between": [0.3, 0.0, 0.6, 0.1],
    "far apart": [1.0, 1e-4, 1e-8, 1e-12],
    "nearly equal": [0.3, 0.3 + 1e-9, 0.2, 0.1],
    "many": [0.02 * (i % 7 + 1) for i in range(40)],
}


def dense(u: Tensor, sink: float = 0.0) -> float:
    total = u.sum() + sink
    if total == 0:
        return 0.0
    return float(torch.linalg.eigvalsh(torch.diag(u) - torch.outer(u, u) / total)[-1].clamp(min=0))


@pytest.mark.parametrize("sink", [None, 0.0, 0.3, 5.0])
@pytest.mark.parametrize("name", ROWS)
def test_the_largest_eigenvalue_is_that_of_the_matrix(name: str, sink: float | None) -> None:
    u = torch.tensor(ROWS[name], dtype=torch.float64)
    at_zero = None if sink is None else torch.tensor([sink], dtype=torch.float64)
    found = rank_one_eigenvalue(u, at_zero)
    assert float(found) == pytest.approx(dense(u, sink or 0.0), rel=1e-12, abs=1e-15)
    rows = torch.stack([u, u.flip(0), 3 * u])
    sinks = None if at_zero is None else torch.stack([at_zero, at_zero, 3 * at_zero])
    several = rank_one_eigenvalue(rows, sinks)
    torch.testing.assert_close(several, found * torch.tensor([1.0, 1.0, 3.0], dtype=torch.float64))
    single = rank_one_eigenvalue(u.float(), None if at_zero is None else at_zero.float())
    assert float(single) == pytest.approx(float(found), rel=1e-5, abs=1e-7)


CLUSTERS = {
    torch.float32: [1.0, 0.995668530, 0.991672575],
    torch.float64: [1.0, 1 - 1.2e-7, 1 - 2.2e-7, 1 - 5e-7, 1 - 1.3e-6, 1 - 2.3e-6, 1 - 8e-6, 0.9, 0.7, 1e-6],
}


@pytest.mark.parametrize("dtype", CLUSTERS)
def test_nearly_equal_entries_take_the_passes_that_their_distances_need(dtype: torch.dtype) -> None:
    u = torch.tensor(CLUSTERS[dtype], dtype=dtype)
    below = (u.max() - u).double().sort().values
    low, high = below[1], torch.zeros_like(below[0])
    for _ in range(200):  # bisection on the distance of the root from the largest entry
        middle = (low + high) / 2
        total = ((1 - below[1:]) / (below[1:] - middle)).sum() - 1 / middle
        low, high = (middle, high) if total > 0 else (low, middle)
    assert abs(float(rank_one_eigenvalue(u)) / float(1 - middle) - 1) <= 4 * torch.finfo(dtype).eps


def test_rows_of_less_precision_than_a_sink_that_they_do_not_hold() -> None:
    first, sink = torch.ones(1, 1, dtype=torch.float64), torch.full((1, 1), 1e-46, dtype=torch.float64)
    found = rank_one_root(first, torch.zeros_like(first), torch.zeros(1, 3), sink)
    torch.testing.assert_close(found, sink, rtol=1e-5, atol=0.0)


TOPS = [[1.0, 0.9, 0.5], [1.0, 0.3, 0.3], [1.0, 0.99, 0.98], [1.0, 0.1, 0.05], [1.0, 0.999, 0.2], [3.0, 1.5, 0.4]]


@pytest.mark.parametrize("sink", [None, 0.0, 0.3, 5.0])
@pytest.mark.parametrize("top", TOPS)
@pytest.mark.parametrize(("low", "high"), [(0.01, 0.05), (1e-4, 0.04), (0.02, 0.02), (0.0, 0.05), (0.0499, 0.05)])
def test_a_root_of_moments_is_exact_where_the_others_have_two_values(
    low: float, high: float, top: list[float], sink: float | None
) -> None:
    """Gauss's quadrature with two nodes is then the sum itself."""
    for lows, highs in ((1, 1), (30, 5), (2, 90), (0, 3), (1, 0)):
        u = torch.tensor([*top, *[low] * lows, *[high] * highs], dtype=torch.float64)
        moments = [(u[3:] ** power).sum() for power in range(1, 5)]
        at_zero = None if sink is None else torch.tensor(sink, dtype=torch.float64)
        found = rank_one_root_of_moments(u[0], u[1], u[2], moments, at_zero)
        assert float(found) == pytest.approx(dense(u, sink or 0.0), rel=1e-12 if low != 0.0499 else 1e-9)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if len(row) > 2])
@pytest.mark.parametrize("sink", [0.0, 0.3])
def test_a_root_of_moments_is_improved_to_the_exact_one(name: str, sink: float) -> None:
    u = torch.tensor(ROWS[name], dtype=torch.float64).sort(descending=True).values
    at_zero = torch.tensor(sink, dtype=torch.float64)
    moments = [(u[3:] ** power).sum() for power in range(1, 5)]
    exact = dense(u, sink)
    root = rank_one_root_of_moments(u[0], u[1], u[2], moments, at_zero)
    assert float(root) == pytest.approx(exact, rel=5e-3, abs=1e-15)
    assert float(root) <= exact * (1 + 1e-9)
    if sink == 0:
        assert float(rank_one_root_of_moments(u[0], u[1], u[2], moments)) == pytest.approx(float(root), rel=1e-12)
    start = u[1] + 0.5 * (root - u[1])
    for x, passes in ((root, 2), (start, 5)):
        for _ in range(passes):
            q = u[1:] / (x - u[1:])
            improved = improved_root(u[0], u[1], x, q.sum(), q.square().sum(), at_zero)
            x = torch.where(improved.isfinite(), improved, x)
        if u[1] < u[0]:
            assert float(x) == pytest.approx(exact, rel=1e-7, abs=1e-15)
    kept = improved_root(u[0], u[0], u[0], torch.tensor(1.0), torch.tensor(1.0), at_zero)
    assert float(kept) == float(u[0])  # two largest are equal: nothing to improve


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_singular_values_of_a_map_divided_by_its_sum(size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = 3
    a = torch.rand(rows, size, generator=generator, dtype=torch.float64)
    f = torch.randn(rows, size, generator=generator, dtype=torch.float64)
    if seed == 1:
        a[:, 0] = 0
        a[:, -1] += 1e-3
    if seed == 2:
        f[:, 0] = 0
    if seed == 3:
        f = f.abs().round(decimals=0)
    a = a / a.sum(-1, keepdim=True)
    found = rank_two_singular_value(a, f)
    for row in range(rows):
        matrix = torch.diag(f[row]) - torch.outer(a[row], f[row])
        expected = float(torch.linalg.matrix_norm(matrix, 2))
        assert float(found[row]) == pytest.approx(expected, rel=1e-7, abs=1e-12)
    hidden = torch.zeros(rows, 2, dtype=torch.float64)
    wider = rank_two_singular_value(torch.cat([a, hidden], -1), torch.cat([f, hidden], -1))
    torch.testing.assert_close(wider, found, rtol=1e-7, atol=1e-12)


def test_leading_dimensions_and_empty_rows_keep_their_shape() -> None:
    u = torch.rand(2, 3, 4, dtype=torch.float64)
    found = rank_one_eigenvalue(u)
    for i, j in itertools.product(range(2), range(3)):
        assert float(found[i, j]) == pytest.approx(dense(u[i, j]), rel=1e-12)
    assert rank_one_eigenvalue(torch.zeros(0, 4)).shape == (0,)
    assert rank_two_singular_value(torch.zeros(2, 0, 4), torch.zeros(2, 0, 4)).shape == (2, 0)
    assert rank_two_singular_value(torch.zeros(1, 3), torch.zeros(1, 3)).tolist() == [0.0]


def test_the_gradient_of_the_eigenvalue_is_that_of_the_matrix() -> None:
    u = torch.tensor([[0.2, 0.7, 0.1], [0.3, 0.3, 0.4]], dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(rank_one_eigenvalue, (u,))


@pytest.mark.parametrize("rest", [1e-3, 1e-7, 1e-11])
def test_singular_values_far_below_the_largest_slope_keep_their_digits(rest: float) -> None:
    """Almost all weight on one key: the matrix is as small as what the others have."""
    a = torch.tensor([[0.0, 0.7 * rest, 0.3 * rest]], dtype=torch.float64)
    others = [rest, 1 - 0.7 * rest, 1 - 0.3 * rest]
    a[0, 0] = 1 - rest
    f = torch.tensor([[1.0, 0.5 * rest, 2.0 * rest]], dtype=torch.float64)
    matrix = -torch.outer(a[0], f[0])
    for key, other in enumerate(others):
        matrix[key, key] = f[0, key] * other
    expected = float(torch.linalg.matrix_norm(matrix, 2))
    assert float(rank_two_singular_value(a, f)) == pytest.approx(expected, rel=1e-9)


def softpick_norm(z: Tensor, floor: float = 1e-8) -> float:
    """The norm of the Jacobian of softpick from all of its entries, in float64."""
    m = z.max().clamp(min=0)
    size = torch.exp(z.relu() - m) * -torch.expm1(-z.abs())
    total = size.sum() + floor * torch.exp(-m)
    weights, slopes = torch.where(z > 0, size, 0.0) / total, torch.exp(z - m) / total
    J = torch.diag(torch.where(z > 0, slopes, 0.0)) - torch.outer(weights, slopes * z.sign())
    key = int(z.argmax())  # 1 - w without a difference, for rows with nearly all weight on one key
    if z[key] > 0:
        J[key, key] = slopes[key] * (size[torch.arange(len(z)) != key].sum() + floor * torch.exp(-m)) / total
    return float(torch.linalg.matrix_norm(J, 2))


def pick_rows() -> dict[str, Tensor]:
    """Logits (rows, keys) of each kind in float32."""
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int = 12, keys: int = 40) -> Tensor:
        return torch.randn(rows, keys, generator=generator)

    levels = draw(12, 4).gather(1, torch.randint(4, (12, 40), generator=generator))
    gap, few = draw(), draw() - 4
    gap[:, 7] += torch.linspace(1, 60, 12)
    few[:, :3] = torch.rand(12, 3, generator=generator)
    ties = -draw().abs()
    ties[:, :3] = 0.8 + torch.logspace(-7, -2, 12)[:, None] * torch.rand(12, 3, generator=generator)
    alone = -draw().abs()
    alone[:, 5] = torch.linspace(1e-3, 9, 12)
    return {
        "random": 2 * draw(), "small": 1e-2 * draw(), "tiny": 1e-6 * draw(), "positive": draw().abs(),
        "huge": 1e4 * draw(),
        "equal levels": levels, "levels far apart": 9 * levels, "clusters": levels + 1e-4 * draw(),
        "positive clusters": levels.abs() + 1e-3 * draw(), "one key above": gap, "three positive": few,
        "one positive": alone, "two keys": draw(12, 2), "one key": draw(12, 1), "no positive": -draw().abs(),
        "nearly equal above": ties, "all nearly equal": torch.tensor([[3.6805744, 3.6805726, 3.6805741, 3.6805732]]),
        "many equal": torch.full((2, 40), 0.3), "zeros": torch.zeros(2, 40),
    }  # fmt: skip


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-8)])
def test_the_norm_of_softpick(dtype: torch.dtype, tolerance: float) -> None:
    wrong = {}
    for kind, logits in pick_rows().items():
        found = softpick_singular_value(logits.to(dtype), torch.full((1,), math.log(1e-8), dtype=dtype)).double()
        expected = torch.tensor([softpick_norm(row) for row in logits.double()], dtype=torch.float64)
        if not torch.allclose(found, expected, rtol=tolerance, atol=1e-37):
            wrong[kind] = (found, expected)
    assert not wrong


def test_hidden_keys_of_softpick_have_no_effect() -> None:
    logits, log_floor = pick_rows()["random"], torch.zeros(12, 1)
    wider = torch.cat([logits, torch.zeros(12, 3)], -1)
    torch.testing.assert_close(
        softpick_singular_value(wider, log_floor), softpick_singular_value(logits, log_floor), rtol=2e-6, atol=0
    )
    assert softpick_singular_value(torch.zeros(2, 0, 4), torch.zeros(1)).shape == (2, 0)
