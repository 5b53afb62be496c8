"""The device of these tests - CUDA, or what ATTNORM_TEST_DEVICE says, to rehearse them without a GPU - and models."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import attnorm
from tests.models import tiny as models

DEVICE = os.environ.get("ATTNORM_TEST_DEVICE", "cuda")
NEEDS_DEVICE = pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device")

FAMILIES = ["gpt2", "llama", "gemma3", "gpt_oss", "bert"]
# 'soft' has no causal form, the other three are another architecture.
OTHERS = ("soft", "differential", "differential_v2", "tda")
NORMALIZERS = [name for name in attnorm.available() if name not in OTHERS]
# One of each way through the engines: rescaled queries, blocks, a sink, distances.
DIFFERENT = ["ssmax", "entmax15", "sink", "scale_invariant"]
# So that the rows here are longer than the window or k.
NARROW: dict[str, dict[str, Any]] = {"local": {"window": 3}, "topk": {"k": 3}, "scale_invariant": {"tau": 2.0}}


def tiny(family: str, **options: Any) -> PreTrainedModel:
    """On the device."""
    model = models.tiny(family, **options)
    if family == "gpt_oss":
        model.set_experts_implementation("eager")  # the others have no float64
    return model.to(DEVICE)


def wide(layers: int = 2) -> PreTrainedModel:
    """On the device, with heads of width 16."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=models.VOCABULARY, num_hidden_layers=layers, max_position_embeddings=128, **sizes)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model.to(DEVICE)


def tokens(batch: int = 2, length: int = 12, seed: int = 0) -> Tensor:
    return models.tokens(batch, length, seed).to(DEVICE)


def relative_error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))
