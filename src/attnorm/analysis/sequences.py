"""The sequences of a batch and which of their rows to measure; padded rows are not measured."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from attnorm.analysis.settings import Rows
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.sampling import rows_to_measure


@dataclass(frozen=True)
class Sequences:
    """Sequences of a call with the same rows: a whole batch, or one item if padding differs."""

    call: AttentionCall
    rows: Tensor  # sorted query indices


def query_masks(model_inputs: Mapping[str, Tensor], *, encoder_decoder: bool) -> dict[str, Tensor]:
    """Return which queries are tokens, (B, Q) boolean, for each kind of attention with padding.

    The masks of attention calls hide padded keys only. Padded queries still see keys and must be ignored.
    """
    decoder = "decoder_attention_mask" if encoder_decoder else "attention_mask"
    names = {"encoder": "attention_mask", "decoder": decoder, "cross": decoder}
    masks = {kind: model_inputs[name].bool() for kind, name in names.items() if name in model_inputs}
    return {kind: mask for kind, mask in masks.items() if mask.dim() == 2 and not bool(mask.all())}


def sequences(call: AttentionCall, tokens_BQ: Tensor | None, rows: Rows) -> Iterator[Sequences]:
    """Yield the batch, or each item of a padded batch, so that every sequence gives the same rows as alone."""
    queries = call.query_BHQD.shape[-2]
    if tokens_BQ is None or tokens_BQ.shape != (call.query_BHQD.shape[0], queries):
        yield Sequences(call, rows_to_measure(rows, queries, causal=call.causal, keys=call.key_BGKD.shape[-2]))
        return
    for item, tokens in enumerate(tokens_BQ.cpu()):
        present = tokens.nonzero().squeeze(-1)
        if len(present):
            yield Sequences(one_sequence(call, item), present[rows_to_measure(rows, len(present), causal=call.causal)])


def one_sequence(call: AttentionCall, item: int) -> AttentionCall:
    """Return the call for one item of the batch; mask and bias get four dimensions."""

    def one(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        tensor = tensor.reshape(*([1] * (4 - tensor.dim())), *tensor.shape)
        return tensor if tensor.shape[0] == 1 else tensor[item : item + 1]  # 1: shared by all items

    here = slice(item, item + 1)
    return replace(
        call,
        query_BHQD=call.query_BHQD[here],
        key_BGKD=call.key_BGKD[here],
        value_BGKE=call.value_BGKE[here],
        mask=one(call.mask),
        bias=one(call.bias),
        inputs_BKC=None if call.inputs_BKC is None else call.inputs_BKC[here],
    )


def visible_keys(call: AttentionCall) -> Tensor | None:
    """Return which keys any query sees, (B or 1, 1, K); None if all are seen."""
    if call.mask is None:
        return None
    mask = call.mask.reshape(*([1] * (4 - call.mask.dim())), *call.mask.shape)
    return mask.any(-2).any(1, keepdim=True)
