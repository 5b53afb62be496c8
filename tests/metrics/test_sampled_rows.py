"""Rows that are measured, worked out by hand: a quarter for the longest bin, the rest evenly over all bins."""

import pytest
import torch

from attnorm.metrics.sampling import AUTO_ROWS, evenly_spaced, length_bins, rows_to_measure


@pytest.mark.parametrize(
    ("longest", "bins"),
    [
        (1, [(1, 1)]),
        (7, [(1, 7)]),
        (8, [(8, 8)]),
        (9, [(8, 9)]),
        (12, [(9, 12), (8, 8)]),
        (40, [(29, 40), (21, 28), (15, 20), (11, 14), (8, 10)]),
    ],
)
def test_bins_are_half_octaves_down_to_eight_keys(longest: int, bins: list[tuple[int, int]]) -> None:
    assert length_bins(longest) == bins


@pytest.mark.parametrize(
    ("count", "queries", "keys", "rows"),
    [
        # Bins of 3, 4, 6, 8 and 12 rows get 1, 1, 2, 2 and 2 + 2 of ten rows.
        (10, 40, None, [9, 13, 16, 19, 23, 27, 30, 33, 36, 39]),
        (10, 40, 60, [0, 5, 9, 15, 21, 25, 28, 32, 35, 39]),  # 21 to 60 keys
        (5, 40, 20, [29, 33, 35, 37, 39]),  # the first 20 queries see none
        (4, 100, None, [49, 69, 84, 99]),
        (3, 9, None, [6, 7, 8]),  # one bin of two rows, and one row of fewer than 8 keys
        (7, 12, None, [2, 6, 7, 8, 9, 10, 11]),
        (12, 12, None, list(range(12))),
        (13, 12, None, list(range(12))),
    ],
)
def test_causal_rows(count: int, queries: int, keys: int | None, rows: list[int]) -> None:
    assert rows_to_measure(count, queries, causal=True, keys=keys).tolist() == rows


def test_full_bins_leave_their_rows_to_others() -> None:
    assert rows_to_measure(30, 40, causal=True).tolist() == [
        7, 8, 9, 10, 11, 12, 13, 14, 15, 17, 18, 19, 21, 22, 24, 25, 26, 27, *range(28, 40),
    ]  # fmt: skip


def test_auto_is_512_rows_and_one_query_is_enough() -> None:
    assert AUTO_ROWS == 512
    assert len(rows_to_measure("auto", 600, causal=True)) == 512
    assert len(rows_to_measure("auto", 600, causal=False)) == 512
    assert rows_to_measure("auto", 1, causal=True).tolist() == [0]
    for bad in (0, -1):
        with pytest.raises(ValueError, match=f"got {bad}"):
            rows_to_measure("all", bad, causal=True)
        with pytest.raises(ValueError, match=f"got {bad}"):
            length_bins(bad)


def test_rows_are_spread_evenly_with_the_last_among_them() -> None:
    assert evenly_spaced(torch.arange(5, 12), 3).tolist() == [6, 9, 11]
    assert evenly_spaced(torch.arange(4), 4).tolist() == evenly_spaced(torch.arange(4), 9).tolist() == [0, 1, 2, 3]
    assert evenly_spaced(torch.arange(7), 1).tolist() == [6]
