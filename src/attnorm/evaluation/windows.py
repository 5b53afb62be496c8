"""Cut a text into windows in which every token except the first is predicted exactly once."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from numpy.typing import NDArray

Tokens = NDArray[np.integer[Any]]  # uint16 where they are stored


def validation_windows(tokens: Tokens, context: int, most: int | None = None) -> list[Int64[torch.Tensor, " window"]]:
    """Return adjacent windows that share one token: every token except the first is predicted exactly once.

    The last window may be shorter. most: return only so many full windows, evenly spaced.
    """
    starts: Any = np.arange(0, len(tokens) - 1, context)
    if most is not None and len(starts) > most:
        starts = starts[np.linspace(0, len(starts) - 2, most).round().astype(int)]
    return [torch.from_numpy(tokens[start : start + context + 1].astype(np.int64)) for start in starts]
