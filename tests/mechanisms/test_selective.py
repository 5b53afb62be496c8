"""Selective attention: what head 0 selected is pushed away from later queries, also across a cache."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import attnorm
from attnorm.mechanisms.selective import Selective
from tests.attention.calls import Call, assert_all_close, mask_per_head, outputs_and_gradients
from tests.attention.reference import HEADS, seen
from tests.mechanisms import reference

LENGTH = 7
SEQUENCE = Call(batch=2, key_heads=2, queries=LENGTH, keys=LENGTH)

MASKS: dict[str, Tensor | None] = {
    "none": None,
    "padding": torch.tensor([[False, False, True, True, True, True, True], [True] * 5 + [False] * 2])[:, None, None],
    "two sequences": torch.tensor([0, 0, 0, 1, 1, 1, 1])[:, None] == torch.tensor([0, 0, 0, 1, 1, 1, 1]),
    "per head": torch.cat([mask_per_head(), mask_per_head()[:, :, :2]], dim=2),
    "of queries": torch.tensor([True, True, False, True, True, True, True])[:, None],
}


def strong(call: Call = SEQUENCE) -> list[Tensor]:
    """q, k, v with logits large enough for the penalty to matter."""
    q, k, v, _ = call.tensors()
    return [3 * q, k, v]


def definition(mask: Tensor | None, causal: bool = True, scale: float | None = None) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        visible = seen(q, k, mask, causal)
        k, v = (t.repeat_interleave(HEADS // t.shape[1], dim=1) for t in (k, v))
        return reference.selective(q, k, v, visible, scale)

    return attend


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("rows", [1, 2, LENGTH])
def test_outputs_and_gradients_equal_the_definition(name: str, causal: bool, rows: int) -> None:
    mechanism = Selective(block_elements=2 * HEADS * LENGTH * rows)
    options = {"mask": MASKS[name], "causal": causal, "scale": 0.9}
    tensors = strong()
    assert_all_close(
        outputs_and_gradients(lambda q, k, v: attnorm.attention(q, k, v, mechanism, **options), tensors),
        outputs_and_gradients(definition(MASKS[name], causal, 0.9), tensors),
    )


def test_the_penalty_matters_and_spares_the_first_key() -> None:
    tensors = strong()
    plain, penalized = (attnorm.attention(*tensors, name, causal=True) for name in ("softmax", "selective"))
    assert (plain - penalized)[..., 2:, :].abs().max() > 0.1
    torch.testing.assert_close(plain[..., :2, :], penalized[..., :2, :])
    _, penalty = Selective().attend(*tensors)
    assert penalty.shape == (2, 1, 1, LENGTH)
    assert penalty[..., 0].eq(0).all()
    assert penalty[..., -1].eq(0).all()
    assert penalty[..., 1:-1].gt(0).any()


@pytest.mark.parametrize("name", ["none", "padding"])
def test_token_by_token_with_the_carried_penalty_equals_the_full_sequence(name: str) -> None:
    mechanism, mask = Selective(), MASKS[name]
    q, k, v = strong()
    full = attnorm.attention(q, k, v, mechanism, mask=mask, causal=True)
    penalty = None
    for t in range(LENGTH):
        seen = None if mask is None else mask[..., : t + 1]
        output, penalty = mechanism.attend(
            q[..., t : t + 1, :], k[..., : t + 1, :], v[..., : t + 1, :], penalty=penalty, mask=seen
        )
        torch.testing.assert_close(output, full[..., t : t + 1, :], atol=1e-12, rtol=0)


@pytest.mark.parametrize("cut", [1, 3, 6])
def test_a_prompt_then_the_rest_equals_the_full_sequence_with_gradients(cut: int) -> None:
    mechanism = Selective(block_elements=1)

    def in_two_parts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first, penalty = mechanism.attend(*(t[..., :cut, :] for t in (q, k, v)))
        second, _ = mechanism.attend(q[..., cut:, :], k, v, penalty=penalty)
        return torch.cat([first, second], dim=-2)

    tensors = strong()
    assert_all_close(outputs_and_gradients(in_two_parts, tensors), outputs_and_gradients(definition(None), tensors))


@pytest.mark.parametrize("left", [3, 0], ids=["left", "right"])
def test_padding_equals_no_padding(left: int) -> None:
    tensors, garbage = strong(), strong(Call(key_heads=2, queries=3, keys=3))
    padded = [torch.cat([p[..., :left, :], t, p[..., left:, :]], dim=-2) for p, t in zip(garbage, tensors, strict=True)]
    mask = torch.zeros(LENGTH + 3, dtype=torch.bool)
    mask[left : left + LENGTH] = True
    actual = attnorm.attention(*padded, "selective", mask=mask, causal=True)[..., left : left + LENGTH, :]
    torch.testing.assert_close(actual, attnorm.attention(*tensors, "selective", causal=True), atol=1e-12, rtol=0)


def test_the_last_token_changes_no_earlier_output() -> None:
    tensors = strong()
    before = attnorm.attention(*tensors, "selective", causal=True)
    for t in tensors:
        t[..., -1, :] += 3
    after = attnorm.attention(*tensors, "selective", causal=True)
    assert torch.equal(before[..., :-1, :], after[..., :-1, :])


def test_three_dimensions_are_heads_length_and_width() -> None:
    q, k, v = (t[:1] for t in strong())
    actual = attnorm.attention(q[0], k[0], v[0], "selective", causal=True)
    torch.testing.assert_close(actual, attnorm.attention(q, k, v, "selective", causal=True)[0])


def test_vmap_of_gradients_runs_in_several_blocks() -> None:
    q, k, v = strong()

    def loss(q: Tensor) -> Tensor:
        return attnorm.attention(q[None], k[:1], v[:1], Selective(block_elements=1), causal=True).square().sum()

    q.requires_grad_()
    (expected,) = torch.autograd.grad(sum(loss(one) for one in q), q)
    assert_close(torch.func.vmap(torch.func.grad(loss))(q.detach()), expected, rtol=0, atol=1e-12)
