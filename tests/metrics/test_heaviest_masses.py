"""Masses of the heaviest keys beside a kernel's sums, against weights row by row."""

import pytest
import torch

from attnorm.metrics.call import AttentionCall
from attnorm.metrics.rows import _top_masses


@pytest.mark.parametrize("top_n", [(1, 3), (2,), (40, 1)])
def test_masses_are_sums_of_the_largest_weights_and_other_rows_are_nan(top_n: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 18, 4, generator=generator) for heads in (4, 2, 2))
    call = AttentionCall(0, "decoder", query, key, value, scale=0.7, causal=True, mask=torch.ones(18, 18).tril().bool())
    rows = torch.tensor([2, 5, 11, 16, 17])
    some = torch.tensor([1, 3, 4])
    logits = (query @ key.repeat_interleave(2, 1).mT * 0.7)[:, :, rows]
    visible = torch.ones(18, 18).tril().bool()[rows]
    factor = torch.rand(2, 4, len(rows), 1, generator=generator) + 0.5
    tops, expected = [], []
    for by in (None, factor):
        z = (logits if by is None else logits * by).masked_fill(~visible, -torch.inf)
        tops.append((by, z.logsumexp(-1)))
        weights = z.softmax(-1).sort(-1, descending=True).values
        expected.append(torch.stack([weights[..., :N].sum(-1) for N in top_n], -1))
    found = _top_masses(call, rows, some, tops, top_n)
    for one, exact in zip(found, expected, strict=True):
        assert one.shape == (2, 4, 5, len(top_n))
        assert one[:, :, [0, 2]].isnan().all()
        torch.testing.assert_close(one[:, :, some], exact[:, :, some], rtol=1e-5, atol=1e-6)
