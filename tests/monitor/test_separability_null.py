"""The monitor's separability of a row and of its permuted weights is that of metrics: masks, ties and broken rows."""

import torch
from torch import Tensor

from attnorm.monitor.measure import _row_and_null, random_scores
from tests.metrics.reference import separability

HEADS, GROUPS, ROWS, KEYS, WIDTH, TOP_N = 4, 2, 5, 40, 3, 6


def rows_of_weights() -> tuple[Tensor, Tensor, Tensor]:
    """Weights full of ties, a mask per head that leaves one row fewer than N keys, and garbage that no row sees."""
    generator = torch.Generator().manual_seed(0)
    visible = torch.rand(HEADS, ROWS, KEYS, generator=generator) < 0.7
    visible[0, 0, TOP_N - 1 :] = False
    visible[..., 7] = False
    weights = torch.randint(0, 5, (HEADS, ROWS, KEYS), generator=generator).double() * visible
    x = torch.randn(GROUPS, KEYS, WIDTH, generator=generator, dtype=torch.float64)
    x[:, 7] = torch.nan
    return weights, visible, x


def measured(weights: Tensor, visible: Tensor, x: Tensor, logs: Tensor | None = None) -> Tensor:
    return _row_and_null(weights, visible, x, random_scores(ROWS, x.shape[-2], x.device), TOP_N, logs)


def expected(weights: Tensor, visible: Tensor, x: Tensor) -> Tensor:
    """(2, h, r) of the plain formulas, one row at a time."""
    found = torch.full((2, HEADS, ROWS), torch.nan, dtype=weights.dtype)
    scores = random_scores(ROWS, KEYS, x.device)
    for head in range(HEADS):
        for row in range(ROWS):
            keys = visible[head, row].nonzero().squeeze(-1)
            if len(keys) <= TOP_N:
                continue
            a, vectors = weights[head, row, keys], x[head // (HEADS // GROUPS), keys]
            order = a.sort(descending=True, stable=True).indices
            found[0, head, row] = separability(a, vectors, order, TOP_N)
            dealt = torch.empty_like(a)
            drawn = scores[row, keys].argsort()
            dealt[drawn] = a[order]
            found[1, head, row] = separability(dealt, vectors, drawn, TOP_N, exchange=False)
    return found


def test_it_is_that_of_the_formulas() -> None:
    weights, visible, x = rows_of_weights()
    found = measured(weights, visible, x)
    assert found[:, 0, 0].isnan().all()
    assert (found.nanmean((1, 2)) > 0).all()
    assert (found.nanmean((1, 2)) < 1).all()
    torch.testing.assert_close(found, expected(weights, visible, x), equal_nan=True)


def test_weights_that_underflow_count_by_their_logarithms() -> None:
    _, visible, x = rows_of_weights()
    logs = torch.randn(visible.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    weights = logs.exp() * visible
    found = measured(weights * 0, visible, x, logs)
    torch.testing.assert_close(found, expected(weights, visible, x), equal_nan=True)


def test_rows_that_see_no_more_than_n_keys_have_none() -> None:
    weights, visible, x = rows_of_weights()
    few = slice(TOP_N)
    assert measured(weights[..., few], visible[..., few], x[:, few]).isnan().all()


def test_a_row_that_is_not_finite_has_none() -> None:
    weights, visible, x = rows_of_weights()
    weights[2, 3, 0] = torch.nan
    for logs in (None, weights.nan_to_num(1.0).log()):
        found = measured(weights, visible, x, logs)
        assert found[:, 2, 3].isnan().all()
        assert found.isnan().sum() == 4


def test_a_value_that_is_not_finite_leaves_nothing_to_tell() -> None:
    for value in (torch.inf, -torch.inf, torch.nan):
        weights, visible, x = rows_of_weights()
        x[0, 3] = value
        found = measured(weights, visible, x)
        sees_it = visible[:2, :, 3]
        assert found[:, :2][:, sees_it].isnan().all()
        assert found[:, 2:].isfinite().all()
