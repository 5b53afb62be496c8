"""The margin that logits of max retrieval need at size n, and the margin that a model delivers.

The best of n uniform priorities and the next are 1/(n + 1) apart on average. A model whose logit rises by `slope` per
unit of priority delivers a margin of slope / (n + 1), which falls with n. Two things can go wrong:

- the margin is smaller than the normalizer needs to give the winner half of the weight: the output is dispersed;
- it is smaller than what the class adds to the logit: then the largest logit is not the right item's, and no normalizer
  can repair it.
"""

import math
from collections.abc import Mapping
from functools import cache

import numpy as np
import torch

from attnorm.normalizers.contract import Normalizer
from attnorm.training.retrieval.data import CLASSES
from attnorm.training.retrieval.model import normalizer_for

HALF = 0.5  # of the weight
LARGEST_MARGIN = 1e3
DRAWS = 40_000


def delivered_margin(slope: float, size: int) -> float:
    """Return the margin between the two largest logits, at the mean gap of the two best priorities."""
    return slope / (size + 1)


def needed_margin(normalizer: str, size: int, learned: Mapping[str, float] | None = None) -> float | None:
    """Return the margin m for which the first of the row 0, -m, -2m, ... gets half of the weight.

    For softmax it is log 2 = 0.69 at any size. None if the normalizer is not shift invariant or its weights do not sum
    to 1, since then no margin alone decides, or if no margin is enough. 0 if any margin is enough.

    Args:
        learned: Values of the normalizer's parameters by name (default: the initial values).
    """
    return _needed_margin(normalizer, size, tuple(sorted((learned or {}).items())))


@cache
def _needed_margin(normalizer: str, size: int, learned: tuple[tuple[str, float], ...]) -> float | None:
    made = normalizer_for(normalizer, 1)
    if not made.properties.shift_invariant or made.properties.row_sum != "one":
        return None
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.fill_(dict(learned).get(name, parameter.item()))
    row = -torch.arange(size, dtype=torch.float64)
    low, high = math.log(1 / LARGEST_MARGIN), math.log(LARGEST_MARGIN)
    if _first_weight(made, row * LARGEST_MARGIN) < HALF:
        return None
    if _first_weight(made, row / LARGEST_MARGIN) >= HALF:
        return 0.0
    for _ in range(20):  # to a relative 1e-5
        middle = (low + high) / 2
        if _first_weight(made, row * math.exp(middle)) < HALF:
            low = middle
        else:
            high = middle
    return math.exp(high)


@torch.no_grad()
def _first_weight(normalizer: Normalizer, row: torch.Tensor) -> float:
    weights: torch.Tensor = normalizer(row[None, None, None])
    return float(weights[..., 0])


def predicted_right(leak: float, size: int) -> float:
    """Return the share of sets whose largest logit is the right item's, if only a constant per class disturbs them.

    Only the best item of each class can win, and these lie independently Exp(1) * 10 / (n + 1) below 1. So the share
    depends on leak * (n + 1) only. Estimated from 40,000 draws, to within half a percent.
    """
    x = leak * (size + 1)
    below, offset = _draws()
    return float((below.argmin(-1) == (below - x * offset).argmin(-1)).mean())


@cache
def _draws() -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.float64]], ...]:
    generator = np.random.default_rng(0)
    return (
        generator.exponential(CLASSES, (DRAWS, CLASSES)),
        generator.standard_normal((DRAWS, CLASSES)),
    )
