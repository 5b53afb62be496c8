"""What is hidden stays hidden: garbage in padding reaches nothing, and a query that sees nothing gets zeros."""

import pytest
import torch

import attnorm
from tests.attention.calls import Call, calling, learned, outputs_and_gradients
from tests.attention.reference import Case, typical

PADDED = Call(key_heads=2, queries=6, keys=6)


@typical(1)
@pytest.mark.parametrize(("garbage", "causal"), [(float("nan"), True), (float("nan"), False), (float("inf"), True)])
def test_garbage_in_padding_reaches_no_output_and_no_gradient(case: Case, garbage: float, causal: bool) -> None:
    normalizer = case.make()
    mask = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    mask[0, ..., :2] = False
    mask[1, ..., 3:] = False
    hidden_keys = ~mask[:, 0, 0, :, None]
    q, k, v, hidden = PADDED.tensors()
    if causal:  # here the first two queries of the first sequence see nothing
        q[0, :, :2] = garbage
    clean = [q.nan_to_num(0, 0, 0), k.masked_fill(hidden_keys[:, None], 7.0), v.masked_fill(hidden_keys[:, None], 7.0)]
    dirty = [q, k.masked_fill(hidden_keys[:, None], garbage), v.masked_fill(hidden_keys[:, None], garbage)]
    attend = calling(case, normalizer, {"mask": mask, "causal": causal})
    expected = outputs_and_gradients(attend, [*clean, hidden], learned(normalizer))
    actual = outputs_and_gradients(attend, [*dirty, hidden], learned(normalizer))
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-12, rtol=0)
    for gradient in actual[2:4]:
        assert gradient.masked_select(hidden_keys[:, None]).eq(0).all()


@typical(0)
def test_a_key_that_only_causality_hides_reaches_nothing(case: Case) -> None:
    """The mask shows the last key to the first query alone, which is too early to see it."""
    normalizer = case.make()
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[1:, -1] = False
    q, k, v, hidden = PADDED.tensors()
    k[..., -1, :] = v[..., -1, :] = float("nan")
    attend = calling(case, normalizer, {"mask": mask, "causal": True})
    for result in outputs_and_gradients(attend, [q, k, v, hidden], learned(normalizer)):
        assert result.isfinite().all()


@typical(1)
def test_garbage_in_queries_before_the_first_key_reaches_nothing(case: Case) -> None:
    """Without a mask: six queries and four keys, of which the first two queries see none."""
    normalizer = case.make()
    q, k, v, hidden = PADDED.tensors()
    q[..., :2, :] = float("nan")
    attend = calling(case, normalizer, {"causal": True})
    output, *gradients = outputs_and_gradients(attend, [q, k[..., :4, :], v[..., :4, :], hidden], learned(normalizer))
    assert output[..., :2, :].eq(0).all()
    assert output.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients)


@typical(0)
@pytest.mark.parametrize("rows", ["some", "all"])
def test_a_query_that_sees_nothing_gets_zeros_and_finite_gradients(case: Case, rows: str) -> None:
    normalizer = case.make()
    mask = torch.ones(6, 6, dtype=torch.bool)
    empty = slice(1, 3) if rows == "some" else slice(None)
    mask[empty] = False
    tensors = PADDED.tensors()
    attend = calling(case, normalizer, {"mask": mask})
    output, *gradients = outputs_and_gradients(attend, tensors, learned(normalizer))
    assert output[..., empty, :].eq(0).all()
    assert gradients[0][..., empty, :].eq(0).all()
    assert all(gradient.isfinite().all() for gradient in gradients)
    if rows == "all":
        assert all(gradient.eq(0).all() for gradient in gradients)


@typical(1)
def test_empty_rows_are_zeros_in_every_dtype(case: Case) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        normalizer = case.make().to(dtype)
        attend = calling(case, normalizer, {"causal": True})
        tensors = Call(queries=6, keys=2).tensors(dtype)
        output, *gradients = outputs_and_gradients(attend, tensors, learned(normalizer))
        assert output.dtype == dtype
        assert output[..., :4, :].eq(0).all()
        assert all(gradient.isfinite().all() for gradient in gradients)


def test_a_length_exponent_below_zero_meets_an_empty_row() -> None:
    normalizer = attnorm.get("asentmax", gamma=-0.5)
    tensors = Call(queries=6, keys=2).tensors()[:3]
    results = outputs_and_gradients(
        lambda q, k, v: attnorm.attention(q, k, v, normalizer, causal=True), tensors, learned(normalizer)
    )
    assert all(result.isfinite().all() for result in results)
