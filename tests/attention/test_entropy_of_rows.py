"""The entropy of each row that engines pass to rules, against its definition; 0 for rows without keys."""

import math

import pytest
import torch
from torch import Tensor

from attnorm.engines import fused, one_pass
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


def logits_of(given: Inputs, factor: Tensor | None = None) -> Tensor:
    """Hidden keys at -inf, in float64."""
    logits = given.scale * given.q_BHQD.double() @ given.k_BGKD.double().repeat_interleave(2, 1).mT
    logits = logits if factor is None else factor.double()[..., None] * logits
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


@pytest.mark.parametrize("kind", ["all", "mask", "mask, causal"])
@pytest.mark.parametrize("scaled", [False, True])
def test_the_entropy_of_the_engine_of_one_pass(kind: str, scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its kernel replaced by the sums that it computes."""
    given = inputs(kind, 6)
    factor = torch.rand(2, 4, 6, generator=torch.Generator().manual_seed(1)) + 0.5 if scaled else None
    logits = logits_of(given, factor)

    def kernel(inputs: Inputs, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        weights = logits.softmax(-1).nan_to_num(0.0)
        mean = weights @ values.double().repeat_interleave(2, 1)
        return mean.float(), (logits.logsumexp(-1) / math.log(2)).float()

    monkeypatch.setattr(one_pass, "_launch", kernel)
    monkeypatch.setattr(one_pass.one_pass_operators, "row_dots", lambda a, b: (a * b).sum(-1))
    found = one_pass._entropy_of_few_queries(given, factor)
    torch.testing.assert_close(found.double(), entropy_of(logits), rtol=1e-5, atol=1e-5)
    assert (found[logits.isinf().all(-1)] == 0).all()
