"""The loss of a model: one function for training and validation, so that both mean the same thing.

At any length every token of the text but the first is predicted exactly once, so losses at different lengths are means
over the same tokens: what differs is how much of the text before them is visible.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch.nn import functional as F

from attnorm.training.settings import Settings
from attnorm.training.tokens import Tokens
from attnorm.training.windows import validation_windows

EVALUATION_BATCH = 16


def predicted_loss(
    hidden: Float[torch.Tensor, "batch length width"],
    unembedding: Float[torch.Tensor, "vocabulary width"],
    targets: Int64[torch.Tensor, "batch length"],
) -> Float[torch.Tensor, ""]:
    """Mean cross entropy in nats per token. Apart from the model so that it can be compiled alone: the logits are the
    largest array of a small model's step."""
    logits = F.linear(hidden, unembedding)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def window_loss(model: Any, windows: Int64[torch.Tensor, "batch window"], loss: Callable[..., Any]) -> Any:
    """Loss of every token of the windows but the first, given those before it in the same window."""
    hidden = model.base_model(input_ids=windows[:, :-1], use_cache=False).last_hidden_state
    return loss(hidden, model.get_output_embeddings().weight, windows[:, 1:])


@torch.inference_mode()
def validation_loss(
    model: Any, windows: Sequence[torch.Tensor], device: torch.device, dtype: torch.dtype, batch_size: int | None = None
) -> float:
    """Nats per token over all windows, each token weighing the same."""
    total, count = 0.0, 0
    together = batch_size or EVALUATION_BATCH
    for start in range(0, len(windows), together):
        group = windows[start : start + together]
        for length in sorted({len(window) for window in group}, reverse=True):
            batch = torch.stack([window for window in group if len(window) == length]).to(device)
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                mean = float(window_loss(model, batch, predicted_loss))
            predicted = batch.shape[0] * (length - 1)
            total, count = total + mean * predicted, count + predicted
    return total / count


def losses_by_length(
    model: Any, valid: Tokens, lengths: Sequence[int], settings: Settings, device: torch.device
) -> dict[int, float]:
    """Nats per token, computed in float32, of windows of each length; as many tokens at once as in training."""
    return {
        length: validation_loss(
            model,
            validation_windows(valid, length),
            device,
            torch.float32,
            batch_size=max(1, EVALUATION_BATCH * settings.context // length),
        )
        for length in lengths
    }
