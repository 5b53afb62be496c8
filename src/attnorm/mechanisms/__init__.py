"""Attention mechanisms: what needs q, k, v themselves, or more than one row of logits at a time.

One file per mechanism. `attend` is what those share that apply a row normalizer.
"""

from torch import Tensor

from attnorm.engines import fused
from attnorm.engines.blocked import blocked
from attnorm.engines.execution import MIN_QUERIES
from attnorm.engines.inputs import Inputs, without_autocast
from attnorm.normalizers.block import is_exporting
from attnorm.normalizers.contract import Normalizer


def attend(inputs: Inputs, normalizer: Normalizer) -> Tensor:
    """Return the output (B, H, Q, E) of a row normalizer inside a mechanism, from the cheapest engine that has it."""
    with without_autocast(inputs.q_BHQD.device):
        if inputs.q_BHQD.numel() == 0:
            return blocked(inputs, normalizer)
        on_sdpa = fused.applies(inputs, normalizer) and not fused.rounds_q(inputs, normalizer)
        if inputs.q_BHQD.is_cuda and not is_exporting() and not (on_sdpa and inputs.queries < MIN_QUERIES):
            from attnorm.engines import one_pass  # loads Triton

            if one_pass.applies(inputs, normalizer):
                return one_pass.one_pass(inputs, normalizer)
        return fused.fused(inputs, normalizer) if on_sdpa else blocked(inputs, normalizer)
