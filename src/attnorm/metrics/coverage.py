"""Coverage: the share of visible keys that the heads of a layer select together, measured and for independent heads."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnorm.engines.execution import sent_to
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.logits import logit_blocks
from attnorm.metrics.normalized import Choice, as_normalizer, resolve_normalizers, rows_block
from attnorm.theory.coverage import independent_union


@dataclass(frozen=True)
class LayerCoverage:
    """Shares of the visible keys for each N, means over rows and batch; NaN if no row could be measured."""

    per_head: Tensor
    union: Tensor
    independent: Tensor
    rows: int


@torch.no_grad()
def measure_coverage(
    call: AttentionCall, normalizers: Sequence[Choice], rows: Tensor, top_n: Sequence[int]
) -> dict[str, LayerCoverage]:
    """Measure the share of a row's visible keys in the top-N sets of the heads.

    Keys of weight 0 are in no set. Rows with weights that are not finite are left out.
    """
    coverage = {}
    for name, (sums, counts) in coverage_sums(call, normalizers, rows, top_n).items():
        count = int(counts)
        means = (sums[:, 0] / count if count else sums[:, 0].fill_(torch.nan)).cpu()
        coverage[name] = LayerCoverage(means[0], means[1], means[2], count)
    return coverage


@torch.no_grad()
def coverage_sums(
    call: AttentionCall, normalizers: Sequence[Choice], rows: Tensor, top_n: Sequence[int], layers: int = 1
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return by normalizer: sums of per_head, union and independent over rows, (3, layers, N); and rows, (layers,).

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
