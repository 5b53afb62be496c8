"""Which rows are measured, and in which bins they are put."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnorm.metrics import fused_rows, sampling
from attnorm.metrics.sampling import evenly_spaced, length_bins, rows_to_measure


@given(st.integers(1, 200_000))
def test_bins_cover_every_length_from_eight_keys_up_once(longest: int) -> None:
    bins = length_bins(longest)
    assert bins[0][1] == longest
    assert bins[-1][0] == (8 if longest >= 8 else 1)
    assert all(low <= high for low, high in bins)
    assert all(later[1] + 1 == earlier[0] for earlier, later in itertools.pairwise(bins))


def test_lengths_that_are_powers_of_two_apart_share_their_bins() -> None:
    assert length_bins(4096)[4:] == length_bins(1024)
    assert length_bins(1024)[4:] == length_bins(256)
    assert length_bins(4096)[:2] == [(2897, 4096), (2049, 2896)]


@given(st.integers(1, 3000), st.integers(1, 200), st.booleans(), st.integers(0, 500))
def test_as_many_rows_as_asked_for_with_the_last_among_them(
    queries: int, count: int, causal: bool, cached: int
) -> None:
    rows = rows_to_measure(count, queries, causal=causal, keys=queries + cached)
    assert len(rows) == min(count, queries)
    assert rows[-1] == queries - 1
    assert torch.equal(rows, rows.unique())
    assert rows[0] >= 0


def test_a_causal_sample_reaches_every_bin_and_favors_the_longest() -> None:
    rows = rows_to_measure(64, 4096, causal=True) + 1
    counts = [int(((rows >= low) & (rows <= high)).sum()) for low, high in length_bins(4096)]
    assert min(counts) >= 1
    assert counts[0] >= 16


def test_all_and_last() -> None:
    assert torch.equal(rows_to_measure("all", 5, causal=True), torch.arange(5))
    assert rows_to_measure("last", 5, causal=True).tolist() == [4]
    assert rows_to_measure(3, 9, causal=False).tolist() == [2, 5, 8]
    assert evenly_spaced(torch.arange(10), 2).tolist() == [4, 9]


@pytest.mark.parametrize("rows", [0, -1, "some", True, 1.5])
def test_anything_else_is_refused(rows: object) -> None:
    with pytest.raises(Exception, match=r"rows|violate"):
        rows_to_measure(rows, 5, causal=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [1, 1024, 1025, 16384, 16385, 131072])
def test_each_bin_is_summarized_by_one_launch(length: int) -> None:
    launches = list(sampling._launches(length))
    for extent in (0, 1, 1024, 1025, 4096, 4097, 8192, 8193, 16384, 16385, length):
        taken = [longer or extent <= size for over, size, longer, _warps in launches if extent > over]
        assert sum(taken) == 1 or extent > length


def test_triton_takes_powers_of_two() -> None:
    sizes = (*itertools.chain(*sampling.KEPT, sampling.KEPT_OF_LONGER), sampling.RANGE_BLOCK)
    for size in (*sizes, fused_rows._BLOCK, *fused_rows._MASK_TILE):
        assert size.bit_count() == 1
