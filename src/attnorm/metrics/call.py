"""`AttentionCall`: one attention call of a model, as the metrics receive it, and its logits in blocks (`logit_blocks`).

A call contains everything that decides its logits, weights and output. Shape letters: see engines/inputs.py. (The
engines use their own record, `Inputs`: it belongs to a call that attnorm computes, this one to a call that a model
makes. `call_of` converts validated inputs to a call.) Calls of several layers can be stacked to one.

A block of logits has a few heads and rows, so that no Q x K array is needed. Its size fits the CPU cache, and it
contains only keys that its rows can see. Hidden keys have the logit `LOW`: its exp is 0, and LOW times 0 is 0. Keys are
padded to a multiple of `GROUP`, so that rows can be divided into groups.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from attnorm.arithmetic import round_up
from attnorm.engines.execution import runs_asynchronously, sent_to
from attnorm.engines.inputs import Inputs, to_four_dimensions
from attnorm.normalizers.block import Positions
from attnorm.normalizers.contract import Mechanism, Normalizer
from attnorm.theory.selection import at_least_float32

Kind = Literal["decoder", "encoder", "cross"]

LOW = -1e30
GROUP = 16
# Logits per block and thread: two arrays of this size fit the cache of a core. A GPU needs larger blocks.
BLOCK_ELEMENTS = 2**19
CUDA_BLOCK_ELEMENTS = 2**25
MAX_THREADS = 8
FEW_ROWS = 64  # up to this many rows, a GPU computes unneeded keys faster than the program learns which are needed


@dataclass(frozen=True)
class AttentionCall:
    """Queries and keys after position encoding, with the model's own numbers of heads; no array of size Q x K."""

    layer: int  # index among the layers of its kind
    kind: Kind  # causal self-attention, bidirectional self-attention, or attention to an encoder
    query_BHQD: Tensor
    key_BGKD: Tensor
    value_BGKE: Tensor
    scale: float
    causal: bool  # aligned bottom-right: the last query sees every key
    # Boolean, True = may attend, broadcastable to (B, H, Q, K). A mask with one row per query includes causality.
    mask: Tensor | None = None
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap)
    sinks_H: Tensor | None = None  # one learned logit per head that takes mass and gives no output
    bias: Tensor | None = None  # added to the logits (T5's relative positions), broadcastable to (B, H, Q, K)
    dropout: float = 0.0  # probability that the model drops a weight in training
    normalizer: Normalizer | Mechanism | None = None  # normalizer of a patched layer; None: softmax
    # Layer input that the keys are projected from, if requested; of a call to attnorm, that of the queries only.
    inputs_BKC: Tensor | None = None
    positions: Positions | None = None  # (1 or B, Q) and (1 or B, K); None: the last query is at the last key


def can_be_stacked(call: AttentionCall) -> bool:
    """Whether calls of several layers can be measured as one: on a GPU, if only q, k, v and sinks differ."""
    alone = call.bias is not None or call.normalizer is not None or call.inputs_BKC is not None
    alone = alone or call.positions is not None
    mask_per_head = call.mask is not None and call.mask.dim() > 2 and call.mask.shape[-3] > 1
    return saves_time(call) and not alone and not mask_per_head


def saves_time(call: AttentionCall) -> bool:
    return call.query_BHQD.is_cuda


def has_parameters_per_head(normalizer: nn.Module) -> bool:
    """Whether a normalizer has parameters per head, so that it cannot be applied to stacked layers."""
    return any(tensor.numel() > 1 for tensor in (*normalizer.parameters(), *normalizer.buffers()))


def same_shape(a: AttentionCall, b: AttentionCall) -> bool:
    def about(call: AttentionCall) -> tuple[object, ...]:
        tensors = (call.query_BHQD, call.key_BGKD, call.value_BGKE)
        shapes = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        return call.kind, call.scale, call.causal, call.softcap, call.dropout, call.sinks_H is None, shapes

    return a.mask is b.mask and about(a) == about(b)


def call_bytes(call: AttentionCall) -> int:
    """Return the size of queries, keys and values in bytes."""
    return sum(tensor.nbytes for tensor in (call.query_BHQD, call.key_BGKD, call.value_BGKE))


def without_data(call: AttentionCall) -> AttentionCall:
    """Return the call with shapes and settings only; tensors are on the meta device or None."""
    shapes = {name: getattr(call, name).to("meta") for name in ("query_BHQD", "key_BGKD", "value_BGKE")}
    return replace(call, **shapes, mask=None, sinks_H=None, bias=None, normalizer=None, inputs_BKC=None)


def stack_calls(calls: Sequence[AttentionCall]) -> AttentionCall:
    """Join calls of the same shape to one call: head h of call i becomes head i H + h."""
    first = calls[0]
    if len(calls) == 1:
        return first
    query, key, value = (
        torch.cat([getattr(call, name) for call in calls], 1) for name in ("query_BHQD", "key_BGKD", "value_BGKE")
    )
    sinks = None if first.sinks_H is None else torch.cat([call.sinks_H for call in calls if call.sinks_H is not None])
    return replace(first, query_BHQD=query, key_BGKD=key, value_BGKE=value, sinks_H=sinks)


def mask_of(inputs: Inputs) -> Tensor | None:
    """Return the mask as an AttentionCall has it: one with a row for each query has causality in it."""
    rows = inputs.mask is not None and inputs.mask.shape[-2] > 1
    return inputs.visible(0, inputs.queries, inputs.keys) if rows else inputs.mask


def call_of(inputs: Inputs) -> AttentionCall:
    return AttentionCall(
        layer=0,
        kind="decoder" if inputs.causal else "encoder",
        query_BHQD=inputs.q_BHQD.detach(),
        key_BGKD=inputs.k_BGKD.detach(),
        value_BGKE=inputs.v_BGKE.detach(),
        scale=inputs.scale,
        causal=inputs.causal,
        mask=mask_of(inputs),
        softcap=inputs.softcap,
        positions=positions_of(inputs),
        inputs_BKC=states_of(inputs),
    )


def states_of(inputs: Inputs) -> Tensor | None:
    """Return the hidden states of the queries, (B, Q, C): of the layer input, `query_states` reads the last Q only."""
    return None if inputs.hidden_states is None else inputs.hidden_states.expand(len(inputs.q_BHQD), -1, -1)


def positions_of(inputs: Inputs) -> Positions | None:
    """Return positions of the queries and keys, (1 or B, Q) and (1 or B, K)."""
    if inputs.positions is None:
        return None
    positions = Positions.of(inputs.positions, inputs.weights_shape, inputs.q_BHQD.device)
    query, key = (t.reshape(-1, t.shape[-1]) for t in (positions.query, positions.key))
    return Positions(query, key)


class LogitWorkspace:
    """A buffer that all blocks share: allocating memory takes longer than the computation in it."""

    def __init__(self, like: Tensor) -> None:
        self._memory = like.new_empty(0)

    def array(self, *shape: int) -> Tensor:
        """Return an array of that shape; it overwrites the previous one."""
        size = math.prod(shape)
        if self._memory.numel() < size:
            self._memory = self._memory.new_empty(size)
        return self._memory[:size].view(shape)


def too_few_to_wait(queries: Tensor) -> bool:
    """Whether computing all keys is cheaper than waiting for the GPU to learn which keys are needed."""
    return len(queries) <= FEW_ROWS and runs_asynchronously(queries)


@dataclass(frozen=True)
class LogitBlock:
    """Logits (h, r, w) of some heads and rows of one batch item. The next block overwrites them."""

    logits: Tensor
    common: int  # the first `common` keys are visible to all rows
    tail: Tensor  # boolean (1 or h, r, w - common): which of the other keys are visible
    n: Tensor  # number of visible keys, (1 or h, r)
    item: int  # index in the batch
    heads: slice
    rows: slice  # part of the requested rows
    queries: Tensor  # their query indices, (r,)
    first_key: int  # key index of the first column
    reach: list[int] | None = None  # number of visible keys of each row, if these are the first keys; None with a mask

    @cached_property
    def visible(self) -> Tensor:
        """Which keys each row sees, (1 or h, r, w)."""
        return pad(self.tail, (self.common, 0), value=True)

    def visible_on_cpu(self, rows: Tensor) -> Tensor:
        """Return the visible keys of some rows (indices), (1 or h, rows, w). Synchronizes only if there is a mask."""
        if self.reach is None:
            return self.visible.cpu()[:, rows]
        return (torch.arange(self.logits.shape[-1]) < torch.tensor(self.reach)[rows, None])[None]

    def n_on_cpu(self) -> Tensor:
        """Return the number of visible keys, (1 or h, r). Synchronizes only if there is a mask."""
        return self.n.cpu() if self.reach is None else torch.tensor([self.reach])

    def hide(self, logits: Tensor) -> Tensor:
        """Set the logits of hidden keys to LOW, in place."""
        logits[..., self.common :].masked_fill_(~self.tail, LOW)
        return logits

    @property
    def first_visible(self) -> Tensor:
        """Column of each row's first visible key, (1 or h, r); 0 if there is none."""
        if self.common:
            return torch.zeros_like(self.n, dtype=torch.long)
        return self.tail.to(torch.uint8).argmax(-1)


@dataclass(frozen=True)
class Visibility:
    """Which keys each query of a call sees."""

    mask: Tensor | None  # boolean, four dimensions
    causal: bool
    queries: int
    keys: int

    @classmethod
    def of(cls, call: AttentionCall) -> "Visibility":
        queries, keys = call.query_BHQD.shape[-2], call.key_BGKD.shape[-2]
        mask, causal = call.mask, call.causal
        if mask is not None:
            mask = to_four_dimensions(mask)
            # A mask with one row per query includes causality; only it shows the empty entries of a cache.
            causal = causal and (mask.shape[-2] == 1 or queries == keys)
        return cls(mask, causal, queries, keys)

    def span(
        self, item: int, heads: slice, queries: Tensor, shortest: int, longest: int
    ) -> tuple[int, int, int, Tensor]:
        """Return the first key, the end, the number of leading keys that all rows see, and a mask of the others.

        shortest, longest: how many keys the first and the last query can see.
        """
        reach = (queries + (self.keys - self.queries + 1)).clamp(min=0) if self.causal else None
        stop = max(longest, 1)
        if self.mask is None:
            common = shortest
            common = min(common, stop)
            end = padded_keys(stop)
            last = queries.new_full((1,), stop) if reach is None else reach
            columns = torch.arange(common, end, device=queries.device)
            return 0, end, common, (columns < last[:, None]).expand(len(queries), -1)[None]
        visible = self.mask[item if self.mask.shape[0] > 1 else 0]
        visible = visible[heads] if visible.shape[0] > 1 else visible
        visible = visible[:, queries] if visible.shape[1] > 1 else visible
        visible = visible.expand(-1, len(queries), self.keys)[..., :stop]
        if reach is not None:
            visible = visible & (torch.arange(stop, device=queries.device) < reach[:, None])
        start, end = 0, padded_keys(stop)
        if not too_few_to_wait(queries):
            used = visible.flatten(0, 1).any(0).nonzero()
            start, end = (int(used[0]) // GROUP * GROUP, padded_keys(int(used[-1]) + 1)) if len(used) else (0, GROUP)
        visible = visible[..., start:end]
        return start, end, 0, pad(visible, (0, end - start - visible.shape[-1]))


def logit_blocks(
    call: AttentionCall,
    rows: Tensor,
    *,
    all_heads: bool = False,
    key_heads: range | None = None,
    block_elements: int | None = None,
    copies: int = 1,
) -> Iterator[LogitBlock]:
    """Yield the logits of these queries (sorted indices) in blocks.

    all_heads: every block has all heads of an item. key_heads: key heads whose query heads are computed (default: all).
    copies: number of arrays of a block's size that the caller needs at a time; with more of them, blocks are smaller.
    Does not synchronize with a GPU if `rows` is on the CPU.
    """
    batch, heads = call.query_BHQD.shape[:2]
    groups = call.key_BGKD.shape[1]
    per_group = heads // groups
    query, key = call.query_BHQD, call.key_BGKD
    key = key if _multiplies_halves(query, key) else at_least_float32(key)
    visibility = Visibility.of(call)
    if padding := padded_keys(visibility.keys) - visibility.keys:  # torch copies a tensor for a padding of 0
        key = pad(key, (0, 0, 0, padding))
    on_cpu = not runs_asynchronously(query)
    elements = block_elements or (
        BLOCK_ELEMENTS * min(torch.get_num_threads(), MAX_THREADS) if on_cpu else CUDA_BLOCK_ELEMENTS
    )
    if all_heads and on_cpu:
        elements *= 4  # blocks of few rows and many heads would read the keys too often
    elements //= copies
    reach = _reaches(visibility, rows)
    rows = sent_to(query.device, rows)
    workspace = LogitWorkspace(at_least_float32(key.new_empty(0)))
    for item in range(batch):
        start = 0
        while start < len(rows):
            count, together = _size(reach, start, per_group, groups, elements, all_heads)
            part = slice(start, start + count)
            computed_groups = range(groups) if key_heads is None else key_heads
            for group in range(computed_groups.start, computed_groups.stop, together):
                block_groups = slice(group, min(group + together, computed_groups.stop))
                owners = slice(block_groups.start * per_group, block_groups.stop * per_group)
                reaches = reach[start : start + count]
                yield _block(
                    call, visibility, workspace, query, key, item, block_groups, owners, part, rows[part], reaches
                )
            start += count


def known_n(call: AttentionCall, rows: Tensor) -> Tensor | None:
    """Return the number of visible keys of these queries, without synchronization; None if there is a mask."""
    visibility = Visibility.of(call)
    return torch.tensor(_reaches(visibility, rows)) if visibility.mask is None else None


def _block(
    call: AttentionCall,
    visibility: Visibility,
    workspace: "LogitWorkspace",
    query: Tensor,
    key: Tensor,
    item: int,
    groups: slice,
    heads: slice,
    part: slice,
    queries: Tensor,
    reaches: list[int],
) -> LogitBlock:
    """Compute the logits of one block. part: slice of the requested rows; queries: their indices."""
    start, end, common, tail = visibility.span(item, heads, queries, reaches[0], reaches[-1])
    q = query[item, heads][:, queries].reshape(groups.stop - groups.start, -1, query.shape[-1])
    logits = workspace.array(len(q), q.shape[1], end - start)
    if key.dtype == logits.dtype:
        torch.bmm(at_least_float32(q).mul_(call.scale), key[item, groups, start:end].mT, out=logits)
    else:
        torch.bmm(q, key[item, groups, start:end].mT, out_dtype=logits.dtype, out=logits).mul_(call.scale)
    logits = logits.view(heads.stop - heads.start, len(queries), end - start)
    if call.softcap is not None:
        logits.div_(call.softcap).tanh_().mul_(call.softcap)
    if call.bias is not None:
        _add_bias(logits, call.bias, item, heads, queries, start)
    n = tail.sum(-1) + common
    reaches_if_known = reaches if visibility.mask is None else None
    block = LogitBlock(logits, common, tail, n, item, heads, part, queries, start, reaches_if_known)
    block.hide(logits)
    return block


def _multiplies_halves(query: Tensor, key: Tensor) -> bool:
    """Whether torch multiplies these in half precision and adds the products, which are exact, in float32."""
    if not key.is_cuda or torch.version.hip is not None or query.dtype != key.dtype:
        return False
    if key.dtype == torch.bfloat16:
        return torch.cuda.get_device_capability(key.device) >= (8, 0)
    return key.dtype == torch.float16 and not torch.backends.cuda.matmul.allow_fp16_accumulation


def _add_bias(logits: Tensor, bias: Tensor, item: int, heads: slice, queries: Tensor, start: int) -> None:
    bias = to_four_dimensions(bias)
    bias = bias[item if bias.shape[0] > 1 else 0]
    bias = bias[heads] if bias.shape[0] > 1 else bias
    bias = bias[:, queries] if bias.shape[1] > 1 else bias
    bias = bias if bias.shape[-1] == 1 else bias[..., start : start + logits.shape[-1]]
    width = logits.shape[-1] if bias.shape[-1] == 1 else bias.shape[-1]  # padding keys get no bias
    logits[..., :width].add_(bias)


def _reaches(visibility: Visibility, rows: Tensor) -> list[int]:
    if not visibility.causal:
        return [visibility.keys] * len(rows)
    reaches: list[int] = (rows + (visibility.keys - visibility.queries + 1)).clamp(min=0).tolist()
    return reaches


def _size(reach: list[int], start: int, per_group: int, groups: int, elements: int, all_heads: bool) -> tuple[int, int]:
    """Return how many rows and groups of heads form a block of about `elements` logits."""
    heads = per_group * groups if all_heads else per_group
    count = 1
    # Rows of very different lengths would compute many hidden keys.
    while (
        start + count < len(reach)
        and heads * (count + 1) * reach[start + count] <= elements
        and reach[start + count] <= max(2 * reach[start], 128)
    ):
        count += 1
    if all_heads:
        return count, groups
    together = max(1, elements // (per_group * count * max(1, reach[start + count - 1])))
    return count, min(together, groups)


def padded_keys(keys: int) -> int:
    """Return the number of columns of a block with this many keys."""
    return round_up(keys, GROUP)
