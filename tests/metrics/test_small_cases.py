"""Sizes of one, and shapes that broadcast: what a general case does not show."""

import numpy as np
import pytest
import torch

from attnorm.metrics import reference
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.coverage import measure_coverage
from attnorm.metrics.isotropy import isotropy
from attnorm.metrics.jacobian import jacobian_norm
from attnorm.metrics.logits import logit_blocks
from attnorm.metrics.normalized import RowsBlock
from attnorm.metrics.summary import summarise
from attnorm.normalizers import Normalizer, get


def call(**more: object) -> AttentionCall:
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(2, 2, 6, 4, generator=generator) for _ in range(3))
    return AttentionCall(0, "decoder", query, key, value, scale=0.5, causal=True, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [1, 2])
def test_quantiles_of_one_row_and_the_largest_quantile_are_numbers_of_the_rows(rows: int) -> None:
    values = torch.arange(1.0, rows + 1).reshape(1, 1, rows)
    found = summarise(
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
