"""Alerts of the monitor: the states of a layer that endanger training, and the thresholds that define them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

from attnorm.monitor.watch import Heads
from attnorm.text import format_percent

MEANING: dict[str, str] = {
    "entropy_collapse": "attends to single keys, and hardly any gradient reaches the logits",
    "dispersion": "spreads over the whole context",
    "saturation": "distinguishes its top keys no better than if their weights were permuted at random",
    "exploding_logits": "has logits so large that half precision loses accuracy and training may diverge",
    "not_finite": "has logits or weights that are not finite",
}


class AttentionAlert(UserWarning):
    """Warning: the attention of a layer entered a state that endangers training."""


@dataclass(frozen=True, kw_only=True)
class AlertThresholds:
    """A head is in a state if its mean over the sampled rows passes a threshold; a layer, if enough of its heads are.

    parked_sink         mass on the first key from which a head is parked: common, harmless, and neither a collapse nor
                        a saturation.
    collapsed_entropy   nats up to which a head has collapsed. 0.05 is a largest weight of about 0.99.
    dispersed_entropy   entropy / log n from which a head is dispersed. Stricter than the verdict of analyze (0.7),
                        which also uses how the head behaves as n grows; untrained weights start at 0.95 and more.
    heads               share of a layer's heads that must be collapsed or dispersed; every model has single ones.
    separability        share of distinguishable top keys, mean over a layer's heads, below which it is saturated, if
                        the same weights permuted at random do no worse. On four texts SmolLM2's layers
                        lay between 0.48 and 0.88, half of them a little below chance.
    exploding_logit     largest logit of the rows measured, from which one head is enough. 100 is where Kimi K2's
                        QK-clip starts (https://arxiv.org/abs/2507.20534) ...
    logit_growth        ... and this many times its value at the first measurement. Trained models may have
                        large logits, of which softmax sees only the differences; growth is the danger.
    """

    parked_sink: float = 0.5
    collapsed_entropy: float = 0.05
    dispersed_entropy: float = 0.9
    heads: float = 0.5
    separability: float = 0.33
    exploding_logit: float = 100.0
    logit_growth: float = 2.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
                raise ValueError(f"expected threshold {field.name} of at least 0, got {value!r}.")
        if not 0 < self.heads <= 1:
            raise ValueError(f"expected threshold heads above 0 and at most 1, got {self.heads!r}.")


@dataclass(frozen=True, kw_only=True)
class State:
    """A state of a layer, and the number that decides it."""

    kind: str  # of MEANING
    value: float
    words: str


@dataclass(frozen=True, kw_only=True)
class Alert:
    step: int
    layer: str  # as in the keys: layer_03
    kind: str
    value: float
    words: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.layer} {MEANING[self.kind]} ({self.words})"


_COMPARED = ("separability", "separability_null")


def states(heads: Heads, first_logit: float, thresholds: AlertThresholds) -> Iterator[State]:
    """The states that a layer is in. first_logit: its largest logit at the first measurement; NaN if unknown."""
    broken = max(heads["broken_rows"])
    if broken > 0:
        yield State(kind="not_finite", value=broken, words=f"up to {format_percent(broken)} of a head's rows")
    count = len(heads["entropy"])
    selecting = [head for head, mass in enumerate(heads["sink_mass"]) if not mass >= thresholds.parked_sink]
    collapsed = sum(heads["entropy"][head] <= thresholds.collapsed_entropy for head in selecting)
    dispersed = sum(ratio >= thresholds.dispersed_entropy for ratio in heads["entropy_ratio"])
    for kind, many in (("entropy_collapse", collapsed), ("dispersion", dispersed)):
        if many / count >= thresholds.heads:
            yield State(kind=kind, value=many / count, words=f"{many} of {count} heads")
    apart, chance = (_mean([heads[name][head] for head in selecting]) for name in _COMPARED)
    if apart < thresholds.separability and apart <= chance:
        yield State(kind="saturation", value=apart, words=f"separability {apart:.2f}, by chance {chance:.2f}")
    logit = largest_logit(heads)
    if logit >= thresholds.exploding_logit and not logit < thresholds.logit_growth * first_logit:
        yield State(
            kind="exploding_logits", value=logit, words=f"largest logit {logit:.3g}, at first {first_logit:.3g}"
        )


def largest_logit(heads: Heads) -> float:
    return max((value for value in heads["largest_logit"] if not math.isnan(value)), default=math.nan)


def _mean(values: list[float]) -> float:
    """Mean without NaN; NaN where there is no number."""
    numbers = [value for value in values if not math.isnan(value)]
    return sum(numbers) / len(numbers) if numbers else math.nan
