"""A patched model compiles into one graph, with one call where it attends in blocks, and trains as uncompiled."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch.testing import assert_close
from transformers import PreTrainedModel

from attnorm.engines import blocked as blocked_engine
from attnorm.models.attach import normalizer_of, patched_modules
from attnorm.models.patch import patch
from tests.models.tiny import LEARNED, llama, tokens

# What attends in blocks: thresholds, learned or not, an order of the keys, a selection.
IN_BLOCKS: list[Any] = [("entmax", LEARNED["entmax"]), ("asentmax", {}), ("stick_breaking", {})]
IN_BLOCKS += [pytest.param(*kind, marks=pytest.mark.nightly) for kind in (("kneemax", {}), ("topk", {"k": 3}))]

pytestmark = pytest.mark.as_installed


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short texts take several blocks, as long ones do."""
    torch.compiler.reset()
    monkeypatch.setattr(blocked_engine, "BLOCK_ELEMENTS", 300)


def one_layer(**options: Any) -> PreTrainedModel:
    model = llama(**options)
    model.model.layers = model.model.layers[:1]
    return model.train()


def gradients(model: PreTrainedModel, run: Any, **inputs: Any) -> dict[str, Tensor]:
    model.zero_grad()
    found = run(tokens(), use_cache=False, **inputs).logits.float()
    (found * torch.linspace(-1, 1, found.numel()).reshape(found.shape)).square().mean().backward()
    return {path: p.grad.clone() for path, p in model.named_parameters() if p.grad is not None}


def assert_trains_the_same(model: PreTrainedModel, backend: Any, **inputs: Any) -> None:
    expected = gradients(model, model, **inputs)
    found = gradients(model, torch.compile(model, backend=backend, fullgraph=True), **inputs)
    assert_close(found, expected, rtol=1e-3, atol=1e-5)
    learned = [path for path in found if "attnorm" in path]
    assert all((found[path] != 0).all() for path in learned), "one number per head, each of its own"


def has_compiler() -> bool:
    try:
        return bool(get_cpp_compiler())
    except InvalidCxxCompiler:
        return False


@pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler")
def test_attention_compiled_for_the_machine_trains_the_same() -> None:
    model = one_layer()
    patch(model, "entmax15")
    expected = gradients(model, model)
    model.model.layers[0].self_attn.compile(fullgraph=True)
    assert_close(gradients(model, model), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler")
def test_a_model_compiled_for_the_machine_trains_the_same() -> None:
    model = one_layer()
    patch(model, "entmax15")
    assert_trains_the_same(model, "inductor")


@pytest.mark.parametrize(("name", "options"), IN_BLOCKS)
def test_a_graph_holds_one_call_and_trains_the_same(name: str, options: dict[str, Any]) -> None:
    model = one_layer()
    patch(model, name, **options)
    visible = torch.ones(2, 12, dtype=torch.long)
    visible[0, 8:] = 0
    compiled = CompileCounterWithBackend("aot_eager")
    assert_trains_the_same(model, compiled, attention_mask=visible)
    (graph,) = compiled.graphs
    assert [node.target for node in graph.graph.nodes].count(torch.ops.attnorm.blocked) == 1


def test_gradient_checkpointing_changes_nothing() -> None:
    model = one_layer()
    patch(model, "entmax", **LEARNED["entmax"])
    expected = gradients(model, model)
    model.gradient_checkpointing_enable()
    assert_close(gradients(model, torch.compile(model, backend="aot_eager")), expected, rtol=1e-3, atol=1e-5)


def test_autocast_rounds_as_it_does_uncompiled() -> None:
    model = one_layer()
    patch(model, "asentmax")
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(model, model)
        found = gradients(model, torch.compile(model, backend="aot_eager", fullgraph=True))
    assert_close(found, expected, rtol=1e-2, atol=1e-3)


def test_backward_drops_the_weights_that_forward_dropped() -> None:
    """The output is linear in the values: <gradient, values> = <g, output> if both passes dropped the same."""
    module = one_layer(attention_dropout=0.5)
    patch(module, "entmax15")
    attend = module.model.layers[0].self_attn
    attend.o_proj = nn.Identity()
    positions = (torch.ones(1, 12, 8), torch.zeros(1, 12, 8))
    x = torch.randn(1, 12, 32)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    outputs = [compiled(x, position_embeddings=positions, attention_mask=None)[0] for _ in range(2)]
    assert not torch.equal(*outputs)
    g = torch.randn_like(outputs[0])
    (gradient,) = torch.autograd.grad(outputs[0], attend.v_proj.weight, g)
    assert_close((gradient * attend.v_proj.weight).sum(), (g * outputs[0]).sum())


def test_layers_compiled_one_by_one_share_a_graph() -> None:
    model = llama().train()
    patch(model, "entmax15")
    expected = gradients(model, model)
    compiled = CompileCounterWithBackend("aot_eager")
    for layer in model.model.layers:
        layer.compile(backend=compiled)
    assert_close(gradients(model, model), expected, rtol=1e-3, atol=1e-5)
    assert compiled.frame_count == 1


def test_a_copy_of_a_model_calls_its_own_normalizer() -> None:
    """Also under the code that was compiled for the original."""
    model = one_layer()
    patch(model, "entmax", alpha=1.3)
    twin = copy.deepcopy(model)
    for module in patched_modules(twin).values():
        normalizer_of(module).map.alpha = 1.8
    for chosen in (model, twin):
        assert_trains_the_same(chosen, "aot_eager")
