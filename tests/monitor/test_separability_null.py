"""The monitor's separability, which looks at no number on the way, is that of theory.geometry."""

import torch
from torch import Tensor

from attnorm.monitor.measure import _sources, random_scores, separability_and_null
from attnorm.theory.geometry import separability
from attnorm.theory.selection import select

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


def expected(weights: Tensor, visible: Tensor, x: Tensor) -> Tensor:
    every = x.repeat_interleave(HEADS // GROUPS, 0)
    return separability(select(weights, every, TOP_N, visible))


def test_it_is_the_share_of_the_theory() -> None:
    weights, visible, x = rows_of_weights()
    found, _ = separability_and_null(weights, visible, x, random_scores(ROWS, KEYS, x.device), TOP_N)
    assert found[0, 0].isnan()
    assert 0 < found.nanmean() < 1
    torch.testing.assert_close(found, expected(weights, visible, x), equal_nan=True)


def test_by_chance_it_is_that_of_weights_dealt_out_anew() -> None:
    weights, visible, x = rows_of_weights()
    weights = weights + visible * torch.rand(weights.shape, generator=torch.Generator().manual_seed(2))  # no ties
    scores = random_scores(ROWS, KEYS, x.device)
    kept, dealt = _sources(visible, scores).unbind(1)
    keys = torch.arange(KEYS).expand(visible.shape)
    assert torch.equal(kept, keys)
    assert torch.equal(dealt.sort(-1).values, keys)
    assert torch.equal(dealt[~visible], keys[~visible])
    assert not torch.equal(dealt, keys)
    found = separability_and_null(weights, visible, x, scores, TOP_N)
    torch.testing.assert_close(found[1], expected(weights.gather(-1, dealt), visible, x), equal_nan=True)


def test_a_row_that_is_not_finite_has_none() -> None:
    weights, visible, x = rows_of_weights()
    weights[2, 3, 0] = torch.nan
    found = separability_and_null(weights, visible, x, random_scores(ROWS, KEYS, x.device), TOP_N)
    assert found[:, 2, 3].isnan().all()
    assert found.isnan().sum() == 4


def test_a_value_that_is_not_finite_leaves_nothing_to_tell() -> None:
    weights, visible, x = rows_of_weights()
    x[0, 3] = torch.inf
    found = separability_and_null(weights, visible, x, random_scores(ROWS, KEYS, x.device), TOP_N)
    sees_it = visible[:2, :, 3]
    assert found[:, :2][:, sees_it].isnan().all()
    assert found[:, 2:].isfinite().all()
