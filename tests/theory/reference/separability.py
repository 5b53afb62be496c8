"""Separability by its definition in arithmetic of thousands of bits, and what rounding of the inputs leaves open."""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import mpmath
import torch
from torch import Tensor

MAX_BITS = 12_000  # a lead of 3,000 nats takes 4,300 bits, and its square twice as many


class Count(NamedTuple):
    """How many selected keys are in the ball: by the definition, surely and at most if every input is off by eps."""

    exact: int
    surely: int
    at_most: int


def in_the_ball(weights: Tensor, vectors: Tensor, top_n: int, *, eps: float, logarithms: bool = False) -> Count:
    """One row of n > N keys: weights (n,) or their logarithms, vectors (n, E)."""
    rows = tuple(tuple(vector) for vector in vectors.double().tolist())
    return _in_the_ball(tuple(weights.double().tolist()), rows, top_n, eps, logarithms)


@cache
def _in_the_ball(
    weights: tuple[float, ...], vectors: tuple[tuple[float, ...], ...], top_n: int, eps: float, logarithms: bool
) -> Count:
    with mpmath.workprec(_bits(weights, logarithms)):
        given = [mpmath.mpf(value) for value in weights]
        a = [mpmath.exp(value) if value > -mpmath.inf else mpmath.mpf(0) for value in given] if logarithms else given
        x = [[mpmath.mpf(value) for value in vector] for vector in vectors]
        order = sorted(range(len(a)), key=lambda i: -given[i])  # stable: ties to the earlier key
        inside, outside = order[:top_n], order[top_n:]
        width = range(len(x[0]))
        s = [mpmath.fsum(a[i] * x[i][e] for i in inside) for e in width]
        norms = [mpmath.sqrt(mpmath.fsum(value * value for value in vector)) for vector in x]
        reach = mpmath.fsum(abs(a[i]) * norms[i] for i in inside)
        # ||y - s||^2 - ||s||^2, exact to thousands of bits
        q = [2 * a[i] * _dot(x[i], s) - (a[i] * norms[i]) ** 2 for i in range(len(a))]
        steps = 4 * (len(a) + len(x[0]) + 8)
        if logarithms:  # rounding of a logarithm is a relative error of the weight
            steps += 4 * max(abs(value) for value in given if value > -mpmath.inf)
        slack = [eps * steps * abs(a[i]) * norms[i] * (2 * reach + abs(a[i]) * norms[i]) for i in range(len(a))]
        return Count(
            _count([q[i] for i in inside], [q[i] for i in outside]),
            _count([q[i] - slack[i] for i in inside], [q[i] + slack[i] for i in outside]),
            _count([q[i] + slack[i] for i in inside], [q[i] - slack[i] for i in outside]),
        )


def _bits(weights: tuple[float, ...], logarithms: bool) -> int:
    """Enough for products of two weights to be added without loss."""
    logs = [value if logarithms else math.log(abs(value)) for value in weights if logarithms or value]
    finite = [value for value in logs if value > -math.inf]
    return min(MAX_BITS, 400 + math.ceil(2 * (max(finite) - min(finite)) / math.log(2)))


def _dot(first: Sequence[mpmath.mpf], second: Sequence[mpmath.mpf]) -> mpmath.mpf:
    return mpmath.fsum(one * other for one, other in zip(first, second, strict=True))


def _count(inside: Sequence[mpmath.mpf], outside: Sequence[mpmath.mpf]) -> int:
    nearest = max(outside)
    return sum(value >= nearest for value in inside)


def rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps
