"""The largest Jacobian norm of alpha-entmax over all rows of n keys, for 1 <= alpha <= 2, exactly.

With T the temperature it is max(lambda_2, lambda_n) / T, where

    lambda_m = m/(m-1) (m-1)^(alpha-1) / (1 + (m-1)^((alpha-1)/(3-alpha)))^(3-alpha)

is reached by one large weight and m-1 equal small ones (Theorem in docs/theory/gradient.md). lambda_2 = 2^(alpha-2), so
softmax has 1/(2T) and sparsemax 1/T at every n; in between the constant 2^(alpha-2) holds only up to a length
(47 for entmax15), after which the norm grows with n towards 1/T.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from attnorm.normalizers.entmax import one_against_equals_norm


def entmax_worst_norm(n: int, alpha: float, temperature: float = 1.0) -> float:
    """max over all rows of n keys of ||J||: the Lipschitz constant of alpha-entmax(z/T), exact and attained."""
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    _check(n, alpha)
    if n == 1:
        return 0.0
    return max(one_against_equals_norm(2, alpha), one_against_equals_norm(n, alpha)) / temperature


def entmax_worst_weights(n: int, alpha: float) -> Float[Tensor, " n"]:
    """Weights (float64) with that norm: two equal ones, or a large one and n-1 small ones, ratio (n-1)^(2/(3-alpha)).

    Softmax reaches its two equal weights among n > 2 keys only in the limit of logits.
    """
    _check(n, alpha)
    weights = torch.zeros(n, dtype=torch.float64)
    if n <= 2 or one_against_equals_norm(2, alpha) >= one_against_equals_norm(n, alpha):
        weights[:2] = 1 / min(n, 2)
        return weights
    ratio = (n - 1) ** (2 / (3 - alpha))
    weights[:] = 1 / (ratio + n - 1)
    weights[0] = ratio / (ratio + n - 1)
    return weights


def longest_constant_length(alpha: float) -> int | None:
    """The largest n at which 2^(alpha-2)/T still bounds the norm; None where it does at every n (alpha = 1 and 2)."""
    _check(2, alpha)
    if alpha in (1, 2):
        return None

    def exceeded(n: int) -> bool:
        return one_against_equals_norm(n, alpha) > one_against_equals_norm(2, alpha)

    # Once exceeded it stays so: the worst case cannot fall when keys are added.
    high = 4
    while not exceeded(high):
        high *= 2
        if math.log2(high) > 1000:
            raise ValueError(f"no such length below 2^1000 for alpha = {alpha}: it is too close to 1")
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if exceeded(middle) else (middle, high)
    return low


def _check(n: int, alpha: float) -> None:
    if n < 1:
        raise ValueError(f"a row needs at least one key, got n = {n}")
    if not 1 <= alpha <= 2:
        raise ValueError(
            f"alpha must lie in [1, 2] (1 = softmax, 2 = sparsemax), got {alpha}; beyond 2 no bound exists"
        )
