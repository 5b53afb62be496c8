"""What a model is, for the manifest of a measurement: enough to tell it from every other."""

import hashlib
import json
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from attnorm.models.dispatch import attention_sites, running_normalizer
from attnorm.models.loaded import LoadedModel
from attnorm.models.positions import longest_context, position_kind, text_config
from attnorm.models.weights_digest import add_weights

# Of a configuration: where it was read from and by whom, not what the model is.
NOT_THE_MODEL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures")


def describe(loaded: LoadedModel) -> dict[str, Any]:
    """Plain values, ready for JSON."""
    model = loaded.model
    config = text_config(model)
    heads = _first(config, "num_attention_heads", "n_head", "num_heads", "decoder_attention_heads")
    width = _first(config, "hidden_size", "n_embd", "d_model")
    alike = not getattr(config, "is_heterogeneous", False)  # what nothing is said about follows from the rest
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
        "kernel": model.config._attn_implementation,
        "fingerprint": fingerprint(model),
        **({} if loaded.tokenizer_given is None else {"tokenizer": loaded.tokenizer_given}),
    }


def fingerprint(model: PreTrainedModel) -> str:
    """sha256 of the configuration, and of names, shapes and some values of all weights: fine-tuned weights differ."""
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
    """The first of these that is a number for the whole model."""
    return next((int(found) for name in names if isinstance(found := _stated(config, name), int)), None)


def _stated(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except RuntimeError:  # what differs from layer to layer (the width of Gemma 4's heads) is not told
        return None
