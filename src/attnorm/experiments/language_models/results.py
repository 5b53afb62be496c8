"""Combine the lines of results.jsonl: one record per model, mean over its seeds, and the normalizers' parameters.

Parameters that are trained without bounds are reported as the value that acts, for example beta = softplus(raw).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from scipy.stats import binomtest, spearmanr

Line = Mapping[str, Any]
Heads = dict[str, list[float]]


@dataclass(frozen=True)
class Spread:
    """Mean over seeds, and half the distance between smallest and largest; None for one seed."""

    mean: float
    half: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(mean(values), None if len(values) < 2 else (max(values) - min(values)) / 2)

    def written(self, digits: int, scale: float = 1.0) -> str:
        half = "" if self.half is None else f" ± {scale * self.half:.{digits}f}"
        return f"{scale * self.mean:.{digits}f}{half}"


@dataclass(frozen=True)
class LMContender:
    """A model as trained, or with another normalizer at inference."""

    normalizer: str
    at_inference: str | None
    seeds: int
    losses: dict[str, dict[int, Spread]]
    """By text and window length, nats per token."""
    keys_found: dict[int, Spread]
    """Share of keys found by length; empty if not measured."""
    characters: dict[int, Spread]
    among_many: Spread | None
    """Share of keys found at the training length if a window has many; None if not measured."""
    attention: dict[str, float]
    by_depth: dict[int, dict[float, float]] = field(default_factory=dict)
    """Share of keys found by length and depth of the key: 0 is the start, 1 the end."""
    questions: int = 0
    """Questions at each length, over all seeds."""
    learning_rate: float | None = None
    tokens: int | None = None
    parameters: int | None = None
    tokens_per_second: float | None = None
    peak_memory_bytes: float | None = None
    computed: str = ""

    @property
    def name(self) -> str:
        return self.normalizer if self.at_inference is None else f"{self.normalizer} → {self.at_inference}"

    def loss(self, text: str, length: int) -> float | None:
        spread = self.losses.get(text, {}).get(length)
        return None if spread is None else spread.mean


def contenders(lines: Iterable[Line]) -> list[LMContender]:
    """Return the models with measured losses, lowest loss at the training length first."""
    all_lines = list(lines)
    measured = [line for line in all_lines if line["stage"] == "measure"]
    keys = dict.fromkeys((line["normalizer"], line["at_inference"]) for line in measured)
    models = [_contender(all_lines, *key) for key in keys]
    return sorted(models, key=lambda model: min(next(iter(model.losses.values())).items())[1].mean)


def _contender(lines: Sequence[Line], normalizer: str, at_inference: str | None) -> LMContender:
    of_normalizer = [line for line in lines if line.get("normalizer") == normalizer]
    of_variant = [line for line in of_normalizer if line.get("at_inference", at_inference) == at_inference]
    measured = [line for line in of_variant if line["stage"] == "measure"]
    needles = [line for line in of_variant if line["stage"] == "needle"]
    main = [line for line in of_normalizer if line["stage"] == "main" and not line["problem"]]
    statistics = [line["attention_statistics"]["mean"] for line in measured if line.get("attention_statistics")]
    trained = at_inference is None
    return LMContender(
        normalizer,
        at_inference,
        seeds=len(measured),
        losses={text: _spread_by_length([line["losses"][text] for line in measured]) for text in measured[0]["losses"]},
        keys_found=_spread_by_length([_numbers_by_length(line, "exact") for line in needles]),
        characters=_spread_by_length([_numbers_by_length(line, "characters") for line in needles]),
        among_many=_among_many(needles),
        attention=_means(statistics),
        by_depth=_found_by_depth(needles),
        questions=sum(min(figures["questions"] for figures in line["by_length"].values()) for line in needles),
        learning_rate=main[0]["learning_rate"] if main and trained else None,
        tokens=main[0]["tokens"] if main and trained else None,
        parameters=main[0]["parameters"] if main and trained else None,
        tokens_per_second=_largest(main, "tokens_per_second") if trained else None,
        peak_memory_bytes=_largest(main, "peak_memory_bytes") if trained else None,
        computed=" and ".join(dict.fromkeys(line["attention"] for line in main)) if trained else "",
    )


def _spread_by_length(runs: Sequence[Mapping[str, float]]) -> dict[int, Spread]:
    if not runs:
        return {}
    return {int(length): Spread.of([run[length] for run in runs]) for length in runs[0]}


def _numbers_by_length(line: Line, name: str) -> dict[str, float]:
    return {length: figures[name] for length, figures in line["by_length"].items()}


def _found_by_depth(needles: Sequence[Line]) -> dict[int, dict[float, float]]:
    shares_by_length: dict[int, dict[float, list[float]]] = {}
    for answer in (answer for line in needles for answer in line.get("answers", ())):
        shares_by_length.setdefault(answer["length"], {}).setdefault(answer["depth"], []).append(answer["exact"])
    return {n: {depth: mean(shares) for depth, shares in by.items()} for n, by in shares_by_length.items()}


def _among_many(needles: Sequence[Line]) -> Spread | None:
    shares = [line["among_many"]["exact"] for line in needles if "among_many" in line]
    return Spread.of(shares) if shares else None


def _means(statistics: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    names = statistics[0] if statistics else ()
    values = {name: [run[name] for run in statistics] for name in names}
    return {name: mean(v for v in numbers if v is not None) for name, numbers in values.items() if None not in numbers}


def _largest(lines: Sequence[Line], name: str) -> float | None:
    values = [line[name] for line in lines if line.get(name) is not None]
    return max(values, default=None)


def most_different_length(models: Sequence[LMContender]) -> int | None:
    """Return the length at which the shares of keys found differ most between models; None if not measured."""
    shares_found = [model.keys_found for model in models if model.keys_found]
    ranges = {n: [by_length[n].mean for by_length in shares_found] for n in (shares_found[0] if shares_found else ())}
    return max(ranges, key=lambda n: max(ranges[n]) - min(ranges[n]), default=None)


def wilson_interval(share: float, questions: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share that was measured with so many questions."""
    interval = binomtest(round(share * questions), questions).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Spearman's rank correlation; None for fewer than four pairs, or if one side is constant."""
    if len(pairs) < 4 or any(len({pair[side] for pair in pairs}) == 1 for side in (0, 1)):
        return None
    return float(spearmanr(*zip(*pairs, strict=True)).statistic)


AS_IT_ACTS: dict[str, tuple[str, Callable[[float], float]]] = {
    "s": ("s", lambda raw: raw),
    "logit": ("sink logit", lambda raw: raw),
    "raw_beta": ("beta", lambda raw: math.log1p(math.exp(raw))),
    "raw_gamma": ("gamma", lambda raw: 2 * math.tanh(raw)),
}


@dataclass(frozen=True)
class Learned:
    """A parameter of a normalizer, over all heads of a model."""

    normalizer: str
    seed: int
    what: str
    mean: float
    smallest: float
    largest: float


def learned_parameters(lines: Sequence[Line], lengths: Sequence[int] = ()) -> list[Learned]:
    """Return the parameters in the order of the runs; with lengths, also the factor on the logits at these lengths."""
    parameters = []
    for run in (line for line in lines if line["stage"] == "main" and line.get("learned")):
        heads = _heads_by_parameter(run["learned"])
        heads |= {f"factor at {n:,} keys": factors for n in lengths if (factors := _factors(heads, n))}
        parameters += [
            Learned(run["normalizer"], run["seed"], name, mean(values), min(values), max(values))
            for name, values in heads.items()
        ]
    return parameters


def _heads_by_parameter(learned: Heads) -> Heads:
    heads: Heads = {}
    for name, values in learned.items():
        last = name.rpartition(".")[2]
        label, acting = AS_IT_ACTS.get(last, (last, float))
        heads.setdefault(label, []).extend(acting(value) for value in values)
    return heads


def _factors(heads: Heads, n: int) -> list[float]:
    """Return the factor per head: s log n for ssmax, 1 + beta log(n + 1)^gamma for asentmax, none for others."""
    if "s" in heads:
        return [s * math.log(n) for s in heads["s"]]
    pairs = zip(heads.get("beta", []), heads.get("gamma", []), strict=True)
    return [1 + beta * math.log(n + 1) ** gamma for beta, gamma in pairs]
