"""`logit_blocks`: the logits of an attention call in blocks of a few heads and rows, so that no Q x K array is needed.

The size of a block fits the CPU cache, and it contains only keys that its rows can see. Hidden keys have the logit
`LOW`: its exp is 0, and LOW times 0 is 0. Keys are padded to a multiple of `GROUP`, so that rows can be divided into
groups.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnorm.engines.execution import runs_asynchronously, sent_to
from attnorm.metrics.call import AttentionCall
from attnorm.theory.selection import at_least_float32

LOW = -1e30
GROUP = 16
# Logits per block and thread: two arrays of this size fit the cache of a core. A GPU needs larger blocks.
BLOCK_ELEMENTS = 2**19
MAX_THREADS = 8
CUDA_BLOCK_ELEMENTS = 2**25
FEW_ROWS = 64  # up to this many rows, a GPU computes unneeded keys faster than the program learns which are needed


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
            mask = mask.reshape(*([1] * (4 - mask.dim())), *mask.shape)
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
    query, key = call.query_BHQD, at_least_float32(call.key_BGKD)
    visibility = Visibility.of(call)
    key = pad(key, (0, 0, 0, padded_keys(visibility.keys) - visibility.keys))
    on_cpu = not runs_asynchronously(query)
    elements = block_elements or (
        BLOCK_ELEMENTS * min(torch.get_num_threads(), MAX_THREADS) if on_cpu else CUDA_BLOCK_ELEMENTS
    )
    if all_heads and on_cpu:
        elements *= 4  # blocks of few rows and many heads would read the keys too often
    elements //= copies
    reach = _reaches(visibility, rows)
    rows = sent_to(query.device, rows)
    workspace = LogitWorkspace(key)
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
    q = (
        at_least_float32(query[item, heads][:, queries])
        .mul_(call.scale)
        .reshape(groups.stop - groups.start, -1, query.shape[-1])
    )
    logits = workspace.array(len(q), q.shape[1], end - start)
    torch.bmm(q, key[item, groups, start:end].mT, out=logits)
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


def _add_bias(logits: Tensor, bias: Tensor, item: int, heads: slice, queries: Tensor, start: int) -> None:
    bias = bias.reshape(*([1] * (4 - bias.dim())), *bias.shape)
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
    return math.ceil(keys / GROUP) * GROUP
