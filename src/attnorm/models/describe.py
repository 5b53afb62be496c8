"""Describe a model for the manifest of a measurement: sizes, position encoding, and a hash of its weights.

Quantized weights are tensor subclasses that have few of a tensor's operations (torchao's cannot be reshaped). The plain
tensors inside them are hashed: those that the subclass names for torch.compile, or its dequantized values.
"""

import hashlib
import json
import re
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnorm.engines.execution import runs_asynchronously
from attnorm.models.dispatch import attention_sites, running_normalizer
from attnorm.models.load import LoadedModel
from attnorm.models.private_names import kernel_name

# Entries of a configuration that do not change the model.
NOT_THE_MODEL = (
    "_name_or_path",
    "attnorm",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "use_cache",
    "architectures",
)

TABLE_NAMES = ("wpe", "position_embedding", "position_embeddings", "embed_positions", "pos_embed", "pos_emb")
LIMITS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_sequence_length", "n_ctx")
SAMPLED = 4096  # values of each weight that enter the hash


def describe(loaded: LoadedModel) -> dict[str, Any]:
    """Describe a model with plain values, ready for JSON."""
    model = loaded.model
    config = text_config(model)
    heads = _first(config, "num_attention_heads", "n_head", "num_heads", "decoder_attention_heads")
    width = _first(config, "hidden_size", "n_embd", "d_model")
    alike = not getattr(config, "is_heterogeneous", False)  # then sizes that the config leaves out follow from others
    weights = next(model.parameters())
    return {
        "name": loaded.name,
        "revision": loaded.revision,
        "class": type(model).__name__,
        "model_type": model.config.model_type,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": weights.device.type,
        "layers": len(attention_sites(model)),
        "heads": heads,
        "kv_heads": _first(config, "num_key_value_heads") or (heads if alike else None),
        "head_dim": _first(config, "head_dim", "d_kv") or (width // heads if alike and width and heads else None),
        "max_positions": longest_context(model)[0],
        "position_kind": position_kind(model),
        "kernel": kernel_name(model.config),
        "fingerprint": fingerprint(model),
        **({} if loaded.tokenizer_given is None else {"tokenizer": loaded.tokenizer_given}),
    }


def fingerprint(model: PreTrainedModel) -> str:
    """Return the SHA-256 of the configuration and of names, shapes and sampled values of all weights."""
    digest = hashlib.sha256(json.dumps(_plain(model.config.to_dict()), sort_keys=True, default=str).encode())
    add_weights(digest, model)
    for path, module in model.named_modules():
        if isinstance(normalizer := running_normalizer(module), nn.Module):
            digest.update(f"{path} {normalizer!r}".encode())
    return digest.hexdigest()


def _plain(config: Any) -> Any:
    if isinstance(config, dict):
        return {str(key): _plain(value) for key, value in config.items() if key not in NOT_THE_MODEL}
    return config


def _first(config: Any, *names: str) -> int | None:
    """Return the first of these config entries that is a number for the whole model."""
    return next((int(entry) for name in names if isinstance(entry := _config_entry(config, name), int)), None)


def _config_entry(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except RuntimeError:  # the value differs between layers (width of Gemma 4's heads)
        return None


PositionKind = Literal["learned", "sinusoidal", "rotary", "relative", "none"]


def longest_context(model: PreTrainedModel) -> tuple[int | None, bool]:
    """Return the number of positions of the model (None: unlimited), and whether longer inputs are impossible."""
    config = text_config(model)
    stated = next((int(getattr(config, name)) for name in LIMITS if getattr(config, name, None)), None)
    kind, table = _positions(model)
    if kind in ("learned", "sinusoidal"):
        limits = [limit for limit in (stated, table) if limit]
        return (min(limits), True) if limits else (None, False)
    return (None if kind == "relative" else stated), False


def position_kind(model: PreTrainedModel) -> PositionKind:
    return _positions(model)[0]


def text_config(model: PreTrainedModel) -> Any:
    """Return the text part of a nested configuration (the decoder, if there are two)."""
    return model.config.get_text_config(decoder=True)


def _positions(model: PreTrainedModel) -> tuple[PositionKind, int | None]:
    """Return the kind of positions, and the usable rows if they are an embedding table."""
    modules = [(path.rsplit(".", 1)[-1], module) for path, module in model.named_modules()]
    if any("Rotary" in type(module).__name__ for _, module in modules):
        return "rotary", None
    tables = [module for name, module in modules if isinstance(module, nn.Embedding) and name in TABLE_NAMES]
    if tables:
        sizes = [table.num_embeddings - _offset(table) for table in tables]
        fixed = all("Sinusoid" in type(table).__name__ or not table.weight.requires_grad for table in tables)
        return "sinusoidal" if fixed and "Sinusoid" in type(tables[0]).__name__ else "learned", min(sizes)
    for name, parameter in model.named_parameters():
        if name.rsplit(".", 1)[-1] in TABLE_NAMES and parameter.dim() >= 2:
            return "learned", parameter.shape[-2]
    if any("relative" in name for name, _ in modules):
        return "relative", None
    return "none", None


def _offset(table: nn.Embedding) -> int:
    """Return the number of rows at the start of the table that no token uses."""
    offset = getattr(table, "offset", None)
    if isinstance(offset, int):
        return offset
    return 0 if table.padding_idx is None else table.padding_idx + 1


ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # of an object in memory: another one in every process


def add_weights(digest: Any, module: nn.Module) -> None:
    """Update a hashlib digest with the parameters of a module."""
    pieces: list[bytes | Tensor] = []
    for name, weight in module.named_parameters():
        pieces.append(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        pieces += _values(weight)
    # A GPU is waited for once, not once for each weight.
    by_device: dict[torch.device, list[Tensor]] = {}
    for piece in pieces:
        if isinstance(piece, Tensor):
            by_device.setdefault(piece.device, []).append(piece)
    arrived = {device: iter(torch.cat(sent).cpu().split(list(map(len, sent)))) for device, sent in by_device.items()}
    for piece in pieces:
        digest.update(next(arrived[piece.device]).numpy().tobytes() if isinstance(piece, Tensor) else piece)


def _values(weight: Tensor) -> list[bytes | Tensor]:
    """Return what of a weight enters the hash: bytes, and bytes in tensors on a GPU."""
    if weight.device.type == "meta":
        return []
    if hasattr(weight, "__tensor_flatten__"):
        names, how = weight.__tensor_flatten__()
        pieces: list[bytes | Tensor] = [f"{type(weight).__name__} {ADDRESS.sub('', str(how))}".encode()]
        for name in names:
            inner = getattr(weight, name)
            pieces += [f"{name} {tuple(inner.shape)} {inner.dtype}".encode(), *_values(inner)]
        return pieces
    try:
        return [_sample(weight)]
    except (NotImplementedError, RuntimeError, TypeError):
        if type(weight) in (Tensor, nn.Parameter):
            raise
        with suppress(NotImplementedError, RuntimeError, TypeError):  # name, shape and dtype must do
            return [_sample(weight.dequantize())]
        return []


def _sample(weight: Tensor) -> bytes | Tensor:
    flat = weight.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // SAMPLED)]
    if type(sample) is Tensor and runs_asynchronously(sample):
        return sample.contiguous().view(torch.uint8)
    return sample.cpu().contiguous().view(torch.uint8).numpy().tobytes()
