"""Products over all tokens, whole and by chunks."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from attnorm.mechanisms import linear


@pytest.mark.parametrize("tokens", [linear.SUM_CHUNK, 2 * linear.SUM_CHUNK, 2 * linear.SUM_CHUNK + 7])
def test_chunks_give_the_product_and_its_gradients(tokens: int) -> None:
    a, b = (torch.randn(2, 3, tokens, width, dtype=torch.float64, requires_grad=True) for width in (5, 4))
    probe = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    whole, by_chunks = a.mT @ b, linear._sum_by_chunks(a, b)
    torch.testing.assert_close(by_chunks, whole)
    for ours, expected in zip(
        torch.autograd.grad((by_chunks * probe).sum(), (a, b)),
        torch.autograd.grad((whole * probe).sum(), (a, b)),
        strict=True,
    ):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("exporting", [False, True])
def test_a_gpu_takes_chunks_unless_the_graph_is_exported(exporting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    by_chunks: list[int] = []
    monkeypatch.setattr(linear, "_sum_by_chunks", lambda a, b: by_chunks.append(a.shape[-2]))
    monkeypatch.setattr(linear, "is_exporting", lambda: exporting)
    with FakeTensorMode():
        a = torch.empty(1, 2, 2 * linear.SUM_CHUNK, 4, device="cuda")
        linear.sum_over_tokens(a, a)
    assert by_chunks == ([] if exporting else [2 * linear.SUM_CHUNK])
