"""A patched model that is compiled trains as it does uncompiled."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel

from attnorm.models.patch import patch
from tests.models.tiny import FAMILIES, LEARNED, llama, tokens


def one_layer() -> PreTrainedModel:
    torch.compiler.reset()
    model = llama()
    model.model.layers = model.model.layers[:1]
    return model.train()


def gradients(model: PreTrainedModel, run: Any, **inputs: Any) -> dict[str, Tensor]:
    model.zero_grad()
    found = run(tokens(), use_cache=False, **inputs).logits.float()
    (found * torch.linspace(-1, 1, found.numel()).reshape(found.shape)).square().mean().backward()
    return {path: p.grad.clone() for path, p in model.named_parameters() if p.grad is not None}


# Tracing a threshold map takes longer than everything else; tests/attention compiles entmax15 in every run.
each = pytest.mark.parametrize(
    "name", ["ssmax", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("entmax", "asentmax"))]
)


@each
@pytest.mark.parametrize("checkpointing", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_learned_parameters_learn_the_same_beside_padding(name: str, checkpointing: bool) -> None:
    model = one_layer()
    patch(model, name, **LEARNED[name])
    visible = torch.ones(2, 12, dtype=torch.long)
    visible[0, 8:] = 0
    expected = gradients(model, model, attention_mask=visible)
    if checkpointing:
        model.gradient_checkpointing_enable()
    found = gradients(model, torch.compile(model, backend="aot_eager"), attention_mask=visible)
    assert_close(found, expected, rtol=1e-3, atol=1e-5)
    assert all((found[path] != 0).all() for path in found if "attnorm" in path), "one number per head, each of its own"


@pytest.mark.nightly  # 3 s; the test above compiles the same model, tests/attention rounds under autocast
@each
def test_autocast_rounds_as_it_does_uncompiled(name: str) -> None:
    model = one_layer()
    patch(model, name)
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(model, model)
        found = gradients(model, torch.compile(model, backend="aot_eager"))
    assert_close(found, expected, rtol=1e-2, atol=1e-3)


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_other_parameters_put_in_by_torch_func_count(backend: str) -> None:
    """Weights of an average of models, say, in the compiled code of one of them."""
    model = one_layer().eval()
    patch(model, "ssmax")
    others = {name: parameter.detach() * 1.3 for name, parameter in model.named_parameters()}

    def run(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (tokens(),), {"use_cache": False}).logits

    assert_close(torch.compile(run, backend=backend)(others), run(others))


@pytest.mark.parametrize("layers", [[0], {0: [1]}], ids=["layer", "head"])
def test_a_layer_with_sinks_of_the_model_compiles_to_one_graph(layers: Any) -> None:
    torch.compiler.reset()
    model = FAMILIES["gpt_oss"]().train()
    patch(model, "ssmax", layers=layers)
    expected = gradients(model, model)
    model.model.layers[0].self_attn.compile(fullgraph=True, backend="aot_eager")
    found = gradients(model, model)
    assert "model.layers.0.self_attn.sinks" in found
    assert_close(found, expected, rtol=1e-3, atol=1e-6)
