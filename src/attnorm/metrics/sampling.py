"""Choose the rows of a batch to measure, and the bins of visible keys n over which they are summarised.

In a causal call row i has a context of length i, so one pass gives every curve against length. Bins are half an octave
wide and start at the longest row, so that lengths that differ by a power of two share their bins. Padded rows are not
measured.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from attnorm.metrics.call import AttentionCall

Rows = Literal["auto", "all", "last"] | int
AUTO_ROWS = 512  # rows per window for "auto"; more would take longer than the model's own pass and change little
# Source of a layer's random numbers: a generator, or numbers that were drawn before, one tensor per item of the batch.
Source = torch.Generator | list[Tensor] | None
SHORTEST = 8  # keys; statistics of shorter rows mean little


def length_bins(longest: int) -> list[tuple[int, int]]:
    """Return bins (n_low, n_high), both inclusive, longest first: (L/sqrt 2, L], (L/2, L/sqrt 2], ... to 8 keys."""
    if longest < 1:
        raise ValueError(f"the longest row must have at least one visible key, got {longest}")
    if longest < SHORTEST:
        return [(1, longest)]
    bins = []
    half_octaves = 0
    high = longest
    while high >= SHORTEST:
        half_octaves += 1
        below = math.floor(longest / 2 ** (half_octaves / 2))
        bins.append((max(below + 1, SHORTEST), high))
        high = below
    return bins


def rows_to_measure(rows: Rows, queries: int, *, causal: bool, keys: int | None = None) -> Tensor:
    """Return sorted query indices, always including the last row.

    rows: "all", "last", a number of rows, or "auto" for AUTO_ROWS. In a causal call, a quarter of them are in the
    longest bin of n, which decides verdicts, and the rest is divided evenly among all bins. Otherwise they are evenly
    spaced. keys: number of keys if it differs from the queries (a cache); row i sees i + 1 + keys - queries of them.
    """
    if queries < 1:
        raise ValueError(f"there must be at least one query, got {queries}")
    if rows == "all":
        return torch.arange(queries)
    count = AUTO_ROWS if rows == "auto" else rows
    if rows == "last":
        count = 1
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"expected rows as 'auto', 'all', 'last' or a whole number of at least 1, got {rows!r}.")
    if count >= queries:
        return torch.arange(queries)
    if not causal:
        return evenly_spaced(torch.arange(queries), count)
    n = torch.arange(queries) + 1 + (queries if keys is None else keys) - queries
    bins = [(n >= low) & (n <= high) for low, high in reversed(length_bins(int(n[-1])))]
    members = [inside.nonzero().squeeze(-1) for inside in bins]
    members = [rows_in_bin for rows_in_bin in members if len(rows_in_bin)]
    selected: list[Tensor] = []
    for_longest = count // 4
    left = count - for_longest
    for index, rows_in_bin in enumerate(members):
        last = index == len(members) - 1
        quota = min(len(rows_in_bin), left // (len(members) - index) + (for_longest if last else 0))
        left += (for_longest if last else 0) - quota
        if quota:
            selected.append(evenly_spaced(rows_in_bin, quota))
    if left:  # the bins have fewer rows than wanted: also take rows with fewer than SHORTEST keys
        selected_rows = torch.cat(selected) if selected else n[:0]
        others = torch.arange(queries)[~torch.isin(torch.arange(queries), selected_rows)]
        selected.append(evenly_spaced(others, left))
    return torch.cat(selected).sort().values


def evenly_spaced(rows: Tensor, count: int) -> Tensor:
    """Return `count` of these rows (all if there are fewer), evenly spaced, including the last."""
    if count >= len(rows):
        return rows
    indices = torch.arange(1, count + 1, dtype=torch.float64, device=rows.device) * (len(rows) / count) - 1
    return rows[indices.round().long()]


def sources_of(given: torch.Generator | Sequence[Source] | None) -> list[Source]:
    """Return the sources of random numbers as a list, one per layer."""
    return [given] if given is None or isinstance(given, torch.Generator) else list(given)


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

    def item_of(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        tensor = tensor.reshape(*([1] * (4 - tensor.dim())), *tensor.shape)
        return tensor if tensor.shape[0] == 1 else tensor[item : item + 1]  # 1: shared by all items

    item_slice = slice(item, item + 1)
    return replace(
        call,
        query_BHQD=call.query_BHQD[item_slice],
        key_BGKD=call.key_BGKD[item_slice],
        value_BGKE=call.value_BGKE[item_slice],
        mask=item_of(call.mask),
        bias=item_of(call.bias),
        inputs_BKC=None if call.inputs_BKC is None else call.inputs_BKC[item_slice],
    )


def visible_keys(call: AttentionCall) -> Tensor | None:
    """Return which keys any query sees, (B or 1, 1, K); None if all are seen."""
    if call.mask is None:
        return None
    mask = call.mask.reshape(*([1] * (4 - call.mask.dim())), *call.mask.shape)
    return mask.any(-2).any(1, keepdim=True)
