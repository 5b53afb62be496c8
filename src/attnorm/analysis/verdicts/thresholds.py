"""The verdicts, their order, and every number that decides between them, each with its reason."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from attnorm.analysis.tables import QUANTILES
from attnorm.text import did_you_mean

UNDECIDED, DIFFERS = "undecided", "differs"
DISPERSED = ("dispersed-forced", "dispersed-by-choice", "dispersed")
SELECTING = ("healthy", "sensitive", "frozen")

# Saturation is judged separately, because it needs the optional metric group "vectors".
SATURATION: dict[str, str] = {
    "saturated": "its keys are shown to be distinguishable hardly better than with permuted weights",
    "distinguishes": "its keys are shown to be distinguishable, most of them or more than with permuted weights",
    "not judged": "not measured, or too few rows to show either",
}


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Thresholds of the verdicts. A head is judged by its median row among its longest rows, unless stated otherwise.

    dispersed_entropy   entropy / log n from which attention counts as spread out. 0.7 is more than n^0.7 keys sharing
                        the weight, 128 of 1,024: a head that reads so many values at once does not select.
    dispersed_slope     slope of the effective gap on log n up to which growth is not compensated. 1 keeps the largest
                        weight at every length, 0 is what theory predicts; at 0.75 its odds halve when n grows 16-fold.
                        The slope must lie below 1 by two standard errors as well.
    silent_sum          sum of the absolute weights of a row below which the head is silent, if that of the mean row is
                        below as well: a head may read in few rows. At 0.01 the output is at most 1 % as large as the
                        largest value, so that the head adds almost nothing. The share that a learned sink takes counts
                        as weight: such a head is sink-dominated.
    near_floor          part of the way from the entropy floor to log n within which a head counts as sharp: as sharp
                        as its spread allows, hence never dispersed.
    sink_dominated      mass on the first key (in a sliding window: its first key) from which a head is sink-dominated.
    sink_matters        mass on the first key from which dispersion is judged among the other keys (entropy, slope and
                        horizon alike): above it a sink can make a spread-out row look sharp, below it one key of many
                        changes nothing.
    frozen_weight       largest weight from which one key takes everything ...
    frozen_norm         ... and Jacobian norm, as a share of the worst case, below which gradients have vanished. A
                        softmax row with largest weight 0.99 has at most 0.04 of its worst case 1/2.
    sensitive_norm      Jacobian norm, as a share of the normalizer's worst case, that counts as near it. Softmax
                        reaches 0.9 of it only with two keys that share the row at about 1 : 2 or closer ...
    sensitive_quantile  ... on at least this quantile's share of the rows: 75 is a quarter of them.
    saturation_top_n    separability is compared with its null at the largest measured N up to this one and up to the
                        keys that the head uses (its effective keys): the papers see it level off between 16 and 20,
                        and keys without weight are no selection.
    saturation_margin   excess of separability over its null below which a head counts as no better than the null. Its
                        90 % interval (two one-sided tests of 5 %) must lie below, else saturation is not judged.
    separable           separability from which a head is not saturated whatever its null: the papers call a head
                        saturated below 0.8.
    confidence          share of bootstrap resamples (of windows, or of blocks of rows where there are fewer than four
                        windows) that must give the same verdict; below it the verdict is "undecided".
    agreement           share of windows that must give the same verdict; below it the verdict is "undecided".
    """

    dispersed_entropy: float = 0.7
    dispersed_slope: float = 0.75
    silent_sum: float = 0.01
    near_floor: float = 0.1
    sink_dominated: float = 0.5
    sink_matters: float = 0.1
    frozen_weight: float = 0.99
    frozen_norm: float = 0.04
    sensitive_norm: float = 0.9
    sensitive_quantile: int = 75
    saturation_top_n: int = 20
    saturation_margin: float = 0.1
    separable: float = 0.8
    confidence: float = 0.9
    agreement: float = 0.5

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is float and not (_is_number(value) and 0 <= value <= 1):
                raise ValueError(f"threshold {field.name} is a share, expected between 0 and 1, got {value!r}")
        if self.sensitive_quantile not in QUANTILES:
            raise ValueError(f"sensitive_quantile must be one of {QUANTILES}, got {self.sensitive_quantile!r}")
        if not isinstance(self.saturation_top_n, int) or self.saturation_top_n < 1:
            raise ValueError(f"saturation_top_n must be a whole number of at least 1, got {self.saturation_top_n!r}")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def changed(self, words: Iterable[str]) -> "Thresholds":
        """Return a copy with some thresholds changed, given as text such as "dispersed_entropy=0.95"."""
        values: dict[str, float] = {}
        for word in words:
            name, equals, value = (part.strip() for part in word.partition("="))
            if not equals:
                raise ValueError(f"a threshold is set as NAME=VALUE, e.g. dispersed_entropy=0.95; got {word!r}")
            if name not in self.as_dict():
                raise ValueError(f"unknown threshold {name!r}; {did_you_mean(name, self.as_dict())}")
            if name in values:
                raise ValueError(f"threshold {name} is set twice")
            values[name] = _read(name, value, integer=isinstance(getattr(self, name), int))
        return replace(self, **values)  # type: ignore[arg-type]  # whole numbers where they belong

    def differences(self, others: "Thresholds") -> dict[str, tuple[float, float]]:
        """Return name -> (value here, value in `others`) for thresholds that differ."""
        other_values = others.as_dict()
        return {
            name: (value, other_values[name]) for name, value in self.as_dict().items() if value != other_values[name]
        }


def checked(thresholds: Thresholds | None) -> Thresholds:
    """Return the thresholds, the defaults for None; raise TypeError for anything else, before a long measurement."""
    if thresholds is not None and not isinstance(thresholds, Thresholds):
        raise TypeError(
            f"thresholds: expected attnorm.Thresholds, got {type(thresholds).__name__}. "
            "Write attnorm.Thresholds(dispersed_entropy=0.8), for example."
        )
    return thresholds or Thresholds()


def thresholds_of(saved: Mapping[str, Any]) -> Thresholds:
    """Return the thresholds of a manifest; names that this version does not know are ignored."""
    names = {field.name for field in fields(Thresholds)}
    return Thresholds(**{name: value for name, value in saved.items() if name in names})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read(name: str, value: str, *, integer: bool) -> float:
    try:
        return int(value) if integer else float(value)
    except ValueError:
        expected = "a whole number" if integer else "a number between 0 and 1"
        raise ValueError(f"threshold {name} takes {expected}, got {value!r}") from None
