"""What the heads of a model do on some windows: the row statistics of `attnorm.analyze`, without its tables.

As there, means are over rows of similar length: those of the longest half octave.
"""

from typing import Any

import torch
from torch import Tensor

from attnorm.metrics.call import AttentionCall
from attnorm.metrics.rows import measure_rows
from attnorm.metrics.sampling import length_bins, spread
from attnorm.models.observe import observe

ROWS = 64  # per head and window
KEPT = (
    "entropy_nats", "entropy_ratio", "effective_keys", "max_weight", "sink_mass", "logit_spread", "jacobian_norm",
    "row_sum",
)  # fmt: skip


@torch.no_grad()  # not inference mode: the Jacobians of some maps take a derivative
def attention_statistics(model: Any, windows: Tensor, device: torch.device) -> dict[str, Any]:
    """Means over heads and rows, and by layer and head; windows (count, length)."""
    length = windows.shape[1]
    shortest, _ = length_bins(length)[0]
    rows = spread(torch.arange(shortest - 1, length), ROWS)
    by_layer: dict[int, list[dict[str, Tensor]]] = {}

    def look(call: AttentionCall) -> None:
        (found,) = measure_rows(call, [None], rows, (1,)).values()
        means = {name: found.values[name].double().nanmean((0, 2)).cpu() for name in KEPT if name in found.values}
        by_layer.setdefault(call.layer, []).append(means)

    model.eval()
    with observe(model, look):
        for window in windows:
            model.base_model(input_ids=window[None].to(device), use_cache=False)
    names = next(iter(by_layer.values()))[0]
    heads = {
        name: [torch.stack([one[name] for one in by_layer[layer]]).nanmean(0) for layer in sorted(by_layer)]
        for name in names
    }
    return {
        "windows": len(windows),
        "length": length,
        "rows": len(rows),
        "mean": {name: _rounded(torch.stack(layers).nanmean().item()) for name, layers in heads.items()},
        "heads": {name: [[_rounded(x) for x in layer.tolist()] for layer in layers] for name, layers in heads.items()},
    }


def _rounded(number: float) -> float | None:
    """JSON has no NaN."""
    return None if number != number else float(f"{number:.5g}")
