"""How many of the visible keys the heads of a layer select together: measured, and as expected of independent heads."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnorm.metrics.call import AttentionCall
from attnorm.metrics.logits import logit_blocks
from attnorm.metrics.normalized import Choice, as_normalizer, resolve_normalizers, rows_block
from attnorm.theory.coverage import independent_union


@dataclass(frozen=True)
class LayerCoverage:
    """Shares of the visible keys, one for each N, means over rows and batch; NaN if no row could be measured."""

    per_head: Tensor
    union: Tensor
    independent: Tensor
    rows: int


@torch.no_grad()
def measure_coverage(
    call: AttentionCall, normalizers: Sequence[Choice], rows: Tensor, top_n: Sequence[int]
) -> dict[str, LayerCoverage]:
    """The share of a row's visible keys in the top-N sets of the heads. A key of weight 0 is selected by no head, and
    rows with broken weights are left out."""
    chosen = resolve_normalizers(call, normalizers)
    sums = {one.name: torch.zeros(3, len(top_n), dtype=torch.float64) for one in chosen}
    counts = dict.fromkeys(sums, 0)
    for block in logit_blocks(call, rows, all_heads=True):
        view = rows_block(call, block)
        visible = block.visible.expand(block.logits.shape)
        seen = visible.any(0)
        size = seen.sum(-1)
        for one in chosen:
            weights = as_normalizer(one, call).weights(view)[0].abs()
            heavy = weights.topk(min(max(top_n), weights.shape[-1]), dim=-1)
            sound = weights.sum(-1).isfinite().all(0) & (size > 0)
            counts[one.name] += int(sound.sum())
            for index, N in enumerate(top_n):
                inside = torch.zeros_like(visible).scatter_(-1, heavy.indices[..., :N], heavy.values[..., :N] > 0)
                share = inside.sum(-1, dtype=torch.float64) / size.clamp(min=1)
                union = inside.any(0).sum(-1, dtype=torch.float64) / size.clamp(min=1)
                shares = torch.stack([share.mean(0), union, independent_union(share.T)])
                sums[one.name][:, index] += shares[:, sound].sum(-1).cpu()
    means = {name: total / counts[name] if counts[name] else total.fill_(torch.nan) for name, total in sums.items()}
    return {name: LayerCoverage(mean[0], mean[1], mean[2], counts[name]) for name, mean in means.items()}
