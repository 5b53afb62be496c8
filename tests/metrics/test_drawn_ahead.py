"""What is drawn for a layer before it is measured: one array for each item of the batch."""

import pytest
import torch
from torch import Tensor

from attnorm.metrics.sensitivity import directions_ahead
from attnorm.metrics.vectors import NULL_ROWS, NULLS, measure_vectors, permutations_ahead
from tests.metrics.calls import HEADS, make_call


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"permutations": 3}])
def test_permutations_move_the_visible_keys_of_each_row(batch: int, options: dict[str, int]) -> None:
    rows = torch.tensor([0, 3, 18])
    drawn = permutations_ahead(make_call(19, batch=batch), rows, torch.Generator().manual_seed(0), **options)
    assert len(drawn) == batch
    for array in drawn:
        assert array.dtype == torch.int32
        assert array.shape == (options.get("permutations", 20), 1, 3, 32)  # columns in groups of 16
        for at, row in enumerate(rows.tolist()):
            seen, rest = array[:, 0, at, : row + 1], array[:, 0, at, row + 1 :]
            assert (seen.sort(-1).values == torch.arange(row + 1)).all()
            assert (rest == torch.arange(row + 1, 32)).all()
    others = [drawn[0][0], *(array[1] for array in drawn)]
    assert all(not torch.equal(one, other) for i, one in enumerate(others) for other in others[:i])


def test_permutations_are_drawn_for_a_few_of_many_rows() -> None:
    assert NULL_ROWS == 16
    (drawn,) = permutations_ahead(make_call(40, batch=1), torch.arange(40), torch.Generator().manual_seed(0))
    assert drawn.shape[2] == 16
    assert set(drawn[0, 0, -1, :40].tolist()) == set(range(40))  # the last row is among them


@pytest.mark.parametrize("batch", [1, 2])
def test_directions_have_numbers_for_every_head_row_and_key(batch: int) -> None:
    drawn = directions_ahead(make_call(5, 9, batch=batch), torch.arange(3), torch.Generator().manual_seed(0))
    assert [array.shape for array in drawn] == [(HEADS, 3, 9)] * batch
    whole = torch.randn(batch * 3, HEADS, 9, generator=torch.Generator().manual_seed(0))
    rows = torch.cat([array.transpose(0, 1) for array in drawn])
    assert rows.shape == whole.shape
    assert len(rows.unique()) == rows.numel()


def test_the_rows_that_have_a_null_are_the_same_in_blocks_of_a_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than have a null: blocks begin between them."""
    call = make_call(24, batch=1)

    def measure() -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(3)
        return measure_vectors(call, [None], torch.arange(24), (2,), generator=generator, permutations=2)["model"]

    monkeypatch.setattr("attnorm.metrics.vectors.NULL_ROWS", 6)
    whole = measure()
    monkeypatch.setattr("attnorm.metrics.call.BLOCK_ELEMENTS", 5 * 24 * HEADS // torch.get_num_threads())
    cut = measure()
    for name in NULLS:
        torch.testing.assert_close(cut[name], whole[name], equal_nan=True, rtol=1e-4, atol=1e-5)
    known = (~whole["separability_null"][0, 0, :, 0].isnan()).nonzero().flatten().tolist()
    assert known == [3, 7, 11, 15, 19, 23]
