"""Models that cannot be watched are refused by name, and what works is read from the installed transformers."""

import pytest
import torch
import transformers

from attnorm.models.dispatch import UnsupportedModel, attention_sites, check_observable, supported_families
from attnorm.models.observe import observe
from tests.models.families import FAMILIES, tiny

BY_THEMSELVES = {
    "bloom": lambda: transformers.BloomConfig(vocab_size=99, hidden_size=32, n_layer=1, n_head=4),
    "gptj": lambda: transformers.GPTJConfig(
        vocab_size=99, n_embd=32, n_layer=1, n_head=4, rotary_dim=4, n_positions=64
    ),
    "mpt": lambda: transformers.MptConfig(vocab_size=99, d_model=32, n_layers=1, n_heads=4),
}


@pytest.mark.parametrize("name", BY_THEMSELVES)
def test_models_that_compute_attention_themselves_are_refused(name: str) -> None:
    model = transformers.AutoModelForCausalLM.from_config(BY_THEMSELVES[name]())
    with pytest.raises(UnsupportedModel) as refusal:
        check_observable(model)
    assert type(model).__name__ in str(refusal.value)
    assert f"'{name}'" in str(refusal.value)
    assert "llama" in str(refusal.value)
    with pytest.raises(UnsupportedModel), observe(model, lambda call: None):
        pass
    assert name not in supported_families()


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "siglip"])
def test_tested_families_are_among_those_that_work(name: str) -> None:
    assert name in supported_families()
    check_observable(tiny(name, FAMILIES[name].kernels[0]))


def test_sites_follow_the_model() -> None:
    sites = attention_sites(tiny("t5")).values()
    assert [site.path for site in sites][:2] == [
        "encoder.block.0.layer.0.SelfAttention",
        "encoder.block.1.layer.0.SelfAttention",
    ]
    assert len({site.stack for site in sites}) == 3


def test_a_subclass_that_keeps_its_parents_forward_counts() -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention

    class Quieter(LlamaAttention):
        pass

    model = tiny("llama")
    model.model.layers[0].self_attn.__class__ = Quieter
    seen = []
    with torch.no_grad(), observe(model, seen.append):
        model(input_ids=torch.ones(1, 4, dtype=torch.long))
    assert len(seen) == 2
