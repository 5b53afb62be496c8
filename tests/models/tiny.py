"""Small random models of the families that differ in how they call attention."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

VOCABULARY = 61
# Normalizers that learn, away from where they start.
LEARNED: dict[str, dict[str, Any]] = {
    "softmax": {"learned": True},
    "ssmax": {"bias": True},
    "sink": {"logit": -1.0},
    "asentmax": {},
    "entmax": {"learned": True, "alpha": 1.4},
}

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_GROUPED: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8}
_ALTERNATING: dict[str, Any] = {**_GROUPED, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}


def _gpt2(**options: Any) -> PreTrainedModel:
    sizes = {name: _SIZES[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")}
    return GPT2LMHeadModel(GPT2Config(**sizes, n_embd=32, n_layer=2, n_head=4, n_positions=64, **options))


def _gemma2(**options: Any) -> PreTrainedModel:
    logits = {"attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}
    # Some versions of transformers run it on SDPA by default, which leaves the softcap out.
    return Gemma2ForCausalLM(Gemma2Config(**_ALTERNATING, **logits, attn_implementation="eager", **options))


def _gpt_oss(**options: Any) -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    return GptOssForCausalLM(GptOssConfig(**_ALTERNATING, **experts, rope_parameters=rope, **options))


def _glm_moe_dsa(**options: Any) -> PreTrainedModel:
    """Each layer chooses the keys of every query; with heads enough for the choice no two keys tie."""
    choice = {"index_topk": 4, "index_n_heads": 8, "index_head_dim": 8}
    widths = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
    dense = {"first_k_dense_replace": 2, "n_routed_experts": 2, "num_experts_per_tok": 1}
    return GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**_SIZES, **choice, **widths, **dense, head_dim=4, **options))


def _t5(**options: Any) -> PreTrainedModel:
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, **options))


FAMILIES: dict[str, Callable[..., PreTrainedModel]] = {
    "gpt2": _gpt2,
    "llama": lambda **options: LlamaForCausalLM(LlamaConfig(**{**_GROUPED, **options})),
    "gemma2": _gemma2,
    "gemma3": lambda **options: Gemma3ForCausalLM(Gemma3TextConfig(**_ALTERNATING, **options)),
    "gpt_oss": _gpt_oss,
    "glm_moe_dsa": _glm_moe_dsa,
    "bert": lambda **options: BertModel(BertConfig(**_SIZES, **options)),
    "t5": _t5,
}


def tiny(family: str, **options: Any) -> PreTrainedModel:
    """A model in eval mode whose random logits are far from flat."""
    torch.default_generator.manual_seed(0)  # without the stack trace that torch keeps for absent GPUs: 4 ms
    model = FAMILIES[family](**options).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "sinks" in name:
                nn.init.normal_(parameter, std=0.5 if "sinks" in name else 0.25)
    return model


def tokens(batch: int = 2, length: int = 12, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def logits(model: PreTrainedModel, ids: Tensor, **inputs: Any) -> Tensor:
    """What the model says about every token: its logits, or its last hidden states."""
    if model.config.is_encoder_decoder:
        inputs.setdefault("decoder_input_ids", ids)
    output = model(ids, **inputs)
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


quiet_logits = torch.no_grad()(logits)
llama = partial(tiny, "llama")
