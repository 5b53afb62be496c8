"""How a model knows where a token stands, and how far that reaches."""

from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel

PositionKind = Literal["learned", "sinusoidal", "rotary", "relative", "none"]

TABLE_NAMES = ("wpe", "position_embedding", "position_embeddings", "embed_positions", "pos_embed", "pos_emb")
LIMITS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_sequence_length", "n_ctx")


def longest_context(model: PreTrainedModel) -> tuple[int | None, bool]:
    """Positions that the model was made for (None: any number), and whether going beyond is impossible."""
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
    """The part of a nested configuration that is about text (the decoder, where there are two)."""
    return model.config.get_text_config(decoder=True)


def _positions(model: PreTrainedModel) -> tuple[PositionKind, int | None]:
    """The kind, and the rows of the table that can be used where it is one."""
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
    """Rows at the start that no token uses."""
    offset = getattr(table, "offset", None)
    if isinstance(offset, int):
        return offset
    return 0 if table.padding_idx is None else table.padding_idx + 1
