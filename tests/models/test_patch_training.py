"""A patched model trains: every learned number gets its gradient, whatever the engine, dtype or checkpointing."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel

from attnorm.engines import blocked as blocked_engine
from attnorm.engines.inputs import validate_inputs
from attnorm.models.patch import patch, swap
from attnorm.normalizers.registry import get
from tests.models.tiny import LEARNED, llama, logits, tiny, tokens


def gradients(model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    logits(model, ids).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short texts take several blocks, as long ones do."""
    monkeypatch.setattr(blocked_engine, "BLOCK_ELEMENTS", 300)


@pytest.fixture(params=["one block", "several blocks"])
def blocks(request: pytest.FixtureRequest) -> None:
    if request.param == "several blocks":
        request.getfixturevalue("small_blocks")


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("name", LEARNED)
def test_every_learned_number_gets_a_gradient(name: str) -> None:
    model = llama()
    handle = patch(model, name, **LEARNED[name])
    gradients(model, tokens())
    for parameter in handle.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
        assert (parameter.grad != 0).all(), "one number per head, each of its own"


@pytest.mark.parametrize("given", ["name", "object"])
def test_a_model_patched_in_inference_mode_learns(given: str) -> None:
    model = llama()
    with torch.inference_mode():
        handle = patch(model, "ssmax" if given == "name" else get("ssmax", heads=4))
    gradients(model, tokens())
    assert all(parameter.grad is not None and (parameter.grad != 0).all() for parameter in handle.parameters())


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("name", LEARNED)
def test_gradient_checkpointing_changes_no_gradient(name: str) -> None:
    model, ids = llama(), tokens()
    model.train()
    patch(model, name, **LEARNED[name])
    plain = gradients(model, ids)
    model.gradient_checkpointing_enable()
    assert_close(gradients(model, ids), plain)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "t5"])
def test_softmax_gives_the_gradients_of_the_model_itself(family: str, small_blocks: None) -> None:
    """Also to what only the attention function sees: T5's position bias and the sinks of gpt-oss."""
    model, ids = tiny(family), tokens()
    expected = gradients(model, ids)
    with swap(model, "softmax"):
        found = gradients(model, ids)
    assert {name: g for name, g in expected.items() if "relative_attention_bias" in name or "sinks" in name} or (
        family in ("llama", "gemma2")
    )
    assert_close(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["ssmax", "entmax15"])
def test_the_models_own_sinks_go_on_learning(name: str, small_blocks: None) -> None:
    model = tiny("gpt_oss")
    patch(model, name)
    found = gradients(model, tokens())
    sinks = [g for path, g in found.items() if "sinks" in path]
    assert len(sinks) == 2
    assert all(g.abs().max() > 0 for g in sinks)


def test_some_heads_leave_all_sinks_learning(small_blocks: None) -> None:
    model = tiny("gpt_oss")
    patch(model, "entmax15", layers={0: [1], 1: [0, 2]})
    found = gradients(model, tokens())
    assert all((g != 0).sum() >= 2 for path, g in found.items() if "sinks" in path)


@pytest.mark.parametrize("name", ["softmax", "ssmax", "entmax15", "sink"])
def test_autocast_trains_in_half_precision(name: str) -> None:
    model, ids = llama(), tokens()
    handle = patch(model, name)
    expected = logits(model, ids)
    with torch.autocast("cpu", torch.bfloat16):
        found = logits(model, ids)
        found.float().square().mean().backward()
    assert found.dtype == torch.bfloat16
    assert_close(found.float(), expected, rtol=0.1, atol=0.25)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in handle.parameters())
    assert all(p.grad.dtype == torch.float32 for p in handle.parameters() if p.grad is not None)


def test_a_model_in_half_precision_runs_with_parameters_in_full() -> None:
    model = llama().to(torch.bfloat16)
    handle = patch(model, "ssmax")
    assert logits(model, tokens()).dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 for p in handle.parameters())


@pytest.mark.parametrize("name", ["ssmax", "entmax15"])
def test_dropout_drops_in_training_only(name: str) -> None:
    model, ids = tiny("gpt2", attn_pdrop=0.5, resid_pdrop=0.0, embd_pdrop=0.0), tokens()
    with swap(model, name), torch.no_grad():
        sure = logits(model, ids)
        assert torch.equal(logits(model, ids), sure)
        model.train()
        drawn = [logits(model, ids) for _ in range(2)]
    assert (drawn[0] - drawn[1]).abs().max() > 1e-3


@pytest.mark.parametrize("rows", [5, 12])
def test_dropout_keeps_the_mean_and_is_the_same_in_backward(rows: int) -> None:
    q, k, v = torch.randn(3, 1, 2, 12, 8, dtype=torch.float64).requires_grad_().unbind()
    plain = validate_inputs(q, k, v, mask=None, causal=True, scale=None, positions=None)
    dropping = replace(plain, dropout=0.5)
    elements = rows * 2 * 12
    outputs = [blocked_engine.blocked(dropping, get("entmax15"), block_elements=elements) for _ in range(100)]
    exact = blocked_engine.blocked(plain, get("entmax15"), block_elements=elements)
    assert (torch.stack([o.detach() for o in outputs]).mean(0) - exact).abs().mean() < 0.1
    # The output is linear in v: if backward drops what forward dropped, <dv, v> = <g, output>.
    g = torch.randn_like(exact)
    (dv,) = torch.autograd.grad(outputs[0], v, g)
    assert_close((dv * v).sum(), (g * outputs[0]).sum())


def test_an_optimizer_moves_what_the_handle_names() -> None:
    model, ids = llama(), tokens()
    handle = patch(model, "ssmax")
    before = [p.detach().clone() for p in handle.parameters()]
    optimizer = torch.optim.SGD(handle.parameters(), lr=1.0)
    logits(model, ids).square().mean().backward()
    optimizer.step()
    assert all(not torch.equal(p, old) for p, old in zip(handle.parameters(), before, strict=True))
