"""Which tokens a step sees: windows at random places, drawn from a generator that knows only the seed and the step.

So a resumed run sees the same windows in the same order as one that was never interrupted.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Int64

from attnorm.training.tokens import Tokens


def check_length(tokens: Tokens, context: int, what: str) -> None:
    """
    Raises:
        ValueError: The text has no room for one window.
    """
    if len(tokens) < context + 2:
        raise ValueError(
            f"the {what} text has {len(tokens)} tokens, too short for one window of {context} and the token after it; "
            f"give more text or a shorter context"
        )


def training_windows(
    tokens: Tokens, *, seed: int, step: int, batch: int, context: int
) -> "Int64[torch.Tensor, 'batch window']":
    """Windows of context + 1 tokens: all but the last are read, all but the first are predicted."""
    starts = np.random.default_rng((seed, step)).integers(0, len(tokens) - context, size=batch)
    return torch.from_numpy(np.stack([tokens[start : start + context + 1] for start in starts]).astype(np.int64))


def validation_windows(tokens: Tokens, context: int, most: int | None = None) -> list["Int64[torch.Tensor, ' window']"]:
    """Windows side by side that share only their edge: every token but the first is predicted exactly once.

    The last window may be shorter. With `most`, that many of the full ones, evenly spread.
    """
    starts: Any = np.arange(0, len(tokens) - 1, context)
    if most is not None and len(starts) > most:
        starts = starts[np.linspace(0, len(starts) - 2, most).round().astype(int)]
    return [torch.from_numpy(tokens[start : start + context + 1].astype(np.int64)) for start in starts]
