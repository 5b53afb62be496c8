"""What is run: the models, the tokens they read, the learning rates tried, and the tests afterwards."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from attnorm.normalizers.spec import parse_spec
from attnorm.training.lm.settings import LMSettings
from attnorm.training.needle.train import NeedleTask

SOFTMAX = "softmax"


@dataclass(frozen=True, kw_only=True)
class LanguageModelPlan:
    """Equal conditions for every normalizer: only the normalizer and its learning rate differ."""

    normalizers: tuple[str, ...] = (
        SOFTMAX, "ssmax", "sigmoid", "entmax15", "asentmax", "kneemax", "kneemax:knee=0.25", "softpick", "sa_softmax",
        "sink",
    )  # fmt: skip
    at_inference: tuple[str, ...] = ("adaptive_temperature", "log_scaled")
    """Replace softmax in the trained softmax model; log_scaled equals softmax up to the training length."""
    layers: int = 8
    heads: int = 8
    width: int = 512
    context: int = 1024
    vocab: int = 8192
    batch: int = 16
    """Windows per step. With 64, the short runs would have too few steps to choose a learning rate."""
    rates: tuple[float, ...] = (5e-4, 1e-3, 2e-3)
    rate_tokens: int = 5_200_000
    main_tokens: int = 50_331_648
    warmup_share: float = 0.1
    weight_decay: float = 0.1
    longer: tuple[int, ...] = (1, 2, 4)
    chunks: int = 40
    """Pieces of text, each as long as the longest window, for the losses at all lengths."""
    observed: int = 2
    """Windows for the attention statistics."""
    needle: NeedleTask = field(default_factory=lambda: NeedleTask(steps=400, batch=16))
    dtype: str = "bfloat16"
    compiled: bool = True

    def settings(self, normalizer: str, *, rate: float, tokens: int, seed: int) -> LMSettings:
        steps = max(1, math.ceil(tokens / (self.batch * self.context)))
        name, options = parse_spec(normalizer)
        return LMSettings(
            architecture="llama", layers=self.layers, heads=self.heads, width=self.width, context=self.context,
            vocab=self.vocab, steps=steps, batch=self.batch, learning_rate=rate,
            warmup=max(1, round(self.warmup_share * steps)), weight_decay=self.weight_decay, seed=seed,
            dtype=self.dtype, normalizer=name, normalizer_options=options,
        )  # fmt: skip

    def chosen(self, names: "tuple[str, ...] | list[str] | None") -> tuple[str, ...]:
        """Return the selected normalizers, or all if none is given.

        Raises:
            ValueError: One is not part of the plan.
        """
        if not names:
            return self.normalizers
        unknown = [name for name in names if name not in self.normalizers]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is not trained here; there are {', '.join(self.normalizers)}")
        return tuple(names)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


FULL = LanguageModelPlan()
QUICK = LanguageModelPlan(
    normalizers=(SOFTMAX, "ssmax", "entmax15"),
    layers=2, heads=2, width=32, context=64, vocab=384, batch=8,
    rates=(3e-3, 1e-2), rate_tokens=5_000, main_tokens=20_000, chunks=4, observed=2,
    needle=NeedleTask(steps=20, batch=8, questions=4, characters=2, longer=(1, 2), depths=(0.2, 0.8)),
    dtype="float32", compiled=False,
)  # fmt: skip


def on_this_machine(plan: LanguageModelPlan) -> LanguageModelPlan:
    """Return the plan for this machine: without a GPU, float32 and nothing compiled."""
    import torch

    return plan if torch.cuda.is_available() else replace(plan, dtype="float32", compiled=False)


def change_plan(plan: LanguageModelPlan, changes: Sequence[str]) -> LanguageModelPlan:
    """Apply NAME=VALUE changes, VALUE in JSON: main_tokens=50000000, rates=[0.001,0.002], needle.steps=300.

    Raises:
        ValueError: The plan has no such name, or the value is not JSON.
    """
    for change in changes:
        name, _, text = change.partition("=")
        part, dot, inner = name.partition(".")
        if part not in plan.as_dict() or (dot and inner not in plan.as_dict()[part]):
            raise ValueError(f"--set {change}: the plan has no {name!r}; it has {', '.join(plan.as_dict())}")
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            raise ValueError(f"--set {change}: the value must be JSON, as in batch=16 or rates=[0.001,0.002]") from None
        value = tuple(value) if isinstance(value, list) else value
        if dot:
            value = replace(getattr(plan, part), **{inner: value})
        plan = replace(plan, **{part: value})
    return plan
