"""The statistics of softmax and its rescalings as one operator of torch.library, so that torch.compile keeps its graph.

A compiled function calls the operator with tensors alone: what the rules multiply the logits by, and the sink's logit,
are computed before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnorm.engines.inputs import Inputs, row_factors
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.logits import LogitBlock
from attnorm.metrics.normalized import MeasuredNormalizer
from attnorm.metrics.rows import measure_rows
from attnorm.normalizers.contract import Normalizer


@dataclass(frozen=True)
class RescaledSoftmax(MeasuredNormalizer):
    """Softmax of logits times a factor of each row, with a learned sink: given as numbers."""

    factor_BHQ1: Tensor | None = None
    sink_H: Tensor | None = None

    @property
    def scaled_softmax(self) -> bool:
        return True

    @property
    def rescales(self) -> bool:
        return self.factor_BHQ1 is not None

    def learned_sink(self, call: AttentionCall, heads: slice) -> Tensor | None:
        return None if self.sink_H is None else self.sink_H[heads]

    def factor(self, call: AttentionCall, block: LogitBlock) -> Tensor | None:
        if self.factor_BHQ1 is None:
            return None
        return self.factor_BHQ1[block.item, block.heads][:, block.queries]


@torch.library.custom_op("attnorm::softmax_statistics", mutates_args=())
def softmax_statistics_operator(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    factor: Tensor | None,
    sink: Tensor | None,
    scale: float,
    causal: bool,
    softcap: float | None,
    names: str,
    top_n: Sequence[int],
) -> list[Tensor]:
    """n (B, H, Q), the numbers of these names (separated by spaces), (names, B, H, Q), the masses (B, H, Q, top_n)."""
    call = AttentionCall(0, "decoder" if causal else "encoder", q, k, k, scale, causal, mask, softcap)
    chosen = RescaledSoftmax("softmax", None, factor, sink)
    (found,) = measure_rows(
        call, [chosen], torch.arange(q.shape[-2]), tuple(top_n), names=names.split(), mass_rows=None
    ).values()
    # An operator must not return two views of one tensor.
    return [found.n, torch.stack([found.values[name] for name in names.split()]), found.top_mass]


@softmax_statistics_operator.register_fake
def _shapes(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    factor: Tensor | None,
    sink: Tensor | None,
    scale: float,
    causal: bool,
    softcap: float | None,
    names: str,
    top_n: Sequence[int],
) -> list[Tensor]:
    shape = q.shape[:-1]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return [
        q.new_empty(shape, dtype=torch.int64),
        q.new_empty((len(names.split()), *shape), dtype=dtype),
        q.new_empty((*shape, len(top_n)), dtype=dtype),
    ]


def compiled_statistics(
    inputs: Inputs, normalizer: Normalizer, names: Sequence[str], top_n: Sequence[int]
) -> list[Tensor]:
    """n, the numbers of these names and the masses, for inputs whose normalizer is a rescaled softmax."""
    factor = row_factors(inputs, normalizer)
    sink = None
    if normalizer.sink is not None:
        sink = normalizer.sink.logit.detach().expand(inputs.q_BHQD.shape[1])
    mask = inputs.mask
    if mask is not None and mask.shape[-2] > 1:
        mask = inputs.visible(0, inputs.queries, inputs.keys)
    n, numbers, masses = torch.ops.attnorm.softmax_statistics(
        inputs.q_BHQD.detach(), inputs.k_BGKD.detach(), mask, None if factor is None else factor.detach(), sink,
        inputs.scale, inputs.causal, inputs.softcap, " ".join(names), list(top_n),
    )  # fmt: skip
    return [n, *numbers.unbind(), masses]
