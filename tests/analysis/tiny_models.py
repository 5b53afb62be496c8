"""Random models of a few thousand parameters, made from their configurations: nothing is downloaded."""

import torch
from transformers import (
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

VOCABULARY = 64
_seed = torch.default_generator.manual_seed  # torch.manual_seed keeps a stack trace for absent GPUs: 4 ms


def gpt2(layers: int = 2, heads: int = 2, positions: int = 128, seed: int = 0) -> PreTrainedModel:
    _seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=positions, n_embd=16 * heads, n_layer=layers, n_head=heads,
        bos_token_id=0, eos_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


def llama(seed: int = 0) -> PreTrainedModel:
    _seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=0, eos_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def diffllama(seed: int = 0) -> PreTrainedModel:
    """Its attention modules attend twice in a forward: to one half of the values, then to the other."""
    _seed(seed)
    config = DiffLlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=0, eos_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    return DiffLlamaForCausalLM(config).eval()


def t5(seed: int = 0) -> PreTrainedModel:
    _seed(seed)
    config = T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config).eval()


def vit(seed: int = 0) -> PreTrainedModel:
    _seed(seed)
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, image_size=16, patch_size=4
    )  # fmt: skip
    return ViTModel(config).eval()


def ids(length: int, batch: int | None = None, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (length,) if batch is None else (batch, length)
    return torch.randint(1, VOCABULARY, shape, generator=generator)
