"""Cases to search with: every size from the smallest up, ordinary rows and the structured ones that break bounds.

A case is a function of its seed alone, so a counterexample is named by the numbers that made it.
"""

import math

import torch
from torch import Tensor

from attnorm.theory.catalogue.claim import Case

ROWS = 32
KEYS = (2, 3, 4, 6, 9, 16, 33, 64)
WIDTHS = (1, 2, 3, 8)


def draw_case(seed: int, most_keys: int, *, structured: bool) -> Case:
    """A batch of rows of one size. `structured`: ties, two levels, one winner, equal or orthogonal vectors, ..."""
    generator = torch.Generator().manual_seed(seed)
    keys = _choice([size for size in KEYS if size <= most_keys], generator)
    width = _choice(WIDTHS, generator)
    top_n = 1 + _integer(max(1, min(keys - 1, 8)), generator)
    temperature = math.exp(_uniform(-2.5, 1.5, generator)) if _integer(2, generator) else 1.0
    logits = _structured_logits(keys, generator) if structured else _random_logits(keys, generator)
    vectors = _structured_vectors(keys, width, generator) if structured else _random_vectors(keys, width, generator)
    dial = torch.exp(1.5 * torch.randn(ROWS, generator=generator, dtype=torch.float64))
    return Case(logits, vectors, temperature, min(top_n, keys - 1), dial)


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
        torch.where(rank < 1, 4 * high, 0.0).expand(ROWS, keys),
        -high * torch.log1p(rank),
        -high * rank,
        torch.where(rank < leaders, high * rank / keys, -2 * high),
    ]
    return torch.stack(shapes)[torch.randint(len(shapes), (ROWS,), generator=generator), torch.arange(ROWS)].clone()


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
    return torch.stack(shapes)[torch.randint(len(shapes), (ROWS,), generator=generator), torch.arange(ROWS)].clone()


def _normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _integer(below: int, generator: torch.Generator) -> int:
    return int(torch.randint(below, (), generator=generator))


def _uniform(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator, dtype=torch.float64))


def _choice(values: list[int] | tuple[int, ...], generator: torch.Generator) -> int:
    return values[_integer(len(values), generator)]
