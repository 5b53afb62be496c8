"""Check that a recorded call is what the kernel computed: the last row of every attention module is computed again.

A model may change its logits in a way that no argument of the call shows. Then every measured number would be wrong, so
the output of the last query is rebuilt from the recorded call and compared with the kernel's output.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from attnorm.engines.device_sync import arrival, runs_asynchronously, sent_to_cpu
from attnorm.metrics.call import AttentionCall
from attnorm.models.dispatch import UnsupportedModel

MOST_PARTS = 256
TOLERANCE = 0.02  # of the largest value: rounding stays far below, another formula far above


def check_output(call: AttentionCall, output_BQHE: Tensor, path: str, kernel: str) -> Callable[[], None]:
    """Raise UnsupportedModel where the last query's output is not softmax over the recorded logits times values.

    On a GPU, call the returned function later: it waits for the result and raises.
    """
    numbers = sent_to_cpu(_compared(call, output_BQHE))
    wait = arrival(output_BQHE.device)
    step = _step(call.query_BHQD)

    def decide() -> None:
        wait()
        seen, error, size, largest = numbers.tolist()
        # A kernel that keeps its logits in half precision rounds a large one by more than 1.
        rounding = math.expm1(min(2 * largest * step, 50.0))
        if seen and error > (TOLERANCE + rounding) * size:
            raise UnsupportedModel(
                f"the attention of {path or 'the model'} (kernel {kernel!r}) is not softmax over the logits it was "
                f"called with: the last query's output differs by {error:.3g} where values are up to {size:.3g}. It "
                "changes logits or weights in a way that its arguments do not show, so attnorm would report wrong "
                "numbers"
            )

    if runs_asynchronously(output_BQHE):
        return decide
    decide()
    return lambda: None


def _compared(call: AttentionCall, output_BQHE: Tensor) -> Tensor:
    """Whether any row can be compared, the largest difference, the largest value and the largest logit."""
    logits_BHK, visible_BHK = _last_row(call)
    sink = logits_BHK.new_full((*logits_BHK.shape[:2], 1), -torch.inf)
    if call.sinks_H is not None:
        sink = sink.copy_(call.sinks_H.to(sink)[None, :, None])
    weights_BHK = torch.cat([logits_BHK.masked_fill(~visible_BHK, -torch.inf), sink], -1).softmax(-1)[..., :-1]
    groups = call.value_BGKE.shape[1]
    value_BGKE = call.value_BGKE.to(logits_BHK)
    rebuilt_BHE = _mixed(weights_BHK.unflatten(1, (groups, -1)), value_BGKE).flatten(1, 2)
    got_BHE = output_BQHE[:, -1].to(rebuilt_BHE)
    seen_BH = visible_BHK.any(-1) & rebuilt_BHE.isfinite().all(-1) & got_BHE.isfinite().all(-1)
    seen_BGK = visible_BHK.unflatten(1, (groups, -1)).any(2)
    error = (rebuilt_BHE - got_BHE).abs().amax(-1).masked_fill(~seen_BH, 0.0).max()
    size = value_BGKE.abs().amax(-1).masked_fill(~seen_BGK, 0.0).nan_to_num().max()
    largest = logits_BHK.masked_fill(~visible_BHK, 0.0).abs().amax(-1).masked_fill(~seen_BH, 0.0).max()
    return torch.stack([seen_BH.any().to(error), error, size, largest])


def _mixed(weights_BGrK: Tensor, value_BGKE: Tensor) -> Tensor:
    """weights @ value. On a GPU the few rows of a product over many keys occupy few of its processors: by parts."""
    parts = math.gcd(weights_BGrK.shape[-1], MOST_PARTS) if runs_asynchronously(value_BGKE) else 1
    weights = weights_BGrK.unflatten(-1, (parts, -1)).movedim(-2, 2)
    mixed: Tensor = (weights @ value_BGKE.unflatten(2, (parts, -1))).sum(2)
    return mixed


def _last_row(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Logits and visibility of the last query, both (B, H, K)."""
    dtype = torch.float64 if call.query_BHQD.dtype == torch.float64 else torch.float32
    query_BH1D = call.query_BHQD[:, :, -1:].to(dtype)
    key_BGKD = call.key_BGKD.to(dtype)
    query_BGrD = query_BH1D[:, :, 0].unflatten(1, (key_BGKD.shape[1], -1))
    logits = (query_BGrD @ key_BGKD.mT).flatten(1, 2) * call.scale
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    if call.bias is not None:
        logits = logits + call.bias[..., -1, :].to(logits)
    visible = torch.ones_like(logits, dtype=torch.bool)
    if call.mask is not None:
        visible = visible & call.mask[..., -1, :]
    return logits, visible


def _step(tensor: Tensor) -> float:
    if tensor.dtype == torch.float32 and tensor.is_cuda:
        return 2.0**-10  # TF32
    return torch.finfo(tensor.dtype).eps
