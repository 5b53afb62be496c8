"""`@declare`: the declaration in the file of each normalizer: a reference, example options and a warm start.

    @declare(reference=_reference, examples=[{}, {"temperature": 0.37}], warm_start=WarmStart("T = 1"))
    def softmax(temperature: float = 1.0) -> Normalizer: ...

The tests, `check_normalizer` and `attnorm.patch` read it through the registry; none of them keeps a table of its own.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

Options = Mapping[str, Any]
F = TypeVar("F", bound=Callable[..., Any])

# Number of heads and width of the hidden states that tests use with `examples`.
HEADS, WIDTH = 4, 3


@dataclass(frozen=True)
class Row:
    """One row of attention, the argument of a reference. It holds visible keys only, so a reference needs no mask."""

    z: Tensor  # logits of the visible keys, in order of position
    distance: Tensor  # position of the query minus the position of each key
    head: int = 0
    hidden: Tensor | None = None  # the layer input of the query
    learned: Mapping[str, Tensor] = field(default_factory=dict)  # state dict of the normalizer; empty: use the options

    @property
    def n(self) -> int:
        return len(self.z)

    def value(self, name: str, option: float) -> Tensor:
        """Return the learned value of that name for this row's head, or the option if it is not learned."""
        if name not in self.learned:
            return torch.tensor(option, dtype=torch.float64)
        value = self.learned[name]
        return value if value.dim() == 0 else value[self.head]


Reference = Callable[..., Tensor]  # reference(row, **options) -> weights of the visible keys


def bisect(sum_at: Callable[[float], float], low: float, high: float) -> float:
    """Return the threshold in [low, high] at which a decreasing sum passes 1, rounded down; about 12 digits."""
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if sum_at(middle) >= 1 else (low, middle)
    return low


@dataclass(frozen=True)
class LayerFacts:
    """Facts about an attention layer of a trained model, from which a warm start chooses options."""

    heads: int
    length: int  # of the texts that the model was trained on
    causal: bool = True
    window: int | None = None
    sinks_H: Tensor | None = None  # learned sinks of the model

    def mean_log_n(self) -> float:
        """Return the mean of log n over the rows of one text of the training length, n = visible keys."""
        if self.length < 3:
            raise ValueError(f"train_length must be at least 3, got {self.length}. log n of a row of one key is 0.")
        if not self.causal:
            return math.log(self.length)
        window = min(self.length, self.window or self.length)
        return math.lgamma(window + 1) / self.length + (1 - window / self.length) * math.log(window)


@dataclass(frozen=True)
class WarmStart:
    """How a normalizer starts close to softmax in a trained model, and whether that is close enough without training.

    why: what is set, and what it does.
    options(layer, given): returns values for options that the user did not give.
    values(layer, given, options): returns entries of the state dict that no option sets.
    safe: measured in docs/results/swap.json: with the default options the loss of SmolLM2 stays the same. The page
    beside it has the limit; a test compares the two.
    """

    why: str = "nothing to set"
    options: Callable[[LayerFacts, Options], dict[str, Any]] = lambda *_: {}
    values: Callable[[LayerFacts, Options, Options], dict[str, float | Tensor]] = lambda *_: {}
    safe: bool = False

    def length_options(self, layer: LayerFacts, given: Options) -> dict[str, Any]:
        """Return the options that depend on the training length and are not given, for this layer."""
        start, longer = (self.options(replace(layer, length=n), given) for n in (layer.length, 2 * layer.length))
        return {name: value for name, value in start.items() if name not in given and value != longer[name]}


def heads_if_learned(layer: LayerFacts, given_options: Options) -> dict[str, Any]:
    """Return the number of heads if parameters are learned: the options of a warm start that sets nothing else."""
    return {"heads": layer.heads} if given_options.get("learned") else {}


@dataclass(frozen=True)
class Declaration:
    """The arguments of `@declare`."""

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
    """Decorate the factory of a normalizer. All parts are optional; checks whose part is missing are skipped."""

    def add(factory: F) -> F:
        _declared[factory] = Declaration(reference, examples, warm_start, exceptions or {})
        return factory

    return add


def declaration_of(factory: Callable[..., Any]) -> Declaration:
    return _declared.get(factory, Declaration())


def warm_start_of(factory: Callable[..., Any]) -> WarmStart:
    """Return the declared warm start; without one, only the option `heads` is set, if the factory has it."""
    declared = declaration_of(factory).warm_start
    if declared is not None:
        return declared
    takes_heads = "heads" in inspect.signature(factory).parameters
    return WarmStart("not declared", lambda layer, given_options: {"heads": layer.heads} if takes_heads else {})
