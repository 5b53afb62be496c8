"""Which keys the rows of a call read: the heaviest keys, one target key per row, and the keys that all heads cover.

Only the chosen rows are computed, block by block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnorm.engines.execution import in_threads, sent_to
from attnorm.metrics.call import AttentionCall, logit_blocks
from attnorm.metrics.normalized import Choice, as_normalizer, resolve_normalizers, rows_block
from attnorm.theory.geometry import independent_union

NO_KEY = -1


@dataclass(frozen=True)
class Reads:
    """Keys and weights (B, H, R, count), heaviest first; NO_KEY and 0 if a row has fewer keys with weight."""

    keys: Tensor  # positions in the sequence
    weights: Tensor  # weights of the normalizer, not rescaled to a row sum of 1


@torch.no_grad()
def measure_reads(call: AttentionCall, normalizers: Sequence[Choice], rows: Tensor, count: int) -> dict[str, Reads]:
    """Return the `count` heaviest keys of these queries (sorted indices), by the normalizers' names.

    Keys are ordered by the size of their weight; among equal weights the earlier key comes first. A key of weight 0 is
    not read, and a row whose weights are not finite reads nothing.
    """
    if count < 1:
        raise ValueError(f"expected a count of keys of at least 1, got {count}.")
    resolved = resolve_normalizers(call, normalizers)
    shape = (*call.query_BHQD.shape[:2], len(rows), count)
    device = call.query_BHQD.device
    keys = {normalizer.name: torch.full(shape, NO_KEY, device=device) for normalizer in resolved}
    weights = {normalizer.name: torch.zeros(shape, dtype=torch.float64, device=device) for normalizer in resolved}

    def measure(_: range) -> None:
        for block in logit_blocks(call, rows, all_heads=True):
            view = rows_block(call, block)
            visible = block.visible.expand(block.logits.shape)
            for normalizer in resolved:
                row_weights = as_normalizer(normalizer, call).weights(view)[0]
                columns, values = heaviest_keys(row_weights, visible, count)
                read = columns >= 0
                target = (block.item, block.heads, block.rows, slice(columns.shape[-1]))
                keys[normalizer.name][target] = torch.where(read, columns + block.first_key, NO_KEY)
                weights[normalizer.name][target] = values.double()

    in_threads(measure, call.key_BGKD.shape[1], device, whole=True)
    return {normalizer.name: Reads(keys[normalizer.name], weights[normalizer.name]) for normalizer in resolved}


@dataclass(frozen=True)
class TargetWeights:
    """Numbers of the target key in every row, (B, H, R), in float64. A hidden target has weight 0."""

    weight: Tensor  # weight of the normalizer, not rescaled to a row sum of 1
    gap: Tensor  # nats: log of the target's weight over the mean weight of the other visible keys; may be infinite
    heaviest: Tensor  # boolean: no visible key has more weight
    n: Tensor  # visible keys


@torch.no_grad()
def measure_targets(
    call: AttentionCall, normalizers: Sequence[Choice], rows: Tensor, targets: Tensor
) -> dict[str, TargetWeights]:
    """Measure one target key per row, by the normalizers' names.

    rows: sorted query indices, (R,). targets: key indices, (B, R).
    """
    batch, heads = call.query_BHQD.shape[:2]
    if targets.shape != (batch, len(rows)):
        raise ValueError(f"expected targets of shape {(batch, len(rows))}, got {tuple(targets.shape)}.")
    if not bool(((targets >= 0) & (targets < call.key_BGKD.shape[-2])).all()):
        raise ValueError(f"expected targets from 0 to {call.key_BGKD.shape[-2] - 1}, got {targets.tolist()}.")
    resolved = resolve_normalizers(call, normalizers)
    device = call.query_BHQD.device
    targets = targets.to(device)
    shape = (batch, heads, len(rows))
    targets_by_name = {
        normalizer.name: TargetWeights(
            weight=torch.zeros(shape, dtype=torch.float64, device=device),
            gap=torch.full(shape, -torch.inf, dtype=torch.float64, device=device),
            heaviest=torch.zeros(shape, dtype=torch.bool, device=device),
            n=torch.zeros(shape, dtype=torch.long, device=device),
        )
        for normalizer in resolved
    }
    for block in logit_blocks(call, rows, all_heads=True):
        rows_view = rows_block(call, block)
        view = rows_view.with_logits(rows_view.logits.double())  # a weight that float32 rounds to 0 has a gap too
        visible = block.visible.expand(block.logits.shape)
        column = targets[block.item, block.rows] - block.first_key
        inside = (column >= 0) & (column < visible.shape[-1])
        target_column = column.clamp(0, visible.shape[-1] - 1)[None, :, None].expand(visible.shape[0], -1, 1)
        target_visible = visible.gather(-1, target_column).squeeze(-1) & inside
        n = visible.sum(-1)
        for normalizer in resolved:
            weights = as_normalizer(normalizer, call).weights(view)[0].double().masked_fill(~visible, 0.0)
            target_weight = torch.where(target_visible, weights.gather(-1, target_column).squeeze(-1), 0.0)
            others = weights.scatter(-1, target_column, 0.0).sum(-1)
            position = (block.item, block.heads, block.rows)
            numbers = targets_by_name[normalizer.name]
            numbers.weight[position] = target_weight
            numbers.gap[position] = target_weight.log() - others.log() + (n - 1).clamp(min=1).double().log()
            numbers.heaviest[position] = target_visible & (target_weight >= weights.amax(-1))
            numbers.n[position] = n
    return targets_by_name


def heaviest_keys(weights: Tensor, visible: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return columns and weights (..., count) of the visible keys with the largest |weight|, largest first.

    There are fewer entries if a row has fewer columns. Of equal weights, the earlier column comes first, on every
    device. -1 and 0 stand for no key: a row has fewer visible keys with weight, or its weights are not finite.
    """
    count = min(count, weights.shape[-1])
    size = weights.abs().masked_fill(~visible, 0.0)
    size = size.masked_fill(~size.sum(-1, keepdim=True).isfinite(), 0.0)
    last = size.shape[-1] - 1
    if size.dtype == torch.float32:
        # topk may return any of several equal numbers. The bits of numbers above 0 have their order, and as upper half
        # of an integer whose lower half counts columns from the right, no two are equal.
        from_the_right = torch.arange(last, -1, -1, device=size.device)
        ordered = (size.view(torch.int32).long() << 32).add_(from_the_right)
        columns = last - (ordered.topk(count, dim=-1).values & 0xFFFFFFFF)
    else:
        columns = size.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    values = weights.gather(-1, columns)
    read = size.gather(-1, columns) > 0
    return torch.where(read, columns, -1), torch.where(read, values, 0.0)


@torch.no_grad()
def coverage_sums(
    call: AttentionCall, normalizers: Sequence[Choice], rows: Tensor, top_n: Sequence[int], layers: int = 1
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return by normalizer: sums of per_head, union and independent over rows, (3, layers, N); and rows, (layers,).

    Each is a share of a row's visible keys in the top-N sets of the heads. Keys of weight 0 are in no set. Rows with
    weights that are not finite are left out.
    layers: number of layers whose heads the call has (`stack_calls` of call.py).
    """
    resolved = resolve_normalizers(call, normalizers)
    device = call.query_BHQD.device
    sums = {
        normalizer.name: torch.zeros(3, layers, len(top_n), dtype=torch.float64, device=device)
        for normalizer in resolved
    }
    counts = {normalizer.name: torch.zeros(layers, dtype=torch.int64, device=device) for normalizer in resolved}
    sizes = sent_to(device, torch.tensor(top_n))
    for block in logit_blocks(call, rows, all_heads=True):
        view = rows_block(call, block)
        size = block.visible.any(0).sum(-1)
        for normalizer in resolved:
            weights = as_normalizer(normalizer, call).weights(view)[0].abs()
            broken = weights.sum(-1).isfinite().logical_not_().unflatten(0, (layers, -1)).any(1)
            sound = ~broken & (size > 0)
            shares = _shares(weights.unflatten(0, (layers, -1)), sizes, max(top_n)) / size.clamp(min=1).unsqueeze(-1)
            per_head, union = shares[:, :-1], shares[:, -1]
            numbers = torch.stack([per_head.mean(1), union, independent_union(per_head.movedim(1, -1))])
            sums[normalizer.name] += torch.where(sound.unsqueeze(-1), numbers, 0.0).sum(2)
            counts[normalizer.name] += sound.sum(1)
    return {name: (sums[name], counts[name]) for name in sums}


def _shares(weights: Tensor, sizes: Tensor, most: int) -> Tensor:
    """Return the number of keys among the N heaviest of each head, and of all heads together: (layers, h + 1, r, N).

    weights (layers, h, r, w): not negative; keys of weight 0 do not count.
    """
    heavy = weights.topk(min(most, weights.shape[-1]), dim=-1)
    read = heavy.values > 0
    rank = torch.arange(read.shape[-1], dtype=torch.int32, device=weights.device)
    last = len(rank)
    per_head = (read.unsqueeze(-2) & (rank < sizes.unsqueeze(-1))).sum(-1)
    rank_of_key = rank.new_full(weights.shape, last)
    rank_of_key.scatter_(-1, heavy.indices, torch.where(read, rank, last))
    first = rank_of_key.amin(1, keepdim=True)  # among the heads
    together = ((first < last).unsqueeze(-2) & (first.unsqueeze(-2) < sizes.unsqueeze(-1))).sum(-1)
    return torch.cat([per_head, together], 1).double()
