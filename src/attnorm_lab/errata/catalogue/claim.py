"""A claim: a statement of a paper, printed or corrected, with what is needed to search for a counterexample.

Every claim is measured on the same kind of case - rows of logits over keys that carry vectors - by one number per row,
its ratio: quantity over upper bound, or lower bound over quantity; two numbers where there are both bounds. The claim
is violated where a ratio exceeds 1, and its bounds are as tight as can be where each ratio comes to 1 on some row.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from attnorm.theory.selection import SelectedRows, select

# Of `attained`: rows of the search lie on the bound, or an ascent comes near it. Either notices a bound 1 % too loose.
EXACTLY, NEARLY = 1 - 1e-6, 0.995

Status = Literal["holds", "vacuous", "false"]
Form = Literal["printed", "corrected", "added"]

ROWS = 32
KEYS = (2, 3, 4, 6, 9, 16, 33, 64)
WIDTHS = (1, 2, 3, 8)
HEAD_SIZE = 2
CHOICES = 12  # of `pick`: a multiple of every number of variants that a claim has


@dataclass(frozen=True)
class ClaimCase:
    """Rows to test a claim on. Every claim reads what it needs; rows are independent."""

    logits: Tensor  # (rows, L)
    vectors: Tensor  # (rows, L, d)
    temperature: float
    top_n: int
    dial: Tensor  # (rows,), positive and free for each claim: a radius, an epsilon, ... relative to its natural size
    pick: Tensor  # (rows,), whole numbers, free for each claim: which of its functions, alphas, ...
    matrices: Tensor  # (rows, 2, e, d): what makes queries and what makes keys out of vectors

    @property
    def keys(self) -> int:
        return self.logits.shape[-1]

    @property
    def width(self) -> int:
        return self.vectors.shape[-1]

    @cached_property
    def weights(self) -> Tensor:
        """Softmax of the logits at the case's temperature."""
        return torch.softmax(self.scaled, dim=-1)

    @property
    def scaled(self) -> Tensor:
        return self.logits / self.temperature

    @cached_property
    def selected(self) -> SelectedRows:
        return select(self.weights, self.vectors, self.top_n)

    @property
    def spread(self) -> Tensor:
        return self.logits.amax(-1) - self.logits.amin(-1)

    @property
    def not_applicable(self) -> Tensor:
        """NaN for every row."""
        return torch.full_like(self.dial, torch.nan)

    def rows(self, which: slice) -> "ClaimCase":
        """Some of the rows as a case of their own."""
        return replace(
            self,
            logits=self.logits[which],
            vectors=self.vectors[which],
            dial=self.dial[which],
            pick=self.pick[which],
            matrices=self.matrices[which],
        )

    def padded(self, ratios: Tensor) -> Tensor:
        """Ratios of the first rows only, as ratios of all: the others are not applicable."""
        missing = ratios.new_full((len(self.dial) - len(ratios), *ratios.shape[1:]), torch.nan)
        return torch.cat([ratios, missing])

    def picked(self, ratios: list[Tensor]) -> Tensor:
        """Row by row one of the ratios (each (rows,), or (rows, 2) for two bounds)."""
        return torch.stack(ratios)[self.pick % len(ratios), torch.arange(len(self.pick))]


@dataclass(frozen=True, kw_only=True)
class CaseSizes:
    """The sizes of cases that a claim is about, or that can be searched in reasonable time."""

    least_keys: int = 2
    most_keys: int = 64
    least_width: int = 1
    least_top_n: int = 1
    most_top_n: int = 8


@dataclass(frozen=True, kw_only=True)
class Claim:
    id: str
    family: str
    source: str
    form: Form
    statement: str
    domain: str
    status: Status
    proof: str  # a heading of a chapter: docs/theory/chapter.md#heading
    counterexample: str = ""
    correction: str = ""  # the id of the claim to use instead, or what to do
    ratio: Callable[[ClaimCase], Tensor] | None = None  # (rows,) or (rows, bounds); None: an argument, see `proof`
    attained: tuple[float | None, ...] = ()  # for each bound the ratio that a search must reach, or it became looser
    says_nothing: Callable[[ClaimCase], Tensor] | None = (
        None  # 1 for rows where the bound is trivially true, NaN: not evaluated
    )
    sizes: CaseSizes = CaseSizes()
    differentiable: bool = True

    @property
    def searched(self) -> bool:
        return self.ratio is not None


def at_most(quantity: Tensor, bound: Tensor, rounding: float = 0.0) -> Tensor:
    """Return quantity / bound, 0 if both are 0. `rounding`: what float64 may add to a quantity that is exactly 0."""
    return torch.where(quantity <= 0, quantity.clamp(max=0), quantity / (bound.clamp(min=0) + rounding))


def at_least(quantity: Tensor, bound: Tensor, rounding: float = 0.0) -> Tensor:
    """Return bound / quantity for a quantity that is never negative."""
    return at_most(bound, quantity, rounding)


def between(quantity: Tensor, lower: Tensor, upper: Tensor, rounding: float = 0.0) -> Tensor:
    """Return both ratios, (..., 2): to the lower bound and to the upper bound."""
    return torch.stack([at_least(quantity, lower, rounding), at_most(quantity, upper, rounding)], -1)


def equals(quantity: Tensor, expected: Tensor, tolerance: Tensor | float) -> Tensor:
    """Return a ratio that is above 1 if the difference exceeds the tolerance."""
    return (quantity - expected).abs() / tolerance


def draw_case(seed: int, sizes: CaseSizes, *, structured: bool) -> ClaimCase:
    """Draw a batch of rows of one size. `structured`: ties, two levels, one leader, equal or orthogonal vectors, ..."""
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
    return _pick_shapes(shapes, generator)


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
    return _pick_shapes(shapes, generator)


def _pick_shapes(shapes: list[Tensor], generator: torch.Generator) -> Tensor:
    """Row by row one of the shapes (each (rows, ...))."""
    shape_indices = torch.randint(len(shapes), (ROWS,), generator=generator)
    return torch.stack(shapes)[shape_indices, torch.arange(ROWS)].clone()


def _normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _integer(below: int, generator: torch.Generator) -> int:
    return int(torch.randint(below, (), generator=generator))


def _uniform(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator, dtype=torch.float64))


def _choice(values: Sequence[int], generator: torch.Generator) -> int:
    return values[_integer(len(values), generator)]
