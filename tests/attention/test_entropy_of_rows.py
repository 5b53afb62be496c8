"""The entropy of each row that the fused engine passes to rules, against its definition; 0 for rows without keys."""

import pytest
import torch
from torch import Tensor

from attnorm.engines import fused
from attnorm.engines.inputs import Inputs


def inputs(kind: str, queries: int, dtype: torch.dtype = torch.float32) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, n, 8, generator=generator, dtype=dtype) for heads, n in ((4, queries), (2, 6)))
    mask = None
    if "mask" in kind:
        mask = torch.rand(2, 1, queries, 6, generator=generator) < 0.6
        mask[0, 0, 0] = False  # this row sees nothing
        mask[1, 0, 1] = torch.arange(6) == 0  # and this one a single key
    return Inputs(q, k, k, mask, causal="causal" in kind, scale=0.7)


def logits_of(given: Inputs) -> Tensor:
    """Hidden keys at -inf, in float64."""
    logits = given.scale * given.q_BHQD.double() @ given.k_BGKD.double().repeat_interleave(2, 1).mT
    seen = torch.ones_like(logits, dtype=torch.bool) if given.mask is None else given.mask.expand_as(logits)
    if given.causal:
        seen = seen & torch.ones(logits.shape[-2:], dtype=torch.bool).tril(given.keys - given.queries)
    return logits.masked_fill(~seen, -torch.inf)


def entropy_of(logits: Tensor) -> Tensor:
    weights = logits.softmax(-1)
    return torch.where(weights > 0, -weights * weights.log(), 0.0).sum(-1).nan_to_num(0.0)


@pytest.mark.parametrize("kind", ["all", "causal", "mask", "mask, causal"])
@pytest.mark.parametrize("queries", [2, 6, 8])
def test_the_entropy_of_the_fused_engine(kind: str, queries: int) -> None:
    given = inputs(kind, queries)
    found = fused._softmax_entropy(given)
    assert found.shape == (2, 4, queries, 1)
    torch.testing.assert_close(found[..., 0].double(), entropy_of(logits_of(given)), rtol=1e-5, atol=1e-5)
    empty = logits_of(given).isinf().all(-1)
    assert (found[..., 0][empty] == 0).all()
