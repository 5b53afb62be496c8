"""What counts as going wrong in training, every number that decides it, and one word about each layer it happens to."""

import math
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

    parked_sink         mass on the first key from which a head is parked: common, harmless, and neither a collapse nor
                        a saturation.
    collapsed_entropy   nats up to which a head has collapsed. 0.05 is a largest weight of about 0.99.
    dispersed_entropy   entropy / log n from which a head is smeared. Stricter than the verdict of analyze (0.7), which
                        also knows how the head behaves as n grows; fresh weights start at 0.95 and more.
    heads               share of a layer's heads that must have collapsed or be smeared: single ones are in every model.
    separability        share of the top keys told apart, mean over a layer's heads, below which it is saturated, if
                        the same weights dealt out at random do no worse: most of them are a blur. On four texts
                        SmolLM2's layers lay between 0.48 and 0.88, half of them a little below chance.
    exploding_logit     largest logit, mean over rows, from which one head is enough. 100 is where Kimi K2's
                        QK-clip steps in (https://arxiv.org/abs/2507.20534) ...
    logit_growth        ... and times its value when the monitor first looked: trained models live with larger ones,
                        of which softmax sees only the differences. What grows is in danger.
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
                raise ValueError(f"threshold {field.name} must be a number from 0 up, got {value!r}")
        if not 0 < self.heads <= 1:
            raise ValueError(f"threshold heads is a share, expected above 0 and up to 1, got {self.heads!r}")


@dataclass(frozen=True, kw_only=True)
class State:
    """What a layer is in, and the number that says so."""

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
        return f"{self.layer} {MEANING[self.kind]} ({self.words})"


_COMPARED = ("separability", "separability_null")

Heads = Mapping[str, list[float]]  # by metric, one number per head


def states(heads: Heads, first_logit: float, thresholds: AlertThresholds) -> Iterator[State]:
    """The states that a layer is in. first_logit: its largest logit when the monitor first looked; NaN if unknown."""
    broken = max(heads["broken_rows"])
    if broken > 0:
        yield State(kind="not_finite", value=broken, words=f"up to {broken:.0%} of a head's rows")
    count = len(heads["entropy"])
    selecting = [head for head, mass in enumerate(heads["sink_mass"]) if not mass >= thresholds.parked_sink]
    collapsed = sum(heads["entropy"][head] <= thresholds.collapsed_entropy for head in selecting)
    dispersed = sum(ratio >= thresholds.dispersed_entropy for ratio in heads["entropy_ratio"])
    for kind, many in (("entropy_collapse", collapsed), ("dispersion", dispersed)):
        if many / count >= thresholds.heads:
            yield State(kind=kind, value=many / count, words=f"{many} of {count} heads")
    apart, chance = (_mean([heads[name][head] for head in selecting]) for name in _COMPARED)
    if apart < thresholds.separability and apart <= chance:
        yield State(kind="saturation", value=apart, words=f"{apart:.2f}, by chance {chance:.2f}")
    logit = largest_logit(heads)
    if logit >= thresholds.exploding_logit and not logit < thresholds.logit_growth * first_logit:
        yield State(kind="exploding_logits", value=logit, words=f"{logit:.3g}, at first {first_logit:.3g}")


def largest_logit(heads: Heads) -> float:
    return max((value for value in heads["max_logit"] if not math.isnan(value)), default=math.nan)


def _mean(values: list[float]) -> float:
    """NaN left out; NaN where nothing is left."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
