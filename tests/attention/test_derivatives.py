"""Which derivatives each engine has: second derivatives, forward mode and torch.func, or an error that says so."""

import pytest
import torch
from torch import Tensor

import attnorm
from attnorm.engines import blocked as blocked_engine
from tests.attention.calls import Call


def inputs() -> list[Tensor]:
    return [t.requires_grad_() for t in Call(batch=1, queries=7, keys=7).tensors()[:3]]


def second(output: Tensor, q: Tensor, k: Tensor) -> Tensor:
    (first,) = torch.autograd.grad(output.square().sum(), q, create_graph=True)
    return torch.autograd.grad(first.square().sum(), k)[0]


@pytest.mark.parametrize("name", ["softmax", "entmax15", "sigmoid"])
def test_blocks_have_second_derivatives_where_one_block_holds_all_rows(name: str) -> None:
    q, k, v = inputs()
    logits = q @ k.transpose(-1, -2) / 2
    expected = second(attnorm.normalize(logits, name) @ v, q, k)
    for options in ({"engine": "blocked"}, {"return_weights": True}):
        found = attnorm.attention(q, k, v, name, **options)
        output = found[0] if isinstance(found, tuple) else found
        torch.testing.assert_close(second(output, q, k), expected, atol=1e-10, rtol=0)


def test_more_blocks_raise_at_the_second_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_engine, "BLOCK_ELEMENTS", 1)
    q, k, v = inputs()
    for wanted in (q, k, v):
        with pytest.raises(RuntimeError, match="return_weights=True"):
            second(attnorm.attention(q, k, v, "entmax15", engine="blocked"), q, wanted)


def test_the_fused_engine_has_first_derivatives_only() -> None:
    q, k, v = inputs()
    with pytest.raises(RuntimeError, match="not implemented"):
        second(attnorm.attention(q, k, v, "softmax", engine="fused"), q, k)


@pytest.mark.parametrize("elements", [1, 2**20], ids=["blocks", "one block"])
@pytest.mark.parametrize("name", ["softmax", "ssmax", "sink", "sigmoid", "relu"])
def test_forward_mode_leaves_the_fused_engine(name: str, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_engine, "BLOCK_ELEMENTS", elements)
    q, k, v = (t.detach() for t in inputs())
    normalizer = attnorm.get(name).double()
    tangent, step = torch.randn_like(q), 1e-6

    def attend(q: Tensor) -> Tensor:
        return attnorm.attention(q, k, v, normalizer, causal=True)

    with torch.no_grad():
        expected = (attend(q + step * tangent) - attend(q - step * tangent)) / (2 * step)
    found = torch.func.jvp(attend, (q,), (tangent,))[1]
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=0)
    with pytest.raises(ValueError, match="engine='auto'"):
        torch.func.jvp(lambda q: attnorm.attention(q, k, v, "softmax", engine="fused"), (q,), (tangent,))


def test_a_map_with_a_backward_of_its_own_has_no_forward_mode() -> None:
    q, k, v = (t.detach() for t in inputs())
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(lambda q: attnorm.attention(q, k, v, "entmax15"), (q,), (q,))


def test_vmap_gives_what_a_batch_gives_in_blocks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_engine, "BLOCK_ELEMENTS", 1)
    q, k, v = (t.detach() for t in inputs())
    many = torch.stack([q, 2 * q])
    for name in ("sigmoid", "entmax15"):
        found = torch.func.vmap(lambda q: attnorm.attention(q, k, v, name))(many)  # noqa: B023
        expected = torch.stack([attnorm.attention(one, k, v, name) for one in many])
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["ssmax", "sink", "asentmax", "alibi"])
def test_a_normalizer_given_by_name_has_gradients_of_torch_func(name: str) -> None:
    q, k, v = (t.detach() for t in inputs())

    def loss(q: Tensor) -> Tensor:
        return attnorm.attention(q, k, v, name).square().sum()

    (expected,) = torch.autograd.grad(loss(q.requires_grad_()), q)
    torch.testing.assert_close(torch.func.grad(loss)(q.detach()), expected)
