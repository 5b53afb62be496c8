"""Differential attention: the difference of two softmax maps per pair of heads."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import attnorm
from attnorm.mechanisms.differential import Differential
from tests.attention.calls import Call, assert_all_close, mask_per_head, outputs_and_gradients
from tests.attention.reference import seen
from tests.mechanisms import reference

CALLS: dict[str, Call] = {
    "causal": Call(queries=7, keys=7, value_width=6, options={"causal": True}),
    "queries at the end": Call(queries=3, keys=7, options={"causal": True}),
    "more queries than keys": Call(queries=5, keys=3, options={"causal": True}),
    "shared key heads": Call(key_heads=2, keys=7, options={"mask": torch.tensor([True] * 5 + [False] * 2)}),
    "a mask per head": Call(keys=7, options={"mask": mask_per_head(), "causal": True}),
}


def tensors_of(call: Call) -> list[Tensor]:
    q, k, v, _ = call.tensors()
    return [q, k, v[:, : call.key_heads // 2]]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("head_norm", [True, False], ids=["norm", "no norm"])
def test_outputs_and_gradients_equal_two_softmax_maps(name: str, head_norm: bool) -> None:
    call = CALLS[name]
    mechanism = Differential(width=4, depth=3, head_norm=head_norm).double()

    def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        visible = seen(q, k, call.options.get("mask"), call.options.get("causal", False))
        # A pair of query heads meets one pair of key heads, which several pairs may share.
        k = k.unflatten(1, (-1, 2)).repeat_interleave(q.shape[1] // k.shape[1], dim=1).flatten(1, 2)
        v = v.repeat_interleave(q.shape[1] // 2 // v.shape[1], dim=1)
        return reference.differential(q, k, v, visible, mechanism.vectors, 3, head_norm)

    tensors, parameters = tensors_of(call), list(mechanism.parameters())
    assert_all_close(
        outputs_and_gradients(
            lambda q, k, v: attnorm.attention(q, k, v, mechanism, **call.options), tensors, parameters
        ),
        outputs_and_gradients(definition, tensors, parameters),
        atol=1e-9,
    )


def test_lambda_starts_at_the_papers_values() -> None:
    for depth, start in [(0, 0.2), (1, 0.8 - 0.6 * math.exp(-0.3)), (12, 0.8 - 0.6 * math.exp(-3.6))]:
        mechanism = Differential(depth=depth)
        with torch.no_grad():
            mechanism.vectors.zero_()
        assert mechanism.share(torch.float32).item() == pytest.approx(start)


def test_the_row_sum_is_one_minus_lambda() -> None:
    q, k, _ = tensors_of(CALLS["causal"])
    mechanism = Differential(head_norm=False).double()
    output = attnorm.attention(q, k, torch.ones(2, 2, 7, 1, dtype=torch.float64), mechanism, causal=True)
    torch.testing.assert_close(output, (1 - mechanism.share(torch.float64)).expand_as(output))


def test_garbage_in_padding_reaches_nothing_and_empty_rows_are_zeros() -> None:
    mechanism = Differential(width=4).double()
    mask = torch.tensor([False, False, True, True, True])
    q, k, v = tensors_of(Call())
    for t in (q, k, v):
        t[..., :2, :] = float("nan")
    output, *gradients = outputs_and_gradients(
        lambda q, k, v: attnorm.attention(q, k, v, mechanism, mask=mask, causal=True), [q, k, v], [mechanism.vectors]
    )
    assert output[..., :2, :].eq(0).all()
    assert all(result.isfinite().all() for result in (output, *gradients))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_errors_are_at_most_twice_those_of_the_plain_computation(dtype: torch.dtype) -> None:
    mechanism = Differential(width=32, depth=4)
    q, k = (torch.randn(1, 4, 61, 32).to(dtype) for _ in range(2))
    v = torch.randn(1, 2, 61, 32).to(dtype)
    exact = attnorm.attention(q.double(), k.double(), v.double(), mechanism, causal=True)
    visible = torch.ones(61, 61, dtype=torch.bool).tril()
    weights = attnorm.normalize(q @ k.transpose(-1, -2) / math.sqrt(32), "softmax", visible)
    difference = weights[:, 0::2] - mechanism.share(dtype) * weights[:, 1::2]
    plain = torch.nn.functional.rms_norm(difference @ v, (32,), eps=1e-5) * (1 - mechanism.start)
    ours = attnorm.attention(q, k, v, mechanism, causal=True)
    assert ours.dtype == dtype
    assert (ours - exact).abs().max() <= 2 * (plain - exact).abs().max()


@pytest.mark.parametrize(("batch", "queries"), [(0, 5), (2, 0)])
def test_an_empty_call_gives_an_empty_output(batch: int, queries: int) -> None:
    q, k, v = tensors_of(Call(batch=batch, queries=queries))
    for mask in (None, torch.ones(5, dtype=torch.bool)):
        assert attnorm.attention(q, k, v, "differential", causal=True, mask=mask).shape == (batch, 2, queries, 4)


def test_decoding_one_token_equals_the_last_row() -> None:
    mechanism = Differential(width=4).double()
    q, k, v = tensors_of(CALLS["causal"])
    full = attnorm.attention(q, k, v, mechanism, causal=True)
    last = attnorm.attention(q[..., -1:, :], k, v, mechanism, causal=True)
    torch.testing.assert_close(last, full[..., -1:, :], atol=1e-12, rtol=0)


def test_forward_mode_leaves_sdpa() -> None:
    q, k, v = (t.detach() for t in tensors_of(CALLS["causal"]))
    mechanism = Differential(width=4).double()
    tangent, step = torch.randn_like(q), 1e-6

    def attend(q: Tensor) -> Tensor:
        return attnorm.attention(q, k, v, mechanism, causal=True)

    expected = (attend(q + step * tangent) - attend(q - step * tangent)) / (2 * step)
    assert_close(torch.func.jvp(attend, (q,), (tangent,))[1], expected, atol=1e-7, rtol=0)


@pytest.mark.parametrize(
    ("name", "options"),
    [("differential", {}), ("differential_v2", {"heads": 2, "width": 6}), ("forget", {"heads": 4, "width": 6})],
)
def test_autocast_rounds_nothing_inside(name: str, options: dict[str, int]) -> None:
    q, k, v = Call(queries=33, keys=33, width=16).tensors(torch.float32)[:3]
    k, v = {"differential": (k, v[:, :2]), "differential_v2": (k[:, :2], v[:, :2])}.get(name, (k, v))
    normalizer, states = attnorm.get(name, **options), torch.randn(2, 33, 6) if options else None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attnorm.attention(q, k, v, normalizer, causal=True, hidden_states=states)

    def under_autocast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return attend(q, k, v)

    tensors, parameters = [q, k, v], list(normalizer.parameters())
    actual, expected = (outputs_and_gradients(run, tensors, parameters) for run in (under_autocast, attend))
    assert all(map(torch.equal, actual, expected))
