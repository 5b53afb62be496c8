"""A .gguf file is a model: what transformers reads out of it is what the same weights in a folder give."""

from pathlib import Path

import numpy as np
import pytest
import torch

from attnorm.models.load import CannotLoad, load
from tests.analysis.tiny_models import VOCABULARY, llama

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp keeps the two halves of a rotary pair side by side."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def write_llama(path: Path) -> torch.nn.Module:
    model = llama()
    config, weights = model.config, model.state_dict()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    tensors = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    for layer in range(config.num_hidden_layers):
        tensors |= {f"blk.{layer}.{theirs}": f"model.layers.{layer}.{ours}" for theirs, ours in NAMES.items()}
    for theirs, ours in tensors.items():
        weight = weights[f"{ours}.weight"]
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(theirs.split(".")[-1])
        weight = weight if heads is None else interleaved(weight, heads)
        writer.add_tensor(f"{theirs}.weight", np.ascontiguousarray(weight.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def test_the_model_in_the_file_is_the_model_that_was_written(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "tiny.gguf")
    loaded = load(tmp_path / "tiny.gguf")
    assert loaded.name == "tiny"
    ids = torch.arange(1, 33)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_file_that_only_has_the_name_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "fake.gguf").write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(CannotLoad, match="GGUF"):
        load(tmp_path / "fake.gguf")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    write_llama(tmp_path / "tiny.gguf")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:100])
    with pytest.raises(CannotLoad, match="cut"):
        load(tmp_path / "cut.gguf")


def test_a_folder_with_a_gguf_file_names_the_file(tmp_path: Path) -> None:
    write_llama(tmp_path / "tiny.gguf")
    with pytest.raises(CannotLoad, match=r"tiny\.gguf"):
        load(tmp_path)


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnorm.models.source.NEEDED", ("gguf", "no_such_package"))
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(CannotLoad, match="pip install no_such_package"):
        load(tmp_path / "x.gguf")
