"""Check that a recorded call is what the kernel computed: the last row of every attention module is computed again.

A model may change its logits in a way that no argument of the call shows. Then every measured number would be wrong, so
the output of the last query is rebuilt from the recorded call and compared with the kernel's output.
"""

import math

import torch
from torch import Tensor

from attnorm.metrics.call import AttentionCall
from attnorm.models.dispatch import UnsupportedModel

TOLERANCE = 0.02  # of the largest value: rounding stays far below, another formula far above


def check_output(call: AttentionCall, output_BQHE: Tensor, path: str, kernel: str) -> None:
    """Raise UnsupportedModel where the last query's output is not softmax over the recorded logits times values."""
    logits_BHK, visible_BHK = _last_row(call)
    sink = logits_BHK.new_full((*logits_BHK.shape[:2], 1), -torch.inf)
    if call.sinks_H is not None:
        sink = sink.copy_(call.sinks_H.to(sink)[None, :, None])
    weights_BHK = torch.cat([logits_BHK.masked_fill(~visible_BHK, -torch.inf), sink], -1).softmax(-1)[..., :-1]
    value_BHKE = _per_query_head(call.value_BGKE.to(logits_BHK), call.query_BHQD.shape[1])
    rebuilt_BHE = (weights_BHK[:, :, None] @ value_BHKE)[:, :, 0]
    got_BHE = output_BQHE[:, -1].to(rebuilt_BHE)
    seen_BH = visible_BHK.any(-1) & rebuilt_BHE.isfinite().all(-1) & got_BHE.isfinite().all(-1)
    if not bool(seen_BH.any()):
        return
    error = float((rebuilt_BHE - got_BHE).abs().amax(-1)[seen_BH].max())
    size = float(value_BHKE.abs().masked_fill(~visible_BHK[..., None], 0.0).nan_to_num().max())
    largest = float(logits_BHK.masked_fill(~visible_BHK, 0.0).abs().amax(-1)[seen_BH].max())
    # A kernel that keeps its logits in half precision rounds a large one by more than 1.
    rounding = math.expm1(min(2 * largest * _step(call.query_BHQD), 50.0))
    if error > (TOLERANCE + rounding) * size:
        raise UnsupportedModel(
            f"the attention of {path or 'the model'} (kernel {kernel!r}) is not softmax over the logits it was called "
            f"with: the last query's output differs by {error:.3g} where values are up to {size:.3g}. It changes "
            "logits or weights in a way that its arguments do not show, so attnorm would report wrong numbers"
        )


def _last_row(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Logits and visibility of the last query, both (B, H, K)."""
    dtype = torch.float64 if call.query_BHQD.dtype == torch.float64 else torch.float32
    query_BH1D = call.query_BHQD[:, :, -1:].to(dtype)
    key_BHKD = _per_query_head(call.key_BGKD.to(dtype), call.query_BHQD.shape[1])
    logits = (query_BH1D @ key_BHKD.mT)[:, :, 0] * call.scale
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    if call.bias is not None:
        logits = logits + call.bias[..., -1, :].to(logits)
    visible = torch.ones_like(logits, dtype=torch.bool)
    if call.mask is not None:
        visible = visible & call.mask[..., -1, :]
    return logits, visible


def _per_query_head(tensor: Tensor, heads: int) -> Tensor:
    return tensor.repeat_interleave(heads // tensor.shape[1], 1)


def _step(tensor: Tensor) -> float:
    if tensor.dtype == torch.float32 and tensor.is_cuda:
        return 2.0**-10  # TF32
    return torch.finfo(tensor.dtype).eps
