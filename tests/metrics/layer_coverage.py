"""What the heads of one layer cover together: the means of `coverage_sums`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnorm.metrics.call import AttentionCall
from attnorm.metrics.normalized import Choice
from attnorm.metrics.reads import coverage_sums


@dataclass(frozen=True)
class LayerCoverage:
    """Shares of the visible keys for each N, means over rows and batch; NaN if no row could be measured."""

    per_head: Tensor
    union: Tensor
    independent: Tensor
    rows: int


def measure_coverage(
    call: AttentionCall, normalizers: Sequence[Choice], rows: Tensor, top_n: Sequence[int]
) -> dict[str, LayerCoverage]:
    coverage = {}
    for name, (sums, counts) in coverage_sums(call, normalizers, rows, top_n).items():
        count = int(counts)
        means = (sums[:, 0] / count if count else sums[:, 0].fill_(torch.nan)).cpu()
        coverage[name] = LayerCoverage(means[0], means[1], means[2], count)
    return coverage
