"""What the file of a normalizer declares beside its map: a plain reference, examples of options, a warm start.

    @declare(reference=_reference, examples=[{}, {"temperature": 0.37}], warm_start=WarmStart("the same", "T = 1"))
    def softmax(temperature: float = 1.0) -> Normalizer: ...

The tests, `check_normalizer` and `attnorm.patch` read it through the registry; none of them keeps a table of its own.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

Options = Mapping[str, Any]
F = TypeVar("F", bound=Callable[..., Any])

# Sizes of the parameters in `examples`: heads, and the width of hidden states.
HEADS, WIDTH = 4, 3


@dataclass(frozen=True)
class Row:
    """One row of attention for a reference: its visible keys only, so that masks cannot matter."""

    z: Tensor  # logits of the visible keys, in order
    distance: Tensor  # position of the query minus the position of each key
    head: int = 0
    hidden: Tensor | None = None  # the layer input of the query
    learned: Mapping[str, Tensor] = field(default_factory=dict)  # state of the normalizer; empty: use the options

    @property
    def n(self) -> int:
        return len(self.z)

    def value(self, name: str, option: float) -> Tensor:
        """The learned value of that name for this row's head, or the option where nothing is learned."""
        if name not in self.learned:
            return torch.tensor(option, dtype=torch.float64)
        value = self.learned[name]
        return value if value.dim() == 0 else value[self.head]


Reference = Callable[..., Tensor]  # reference(row, **options) -> weights of the visible keys


def bisect(sum_at: Callable[[float], float], low: float, high: float) -> float:
    """The threshold in [low, high] at which a falling sum passes 1, from below; a Newton step gives the last digits."""
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if sum_at(middle) >= 1 else (low, middle)
    return low


@dataclass(frozen=True)
class LayerFacts:
    """What a warm start may depend on."""

    heads: int
    length: int  # of the texts that the model was trained on
    causal: bool = True
    window: int | None = None
    sinks_H: Tensor | None = None  # the model's own

    def mean_log_n(self) -> float:
        """The mean of log n, n the visible keys of a row, over one text of the training length."""
        if self.length < 3:
            raise ValueError(f"train_length must be at least 3, got {self.length}: log n is 0 for a row of one key")
        if not self.causal:
            return math.log(self.length)
        window = min(self.length, self.window or self.length)
        return math.lgamma(window + 1) / self.length + (1 - window / self.length) * math.log(window)


@dataclass(frozen=True)
class WarmStart:
    """How close to softmax a normalizer starts in a trained model, and how it gets there.

    options: those that the user did not give, from the layer and the given ones. values: entries of the state that no
    option sets, from the layer, the given options and all options. by_length: the option that the length decides.
    """

    close: str
    why: str = "nothing to set"
    options: Callable[[LayerFacts, Options], dict[str, Any]] = lambda layer, given: {}
    values: Callable[[LayerFacts, Options, Options], dict[str, float | Tensor]] = lambda layer, given, options: {}
    by_length: str | None = None


@dataclass(frozen=True)
class Declaration:
    reference: Reference | None = None
    examples: Sequence[Options] = ({},)
    warm_start: WarmStart | None = None
    exceptions: Mapping[str, str] = field(default_factory=dict)  # check of check_normalizer -> why it cannot hold


_declared: dict[Any, Declaration] = {}


def declare(
    *,
    reference: Reference | None = None,
    examples: Sequence[Options] = ({},),
    warm_start: WarmStart | None = None,
    exceptions: Mapping[str, str] | None = None,
) -> Callable[[F], F]:
    """Decorator of a factory. All parts are optional; a check is skipped where its part is missing."""

    def add(factory: F) -> F:
        _declared[factory] = Declaration(reference, examples, warm_start, exceptions or {})
        return factory

    return add


def declaration_of(factory: Callable[..., Any]) -> Declaration:
    return _declared.get(factory, Declaration())


def warm_start_of(factory: Callable[..., Any]) -> WarmStart:
    """The declared one; else a factory that takes `heads` is given them."""
    declared = declaration_of(factory).warm_start
    if declared is not None:
        return declared
    takes_heads = "heads" in inspect.signature(factory).parameters
    return WarmStart("unknown", "not declared", lambda layer, given: {"heads": layer.heads} if takes_heads else {})
