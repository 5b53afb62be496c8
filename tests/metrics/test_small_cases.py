"""Sizes of one, and shapes that broadcast: what a general case does not show."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attnorm.engines.inputs import validate_inputs
from attnorm.metrics.attention_statistics import compiled_softmax_statistics, statistics_of
from attnorm.metrics.call import FEW_ROWS, AttentionCall, logit_blocks, too_few_to_wait
from attnorm.metrics.catalogue import METRICS
from attnorm.metrics.fused_rows import _tile
from attnorm.metrics.normalized import with_own_tensors
from attnorm.metrics.rows import _power_rows, measure_rows
from attnorm.metrics.sampling import summarize
from attnorm.metrics.sensitivity import POWER_ROWS, jacobian_norm, measure_sensitivity
from attnorm.metrics.vectors import isotropy
from attnorm.normalizers import Normalizer, Sink, compose, get, mixture
from attnorm.normalizers.block import RowsBlock
from attnorm.normalizers.contract import normalizer_of
from tests.metrics import reference
from tests.metrics.calls import make_call
from tests.metrics.layer_coverage import measure_coverage


def call(**more: object) -> AttentionCall:
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(2, 2, 6, 4, generator=generator) for _ in range(3))
    return AttentionCall(0, "decoder", query, key, value, scale=0.5, causal=True, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [1, 2])
def test_quantiles_of_one_row_and_the_largest_quantile_are_numbers_of_the_rows(rows: int) -> None:
    values = torch.arange(1.0, rows + 1).reshape(1, 1, rows)
    found = summarize(
        values, torch.full((1, 1, rows), 8), [(1, 9)], torch.zeros(1, 1, rows).bool(), quantiles=(0.0, 0.5, 1.0)
    )
    np.testing.assert_allclose(found.quantiles[0, 0], [1.0, (1 + rows) / 2, rows])
    assert found.mean[0, 0] == (1 + rows) / 2


@pytest.mark.parametrize("seed", range(4))
def test_the_smallest_distance_keeps_its_digits_among_several_close_pairs(seed: int) -> None:
    """Products of vectors of norm 1e3 lose distances below 1 in float32; several pairs are computed again."""
    generator = torch.Generator().manual_seed(seed)
    centers = 1e3 * torch.randn(1, 1, 5, 4, generator=generator)
    steps = torch.tensor([0.5, 0.3, 0.7, 0.4, 0.6])[:, None] * torch.eye(4)[0]
    vectors = torch.cat([centers, centers + steps], -2)
    exact = torch.cdist(vectors[0, 0].double(), vectors[0, 0].double()) + 1e9 * torch.eye(10)
    expected = exact.min() / vectors[0, 0].double().norm(dim=-1).mean()
    assert isotropy(vectors).smallest_distance.item() == pytest.approx(expected.item(), rel=1e-3)


def test_a_row_of_one_key_counts_in_the_coverage_of_heads() -> None:
    one = call()
    found = measure_coverage(one, [None], torch.arange(6), (1, 3))["model"]
    shares = [[min(N, n) / n for n in range(1, 7)] for N in (1, 3)]
    np.testing.assert_allclose(np.asarray(found.per_head), np.mean(shares, 1), rtol=1e-6)


@pytest.mark.parametrize(
    "shape", [(1, 1, 6, 1), (2, 2, 6, 1), (1, 2, 1, 6), (2, 1, 1, 1), (2, 1, 6, 6), (2, 2, 6, 6), (6, 6), (2, 6, 1)]
)
def test_a_bias_that_broadcasts_gives_the_logits_of_the_dense_matrix(shape: tuple[int, ...]) -> None:
    one = call(bias=torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    rows = torch.tensor([1, 4, 5])
    exact = reference.dense_logits(one)
    for block in logit_blocks(one, rows):
        visible = block.visible.expand(block.logits.shape)
        expected = exact[block.item, block.heads][:, rows[block.rows], block.first_key :].float()
        width = min(expected.shape[-1], block.logits.shape[-1])
        seen = visible[..., :width]
        torch.testing.assert_close(block.logits[..., :width][seen], expected[..., :width][seen])
        assert not visible[..., width:].any()


def test_a_kernel_whose_values_are_all_zero_has_a_jacobian_of_zero() -> None:
    normalizer = get("kernel", function="polynomial")
    assert isinstance(normalizer, Normalizer)
    logits = torch.zeros(1, 2, 3, 5)
    block = RowsBlock(logits, torch.ones_like(logits, dtype=torch.bool), None, None, queries=torch.arange(3))
    found = jacobian_norm(normalizer, block, normalizer.weights(block))
    assert found is not None
    assert found.tolist() == [[[0.0] * 3] * 2]


@pytest.mark.parametrize("queries", [1, 2, 6])
@pytest.mark.parametrize("sink", [None, 0.7])
@pytest.mark.parametrize("rows", ["none", "one", "each"])
def test_the_operator_of_compiled_functions_gives_the_numbers_of_eager_ones(
    queries: int, sink: float | None, rows: str
) -> None:
    """A mask of one row is combined with causality by the operator, one of a row per query before it."""
    generator = torch.Generator().manual_seed(4)
    q, k = (torch.randn(2, heads, length, 4, generator=generator) for heads, length in ((4, queries), (2, 7)))
    shape = {"none": None, "one": (2, 1, 1, 7), "each": (2, 1, queries, 7)}[rows]
    mask = None if shape is None else torch.rand(shape, generator=generator) < 0.8
    learned = None if sink is None else Sink(sink, heads=4)
    normalizer = compose(scale="ssmax", sink=learned)
    inputs = validate_inputs(q, k, k, mask=mask, causal=True, scale=0.6, positions=None)
    names = ["entropy_nats", "max_logit", "row_sum"]
    n, *values, mass = compiled_softmax_statistics(inputs, normalizer, names, (1, 3))
    found = statistics_of(inputs, normalizer, (1, 3))
    assert torch.equal(n, found.n)
    assert torch.equal(found.n, inputs.n().squeeze(-1).long().expand(2, 4, queries))
    for value, name in zip(values, ("entropy", "max_logit", "row_sum"), strict=True):
        torch.testing.assert_close(value, getattr(found, name), equal_nan=True)
    torch.testing.assert_close(mass, found.top_mass, equal_nan=True)


def test_a_row_of_one_key_that_is_not_finite_is_broken_and_a_row_of_none_is_not() -> None:
    given = call(mask=torch.arange(6).ge(1).expand(1, 1, 6, 6).tril())
    given.key_BGKD[:, :, 1] = math.nan
    (found,) = measure_rows(given, [None], torch.arange(6), (1,)).values()
    assert found.n[0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert found.broken[0, 0].tolist() == [False, True, True, True, True, True]


def test_the_range_that_a_metric_cannot_leave() -> None:
    ranges = {metric.name: metric.bounded for metric in METRICS if metric.bounded is not None}
    assert ranges.pop("mean_cosine") == (-1, 1)
    assert set(ranges.values()) == {(0, 1)}  # shares, weights and scores
    assert {"entropy_ratio", "max_weight", "sink_mass", "output_gate", "induction"} <= set(ranges)


def test_every_row_has_a_norm_where_there_are_few_of_a_map_without_a_closed_form() -> None:
    for count in (1, 3, POWER_ROWS, POWER_ROWS + 2):
        rows = torch.arange(20 - count, 20)
        (found,) = measure_sensitivity(make_call(20), ["sa_softmax"], rows, (0.5, 1.0), (0.1,)).values()
        known = found["jacobian_norm"].isfinite().all(-1)[0, 0]
        assert known.tolist() == [row >= count - POWER_ROWS for row in range(count)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rows", [None, "one", "each"])
@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (3, 5), (1, 4), (5, 3)])
def test_which_keys_a_query_sees(causal: bool, rows: str | None, queries: int, keys: int) -> None:
    """A mask of one row hides keys from all queries; one per query is complete where queries and keys differ."""
    generator = torch.Generator().manual_seed(queries)
    shape = {None: (1, 1, 1, keys), "one": (2, 1, 1, keys), "each": (2, 1, queries, keys)}[rows]
    mask = torch.rand(shape, generator=generator) < 0.7 if rows else None
    given = make_call(queries, keys, causal=causal, kind="decoder" if causal else "encoder", mask=mask)
    (found,) = measure_rows(given, [None], torch.arange(queries), (1,)).values()
    whole = torch.ones(shape, dtype=torch.bool) if mask is None else mask
    expected = [
        [
            sum(
                bool(whole.expand(2, 1, queries, keys)[item, 0, i, j])
                and (not causal or j <= i + keys - queries or (rows == "each" and 1 < queries != keys))
                for j in range(keys)
            )
            for i in range(queries)
        ]
        for item in range(2)
    ]
    assert found.n[:, 0].tolist() == expected


def test_logits_near_the_largest_number_are_no_broken_rows() -> None:
    query, key = torch.full((1, 1, 1, 1), 2e19), torch.tensor([1e19, 0.0, -5e18]).reshape(1, 1, 3, 1)
    given = AttentionCall(0, "encoder", query, key, key, scale=1.0, causal=False)
    (found,) = measure_rows(given, [None], torch.arange(1), (1,)).values()
    assert not found.broken.any()
    assert float(found.values["logit_spread"]) == pytest.approx(3e38)
    assert float(found.values["max_weight"]) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 32, 64, 128, 256])
def test_sizes_of_tiles_are_powers_of_two_that_tensor_cores_take(dtype: torch.dtype, width: int) -> None:
    rows, keys, warps, stages = _tile(dtype, width)
    assert {rows, keys} <= {16, 32, 64, 128}
    assert warps in (4, 8)
    # Keys of every stage in flight, beside the queries, have to fit into 227 KB of shared memory.
    assert (rows + stages * keys) * width * dtype.itemsize <= 227 * 1024


def test_a_horizon_that_float64_cannot_hold_is_infinite() -> None:
    assert reference._horizon(3.0) == pytest.approx(1 + math.e**3)
    assert reference._horizon(708.9) == pytest.approx(math.exp(708.9))
    assert reference._horizon(709.0) == reference._horizon(709.5) == reference._horizon(1e4) == math.inf


@pytest.mark.parametrize("size", [1, 2, 5, 7, 40])
def test_blocks_share_out_the_rows_whose_norm_takes_power_iteration(size: int) -> None:
    """Eight of forty rows, evenly spaced with the last among them: 4, 9, 14, ..."""
    found = []
    for start in range(0, 40, size):
        block = SimpleNamespace(rows=slice(start, min(start + size, 40)), queries=torch.arange(size))
        found += [start + row for row in _power_rows(block, 40).tolist()]  # type: ignore[arg-type]
    assert found == list(range(4, 40, 5))


@pytest.mark.parametrize("elements", [1, 10**7])
@pytest.mark.parametrize("masked", [False, True])
def test_heads_with_parameters_of_their_own_are_measured_in_blocks_of_any_size(elements: int, masked: bool) -> None:
    mask = torch.rand(1, 4, 6, 6, generator=torch.Generator().manual_seed(0)) < 0.8 if masked else None
    one, normalizer = make_call(6, batch=1, mask=mask), get("entmax", alpha=1.5, learned=True, heads=4)
    with torch.no_grad():
        normalizer.map.theta.copy_(torch.tensor([-2.0, -1.0, 1.0, 2.0]))
    (found,) = measure_rows(one, [normalizer], torch.arange(6), (1,), block_elements=elements).values()
    weights = reference.dense_weights(one, normalizer)
    torch.testing.assert_close(found.values["max_weight"].nan_to_num().double(), weights.amax(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "on_gpu", "few"), [(1, True, True), (FEW_ROWS, True, True), (FEW_ROWS + 1, True, False), (1, False, False)]
)
def test_only_a_gpu_computes_few_rows_without_looking_at_them(rows: int, on_gpu: bool, few: bool) -> None:
    queries = torch.empty(rows, device="meta" if on_gpu else "cpu")
    assert too_few_to_wait(queries) is few


def test_a_copy_for_measuring_has_a_handle_of_its_own() -> None:
    for normalizer in (get("ssmax"), mixture("ssmax", "sink")):
        twin = with_own_tensors(normalizer)
        of_twin = [part for part in twin.modules() if isinstance(part, Normalizer)]
        assert [normalizer_of(part.handle) for part in of_twin] == of_twin
        assert normalizer_of(normalizer.handle) is normalizer
