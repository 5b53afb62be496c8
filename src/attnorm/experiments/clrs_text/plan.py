"""The plan of the experiment: equal data, order, steps and batch for every normalizer; only its learning rate differs.

Every normalizer is first trained for a few steps at each learning rate; the lowest held-out loss decides. The items are
ordered so that what the paper claims is complete first: softmax and adaptive temperature, then their further seeds,
then the other normalizers.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from attnorm.training.clrs.model import ClrsRecipe, with_normalizer
from attnorm.training.clrs.train import REFITTED

SOFTMAX, ADAPTIVE = "softmax", "adaptive_temperature"
FIRST_SEED = 0


@dataclass(frozen=True, kw_only=True)
class ClrsPlan:
    """Defaults are for SmolLM2-135M on one large GPU; a model from scratch has `layers`, `heads` and `width`."""

    normalizers: tuple[str, ...] = (SOFTMAX, ADAPTIVE, REFITTED, "ssmax", "entmax15", "asentmax")
    """REFITTED: adaptive temperature with a polynomial fitted to the trained softmax model of the first seed."""
    repeated: tuple[str, ...] = (SOFTMAX, ADAPTIVE)
    """Trained with every seed; the others with the first."""
    seeds: int = 3
    at_inference: tuple[str, ...] = (ADAPTIVE, REFITTED)
    """Replace softmax in further tests of the trained softmax models."""
    rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3)
    rate_steps: int = 100
    steps: int = 1000
    batch: int = 128
    warmup_share: float = 0.05
    weight_decay: float = 0.1
    tokens_at_once: int = 2**15
    context: int = 256
    layers: int = 8
    heads: int = 8
    width: int = 512
    held_out: int = 2000
    observed: int = 1
    algorithms: tuple[str, ...] = ()
    dense: tuple[str, ...] = ()
    """Normalizers that are computed over the whole matrix of weights, where that is faster."""
    dtype: str = "bfloat16"
    compiled: bool = True
    """Compile the blocks, on a GPU."""

    def recipe(self, label: str, *, rate: float, steps: int, seed: int, coefficients: Sequence[float]) -> ClrsRecipe:
        """coefficients: for REFITTED."""
        plain = ClrsRecipe(
            steps=steps, batch=self.batch, learning_rate=rate, warmup=max(1, round(self.warmup_share * steps)),
            weight_decay=self.weight_decay, seed=seed, dtype=self.dtype, tokens_at_once=self.tokens_at_once,
            layers=self.layers, heads=self.heads, width=self.width, context=self.context,
        )  # fmt: skip
        if label == REFITTED:
            return with_normalizer(plain, ADAPTIVE, {"coefficients": list(coefficients)})
        return with_normalizer(plain, label)

    def identity(self) -> dict[str, Any]:
        """Return the values that decide the record of an item; which items there are does not."""
        excluded = ("normalizers", "repeated", "seeds", "dense", "compiled")
        return {name: value for name, value in asdict(self).items() if name not in excluded}

    def only(self, names: Sequence[str]) -> "ClrsPlan":
        """Return the plan with softmax and these normalizers (default: all).

        Raises:
            ValueError: One is not part of the plan.
        """
        unknown = [name for name in names if name not in self.normalizers]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is not trained here; there are {', '.join(self.normalizers)}")
        normalizers = tuple(name for name in self.normalizers if name == SOFTMAX or name in names)
        return replace(self, normalizers=normalizers) if names else self


FULL = ClrsPlan()
QUICK = ClrsPlan(
    normalizers=(SOFTMAX, ADAPTIVE, REFITTED), seeds=1, rates=(3e-3, 1e-2), rate_steps=4, steps=12, batch=8,
    tokens_at_once=1024, context=64, layers=1, heads=2, width=32, held_out=8, dtype="float32",
    dense=(SOFTMAX, ADAPTIVE, REFITTED),
)  # fmt: skip


@dataclass(frozen=True)
class ClrsItem:
    """One training: a short one to choose the learning rate, or a main one with all tests."""

    stage: Literal["rate", "main"]
    label: str
    seed: int
    learning_rate: float | None = None  # of the stage "rate"

    @property
    def name(self) -> str:
        rate = "" if self.learning_rate is None else f"-{self.learning_rate:g}"
        return f"{self.stage}-{self.label.replace(':', '-')}-seed-{self.seed}{rate}"


def items(plan: ClrsPlan) -> list[ClrsItem]:
    """Return all items in order: what an item needs stands before it."""
    claimed = [name for name in plan.normalizers if name in plan.repeated]
    others = [name for name in plan.normalizers if name not in plan.repeated]
    ordered: list[ClrsItem] = []
    for label in claimed:
        ordered += _items_of(plan, label)
    for seed in range(FIRST_SEED + 1, FIRST_SEED + plan.seeds):
        ordered += [ClrsItem("main", label, seed) for label in claimed]
    for label in others:
        ordered += _items_of(plan, label)
    return ordered


def _items_of(plan: ClrsPlan, label: str) -> list[ClrsItem]:
    rates = [ClrsItem("rate", label, FIRST_SEED, rate) for rate in plan.rates]
    return [*rates, ClrsItem("main", label, FIRST_SEED)]


def change_plan(plan: ClrsPlan, changes: Sequence[str]) -> ClrsPlan:
    """Apply NAME=VALUE changes, VALUE in JSON: steps=500, rates=[0.001,0.003], algorithms=["minimum"].

    Raises:
        ValueError: The plan has no such name, or the value is not JSON.
    """
    for change in changes:
        name, _, text = change.partition("=")
        if name not in asdict(plan):
            raise ValueError(f"--set {change}: the plan has no {name!r}; it has {', '.join(asdict(plan))}")
        try:
            value: Any = json.loads(text)
        except json.JSONDecodeError:
            raise ValueError(f"--set {change}: expected a JSON value, as in steps=500; got {text!r}") from None
        value = tuple(value) if isinstance(value, list) else value
        plan = replace(plan, **{name: value})
    return plan
