"""The results: one record per model, mean over its seeds, as Markdown tables and as a summary.

They combine the lines of results.jsonl. Parameters that are trained without bounds are reported as the value that acts,
for example beta = softplus(raw).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, variance
from typing import Any

from scipy.stats import spearmanr
from scipy.stats import t as student

from attnorm.arithmetic import SIGNIFICANT, wilson_interval
from attnorm.text import markdown_table as table
from attnorm_lab.experiments.experiment import compare_over_seeds

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


def main_runs(lines: Iterable[Line]) -> list[Line]:
    """Return the main runs; the last one of a model that was trained again because its checkpoint was lost."""
    runs = {(line["normalizer"], line.get("seed")): line for line in lines if line["stage"] == "main"}
    return list(runs.values())


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
    # What training says is said of the model as trained only.
    main = [line for line in main_runs(of_normalizer) if not line["problem"]] if at_inference is None else []
    first: Line = main[0] if main else {}
    statistics = [line["attention_statistics"]["mean"] for line in measured if line.get("attention_statistics")]
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
        learning_rate=first.get("learning_rate"),
        tokens=first.get("tokens"),
        parameters=first.get("parameters"),
        tokens_per_second=_largest(main, "tokens_per_second"),
        peak_memory_bytes=_largest(main, "peak_memory_bytes"),
        computed=" and ".join(dict.fromkeys(line["attention"] for line in main)),
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


def most_informative_length(models: Sequence[LMContender]) -> int | None:
    """Return the length at which shares of keys found are farthest from none and all; None if not measured.

    It maximizes the sum of p (1 - p). A model that finds no key at any length does not count.
    """
    shares_found = [model.keys_found for model in models if model.keys_found]
    lengths = shares_found[0] if shares_found else ()
    return max(
        lengths,
        key=lambda n: sum(by_length[n].mean * (1 - by_length[n].mean) for by_length in shares_found),
        default=None,
    )


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
    for run in (line for line in main_runs(lines) if line.get("learned")):
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


# Attention statistics: heading and digits.
ATTENTION = {
    "entropy_ratio": ("entropy / log n", 3),
    "effective_keys": ("effective keys", 1),
    "max_weight": ("largest weight", 3),
    "sink_mass": ("first key and sink", 3),
    "row_sum": ("row sum", 3),
    "jacobian_norm": ("Jacobian norm", 3),
}


def all_tables(lines: Iterable[Line]) -> str:
    all_lines = list(lines)
    models = contenders(all_lines)
    parts = [
        ("Loss", losses_table(models)), ("Loss above softmax", differences_table(all_lines, "softmax")),
        ("Loss above softmax with ALiBi", differences_table(all_lines, "alibi")),
        ("Pass keys found", needle_table(models)),
        ("Where the key lay", depth_table(models)), ("Cost", cost_table(models)),
        ("Attention", attention_table(models)), ("Sharper heads, better recall?", recall_table(models)),
        ("Learned by the normalizers", learned_table(all_lines, models)), ("Learning rates", rates_table(all_lines)),
        ("While training", course_table(all_lines)), ("Summary", summary(models)),
    ]  # fmt: skip
    return "\n\n".join(f"## {title}\n\n{body}" for title, body in parts if body) + "\n"


def losses_table(models: Sequence[LMContender]) -> str:
    """Return nats per token by text and window length."""
    if not models:
        return ""
    columns = [(text, length) for text, lengths in models[0].losses.items() for length in lengths]
    rows = [
        [model.name, str(model.seeds), *(model.losses[text][length].written(4) for text, length in columns)]
        for model in models
    ]
    return table(["normalizer", "seeds", *(f"{text}, {length:,}" for text, length in columns)], rows)


def differences_table(lines: Iterable[Line], baseline: str) -> str:
    """Return the loss above that of a baseline, with its 95 % interval; bold: p < 0.05 after Holm over the column.

    One seed has no spread of its own: its interval is that of the difference from the mean of the baseline, by the
    spread over seeds that the models of these lines have in common, and it is never bold.
    """
    losses: dict[str, dict[int, Any]] = {}
    for line in lines:
        if line["stage"] == "measure" and line["at_inference"] is None:
            losses.setdefault(line["normalizer"], {})[line.get("seed", 0)] = line["losses"]
    base = losses.pop(baseline, None)
    if base is None or not losses:
        return ""
    columns = [(text, length) for text, lengths in next(iter(base.values())).items() for length in lengths]
    cells: dict[str, list[str]] = {name: [str(len(seeds))] for name, seeds in losses.items()}
    for text, length in columns:
        theirs, *others = (
            {seed: by_text[text][length] for seed, by_text in seeds.items()} for seeds in (base, *losses.values())
        )
        tests = compare_over_seeds({name: (ours, theirs) for name, ours in zip(losses, others, strict=True)})
        for name, ours in zip(losses, others, strict=True):
            if name in tests:
                test, p_holm = tests[name]
                cell = f"{test.value:+.3f} ± {(test.high - test.low) / 2:.3f}"
                cells[name].append(f"**{cell}**" if p_holm < SIGNIFICANT else cell)
            else:
                half_width = _half_width_of_one_seed([theirs, *others], len(theirs))
                cells[name].append(f"{mean(ours.values()) - mean(theirs.values()):+.3f}" + half_width)
    headings = ["normalizer", "seeds", *(f"{text}, {int(length):,}" for text, length in columns)]
    return table(headings, [[name, *row] for name, row in cells.items()])


def _half_width_of_one_seed(losses: Iterable[Mapping[int, float]], seeds: int) -> str:
    """Return " ± half width" of one seed minus the mean of others, by the pooled deviation; empty without any."""
    repeated = [list(by_seed.values()) for by_seed in losses if len(by_seed) > 1]
    freedom = sum(len(group) - 1 for group in repeated)
    if not freedom:
        return ""
    spread = math.sqrt(sum((len(group) - 1) * variance(group) for group in repeated) / freedom)
    return f" ± {student.ppf(0.975, freedom) * spread * math.sqrt(1 + 1 / seeds):.3f}"


def needle_table(models: Sequence[LMContender]) -> str:
    """Return the percentage of keys with every character right, and of characters."""
    tested = [model for model in models if model.keys_found]
    if not tested:
        return ""
    lengths = list(tested[0].keys_found)
    best_first = sorted(tested, key=lambda model: [-model.keys_found[length].mean for length in reversed(lengths)])
    rows = [
        [
            model.name,
            *(model.keys_found[length].written(1, 100) for length in lengths),
            *(model.characters[length].written(1, 100) for length in lengths),
            model.among_many.written(1, 100) if model.among_many else "",
        ]
        for model in best_first
    ]
    headings = [f"{what} at {length:,}" for what in ("keys", "characters") for length in lengths]
    return table(["normalizer", *(f"% {heading}" for heading in headings), "% keys among many"], rows)


def depth_table(models: Sequence[LMContender]) -> str:
    """Return the percentage of keys found by position, at the most informative length."""
    length = most_informative_length(models)
    looked = [model for model in models if length is not None and model.by_depth.get(length)]
    if length is None or not looked:
        return ""
    depths = list(looked[0].by_depth[length])
    rows = [[model.name, *(f"{100 * model.by_depth[length][depth]:.0f}" for depth in depths)] for model in looked]
    return table([f"key at token, of {length:,}", *(f"{depth * length:,.0f}" for depth in depths)], rows)


def cost_table(models: Sequence[LMContender]) -> str:
    rows = [
        [
            model.name,
            _number(model.tokens_per_second, "{:,.0f}"),
            _number(None if model.peak_memory_bytes is None else model.peak_memory_bytes / 2**30, "{:.1f}"),
            model.computed,
            _number(model.tokens, "{:,}"),
            _number(model.parameters, "{:,}"),
            _number(model.learning_rate, "{:g}"),
        ]
        for model in models
        if model.at_inference is None
    ]
    headings = [
        "normalizer",
        "tokens/s in this run",
        "peak GiB",
        "attention",
        "tokens read",
        "parameters",
        "learning rate",
    ]
    return table(headings, rows)


def attention_table(models: Sequence[LMContender]) -> str:
    looked = [model for model in models if model.attention]
    rows = [
        [
            model.name,
            *(_number(model.attention.get(name), f"{{:.{digits}f}}") for name, (_, digits) in ATTENTION.items()),
        ]
        for model in looked
    ]
    return table(["normalizer", *(heading for heading, _ in ATTENTION.values())], rows)


def recall_table(models: Sequence[LMContender]) -> str:
    """Return keys found at the most informative length, with a 95 % interval; lowest entropy first."""
    length = most_informative_length(models)
    if length is None:
        return ""
    tested = [model for model in models if model.keys_found and "entropy_ratio" in model.attention]
    rows = []
    for model in sorted(tested, key=lambda model: model.attention["entropy_ratio"]):
        low, high = wilson_interval(model.keys_found[length].mean, model.questions)
        rows.append(
            [model.name, f"{model.attention['entropy_ratio']:.3f}", model.keys_found[length].written(0, 100),
             f"{100 * low:.0f} to {100 * high:.0f}", model.characters[length].written(0, 100)]
        )  # fmt: skip
    return table(["normalizer", "entropy / log n", f"% keys at {length:,}", "95 %", "% characters"], rows)


def learned_table(lines: Sequence[Line], models: Sequence[LMContender]) -> str:
    """Return the normalizers' parameters over all heads, and their factor on the logits at every measured length."""
    lengths = sorted({n for model in models for by_length in model.losses.values() for n in by_length})
    rows = [
        [
            parameter.normalizer,
            str(parameter.seed),
            parameter.what,
            *(f"{x:.3f}" for x in (parameter.mean, parameter.smallest, parameter.largest)),
        ]
        for parameter in learned_parameters(lines, lengths)
    ]
    return table(["normalizer", "seed", "parameter", "mean", "smallest", "largest"], rows)


def course_table(lines: Sequence[Line]) -> str:
    """Return the validation loss during training, by million tokens read."""
    runs = [line for line in main_runs(lines) if line.get("course")]
    courses = [{point[0]: point[2] for point in run["course"] if point[2] is not None} for run in runs]
    read = sorted({tokens for course in courses for tokens in course})
    rows = [
        [run["normalizer"], str(run["seed"]), *(_number(course.get(tokens), "{:.3f}") for tokens in read)]
        for run, course in zip(runs, courses, strict=True)
    ]
    return table(["normalizer", "seed", *(f"{tokens / 1e6:.1f} M" for tokens in read)], rows)


def rates_table(lines: Sequence[Line]) -> str:
    """Return the final validation loss of the short runs."""
    tried = [line for line in lines if line["stage"] == "rate"]
    rates = sorted({line["learning_rate"] for line in tried})
    rows = []
    for name in dict.fromkeys(line["normalizer"] for line in tried):
        ended = {line["learning_rate"]: line["valid_loss"] for line in tried if line["normalizer"] == name}
        best = min((loss for loss in ended.values() if loss is not None), default=None)
        cells = [_number(ended.get(rate), "{:.4f}") if rate in ended else "" for rate in rates]
        rows.append(
            [name, *(f"**{cell}**" if ended.get(r) == best else cell for r, cell in zip(rates, cells, strict=True))]
        )
    return table(["normalizer", *(f"{rate:g}" for rate in rates)], rows)


def summary(models: Sequence[LMContender]) -> str:
    """Return the summary: the best normalizers, and whether sharper heads find more keys."""
    trained = [model for model in models if model.at_inference is None]
    if len(trained) < 2:
        return ""
    text, lengths = next(iter((text, list(by)) for text, by in models[0].losses.items()))
    sentences = []
    for length in (lengths[0], lengths[-1]):
        best = min(models, key=lambda model: model.losses[text][length].mean)
        softmax = next((model for model in models if model.name == "softmax"), None)
        behind = "" if softmax is None or softmax is best else f"; softmax {softmax.losses[text][length].mean:.4f}"
        sentences.append(
            f"On windows of {length:,} tokens {best.name} has the lowest loss on {text}, "
            f"{best.losses[text][length].mean:.4f} nats{behind}."
        )
    tested = [model for model in models if model.keys_found]
    if tested:
        for length in (min(tested[0].keys_found), max(tested[0].keys_found)):
            most = max(model.keys_found[length].mean for model in tested)
            best_ones = [model.name for model in tested if model.keys_found[length].mean == most]
            finds = f"{', '.join(best_ones)} {'finds' if len(best_ones) == 1 else 'find'} most keys, {100 * most:.1f} %"
            sentences.append(f"At {length:,} tokens {finds if most else 'no model finds a key'}.")
        sentences.append(_describe_correlation(tested))
    return " ".join(sentence for sentence in sentences if sentence)


def _describe_correlation(models: Sequence[LMContender]) -> str:
    length = most_informative_length(models)
    assert length is not None
    pairs = [
        (model.attention["entropy_ratio"], model.keys_found[length].mean)
        for model in models
        if model.at_inference is None and "entropy_ratio" in model.attention
    ]
    correlation = rank_correlation(pairs)
    if correlation is None:
        return ""
    return (
        f"Rank correlation of entropy / log n (before fine-tuning) with keys found at {length:,} tokens, over "
        f"{len(pairs)} normalizers: {correlation:+.2f}."
    )


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
