"""Which normalizers Lemma 1 covers, and its constants for them, read off what the normalizer declares.

Lemma 1 of Mudarisov et al. 2025, https://arxiv.org/abs/2508.17821, is about weights F(l_i) / sum F(l) with a positive F
that does not depend on the number of keys. Softmax is F = exp; `kernel` declares its F; a temperature only changes the
interval. Everything else is outside it, each for its own reason.
"""

import math

from torch import Tensor

from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.kernel import FUNCTIONS, Kernel, PositiveFunction
from attnorm.normalizers.softmax import Softmax, Temperature
from attnorm.theory.dispersion import lemma1_constants, range_on_interval


def not_covered(normalizer: Normalizer) -> str | None:
    """Why Lemma 1 does not apply to this normalizer; None if it does."""
    if not isinstance(normalizer.map, Softmax | Kernel):
        return f"the map {type(normalizer.map).__name__} is not F(l) / sum F(l) with a positive F"
    if normalizer.selections:
        return "it hides keys, so that F is 0 for some"
    if normalizer.sink is not None:
        return "its sink takes part of the row"
    for rule in normalizer.rules:
        if not isinstance(rule, Temperature):
            return f"its scale depends on more than the logit ({rule.length or type(rule).__name__})"
    return None


def lemma1_constants_of(normalizer: Normalizer, low: float, high: float) -> tuple[Tensor, Tensor]:
    """C1 and C2 with C1/n <= a_i <= C2/n at every n, for logits between low and high."""
    reason = not_covered(normalizer)
    if reason is not None:
        raise ValueError(f"Lemma 1 does not cover {normalizer.name!r}: {reason}")
    scale = math.prod(rule.gain(1) or 0.0 for rule in normalizer.rules)
    F_min, F_max = range_on_interval(_function(normalizer).value, low * scale, high * scale)
    return lemma1_constants(F_min, F_max)


def _function(normalizer: Normalizer) -> PositiveFunction:
    return normalizer.map.function if isinstance(normalizer.map, Kernel) else FUNCTIONS["exp"]
