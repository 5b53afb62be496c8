"""Attention over the whole matrix in training: the same function as the engines', compiled in one graph or not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface

from attnorm import attention
from attnorm.mechanisms.soft import newton_inverse
from attnorm.models.dispatch import NORMALIZER
from attnorm.models.patched_attention import KERNEL, patched_attention
from attnorm.normalizers import threshold
from attnorm.normalizers.contract import Normalizer
from attnorm_lab.training.lm.attention import Attention, dense_attention, in_training, is_traceable
from attnorm_lab.training.lm.model import build_model
from tests.attention.test_overridden_methods import OVERRIDING, drawn
from tests_lab.training.conftest import tiny
from tests_lab.training.test_lm import metrics
from tests_lab.training.test_normalizers_in_training import Train

NORMALIZERS = ("ssmax", "sigmoid", "entmax15", "asentmax", "kneemax", "softpick", "sa_softmax", "sink", "log_scaled")


def loss_and_gradient(
    model: Any, windows: torch.Tensor, attention: Attention, half: bool = False
) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    with in_training(model, attention=attention), torch.autocast("cpu", torch.bfloat16, enabled=half):
        hidden = model.base_model(input_ids=windows, use_cache=False).last_hidden_state
    loss = (hidden.float() * torch.linspace(-1, 1, hidden.shape[-1])).square().mean()
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", NORMALIZERS)
@pytest.mark.every_second("name")
def test_the_whole_matrix_gives_what_the_engine_gives(name: str) -> None:
    model = build_model(tiny(architecture="llama", normalizer=name), vocabulary=300, end_of_text=0)
    windows = torch.randint(0, 300, (2, 20), generator=torch.Generator().manual_seed(0))
    loss, gradient = loss_and_gradient(model, windows, "engine")
    dense_loss, dense_gradient = loss_and_gradient(model, windows, "dense")
    assert dense_loss == pytest.approx(loss, rel=1e-5)
    assert torch.allclose(dense_gradient, gradient, rtol=1e-3, atol=1e-6)
    rounded, rounded_gradient = loss_and_gradient(model, windows, "dense", half=True)
    assert rounded != dense_loss
    assert rounded == pytest.approx(loss, rel=3e-2)
    assert (rounded_gradient - gradient).norm() < 0.05 * gradient.norm()


@pytest.mark.parametrize("normalizer", OVERRIDING.values(), ids=OVERRIDING)
def test_methods_that_a_subclass_overrides_give_the_weights(normalizer: Normalizer) -> None:
    module, (q, k, v) = nn.Module(), drawn()
    setattr(module, NORMALIZER, normalizer)
    found, _ = dense_attention(module, q, k, v, None)
    torch.testing.assert_close(found.transpose(1, 2), attention(q, k, v, normalizer, causal=True))


def test_afterwards_the_engine_is_back() -> None:
    model = build_model(tiny(architecture="llama", normalizer="entmax15"), vocabulary=300, end_of_text=0)
    with in_training(model, attention="dense"):
        assert AttentionInterface()[KERNEL] is dense_attention
    assert AttentionInterface()[KERNEL] is patched_attention


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.nightly)])
def test_it_is_traced_into_the_block_without_a_break(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With keys enough for the sparse maps to take their groups of keys apart."""
    monkeypatch.setattr(threshold, "FIXED_STEPS", 10)  # a graph of all steps takes longer to trace
    monkeypatch.setattr(threshold, "STEPS_AFTER_LEADERS", 6)
    torch._dynamo.reset()
    settings = tiny(architecture="llama", normalizer="kneemax", context=264, layers=1)
    model = build_model(settings, vocabulary=300, end_of_text=0)
    windows = torch.randint(0, 300, (1, 264), generator=torch.Generator().manual_seed(0))
    loss, gradient = loss_and_gradient(model, windows, "dense")
    for block in model.model.layers:
        block.compile(dynamic=False, backend=backend, fullgraph=True)
    compiled_loss, compiled_gradient = loss_and_gradient(model, windows, "dense")
    assert compiled_loss == pytest.approx(loss, rel=1e-5)
    assert torch.allclose(compiled_gradient, gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(  # tests/mechanisms/test_soft.py compiles soft on every commit
    ("name", "options"),
    [
        ("linear", {}),
        pytest.param("soft", {"landmarks": 4, "learned": 16, "normalised": True}, marks=pytest.mark.nightly),
    ],
)
def test_sums_over_tokens_are_traced_into_the_block_without_a_break(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(newton_inverse, "__defaults__", (2,))  # each step of soft is traced
    torch._dynamo.reset()
    settings = tiny(
        architecture="llama", normalizer=name, normalizer_options=options, context=264, layers=1, width=32, heads=2
    )
    model = build_model(settings, vocabulary=300, end_of_text=0)
    assert is_traceable(model)
    windows = torch.randint(0, 300, (1, 264), generator=torch.Generator().manual_seed(0))
    loss, gradient = loss_and_gradient(model, windows, "engine")
    for block in model.model.layers:
        block.compile(dynamic=False, backend="eager", fullgraph=True)
    with in_training(model, compiled=True):
        assert AttentionInterface()[KERNEL] is patched_attention
    compiled_loss, compiled_gradient = loss_and_gradient(model, windows, "engine")
    assert compiled_loss == pytest.approx(loss, rel=1e-5)
    assert torch.allclose(compiled_gradient, gradient, rtol=1e-3, atol=1e-6)


def test_training_goes_the_same_way(train: Train, tmp_path: Path) -> None:
    ways: tuple[Attention, ...] = ("engine", "dense")
    for way in ways:
        train(tmp_path / way, architecture="llama", normalizer="kneemax", steps=10, options={"attention": way})
    ends = [metrics(tmp_path / way)[-1]["valid_loss"] for way in ways]
    assert ends[0] == pytest.approx(ends[1], rel=1e-4)


def test_a_mechanism_is_refused_before_anything_is_written(train: Train, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'gaussian'.*--dense"):
        train(tmp_path / "run", normalizer="gaussian", options={"attention": "dense"})
    assert not (tmp_path / "run").exists()


def test_padding_is_refused() -> None:
    model = build_model(tiny(architecture="llama", normalizer="entmax15"), vocabulary=300, end_of_text=0)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    with in_training(model, attention="dense"), pytest.raises(ValueError, match="padding"):
        model(input_ids=torch.ones(2, 4, dtype=torch.long), attention_mask=mask)
