"""The heaviest keys of a row are those of the dense float64 weights, for every call and normalizer."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnorm.metrics.call import AttentionCall
from attnorm.metrics.reads import NO_KEY, heaviest_keys, measure_reads
from attnorm.normalizers import get
from attnorm.normalizers.contract import Normalizer
from tests.metrics import reference
from tests.metrics.calls import CALLS, HEADS, ROW_NORMALIZERS, make_call, window

COUNT = 6


def rows_of(call: AttentionCall) -> Tensor:
    queries = call.query_BHQD.shape[-2]
    return torch.tensor(sorted({0, queries // 3, queries - 1}))


def compare(call: AttentionCall, normalizer: Normalizer | None, tolerance: float) -> None:
    rows = rows_of(call)
    (found,) = measure_reads(call, [normalizer], rows, COUNT).values()
    dense = reference.dense_weights(call, normalizer).detach()[..., rows, :]
    visible = reference.dense_visible(call)[..., rows, :]
    dense = torch.where(visible, dense, 0.0)
    for index in torch.cartesian_prod(*(torch.arange(size) for size in found.keys.shape[:3])).tolist():
        row = dense[tuple(index)]
        keys, weights = found.keys[tuple(index)], found.weights[tuple(index)]
        read = keys != NO_KEY
        expected = row.abs().sort(descending=True).values[:COUNT]
        count = int(read.sum())
        assert bool((expected[count:] <= tolerance).all()), index  # a weight of 0 is not read
        assert torch.allclose(weights[read].abs(), expected[:count], rtol=tolerance, atol=tolerance), index
        # The position: its own dense weight is the one reported there.
        assert torch.allclose(row[keys[read]], weights[read], rtol=tolerance, atol=tolerance), index
        assert len(set(keys[read].tolist())) == count


@pytest.mark.parametrize("name", CALLS)
def test_keys_and_weights_are_those_of_the_dense_matrix(name: str) -> None:
    call = CALLS[name]
    size = 60 if name == "large logits" else 1  # logits of that size are off by as many units in the last place
    compare(call, None, 50 * size * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("name", [None, "entmax15"])
def test_keys_of_a_window_far_from_the_first_key_keep_their_indices(name: str | None) -> None:
    call, rows = make_call(60, batch=1, mask=window(60, 5)), torch.arange(55, 60)
    (found,) = measure_reads(call, [name], rows, 3).values()
    dense = reference.dense_weights(call, None if name is None else get(name))  # type: ignore[arg-type]
    for head, row in torch.cartesian_prod(torch.arange(HEADS), torch.arange(5)).tolist():
        keys, weights = found.keys[0, head, row], found.weights[0, head, row]
        read = keys != NO_KEY
        assert bool(read.any())
        assert all(51 + row <= key <= 55 + row for key in keys[read].tolist())
        torch.testing.assert_close(dense[0, head, 55 + row][keys[read]].double(), weights[read], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ROW_NORMALIZERS)
def test_every_normalizer_reads_its_own_keys(name: str) -> None:
    normalizer = get(name)
    assert isinstance(normalizer, Normalizer)
    compare(make_call(batch=1), normalizer, 2e-5)


def test_a_sparse_map_reads_no_key_of_weight_0() -> None:
    (found,) = measure_reads(make_call(size=8.0), ["sparsemax"], torch.tensor([32]), COUNT).values()
    assert int((found.keys == NO_KEY).sum()) > 0
    assert bool((found.weights[found.keys != NO_KEY] > 0).all())
    assert bool((found.weights[found.keys == NO_KEY] == 0).all())


def test_a_broken_row_reads_nothing_and_leaves_the_others_alone() -> None:
    call = make_call(batch=1)
    call.query_BHQD[0, 1, 20] = math.nan
    (found,) = measure_reads(call, [None], torch.tensor([10, 20]), COUNT).values()
    assert bool((found.keys[0, 1, 1] == NO_KEY).all())
    assert bool((found.keys[0, [0, 2, 3]] != NO_KEY).all())
    assert bool((found.keys[0, 1, 0] != NO_KEY).all())


def test_of_equal_weights_the_earlier_keys_are_read() -> None:
    (found,) = measure_reads(make_call(size=0.0), [None], torch.tensor([20]), COUNT).values()
    assert found.keys[0, 0, 0].tolist() == list(range(COUNT))


@given(st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, -0.25]), min_size=1, max_size=12), st.integers(1, 14), st.data())
def test_heaviest_keys_are_those_of_a_stable_sort(row: list[float], count: int, data: st.DataObject) -> None:
    visible = data.draw(st.lists(st.booleans(), min_size=len(row), max_size=len(row)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    keys, weights = heaviest_keys(torch.tensor([row], dtype=dtype), torch.tensor([visible]), count)
    order = sorted((i for i in range(len(row)) if visible[i] and row[i]), key=lambda i: (-abs(row[i]), i))[:count]
    assert [key for key in keys[0].tolist() if key >= 0] == order
    assert weights[0, : len(order)].tolist() == pytest.approx([row[i] for i in order])
