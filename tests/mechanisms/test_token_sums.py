"""Products over all tokens, whole and by chunks."""

import pytest
import torch

from attnorm.mechanisms import token_sums


@pytest.mark.parametrize("tokens", [token_sums.CHUNK, 2 * token_sums.CHUNK, 2 * token_sums.CHUNK + 7])
def test_chunks_give_the_product_and_its_gradients(tokens: int) -> None:
    a, b = (torch.randn(2, 3, tokens, width, dtype=torch.float64, requires_grad=True) for width in (5, 4))
    probe = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    whole, by_chunks = a.mT @ b, token_sums._sum_by_chunks(a, b)
    torch.testing.assert_close(by_chunks, whole)
    for ours, expected in zip(
        torch.autograd.grad((by_chunks * probe).sum(), (a, b)),
        torch.autograd.grad((whole * probe).sum(), (a, b)),
        strict=True,
    ):
        torch.testing.assert_close(ours, expected)
