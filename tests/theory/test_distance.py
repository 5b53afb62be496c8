"""Theorem 1 and Corollary 2: the distance itself, what holds as printed, what does not, and what does instead."""

import itertools
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from attnorm.theory import distance
from attnorm.theory.selection import SelectedRows, scaled_distances, select, top_n_indices, top_n_set
from tests.theory.strategies import ClaimCase, cases

SLACK = 1e-9
ZERO = 1e-12


def random_rows(L: int, N: int, d: int, rows: int = 1, scale: float = 1.0, seed: int = 0) -> SelectedRows:
    rng = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, L, generator=rng, dtype=torch.float64)
    return select(torch.softmax(logits, -1), torch.randn(rows, L, d, generator=rng, dtype=torch.float64), N)


def brute_force_distance(weights: Tensor, vectors: Tensor, chosen: list[int]) -> Tensor:
    y = weights[:, None] * vectors
    s = y[chosen].sum(0)
    return torch.stack([(y[i] - s).norm() for i in range(len(y)) if i not in chosen]).sum()


def brute_force_expectation(weights: Tensor, vectors: Tensor, N: int) -> Tensor:
    sets = itertools.combinations(range(len(weights)), N)
    return torch.stack([brute_force_distance(weights, vectors, list(chosen)) for chosen in sets]).mean()


def test_the_top_n_set_is_exact_and_ties_go_to_the_earlier_key() -> None:
    weights = torch.tensor([[0.2, 0.3, 0.3, 0.2], [0.25, 0.25, 0.25, 0.25], [0.1, 0.0, 0.9, 0.0]])
    assert top_n_set(weights, 3).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0]]
    mask = torch.tensor([[False, True, True, True], [True] * 4, [True, False, False, True]])
    assert top_n_set(weights, 2, mask).int().tolist() == [[0, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 1]]
    assert top_n_set(weights, 3, mask)[2].int().tolist() == [1, 0, 0, 1]  # only two keys to choose from
    assert top_n_set(torch.full((5000,), 1 / 5000), 9).nonzero().flatten().tolist() == list(range(9))


@given(case=cases())
def test_the_distance_equals_its_definition(case: ClaimCase) -> None:
    rows = case.rows
    chosen = rows.indices[0].tolist()
    brute = brute_force_distance(case.weights, case.vectors, chosen)
    assert torch.allclose(distance.d_tilde(rows), brute, rtol=1e-6, atol=ZERO)
    assert sorted(case.weights.tolist(), reverse=True)[: case.top_n] == [float(case.weights[i]) for i in chosen]


def test_distances_keep_their_digits_where_points_nearly_coincide() -> None:
    offsets = torch.logspace(-12, 0, 40, dtype=torch.float64)
    vectors = torch.stack([torch.ones_like(offsets), 1 + offsets], -1)
    point = torch.ones(1, 2, dtype=torch.float64)
    for unit in (1e-3, 1.0, 1e3):
        found = scaled_distances(torch.ones(1, 40, dtype=torch.float64), unit * vectors, unit * point)
        assert torch.allclose(found[0] / unit, vectors[:, 1] - 1, rtol=1e-4 if unit != 1 else 1e-7, atol=0)
    assert scaled_distances(torch.ones(1, 1, dtype=torch.float64), point, point) == 0


@given(case=cases())
def test_theorem1_fixed_holds_as_printed_and_the_tight_form_lies_between(case: ClaimCase) -> None:
    rows = case.rows
    exact, tight, printed = (
        f(rows) for f in (distance.d_tilde, distance.theorem1_fixed_tight, distance.theorem1_fixed_printed)
    )
    assert exact <= tight * (1 + SLACK) + ZERO
    assert tight <= printed * (1 + SLACK) + ZERO


def test_the_printed_fixed_bound_equals_its_formula() -> None:
    rows = random_rows(9, 3, 4)
    a, x, chosen = rows.weights[0, 0], rows.vectors[0], rows.indices[0, 0].tolist()
    outside = [i for i in range(9) if i not in chosen]
    d1 = max(float((x[i] - x[j]).norm()) for i in outside for j in chosen)
    A = float(a[chosen].sum())
    largest = max(float(x[j].norm()) for j in chosen)
    expected = (1 - A) * d1 + largest * (A * 6 - (1 - A))
    assert float(distance.theorem1_fixed_printed(rows)[0]) == pytest.approx(expected)


def test_gaps_of_several_n_at_once_are_those_of_each() -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(2, 30, 4, generator=generator, dtype=torch.float64) + 5
    visible = torch.rand(2, 3, 30, generator=generator) < 0.4  # some rows see fewer keys than the largest N
    weights = torch.rand(2, 3, 30, generator=generator, dtype=torch.float64)
    largest = select(weights, vectors, 12, visible)
    gaps = distance.largest_gaps(largest, (1, 4, 12))
    for column, N in enumerate((1, 4, 12)):
        rows = select(weights, vectors, N, visible)
        for group, row in rows.applies.nonzero().tolist():
            chosen, outside = (vectors[group, which[group, row]] for which in (rows.chosen, rows.outside))
            assert float(gaps[group, row, column]) == pytest.approx(float(torch.cdist(chosen, outside).max()))


@pytest.mark.parametrize("levels", [1, 3, 1000])
def test_the_heaviest_keys_are_those_of_a_stable_sort(levels: int) -> None:
    generator = torch.Generator().manual_seed(levels)
    weights = torch.randint(levels, (4, 50), generator=generator).double()
    visible = torch.rand(4, 50, generator=generator) < 0.7
    for top_n in (1, 7, 20):
        found = top_n_indices(weights, top_n, visible)
        for row in range(4):
            keys = sorted(visible[row].nonzero().flatten().tolist(), key=lambda i: (-float(weights[row, i]), i))
            assert found[row].tolist() == keys[:top_n]


def test_the_tight_form_is_much_tighter_on_ordinary_rows() -> None:
    rows = random_rows(200, 5, 16, rows=50)
    exact = distance.d_tilde(rows)
    assert (exact / distance.theorem1_fixed_printed(rows)).median() < 0.5
    assert (exact / distance.theorem1_fixed_tight(rows)).median() > 0.9


@given(case=cases(), signs=st.integers(0, 127), size=st.floats(0.1, 10))
def test_the_tight_form_holds_for_signed_and_unnormalised_rows(case: ClaimCase, signs: int, size: float) -> None:
    sign = torch.tensor([1.0 - 2 * (signs >> i & 1) for i in range(len(case.logits))], dtype=torch.float64)
    rows = select(size * sign * case.weights, case.vectors, case.top_n)
    bound = distance.theorem1_fixed_tight(rows)
    assert bound.isnan() or distance.d_tilde(rows) <= bound * (1 + SLACK) + ZERO
    # Without the absolute value of the weights the bound fails: y_2 - s = -e_2 - e_1 has length sqrt 2.
    rows = select(torch.tensor([1.0, -1.0]), torch.eye(2), 1)
    without = -1 * float((rows.vectors[1] - rows.context[0]).norm()) + 2 * 1
    assert without < distance.d_tilde(rows) <= distance.theorem1_fixed_tight(rows)


def test_the_printed_fixed_bound_needs_the_true_top_n_set() -> None:
    weights, vectors = torch.tensor([0.9, 0.1], dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)
    wrong = select(weights, vectors, 1).with_indices(torch.tensor([[1]]))
    assert float(distance.d_tilde(wrong)) == pytest.approx(0.8)
    assert float(distance.theorem1_fixed_printed(wrong)) == pytest.approx(-0.8)
    assert float(distance.theorem1_fixed_tight(wrong)) == pytest.approx(0.8)


@given(case=cases(most_keys=6))
@settings(max_examples=30)
def test_theorem1_random_corrected_brackets_the_exact_expectation(case: ClaimCase) -> None:
    rows = case.rows
    exact = brute_force_expectation(case.weights, case.vectors, case.top_n)
    assert torch.allclose(distance.random_set_exact(rows), exact, rtol=1e-6, atol=ZERO)
    lower, upper = distance.theorem1_random_bounds(rows)
    assert lower <= exact * (1 + SLACK) + ZERO
    assert exact <= upper * (1 + SLACK) + ZERO
    # The printed epsilon is right for the corrected main term.
    assert upper <= (lower + distance.theorem1_random_epsilon(rows)) * (1 + SLACK) + ZERO
    low, high = distance.corollary2_bounds(rows)
    assert low <= exact * (1 + SLACK) + ZERO
    assert exact <= high * (1 + SLACK) + ZERO


@given(case=cases(most_keys=6))
@settings(max_examples=15)
def test_telling_apart_the_heaviest_keys_narrows_the_bracket_down_to_the_expectation(case: ClaimCase) -> None:
    rows, n = case.rows, len(case.logits)
    exact = distance.random_set_exact(rows)
    brackets = [distance.theorem1_random_bounds(rows, heaviest) for heaviest in range(n + 1)]
    for wide, narrow in itertools.pairwise(brackets):
        assert wide.lower <= narrow.lower * (1 + SLACK) + ZERO
        assert narrow.lower <= exact * (1 + SLACK) + ZERO
        assert exact <= narrow.upper * (1 + SLACK) + ZERO
        assert narrow.upper <= wide.upper * (1 + SLACK) + ZERO
    assert torch.allclose(brackets[-1].lower, exact, rtol=1e-6, atol=1e-10)
    assert torch.allclose(brackets[-1].upper, exact, rtol=1e-6, atol=1e-10)


def test_a_peaked_row_needs_the_refined_bracket() -> None:
    rows = random_rows(300, 3, 64, rows=10, scale=3.0)
    estimate = distance.random_set_monte_carlo(rows, 300, torch.Generator().manual_seed(0))
    looseness = [
        float((distance.theorem1_random_bounds(rows, heaviest).upper / estimate.mean).median()) for heaviest in (0, 4)
    ]
    assert looseness[0] > 2
    assert looseness[1] < 1.6


def test_the_variance_is_that_of_sampling_without_replacement() -> None:
    rows = random_rows(6, 3, 2)
    y = rows.weights[0, 0, :, None] * rows.vectors[0]
    upper = 0.0
    for i in range(6):
        others = [j for j in range(6) if j != i]
        second = [float((y[i] - y[list(chosen)].sum(0)).square().sum()) for chosen in itertools.combinations(others, 3)]
        upper += math.sqrt(np.mean(second)) * 3 / 6
    assert float(distance.theorem1_random_bounds(rows).upper[0]) == pytest.approx(upper, rel=1e-12)


@pytest.mark.parametrize(("L", "N"), [(2, 1), (5, 4)])
def test_bounds_and_expectation_meet_where_the_set_is_certain(L: int, N: int) -> None:
    rows = random_rows(L, N, 3, rows=4)
    lower, upper = distance.theorem1_random_bounds(rows)
    assert torch.allclose(lower, upper)
    assert torch.allclose(lower, distance.random_set_exact(rows))


def test_the_printed_main_term_of_the_random_set_is_off_by_a_factor() -> None:
    rows = random_rows(200, 5, 8)
    estimate = distance.random_set_monte_carlo(rows, 400, torch.Generator().manual_seed(0))
    lower, upper = distance.theorem1_random_bounds(rows)
    margin = 4 * estimate.standard_error
    assert (distance.theorem1_random_printed(rows) > 4 * (estimate.mean + margin)).all()
    assert (lower < estimate.mean + margin).all()
    assert (estimate.mean - margin < upper).all()
    assert (upper < 1.4 * estimate.mean).all()
    # Exactly: two equal keys, N = 1. s is the other key's y, so every distance is 0; printed: |1/2 + 1 - 1| = 1/2.
    equal = select(torch.tensor([0.5, 0.5], dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64), 1)
    assert distance.random_set_exact(equal) == 0
    assert distance.theorem1_random_bounds(equal).upper == 0
    assert distance.corollary2_bounds(equal).lower == 0
    assert float(distance.theorem1_random_printed(equal)) == pytest.approx(0.5)


def test_the_printed_random_terms_equal_their_formulas() -> None:
    rows = random_rows(7, 3, 2)
    a, x = rows.weights[0, 0], rows.vectors[0]
    y = a[:, None] * x
    main = sum(float(((a[i] + 3 / 6) * x[i] - y.sum(0)).norm()) for i in range(7)) * 4 / 7
    epsilon = 0.0
    for i in range(7):
        others = [j for j in range(7) if j != i]
        bottom = (y[i] - 3 / 6 * y[others].sum(0)).norm()
        epsilon += float(3 / 6 * y[others].square().sum() / bottom) / 2 * (1 - 3 / 7)
    assert float(distance.theorem1_random_printed(rows)[0]) == pytest.approx(main)
    assert float(distance.theorem1_random_epsilon(rows)[0]) == pytest.approx(epsilon)


def test_corollary2_is_off_by_the_root_of_n_plus_one_for_orthonormal_vectors() -> None:
    L, N = 12, 3
    rows = select(torch.full((L,), 1 / L, dtype=torch.float64), torch.eye(L, dtype=torch.float64), N)
    exact = (1 - N / L) * (N + 1) ** 0.5
    assert float(distance.random_set_exact(rows)) == pytest.approx(exact)
    assert float(distance.corollary2_printed(rows)) == pytest.approx(1)
    big = random_rows(1000, 5, 64)
    estimate = distance.random_set_monte_carlo(big, 100, torch.Generator().manual_seed(0))
    assert (estimate.mean - 4 * estimate.standard_error > 2 * distance.corollary2_printed(big)).all()


def test_the_lower_end_of_corollary2_equals_its_formula() -> None:
    rows = random_rows(9, 4, 2)
    expected = (1 - 4 / 9) * 3 * (8 + 4) / (3 * 8 + 4 * 9) * distance.corollary2_printed(rows)
    assert torch.allclose(distance.corollary2_bounds(rows).lower, expected)


def test_a_one_hot_row_attains_the_upper_end_and_keeps_its_distance_until_n_equals_l() -> None:
    L = 6
    one_hot = torch.eye(L, dtype=torch.float64)[0]
    vectors = torch.ones(L, 1, dtype=torch.float64)
    found = [float(distance.random_set_exact(select(one_hot, vectors, N))) for N in range(1, L)]
    assert found == pytest.approx([(1 - N / L) * (N + 1) for N in range(1, L)])
    assert found[-1] == pytest.approx(1)  # N = L - 1: as far as with nothing selected


def test_the_distance_need_not_collapse_when_n_grows_with_l() -> None:
    found = [float(distance.d_tilde(distance.no_collapse_example(L))) for L in (100, 1000, 10_000)]
    assert found == pytest.approx([24.5, 249.5, 2499.5])


@given(case=cases())
def test_the_relative_distance_is_one_up_to_the_size_of_what_is_left_out(case: ClaimCase) -> None:
    rows = case.rows
    ratio, (lower, upper) = distance.relative_distance(rows), distance.relative_distance_bounds(rows)
    size = rows.context.norm()
    if size > 1e-6:
        expected = distance.d_tilde(rows) / ((len(case.logits) - case.top_n) * size)
        assert torch.allclose(ratio, expected)
        assert lower - SLACK <= ratio <= upper * (1 + SLACK)


def test_sub_linear_growth_is_judged_by_an_interval() -> None:
    lengths = torch.tensor([32.0, 64, 128, 256, 512, 1024])
    linear = distance.fit_power_law(lengths, 0.06 * lengths)
    assert linear.exponent == pytest.approx(1)
    assert linear.coefficient == pytest.approx(0.06)
    assert linear.exponent_interval[1] >= 1
    assert distance.fit_power_law(lengths, lengths**0.5).exponent_interval[1] < 1


def test_a_power_law_through_values_of_1_and_below() -> None:
    lengths = torch.tensor([1.0, 2, 4, 8], dtype=torch.float64)
    values = torch.tensor([0.5, 1.0, 1.2, 3.0], dtype=torch.float64)
    fit, line = distance.fit_power_law(lengths, values, 0.8), stats.linregress(lengths.log(), values.log())
    margin = line.stderr * stats.t.ppf(0.9, 2)
    assert (fit.coefficient, fit.exponent) == pytest.approx((math.exp(line.intercept), line.slope))
    assert fit.exponent_interval == pytest.approx((line.slope - margin, line.slope + margin))
    assert fit.confidence == 0.8
    assert distance.fit_power_law(lengths, values).confidence == 0.95
    for bad in (0.0, 1.0):
        with pytest.raises(ValueError, match=f"{bad}"):
            distance.fit_power_law(lengths, values, bad)


def test_the_power_law_interval_covers_the_truth_as_often_as_it_says() -> None:
    lengths = torch.tensor([32.0, 64, 128, 256, 512, 1024])
    covered = 0
    for _ in range(400):
        fit = distance.fit_power_law(lengths, 2 * lengths**0.8 * torch.exp(0.2 * torch.randn(6)), confidence=0.9)
        covered += fit.exponent_interval[0] <= 0.8 <= fit.exponent_interval[1]
    assert 340 <= covered <= 380


@pytest.mark.parametrize("heads", [144, 1152])
def test_what_the_ks_test_calls_indistinguishable_depends_on_the_number_of_heads(heads: int) -> None:
    ranks = np.arange(heads)
    gap = distance.ks_resolution(heads)
    assert stats.ks_2samp(ranks, ranks + 0.9 * gap * heads).pvalue > 0.01
    assert stats.ks_2samp(ranks, ranks + 1.1 * gap * heads).pvalue < 0.01
    assert distance.ks_resolution(144) == pytest.approx(0.192, abs=5e-4)


def test_monte_carlo_agrees_with_going_through_all_sets() -> None:
    rows = random_rows(8, 3, 2, rows=5)
    estimate = distance.random_set_monte_carlo(rows, 400, torch.Generator().manual_seed(1))
    assert ((estimate.mean - distance.random_set_exact(rows)).abs() < 4.5 * estimate.standard_error).all()
    again = distance.random_set_monte_carlo(rows, 400, torch.Generator().manual_seed(1))
    assert torch.equal(estimate.mean, again.mean)


QUANTITIES = (
    distance.d_tilde,
    distance.relative_distance,
    distance.theorem1_fixed_printed,
    distance.theorem1_fixed_tight,
    distance.theorem1_random_printed,
    distance.theorem1_random_epsilon,
    lambda rows: distance.theorem1_random_bounds(rows).lower,
    lambda rows: distance.theorem1_random_bounds(rows).upper,
    lambda rows: distance.theorem1_random_bounds(rows, 2).lower,
    lambda rows: distance.theorem1_random_bounds(rows, 4).upper,
    distance.corollary2_printed,
    lambda rows: distance.corollary2_bounds(rows).lower,
    lambda rows: distance.corollary2_bounds(rows).upper,
    lambda rows: distance.relative_distance_bounds(rows).upper,
    distance.random_set_exact,
)


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_both_layouts_and_masks_give_what_single_rows_give(quantity: object) -> None:
    B, Q, L, d, N = 2, 4, 7, 3, 2
    vectors = torch.randn(B, L, d, dtype=torch.float64)
    vectors[1, 6] = torch.nan  # a key that no row of this batch element may see
    mask = torch.rand(B, Q, L) < 0.8
    mask[..., :3] = True
    mask[1, :, 6] = False
    mask[0, 0, 2:] = False  # two visible keys are too few for N = 2
    weights = torch.softmax(torch.where(mask, torch.randn(B, Q, L, dtype=torch.float64), -torch.inf), -1)
    shared = quantity(select(weights, vectors, N, mask))  # type: ignore[operator]
    own = quantity(select(weights, vectors[:, None].expand(B, Q, L, d), N, mask))  # type: ignore[operator]
    assert shared.shape == own.shape == (B, Q)
    assert torch.allclose(shared, own, equal_nan=True)
    assert shared.isnan().sum() == 1
    for b, q in itertools.product(range(B), range(Q)):
        seen = mask[b, q]
        if (b, q) != (0, 0):
            alone = quantity(select(weights[b, q][seen], vectors[b][seen], N))  # type: ignore[operator]
            assert torch.allclose(shared[b, q], alone)


def test_gradients_of_distance_and_bounds() -> None:
    logits = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    vectors = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1, 4:] = False

    def quantities(z: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        rows = select(torch.softmax(torch.where(mask, z, -torch.inf), -1), x, 2, mask)
        fixed = distance.d_tilde(rows), distance.theorem1_fixed_tight(rows)
        return *fixed, *distance.theorem1_random_bounds(rows), *distance.theorem1_random_bounds(rows, 2)

    assert torch.autograd.gradcheck(quantities, (logits, vectors))
    equal = torch.full((4,), 0.25, dtype=torch.float64, requires_grad=True)
    distance.d_tilde(select(equal, torch.ones(4, 1, dtype=torch.float64), 1)).backward()  # every y_i equals s
    assert equal.grad is not None
    assert equal.grad.isfinite().all()


def test_half_precision_is_computed_in_float32() -> None:
    rows = select(torch.softmax(torch.randn(9), -1).bfloat16(), torch.randn(9, 4).bfloat16(), 2)
    assert distance.d_tilde(rows).dtype == torch.float32


def test_impossible_input_is_refused_by_name() -> None:
    weights, vectors = torch.full((4,), 0.25), torch.randn(4, 2)
    with pytest.raises(ValueError, match=r"top_n.*0"):
        select(weights, vectors, 0)
    with pytest.raises(ValueError, match=r"top_n = 4.*4"):
        select(weights, vectors, 4)
    with pytest.raises(ValueError, match="2 visible"):
        select(weights, vectors, 2, torch.tensor([True, True, False, False]))
    with pytest.raises(ValueError, match="4"):
        distance.theorem1_fixed_printed(select(torch.ones(4), vectors, 2))
    mixed = torch.stack([torch.full((4,), 0.25), torch.ones(4)])
    assert distance.theorem1_fixed_printed(select(mixed, vectors, 2)).isnan().tolist() == [False, True]
    with pytest.raises(ValueError, match=r"10.*random_set_monte_carlo"):
        distance.random_set_exact(select(torch.full((8,), 0.125), torch.randn(8, 2), 3), most_sets=10)
    with pytest.raises(ValueError, match=r"2.*got 1"):
        distance.random_set_monte_carlo(select(weights, vectors, 1), draws=1)
    with pytest.raises(ValueError, match="got -1"):
        distance.theorem1_random_bounds(select(weights, vectors, 1), heaviest=-1)
    with pytest.raises(ValueError, match=r"three.*lengths"):
        distance.fit_power_law(torch.ones(2), torch.ones(2))
    with pytest.raises(ValueError, match="positive"):
        distance.fit_power_law(torch.tensor([1.0, 2, 3]), torch.tensor([1.0, 0, 3]))


@pytest.mark.parametrize(("heads", "level"), [(0, 0.01), (-1, 0.01), (5, 0.0), (5, 1.0), (5, -0.5), (5, 2.0)])
def test_no_resolution_without_heads_or_a_level_between_0_and_1(heads: int, level: float) -> None:
    with pytest.raises(ValueError, match=re.escape(f"heads = {heads}, level = {level}")):
        distance.ks_resolution(heads, level)
    assert distance.ks_resolution(1, 0.5) == pytest.approx(math.sqrt(math.log(4)))


@pytest.mark.parametrize("pairs", [1, 60, 10**9])
def test_the_largest_gaps_of_a_gpu_are_those_of_a_cpu(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(2, 9, 3, generator=generator, dtype=torch.float64)
    weights = torch.rand(2, 5, 9, generator=generator, dtype=torch.float64).softmax(-1)
    rows = select(weights, vectors, 4)
    expected = distance.largest_gaps(rows, (1, 3, 4))
    monkeypatch.setattr(distance, "runs_asynchronously", lambda tensor: True)
    monkeypatch.setattr(distance, "PAIRS_AT_ONCE", pairs)
    made: list[int] = []
    split = Tensor.split
    monkeypatch.setattr(Tensor, "split", lambda t, size, dim: (made.append(size), split(t, size, dim))[1])
    torch.testing.assert_close(distance.largest_gaps(rows, (1, 3, 4)), expected, rtol=1e-9, atol=1e-12)
    assert set(made) == {max(1, pairs // (2 * 9 * 4))}
    for item, row, (N, column) in itertools.product(range(2), range(5), ((1, 0), (3, 1), (4, 2))):
        inside = rows.indices[item, row, :N].tolist()
        gaps = [
            float((vectors[item, i] - vectors[item, j]).norm()) for i in inside for j in range(9) if j not in inside
        ]
        assert float(expected[item, row, column]) == pytest.approx(max(gaps))
