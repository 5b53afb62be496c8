"""A claim: a statement of a paper, printed or corrected, with what is needed to search for a counterexample.

Every claim is measured on the same kind of case - rows of logits over keys that carry vectors - by one number per row,
its ratio: quantity over upper bound, or lower bound over quantity. The claim is violated where the ratio exceeds 1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from attnorm.theory.selection import SelectedRows, select

Status = Literal["holds", "vacuous", "false"]
Form = Literal["printed", "corrected", "added"]


@dataclass(frozen=True)
class Case:
    """Rows to test a claim on: logits (rows, L), vectors (rows, L, d), a temperature, a top-N and a positive number."""

    logits: Tensor
    vectors: Tensor
    temperature: float
    top_n: int
    dial: Tensor  # (rows,), free for each claim: a radius, an epsilon, ... relative to its natural size

    @property
    def keys(self) -> int:
        return self.logits.shape[-1]

    @cached_property
    def weights(self) -> Tensor:
        """Softmax of the logits at the case's temperature."""
        return torch.softmax(self.logits / self.temperature, dim=-1)

    @cached_property
    def selected(self) -> SelectedRows:
        return select(self.weights, self.vectors, self.top_n)

    @property
    def spread(self) -> Tensor:
        return self.logits.amax(-1) - self.logits.amin(-1)


@dataclass(frozen=True, kw_only=True)
class Claim:
    id: str
    family: str
    source: str
    form: Form
    statement: str
    domain: str
    status: Status
    proof: str
    counterexample: str = ""
    correction: str = ""  # the id of the claim to use instead
    ratio: Callable[[Case], Tensor] | None = None  # None: an argument, not a number; see `proof`
    says_nothing: Callable[[Case], Tensor] | None = None  # 1 for rows on which a bound is trivially true, NaN: not counted
    most_keys: int = 64
    differentiable: bool = True

    @property
    def searched(self) -> bool:
        return self.ratio is not None


def at_most(quantity: Tensor, bound: Tensor, rounding: float = 0.0) -> Tensor:
    """quantity / bound, 0 where both are 0. `rounding`: what float64 may add to a quantity that is exactly 0."""
    return torch.where(quantity <= 0, quantity.clamp(max=0), quantity / (bound.clamp(min=0) + rounding))


def at_least(quantity: Tensor, bound: Tensor, rounding: float = 0.0) -> Tensor:
    """bound / quantity for a quantity that is never negative."""
    return at_most(bound, quantity, rounding)


def between(quantity: Tensor, lower: Tensor, upper: Tensor, rounding: float = 0.0) -> Tensor:
    return torch.maximum(at_most(quantity, upper, rounding), at_least(quantity, lower, rounding))


def equals(quantity: Tensor, expected: Tensor, tolerance: float) -> Tensor:
    """Above 1 where the relative difference exceeds the tolerance."""
    return (quantity - expected).abs() / (tolerance * torch.maximum(expected.abs(), torch.full_like(expected, 1e-12)))
