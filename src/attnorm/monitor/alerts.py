"""What counts as going wrong in training, every number that decides it, and one word about each layer it happens to."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

# In words, for the warning.
MEANING: dict[str, str] = {
    "entropy_collapse": "attends to single keys, and hardly any gradient reaches the logits",
    "dispersion": "is smeared over the context",
    "saturation": "tells its top keys apart no better than if their weights were dealt out at random",
    "exploding_logits": "has logits so large that half precision and the loss are in danger",
    "not_finite": "has logits or weights that are not finite",
}


class AttentionAlert(UserWarning):
    """A layer's attention went wrong in training."""


@dataclass(frozen=True, kw_only=True)
class AlertThresholds:
    """A head is in a state if its mean over the sampled rows says so; a layer, if enough of its heads are.

    collapsed_entropy   nats up to which a head has collapsed. 0.05 is a largest weight of about 0.99 ...
    parked_sink         ... unless its first key holds this much: a head parked on a sink is common and harmless.
    dispersed_entropy   entropy / log n from which a head is smeared. Stricter than the verdict of analyze (0.7), which
                        also knows how the head behaves as n grows; fresh weights start at 0.95 and more.
    separable           separability from which a layer is not saturated, whatever chance does. Below it, it is where
                        the heads' mean is no higher than that of the same weights dealt out to the keys at random.
    exploding_logit     largest logit, mean over rows, from which one head is enough. 100 is where Kimi K2's
                        QK-clip steps in (https://arxiv.org/abs/2507.20534).
    heads               share of a layer's heads that must have collapsed or be smeared: single ones are in every model.
    """

    collapsed_entropy: float = 0.05
    parked_sink: float = 0.5
    dispersed_entropy: float = 0.9
    separable: float = 0.95
    exploding_logit: float = 100.0
    heads: float = 0.5

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value >= 0:
                raise ValueError(f"threshold {field.name} must be a number from 0 up, got {value!r}")
        if not 0 < self.heads <= 1:
            raise ValueError(f"threshold heads is a share, expected above 0 and up to 1, got {self.heads!r}")


@dataclass(frozen=True, kw_only=True)
class Alert:
    step: int
    kind: str  # of MEANING
    layer: str  # as in the keys: layer_03
    value: float
    threshold: float

    def __str__(self) -> str:
        return f"{self.layer} {MEANING[self.kind]} ({self.value:.3g}, threshold {self.threshold:.3g})"


Heads = Mapping[str, list[float]]  # by metric, one number per head


def states(heads: Heads, thresholds: AlertThresholds) -> Iterator[tuple[str, float, float]]:
    """The states that a layer is in: kind, the number that says so, and its threshold."""
    broken = max(heads["broken_rows"])
    if broken > 0:
        yield "not_finite", broken, 0.0
    rows = zip(heads["entropy"], heads["sink_mass"], heads["entropy_ratio"], strict=True)
    count = len(heads["entropy"])
    collapsed, dispersed = 0, 0
    for entropy, sink, ratio in rows:
        collapsed += entropy <= thresholds.collapsed_entropy and not sink >= thresholds.parked_sink
        dispersed += ratio >= thresholds.dispersed_entropy
    if collapsed / count >= thresholds.heads:
        yield "entropy_collapse", collapsed / count, thresholds.heads
    if dispersed / count >= thresholds.heads:
        yield "dispersion", dispersed / count, thresholds.heads
    measured, chance = _mean(heads["separability"]), _mean(heads["separability_null"])
    if measured <= chance and measured < thresholds.separable:
        yield "saturation", measured, chance
    largest = max((logit for logit in heads["max_logit"] if logit == logit), default=float("nan"))
    if largest >= thresholds.exploding_logit:
        yield "exploding_logits", largest, thresholds.exploding_logit


def _mean(values: list[float]) -> float:
    """NaN left out; NaN where nothing is left."""
    known = [value for value in values if value == value]
    return sum(known) / len(known) if known else float("nan")
