"""Cases to search with: every size from the smallest up, ordinary rows and the structured ones that break bounds.

A case is a function of its seed alone, so a counterexample is named by the numbers that made it.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attnorm.theory.catalogue.claim import CaseSizes, ClaimCase

ROWS = 32
KEYS = (2, 3, 4, 6, 9, 16, 33, 64)
WIDTHS = (1, 2, 3, 8)
HEAD_SIZE = 2
CHOICES = 12  # of `pick`: a multiple of every number of variants that a claim has


def draw_case(seed: int, sizes: CaseSizes, *, structured: bool) -> ClaimCase:
    """A batch of rows of one size. `structured`: ties, two levels, one winner, equal or orthogonal vectors, ..."""
    generator = torch.Generator().manual_seed(seed)
    least_keys = max(sizes.least_keys, sizes.least_top_n + 1)
    keys = _choice([size for size in KEYS if least_keys <= size <= sizes.most_keys], generator)
    width = _choice([size for size in WIDTHS if size >= sizes.least_width], generator)
    top_n = _choice(range(sizes.least_top_n, min(keys - 1, sizes.most_top_n) + 1), generator)
    temperature = math.exp(_uniform(-2.5, 1.5, generator)) if _integer(2, generator) else 1.0
    return ClaimCase(
        logits=(_structured_logits if structured else _random_logits)(keys, generator),
        vectors=(_structured_vectors if structured else _random_vectors)(keys, width, generator),
        temperature=temperature,
        top_n=top_n,
        dial=torch.exp(1.5 * _normal(ROWS, generator=generator)),
        pick=torch.randint(CHOICES, (ROWS,), generator=generator),
        matrices=_normal(ROWS, 2, HEAD_SIZE, width, generator=generator),
    )


def _random_logits(keys: int, generator: torch.Generator) -> Tensor:
    scale = torch.exp(1.5 * _normal(ROWS, 1, generator=generator))
    return scale * _normal(ROWS, keys, generator=generator)


def _structured_logits(keys: int, generator: torch.Generator) -> Tensor:
    high = torch.exp(1.5 * _normal(ROWS, 1, generator=generator))
    rank = torch.arange(keys, dtype=torch.float64)
    leaders = 1 + torch.randint(keys, (ROWS, 1), generator=generator)
    shapes = [
        torch.zeros(ROWS, keys, dtype=torch.float64),
        torch.where(rank < leaders, high, 0.0),
        torch.where(rank < 1, 2 * high, 0.0).expand(ROWS, keys),
        torch.where(rank < keys - 1, high, 0.0).expand(ROWS, keys),
        -high * torch.log1p(rank),
        -high * rank,
        torch.where(rank < leaders, high * rank / keys, -2 * high),
    ]
    return _one_of(shapes, generator)


def _random_vectors(keys: int, width: int, generator: torch.Generator) -> Tensor:
    lengths = torch.exp(0.5 * _normal(ROWS, keys, 1, generator=generator))
    return lengths * _normal(ROWS, keys, width, generator=generator)


def _structured_vectors(keys: int, width: int, generator: torch.Generator) -> Tensor:
    plain = _normal(ROWS, keys, width, generator=generator)
    direction = _normal(ROWS, 1, width, generator=generator)
    axis = torch.nn.functional.one_hot(torch.arange(keys) % width, width).double().expand(ROWS, keys, width)
    sign = 1 - 2.0 * (torch.arange(keys) % 2).double()[:, None]
    shapes = [
        direction.expand(ROWS, keys, width),
        axis,
        sign * direction,
        direction + 0.1 * plain,
        plain / plain.norm(dim=-1, keepdim=True),
        torch.where(torch.arange(keys)[:, None] < 1, 10 * plain, 0.1 * plain),
    ]
    return _one_of(shapes, generator)


def _one_of(shapes: list[Tensor], generator: torch.Generator) -> Tensor:
    """Row by row one of the shapes (each (rows, ...))."""
    chosen = torch.randint(len(shapes), (ROWS,), generator=generator)
    return torch.stack(shapes)[chosen, torch.arange(ROWS)].clone()


def _normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _integer(below: int, generator: torch.Generator) -> int:
    return int(torch.randint(below, (), generator=generator))


def _uniform(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator, dtype=torch.float64))


def _choice(values: Sequence[int], generator: torch.Generator) -> int:
    return values[_integer(len(values), generator)]
