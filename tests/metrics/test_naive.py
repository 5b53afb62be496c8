"""Coverage, isotropy, nulls and sampled rows against loops over single numbers, at sizes of one to five."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from attnorm.metrics.call import AttentionCall
from attnorm.metrics.catalogue import METRICS
from attnorm.metrics.reads import measure_reads
from attnorm.metrics.rows import measure_rows
from attnorm.metrics.sampling import AUTO_ROWS, bin_ids, binned, evenly_spaced, length_bins, rows_to_measure
from attnorm.metrics.sensitivity import measure_sensitivity
from attnorm.metrics.vectors import NULLS, NUMBERS, _null, isotropy, measure_vectors
from attnorm.normalizers import get
from attnorm.normalizers.contract import Normalizer
from attnorm.theory.geometry import nearest_outsider, theorem2_bounds
from attnorm.theory.selection import select
from tests.metrics import reference
from tests.metrics.calls import HEADS, KEY_HEADS, make_call, window
from tests.metrics.layer_coverage import measure_coverage
from tests.metrics.test_rows import in_float64, one_row

EMPTY_ROWS = torch.tensor([[0, 0, 0], [1, 0, 0], [0, 1, 1]]).bool()[None, None]
CALLS = {
    "1 key": make_call(1),
    "2 keys": make_call(2),
    "3 keys": make_call(3),
    "5 keys of a cache": make_call(2, 5),
    "empty rows": make_call(3, mask=EMPTY_ROWS),
    "one item": make_call(3, batch=1, mask=EMPTY_ROWS),
    "one head hidden": make_call(2, mask=torch.tensor([True, True, False, True])[None, :, None, None]),
    "window": make_call(40, batch=1, mask=window(40, 2)),
    "whole groups of keys": make_call(2, 16, batch=1, causal=False),  # a block is not padded
}
TOP_N = (1, 2, 4)


@pytest.mark.parametrize("choice", [None, "sparsemax", "sigmoid"])
@pytest.mark.parametrize("name", CALLS)
def test_coverage_of_small_calls(name: str, choice: str | None) -> None:
    call = in_float64(CALLS[name])
    normalizer = None if choice is None else get(choice)
    assert normalizer is None or isinstance(normalizer, Normalizer)
    (found,) = measure_coverage(call, [choice], torch.arange(call.query_BHQD.shape[-2]), TOP_N).values()
    weights, visible = reference.dense_weights(call, normalizer).detach(), reference.dense_visible(call)
    shares: dict[int, list[tuple[float, float, float]]] = {N: [] for N in TOP_N}
    for item, row in itertools.product(range(weights.shape[0]), range(weights.shape[2])):
        seen = visible[item, :, row].any(0).nonzero().flatten().tolist()
        for N in TOP_N if seen else ():
            sets = [
                {int(key) for key in weights[item, head, row].topk(min(N, weights.shape[-1])).indices}
                & set(weights[item, head, row].nonzero().flatten().tolist())
                for head in range(HEADS)
            ]
            each = [len(one) / len(seen) for one in sets]
            together = len(set().union(*sets)) / len(seen)
            shares[N].append((sum(each) / HEADS, together, 1 - math.prod(1 - share for share in each)))
    assert found.rows == len(shares[1])
    for index, N in enumerate(TOP_N):
        for kind, numbers in zip(("per_head", "union", "independent"), zip(*shares[N], strict=True), strict=True):
            assert float(getattr(found, kind)[index]) == pytest.approx(sum(numbers) / len(numbers), abs=1e-12), kind


def test_coverage_of_one_head_is_that_head_and_rows_without_numbers_leave_nothing() -> None:
    call = replace(one := make_call(3), query_BHQD=one.query_BHQD[:, :1], key_BGKD=one.key_BGKD[:, :1])
    found = measure_coverage(call, [None], torch.arange(3), (2,))["model"]
    assert found.per_head == found.union
    torch.testing.assert_close(found.independent, found.union)
    nothing = measure_coverage(make_call(3, mask=EMPTY_ROWS), [None], torch.tensor([0]), (1, 2))["model"]
    assert nothing.rows == 0
    assert nothing.per_head.isnan().all()
    assert nothing.per_head.shape == (2,)
    call.key_BGKD[0, 0, 2] = math.nan
    broken = measure_coverage(call, [None], torch.arange(3), (2,))["model"]
    assert broken.rows == 5


@pytest.mark.parametrize("keys", [1, 2, 3, 5])
@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_isotropy_of_few_vectors(keys: int, zeros: int) -> None:
    generator = torch.Generator().manual_seed(keys)
    vectors = torch.randn(2, 3, keys, 4, generator=generator, dtype=torch.float64)
    vectors[:, :, :zeros] = 0
    visible = torch.rand(2, 3, keys, generator=generator) < 0.8
    found = isotropy(vectors, visible)
    for item, head in itertools.product(range(2), range(3)):
        x = [v for v, seen in zip(vectors[item, head], visible[item, head], strict=True) if seen]
        pairs = list(itertools.combinations(x, 2))
        if not pairs:
            expected = {"mean_cosine": math.nan, "effective_rank": math.nan, "smallest_distance": math.nan}
        else:
            cosines = [float(a @ b / (a.norm() * b.norm())) for a, b in pairs if a.norm() > 0 and b.norm() > 0]
            moments = sum(torch.outer(v, v) for v in x)
            assert isinstance(moments, torch.Tensor)
            mean_norm = sum(float(v.norm()) for v in x) / len(x)
            distance = min(float((a - b).norm()) for a, b in pairs)
            expected = {
                "mean_cosine": sum(cosines) / len(cosines) if cosines else math.nan,
                "effective_rank": float(moments.trace() ** 2 / moments.square().sum()),
                "smallest_distance": distance / mean_norm if mean_norm else math.nan,
            }
        for name, value in expected.items():
            assert float(getattr(found, name)[item, head]) == pytest.approx(value, nan_ok=True, abs=1e-12), name


def test_nulls_are_means_over_draws_and_quantiles_of_means_over_rows() -> None:
    draws = torch.rand(2, 3, 4, 2, 2, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draws[0, :, 1] = draws[:, 1, 2, 0] = math.nan
    found = dict(zip(NULLS, (_null(draws)[name].numpy() for name in NULLS), strict=True))
    numbers = draws.numpy()
    with np.errstate(invalid="ignore"):
        means = np.nanmean(numbers[..., 0, :], 2, keepdims=True)
    missing = np.isnan(numbers[..., 0, 0])
    np.testing.assert_allclose(found["separability_null"], numbers[..., 0, :].mean(-1))
    np.testing.assert_allclose(found["separability_sphere_null"], numbers[..., 1, :].mean(-1))
    for name, share in (("separability_null_low", 0.05), ("separability_null_high", 0.95)):
        expected = np.broadcast_to(np.quantile(means, share, axis=-1), missing.shape)
        np.testing.assert_allclose(found[name], np.where(missing, np.nan, expected))


def test_the_null_takes_twenty_permutations_unless_asked_otherwise() -> None:
    def null(**options: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return measure_vectors(make_call(9), [None], torch.tensor([8]), (2,), generator=generator, **options)["model"][
            "separability_null"
        ]

    assert torch.equal(null(), null(permutations=20))
    assert null(permutations=1).isfinite().all()
    assert not torch.equal(null(), null(permutations=19))


@pytest.mark.parametrize(
    "name", ["2 keys", "3 keys", "5 keys of a cache", "empty rows", "window", "whole groups of keys"]
)
def test_distances_and_separability_of_few_keys(name: str) -> None:
    call = in_float64(CALLS[name])
    queries = call.query_BHQD.shape[-2]
    rows = torch.arange(queries)[-4:]
    found = measure_vectors(call, [None], rows, (1, 2), permutations=2)["model"]
    weights, visible = reference.dense_weights(call), reference.dense_visible(call)
    values = call.value_BGKE.repeat_interleave(HEADS // KEY_HEADS, 1)
    for item, head, index in itertools.product(range(weights.shape[0]), range(HEADS), range(len(rows))):
        keys = visible[item, head, rows[index]]
        for column, N in enumerate((1, 2)):
            numbers = {number: float(found[number][item, head, index, column]) for number in NUMBERS}
            if int(keys.sum()) <= N:
                assert all(math.isnan(value) for value in numbers.values())
                continue
            w, x = weights[item, head, rows[index]][keys], values[item, head][keys]
            expected = reference.vector_numbers(w, x, N)
            one = select(w[None], x, N)
            lower, upper = theorem2_bounds(one, nearest_outsider(one), x.square().sum(-1).mean().sqrt())
            expected |= {"separability_lower": float(lower), "separability_upper": float(upper)}
            for number, value in expected.items():
                assert numbers[number] == pytest.approx(value, rel=1e-6, abs=1e-12), (number, N)


@pytest.mark.parametrize("name", ["1 key", "2 keys", "3 keys", "empty rows", "window", "whole groups of keys"])
def test_sensitivity_of_few_keys_against_its_definition(name: str) -> None:
    call = in_float64(CALLS[name])
    rows, temperatures = torch.arange(call.query_BHQD.shape[-2])[-3:], (0.5, 2.0)
    (found,) = measure_sensitivity(call, ["entmax15"], rows, temperatures, (0.1,)).values()
    normalizer = get("entmax15")
    assert isinstance(normalizer, Normalizer)
    visible = reference.dense_visible(call)
    for item, head, index in itertools.product(range(visible.shape[0]), range(HEADS), range(len(rows))):
        n = int(visible[item, head, rows[index]].sum())
        for column, temperature in enumerate(temperatures):
            place = (item, head, index, column)
            if n == 0:
                assert all(value[place].isnan() for value in found.values())
                continue
            cooled = replace(call, scale=call.scale / temperature)
            norm = reference.jacobian_norm(cooled, normalizer, item, head, int(rows[index])) / temperature
            constant = normalizer.lipschitz(n)
            assert constant is not None
            assert float(found["jacobian_norm"][place]) == pytest.approx(norm, abs=1e-7)
            assert float(found["bound"][place]) == pytest.approx(constant / temperature)
            assert n > 1 or float(found["gain_0.1"][place]) == 0


def test_bad_arguments_of_measurements_are_named() -> None:
    call, rows = make_call(3), torch.arange(3)
    for temperatures in ((), (0.0,), (1.0, -1.0)):
        with pytest.raises(ValueError, match="temperatures"):
            measure_sensitivity(call, [None], rows, temperatures, (0.1,))
    for eps in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="epsilons"):
            measure_sensitivity(call, [None], rows, (1.0,), (0.1, eps))
    for top_n in ((), (0,), (1, -1)):
        with pytest.raises(ValueError, match="top_n"):
            measure_vectors(call, [None], rows, top_n)
    with pytest.raises(ValueError, match=r"permutations.*0"):
        measure_vectors(call, [None], rows, (1,), permutations=0)
    with pytest.raises(ValueError, match="'keys'"):
        measure_vectors(call, [None], rows, (1,), "keys")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got 0"):
        measure_reads(call, [None], rows, 0)
    assert measure_reads(call, [None], rows, 1)["model"].keys.shape == (2, HEADS, 3, 1)


def test_ranges_of_metrics_are_those_of_shares_and_cosines() -> None:
    ranges = {metric.name: metric.bounded for metric in METRICS if metric.bounded is not None}
    assert ranges.pop("mean_cosine") == (-1, 1)
    assert len(ranges) >= 12
    assert set(ranges.values()) == {(0, 1)}


def test_bins_of_short_rows() -> None:
    assert [length_bins(n) for n in (1, 7, 8, 9)] == [[(1, 1)], [(1, 7)], [(8, 8)], [(8, 9)]]
    assert length_bins(12) == [(9, 12), (8, 8)]
    assert length_bins(32) == [(23, 32), (17, 22), (12, 16), (9, 11), (8, 8)]
    with pytest.raises(ValueError, match="got 0"):
        length_bins(0)
    with pytest.raises(ValueError, match="got 0"):
        rows_to_measure(1, 0, causal=True)


def test_a_quarter_of_sampled_rows_lies_in_the_longest_bin_and_the_rest_is_shared_evenly() -> None:
    """32 queries: bins of 1, 3, 5, 6 and 10 rows, and 7 rows of fewer than 8 keys."""

    def per_bin(rows: torch.Tensor, longest: int = 32) -> list[int]:
        n = rows + 1 + longest - 32
        return [int(((n >= low) & (n <= high)).sum()) for low, high in length_bins(longest)]

    assert rows_to_measure(1, 32, causal=True).tolist() == [31]
    assert rows_to_measure(4, 32, causal=True).tolist() == [15, 21, 26, 31]
    assert per_bin(rows_to_measure(8, 32, causal=True)) == [4, 1, 1, 1, 1]
    assert per_bin(rows_to_measure(20, 32, causal=True)) == [9, 4, 3, 3, 1]
    assert per_bin(rows_to_measure(26, 32, causal=True)) == [10, 6, 5, 3, 1]
    assert len(rows_to_measure(26, 32, causal=True)) == 26
    assert per_bin(rows_to_measure(12, 32, causal=True, keys=64), 64) == [8, 4, 0, 0, 0, 0, 0]
    assert rows_to_measure(4, 32, causal=False).tolist() == [7, 15, 23, 31]
    assert len(rows_to_measure("auto", AUTO_ROWS + 1, causal=True)) == AUTO_ROWS == 512
    assert torch.equal(rows_to_measure(32, 32, causal=True), torch.arange(32))
    assert evenly_spaced(torch.arange(5), 5).tolist() == [0, 1, 2, 3, 4]
    assert evenly_spaced(torch.arange(5), 1).tolist() == [4]


def test_bins_hold_their_ends_in_any_order() -> None:
    keys = torch.arange(1, 12)[None]
    none = torch.zeros_like(keys, dtype=torch.bool)
    assert bin_ids(keys, [(5, 8), (2, 3), (10, 10)], none)[0].tolist() == [-1, 1, 1, -1, 0, 0, 0, 0, -1, 2, -1]
    left_out = keys == 3
    assert bin_ids(keys, [(2, 3)], left_out)[0].tolist() == [-1, 0, *([-1] * 9)]


@pytest.mark.parametrize("heads", [1, 2])
def test_numbers_of_few_members_in_bins(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnorm.metrics.sampling.runs_triton", lambda device: False)
    ids = torch.tensor([[0, 0, 1, -1, 2, 2]] * heads)
    numbers = torch.tensor([[1.0, 3.0, 5.0, 9.0, math.nan, 7.0], [4.0, 2.0, math.nan, 0.0, -1.0, 0.0]])
    found = binned(numbers, ids, 4, (0.0, 0.25, 1.0))
    assert found.members.tolist() == [[2, 1, 2, 0]] * 2
    np.testing.assert_allclose(found.mean, [[2.0, 5.0, 7.0, math.nan], [3.0, math.nan, -0.5, math.nan]])
    nan = [math.nan] * 3
    np.testing.assert_allclose(found.quantiles[0], [[1.0, 1.5, 3.0], [5.0] * 3, [7.0] * 3, nan])
    np.testing.assert_allclose(found.quantiles[1], [[2.0, 2.5, 4.0], nan, [-1.0, -0.75, 0.0], nan])


def test_a_row_with_fewer_keys_than_asked_for_is_filled_up() -> None:
    call: AttentionCall = one_row([1.0, 1.0, 0.0])
    found = measure_reads(call, [None], torch.tensor([0]), 5)["model"]
    assert found.keys[0, 0, 0].tolist() == [0, 1, 2, -1, -1]
    assert found.weights[0, 0, 0, 3:].tolist() == [0.0, 0.0]


def test_pairs_of_more_than_512_vectors_are_compared_among_512_of_them() -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(1, 1, 540, 2, generator=generator, dtype=torch.float64)
    chosen = torch.randperm(540, generator=torch.Generator().manual_seed(5))[:512]
    some = vectors[0, 0, chosen]
    distances = torch.cdist(some, some, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(math.inf)
    expected = distances.min() / vectors.norm(dim=-1).mean()
    assert float(isotropy(vectors, seed=5).smallest_distance) == pytest.approx(float(expected))


def test_norms_without_a_closed_form_and_separability_are_measured_on_eight_and_sixteen_rows() -> None:
    call = make_call(40, batch=1)
    norms = measure_rows(call, ["stick_breaking"], torch.arange(40), (1,))["stick_breaking"].values["jacobian_norm"]
    assert (~norms.isnan()).sum(-1).tolist() == [[8] * HEADS]
    gains = measure_sensitivity(call, ["stick_breaking"], torch.arange(30, 40), (1.0,), ())["stick_breaking"]
    assert (~gains["jacobian_norm"][..., 0].isnan()).sum(-1).tolist() == [[8] * HEADS]
    found = measure_vectors(call, [None], torch.arange(5, 40), (2,), permutations=1)["model"]
    assert (~found["separability"][..., 0].isnan()).sum(-1).tolist() == [[16] * HEADS]
