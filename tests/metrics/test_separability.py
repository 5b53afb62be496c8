"""Separability where keys are nearly equally close or heavy: continuous, and the same for one N as for several."""

import torch
from torch import Tensor

from attnorm.metrics.nested_sets import NestedSets
from attnorm.metrics.separability import NEAR_TIE, draw_permutations, separability_and_null
from attnorm.metrics.vectors import _separabilities
from tests.metrics import reference

KEYS, TIED = 32, 4


def tied_rows() -> tuple[Tensor, Tensor]:
    """Logits (r, w) and vectors (r, w, E): in half of the rows a key outside is as close as a selected one, in the
    others the last selected weight and the next one are equal."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(16, KEYS, generator=generator, dtype=torch.float64).sort(descending=True).values
    x = torch.randn(16, KEYS, 8, generator=generator, dtype=torch.float64)
    weights = logits.softmax(-1)
    y = weights[..., None] * x
    s = y[:, :TIED].sum(1)
    closeness = 2 * (y * s[:, None]).sum(-1) - y.square().sum(-1)
    target = closeness[:8, :TIED].median(-1).values  # the root for which the key outside has this closeness
    length = s[:8].norm(dim=-1)
    x[:8, TIED:] *= 0.01
    x[:8, TIED] = ((1 - (1 - target / length**2).sqrt()) / weights[:8, TIED])[:, None] * s[:8]
    logits[8:, TIED] = logits[8:, TIED - 1]
    return logits, x


def shares(logits: Tensor, x: Tensor) -> Tensor:
    """Separability of each row and of 3 permutations, (r, 1 + 3, 2)."""
    visible = torch.ones(len(x), 1, KEYS, dtype=torch.bool)
    given = NestedSets.of(logits.softmax(-1)[:, None], x, visible, (TIED,), logits[:, None])
    targets = draw_permutations(visible, 3, torch.Generator().manual_seed(1))
    return _separabilities(given, targets, torch.arange(len(x))[:, None])[:, :, 0, :, 0]


def test_separability_is_continuous_where_keys_are_equally_close_or_heavy() -> None:
    logits, x = tied_rows()
    expected = shares(logits, x)
    generator = torch.Generator().manual_seed(2)
    for noise, dtype in ((1e-7, torch.float64), (1e-6, torch.float64), (1e-6, torch.float32)):
        moved_logits, moved_x = (
            (t + noise * torch.randn(t.shape, generator=generator, dtype=t.dtype) * t.abs()).to(dtype)
            for t in (logits, x)
        )
        rounding = 0.0 if dtype == torch.float64 else 1e-6
        change = (shares(moved_logits, moved_x) - expected).abs()
        assert change.max() <= 4 * (noise + rounding) / NEAR_TIE


def test_the_separability_of_one_set_does_not_depend_on_the_others() -> None:
    """The first weights are nearly equal, so that every set has one with two keys exchanged beside it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 12, 3, generator=generator, dtype=torch.float64)
    weights = 1 + 0.005 * torch.rand(1, 40, 12, generator=generator, dtype=torch.float64)
    visible = torch.ones_like(weights, dtype=torch.bool)

    def of(*sizes: int) -> Tensor:
        rows = NestedSets.of(weights, x, visible, sizes, None)
        no_draws = torch.empty(1, 0, 1, 40, 12, dtype=torch.long)
        return separability_and_null(rows, rows.ranked_keys(), no_draws)[:, 0]

    together = of(1, 2, 3, 6)
    for index, N in enumerate((1, 2, 3, 6)):
        alone = of(N)[..., 0]
        torch.testing.assert_close(together[..., index], alone)
        for row in range(5):
            expected = reference.separability(weights[0, row], x[0], weights[0, row].argsort(descending=True), N)
            torch.testing.assert_close(alone[0, row, 0], expected)
