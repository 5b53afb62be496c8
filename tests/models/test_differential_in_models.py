"""`differential_v2` in models of `train lm`: a second projection of queries, lambda read from the layer's input."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import DynamicCache

import attnorm
from attnorm.models.patch_state import normalizer_of, patched_modules
from attnorm_lab.training.lm.model import LMSettings, build_model
from attnorm_lab.training.run import make_optimizer
from tests.models.tiny import tiny

WIDTH, HEADS = 16, 4
ARCHITECTURES = ["llama", "nope", "gpt2"]


def settings(architecture: str, **changed: Any) -> LMSettings:
    return LMSettings(architecture=architecture, layers=2, heads=HEADS, width=WIDTH, context=32, vocab=300, **changed)


def model(architecture: str, normalizer: str = "differential_v2") -> Any:
    made = build_model(settings(architecture, normalizer=normalizer), vocabulary=300, end_of_text=0).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in made.named_parameters():
            if value.dim() > 1 and "wte" not in name and "embed" not in name:
                value.copy_(torch.randn(value.shape, generator=generator) * 0.3)  # attention that is not uniform
    return made


def tokens() -> Tensor:
    return torch.randint(1, 300, (2, 20), generator=torch.Generator().manual_seed(2))


def attention_of(model: Any) -> tuple[nn.Module, nn.Module]:
    """The first attention module, and its output projection."""
    found = model.transformer.h[0].attn if hasattr(model, "transformer") else model.model.layers[0].self_attn
    return found, getattr(found, "c_proj", None) or found.o_proj


@torch.no_grad()
def seen_by(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Input of the first attention module, and its heads' outputs (B, L, H, D)."""
    seen: dict[str, Tensor] = {}
    attention, projection = attention_of(model)

    def before(module: nn.Module, args: Any, options: Any) -> None:
        seen["input"] = options.get("hidden_states", args[0] if args else None)

    handles = [
        attention.register_forward_pre_hook(before, with_kwargs=True),
        projection.register_forward_pre_hook(lambda module, args: seen.__setitem__("heads", args[0])),
    ]
    model(input_ids=ids)
    for handle in handles:
        handle.remove()
    return seen["input"], seen["heads"].unflatten(-1, (HEADS, -1))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_heads_are_the_difference_of_two_softmax_models(architecture: str) -> None:
    made, ids = model(architecture), tokens()
    attention, _ = attention_of(made)
    mechanism: Any = normalizer_of(attention)
    x, found = seen_by(made, ids)
    first = copy.deepcopy(made)
    attnorm.unpatch(first)
    second = copy.deepcopy(first)
    queries: Any = attention_of(second)[0]
    with torch.no_grad():
        if architecture == "gpt2":
            queries.c_attn.weight[:, :WIDTH] = mechanism.second.weight.T
            queries.c_attn.bias[:WIDTH] = 0
        else:
            queries.q_proj.weight.copy_(mechanism.second.weight)
    share = torch.sigmoid(x @ mechanism.from_hidden.weight.T)[..., None]
    expected = seen_by(first, ids)[1] - share * seen_by(second, ids)[1]
    assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert (share * seen_by(second, ids)[1]).abs().max() > 0.1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_decoding_with_a_cache_equals_one_pass(architecture: str) -> None:
    made, ids = model(architecture), tokens()
    cache = DynamicCache()
    parts = [made(input_ids=ids[:, :7], past_key_values=cache).logits]
    parts += [made(input_ids=ids[:, at : at + 1], past_key_values=cache).logits for at in range(7, 20)]
    assert_close(torch.cat(parts, 1), made(input_ids=ids, use_cache=False).logits, rtol=1e-4, atol=1e-4)


def test_a_saved_model_is_the_same(tmp_path: Path) -> None:
    made, ids = model("llama"), tokens()
    attnorm.save_pretrained(made, tmp_path)
    again = attnorm.from_pretrained(tmp_path).eval()
    options = again.config.attnorm["recipes"][0]["options"]
    assert options == {"heads": HEADS, "width": WIDTH, "head_width": WIDTH // HEADS}
    with torch.no_grad():
        assert_close(again(input_ids=ids).logits, made(input_ids=ids).logits)


def test_it_has_one_more_projection_per_layer_that_decays_as_the_others() -> None:
    chosen = settings("llama", normalizer="differential_v2")
    plain, made = (build_model(one, 300, 0) for one in (settings("llama"), chosen))
    sizes = [sum(value.numel() for value in each.parameters()) for each in (plain, made)]
    assert sizes[1] - sizes[0] == 2 * (WIDTH * WIDTH + HEADS * WIDTH)
    decaying, free = make_optimizer(made, chosen).param_groups
    for module in patched_modules(made).values():
        mechanism: Any = normalizer_of(module)
        assert any(value is mechanism.second.weight for value in decaying["params"])
        assert any(value is mechanism.from_hidden.weight for value in free["params"])


def test_all_of_it_learns() -> None:
    made, ids = model("llama").train(), tokens()
    made(input_ids=ids, labels=ids).loss.backward()
    learned = [value for name, value in made.named_parameters() if "attnorm" in name]
    assert len(learned) == 4
    assert all(value.grad is not None and value.grad.abs().max() > 0 for value in learned)


def test_where_it_cannot_be() -> None:
    trained = tiny("llama")
    with pytest.raises(ValueError, match=r"differential_v2.*another architecture.*train lm"):
        attnorm.patch(trained, "differential_v2")
    with pytest.raises(ValueError, match=r"LlamaAttention.*Gemma3Attention"):
        attnorm.patch(tiny("gemma3"), "differential_v2", width=32, head_width=8)
    with pytest.raises(ValueError, match=r"head_width=8"):
        attnorm.get("differential_v2", head_width=8)
    with pytest.raises(ValueError, match=r"head_width=8.*head_width=4"):
        attnorm.patch(trained, "differential_v2", width=32, head_width=4)
