"""Train and measure every model of a plan, and compute statistics over their records.

Each finished model is stored as one record, so an interrupted run resumes. `run_grid` is the entry point; `records_of`
trains what has no record, and `train_and_measure` does the work for one model. Statistics: means, deviations over
seeds, and the variance that each factor explains.
"""

import math
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from attnorm.analysis.analyze import analyze
from attnorm.files import read_jsonl
from attnorm.provenance import settings_hash
from attnorm_lab.experiments.experiment import (
    ExperimentSubject,
    Outcome,
    ProgressCallback,
    UnfinishedError,
    copied_records,
    without_verdicts,
)
from attnorm_lab.experiments.trained_models import (
    ModelPlan,
    Texts,
    Workspace,
    check_same_texts,
    learned,
    on_this_machine,
    prepare_texts,
    texts_of,
)
from attnorm_lab.training.checkpoints import METRICS, StopRequest, TrainingInterrupted, speed_and_memory
from attnorm_lab.training.device import accelerated, chosen_device, free_memory, machine
from attnorm_lab.training.lm.attention import Attention, fastest_attention, in_training, without_compiled_blocks
from attnorm_lab.training.lm.evaluate import attention_statistics, losses_at, observed_windows
from attnorm_lab.training.lm.model import ANY_LENGTH, LMSettings, count_parameters
from attnorm_lab.training.lm.train import Run

MEASUREMENTS_IN_TRAINING = 8  # how often a model is measured while it is trained
MEASURED_IN_TRAINING = ("entropy_ratio", "max_weight", "jacobian_norm", "logit_spread")
# A metric's own column is that of the median row of each head, NAME_mean is the mean over rows. Older records do not
# have the mean.
KEPT_OF_HEADS = (
    "entropy_ratio", "entropy_ratio_mean", "effective_keys", "effective_keys_mean", "max_weight", "max_weight_mean",
    "sink_mass", "gap_slope", "gap_slope_without_sink", "horizon", "n_high", "jacobian_norm", "jacobian_norm_mean",
)  # fmt: skip
KEPT_OF_TOP_N = ("top_n", "separability", "separability_null", "separability_null_low", "separability_null_high")
KEPT_OF_COVERAGE = ("top_n", "per_head", "union", "independent")
Record = dict[str, Any]


@dataclass(frozen=True)
class GridModel:
    """One model of a grid."""

    columns: Mapping[str, Any]  # columns of the results that distinguish it from the other models
    normalizer: str = "softmax"  # specification, such as `topk:k=4`
    settings: Mapping[str, Any] | None = None  # fields of LMSettings that differ from the plan

    @property
    def label(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.columns.items())


@dataclass(frozen=True, kw_only=True)
class GridPlan(ModelPlan):
    """The models of a grid, and the settings that all of them share."""

    models: tuple[GridModel, ...]
    seeds: tuple[int, ...] = (0,)
    tokens: int = 50_331_648
    rate: float = 1e-3
    metrics: str = "core"  # metric group of attnorm.analyze for the trained model
    looks: bool = False  # whether to measure attention during training too


# The settings of --quick: models that train in seconds and show only that everything runs.
TINY = GridPlan(
    models=(), layers=1, width=16, context=32, vocab=300, batch=4, tokens=1_000, rate=1e-2, chunks=2, observed=1,
    dtype="float32", compiled=False,
)  # fmt: skip


def run_grid(
    full: GridPlan, quick: GridPlan, outcome: Callable[[Sequence[Record], GridPlan], Outcome],
    subject: ExperimentSubject, progress: ProgressCallback, parts: Path,
) -> Outcome:  # fmt: skip
    """Train the models of the full or the quick plan and return the outcome of their records."""
    plan = quick if subject.quick else full
    made = outcome(records_of(plan, subject, progress, parts), plan)
    return without_verdicts(made) if subject.quick else made


def records_of(plan: GridPlan, subject: ExperimentSubject, progress: ProgressCallback, parts: Path) -> list[Record]:
    """Return the record of every model and seed of the plan; train models without a record.

    Raises:
        UnfinishedError: The time limit was reached. No model is started that takes longer than the time left, by the
            slowest one so far.
    """
    deadline = math.inf if subject.minutes is None else time.monotonic() + 60 * subject.minutes
    plan = on_this_machine(plan)
    workspace = Workspace.open(parts, plan)
    pairs = [(model, subject.seed + seed) for seed in plan.seeds for model in plan.models]
    keys = [_record_key(model.label, settings_of(plan, model, seed).as_dict()) for model, seed in pairs]
    known = _known_records(workspace, parts)
    missing = [(key, *pair) for key, pair in zip(keys, pairs, strict=True) if key not in known]
    if missing:
        progress("encoding the texts", 0, len(missing))
        train, valid, others = texts_of(subject, parts)
        texts = prepare_texts(workspace, train, valid, others)
        given = _records_elsewhere(parts)
        check_same_texts([line for line in given if line.get("stage") == "texts"], texts, str(parts.parent.parent))
        unigram = _unigram_loss(workspace)
        for done, (key, model, seed) in enumerate(missing):
            known = _known_records(workspace, parts)
            if time.monotonic() + _slowest(known.values()) >= deadline:
                raise UnfinishedError(
                    f"{sum(key in known for key in keys)} of {len(keys)} models are finished within the time limit"
                )
            progress(f"training {model.label}, seed {seed}", done, len(missing))
            with workspace.claimed(f"{model.label}-seed-{seed}") as acquired:
                if acquired and key not in _known_records(workspace, parts):  # another process may have finished it
                    device = chosen_device(subject.device)
                    record = train_and_measure(plan, model, seed, texts, parts, device, deadline)
                    workspace.add(record | {"unigram_loss": unigram})
    known = _known_records(workspace, parts)
    return [known[key] for key in keys if key in known]


def _records_elsewhere(parts: Path) -> list[Record]:
    """Return the lines of another machine, in OUT/records.jsonl or its packed copy."""
    return [record for file in copied_records(parts) for record in read_jsonl(file)]


def _known_records(workspace: Workspace[GridPlan], parts: Path) -> dict[str, Record]:
    lines = [*_records_elsewhere(parts), *workspace.results()]
    records = [record for record in lines if record.get("stage") == "model"]
    return {_record_key(record["label"], record["settings"]): record for record in records}


def _slowest(records: Iterable[Record]) -> float:
    """Return the seconds of the slowest model; 0 if none is known."""
    return max((record.get("wall_seconds", 0.0) for record in records), default=0.0)


def _unigram_loss(workspace: Workspace[GridPlan]) -> float:
    """Return the loss of token frequencies: a model with a higher loss has learned nothing."""
    (described,) = workspace.results(stage="texts")
    loss: float = next(iter(described["held_out"].values()))["counting"]["unigram"]
    return loss


def _record_key(label: str, settings: Mapping[str, Any]) -> str:
    """Return the key of a record: a hash of model and settings, including the seed, without the machine's dtype."""
    return settings_hash({"label": label, **{name: value for name, value in settings.items() if name != "dtype"}})


def settings_of(plan: GridPlan, model: GridModel, seed: int) -> LMSettings:
    others = model.settings or {}
    return plan.model_settings(model.normalizer, rate=plan.rate, tokens=plan.tokens, seed=seed, **others)


def train_and_measure(
    plan: GridPlan, model: GridModel, seed: int, texts: Texts, parts: Path, device: torch.device,
    deadline: float = math.inf,
) -> Record:  # fmt: skip
    """Train one model from scratch and measure it. A run that diverges also gives a record.

    Raises:
        UnfinishedError: The training did not finish before the deadline, by time.monotonic().
    """
    began = time.monotonic()
    settings = settings_of(plan, model, seed)
    attention = fastest_attention(model.normalizer, device, settings.width // settings.heads)
    folder = parts / "runs" / f"{model.label}-seed-{seed}".replace(" ", "-").replace(":", "-").replace(",", "")
    shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted run, which has no checkpoint
    folder.mkdir(parents=True)
    torch.set_float32_matmul_precision("high")
    if plan.compiled:
        torch.compiler.reset()  # otherwise torch would check the graphs of earlier models at every call
    windows = observed_windows(texts.valid, plan.observed, settings.context)
    looks, problem = [], None
    with accelerated(device, settings.dtype) as accelerator, StopRequest() as stop:
        run = Run(folder, settings, texts.corpus, accelerator, compiled=plan.compiled, attention=attention)
        try:
            for entry in run.steps(deadline, stop, max(1, settings.steps // MEASUREMENTS_IN_TRAINING), None):
                if plan.looks and "valid_loss" in entry:
                    looks.append({"step": entry["step"], **measure_heads(run.model, windows[:1], device)})
                    run.model.train()
        except ValueError as error:  # a loss that is not finite
            problem = str(error)
        if stop.requested:
            raise TrainingInterrupted(run.step)
        if problem is None and run.step < settings.steps:
            raise UnfinishedError(f"{model.label}, seed {seed}: {run.step} of {settings.steps} steps")
    course = read_jsonl(folder / METRICS)
    losses = [entry["valid_loss"] for entry in course if "valid_loss" in entry]
    record: Record = {
        "stage": "model", "label": model.label, **model.columns, "seed": seed, "normalizer": model.normalizer,
        "valid_loss": losses[-1] if problem is None else None, "lowest_loss": min(losses, default=None),
        "problem": problem,
        "parameters": count_parameters(run.model),
        "course": [
            [entry["step"], entry["loss"], entry.get("valid_loss"), entry["gradient_norm"]] for entry in course
        ],
        "looks": looks, **speed_and_memory(folder / METRICS), "settings": settings.as_dict(),
        "learned": learned(run.model), **machine(device),
    }  # fmt: skip
    if problem is None:
        record |= measure_model(plan, run.model.eval(), settings, texts, windows, attention, device)
    del run, accelerator  # the accelerator holds the optimizer
    free_memory()
    return record | {"wall_seconds": round(time.monotonic() - began, 1)}


def measure_model(
    plan: GridPlan, model: Any, settings: LMSettings, texts: Texts, windows: torch.Tensor, attention: Attention,
    device: torch.device,
) -> Record:  # fmt: skip
    """Return losses by length on every held-out text, and the tables of attnorm.analyze as lists of numbers."""
    longer = plan.longer if ANY_LENGTH[settings.architecture] else (1,)
    with in_training(model, attention=attention), without_compiled_blocks(model, settings):
        losses = {
            name: losses_at(longer, model, settings, tokens, plan.chunks, device)
            for name, tokens in texts.held_out.items()
        }
    analysis = analyze(model, windows, metrics=plan.metrics, read_keys=0)
    return {
        "losses": losses,
        "heads": _columns_for_json(analysis.heads, ("layer", "head", *KEPT_OF_HEADS)),
        "top_n": _columns_for_json(analysis.top_n, ("layer", "head", *KEPT_OF_TOP_N)),
        "coverage": _columns_for_json(analysis.coverage, ("layer", *KEPT_OF_COVERAGE)),
    }


def _columns_for_json(table: pa.Table, columns: Sequence[str]) -> dict[str, list[float | None]]:
    """Return columns of a table as lists; NaN and infinity, which JSON does not have, become None."""
    values_by_name = table.select(list(columns)).to_pydict()
    return {
        name: [None if value is None or not math.isfinite(value) else float(f"{value:.6g}") for value in column]
        for name, column in values_by_name.items()
    }


@torch.no_grad()
def measure_heads(model: Any, windows: torch.Tensor, device: torch.device) -> dict[str, float]:
    """Return the means of a few row statistics over the rows and heads of these windows."""
    means: Mapping[str, float] = attention_statistics(model, windows, device)["mean"]
    return {name: means[name] for name in MEASURED_IN_TRAINING if name in means}


Number = Callable[[Record], float]
LISTS = (list, dict)


def select_records(records: Sequence[Record], **columns: Any) -> list[Record]:
    """Return the records that have these values."""
    return [record for record in records if all(record.get(name) == value for name, value in columns.items())]


def distinct(records: Sequence[Record], column: str) -> list[Any]:
    """Return the different values of a column, in the order of the records."""
    return list(dict.fromkeys(record[column] for record in records))


def values(records: Sequence[Record], number: Number) -> list[float]:
    """Return the number of every record that has one."""
    numbers = [number(record) for record in records]
    return [value for value in numbers if math.isfinite(value)]


def mean(records: Sequence[Record], number: Number) -> float:
    numbers = values(records, number)
    return fmean(numbers) if numbers else math.nan


def seed_deviation(records: Sequence[Record], number: Number) -> float:
    """Return the standard deviation over seeds; NaN below two."""
    numbers = values(records, number)
    return stdev(numbers) if len(numbers) > 1 else math.nan


def diverged(record: Record) -> bool:
    """Whether the loss stopped being finite. A run that ends above the loss of word counts did not diverge."""
    return record["valid_loss"] is None


def ended_above_word_counts(record: Record) -> bool:
    """Whether the run finished with a loss above that of token frequencies: it learned nothing, or too little yet."""
    return not diverged(record) and loss(record) > record["unigram_loss"]


def loss(record: Record) -> float:
    return math.nan if record["valid_loss"] is None else float(record["valid_loss"])


def loss_at(record: Record, times: int) -> float:
    """Return the first text's loss in windows of `times` training lengths; NaN if the model has no such positions."""
    if "losses" not in record:
        return math.nan
    by_length = next(iter(record["losses"].values()))
    return float(by_length.get(str(times * record["settings"]["context"]), math.nan))


def values_of_heads(record: Record, column: str) -> list[float]:
    """Return a column of the heads of a model, without the heads that have no value."""
    numbers = np.array(record.get("heads", {}).get(column, []), dtype=np.float64)
    return [float(number) for number in numbers if math.isfinite(number)]


def mean_over_heads(record: Record, column: str) -> float:
    """Return the mean of a column over all heads of a model.

    The column of a metric holds each head's median row, so this is no mean over rows; `NAME_mean` holds that.
    """
    numbers = values_of_heads(record, column)
    return fmean(numbers) if numbers else math.nan


def row_numbers(records: Sequence[Record], metrics: Iterable[str]) -> dict[str, Number]:
    """Return the numbers of metrics of rows, mean over heads: of the median row, and of the mean over rows if kept."""
    numbers: dict[str, Number] = {}
    for name in metrics:
        numbers[f"{name}_median_row"] = partial(mean_over_heads, column=name)
        if any(values_of_heads(record, f"{name}_mean") for record in records):
            numbers[f"{name}_mean_row"] = partial(mean_over_heads, column=f"{name}_mean")
    return numbers


def share_beyond_horizon(record: Record) -> float:
    """Return the share of heads whose longest rows have more keys than the horizon of their median row.

    NaN if no head has a horizon: with weights of exactly 0, or a penalty on distance, a head need not disperse.
    """
    heads = record.get("heads", {"horizon": [], "n_high": []})
    horizon, n = (np.array(heads[name], dtype=np.float64) for name in ("horizon", "n_high"))
    return float(np.mean(n > horizon)) if np.isfinite(horizon).any() else math.nan


def variance_shares(records: Sequence[Record], factors: Sequence[str], number: Number) -> dict[str, float]:
    """Return the share of the variance between models that each factor explains by itself, and what is left.

    Sums of squares of the main effects; models without the number are left out. The shares add up to 1 if every
    combination of the factors has equally many models.
    """
    kept = [record for record in records if math.isfinite(number(record))]
    y = np.array([number(record) for record in kept])
    total = float(((y - y.mean()) ** 2).sum()) if len(y) else 0.0
    if not total:
        return {}
    shares = {}
    for factor in factors:
        levels = np.array([str(record[factor]) for record in kept])
        means = {level: y[levels == level].mean() for level in np.unique(levels)}
        shares[factor] = float(sum((means[level] - y.mean()) ** 2 for level in levels)) / total
    return shares | {"the rest": 1 - sum(shares.values())}


def table(records: Sequence[Record], **numbers: Number) -> pa.Table:
    """Return one row per model: its plain values, and the given numbers."""
    rows = [
        {name: value for name, value in record.items() if not isinstance(value, LISTS)}
        | {name: number(record) for name, number in numbers.items()}
        for record in records
    ]
    return pa.Table.from_pylist([{name: _plain(value) for name, value in row.items()} for row in rows])


def lengths_table(records: Sequence[Record], columns: Sequence[str]) -> pa.Table:
    """Return the loss by held-out text and length of the window: mean and deviation over seeds.

    columns: names of the columns that distinguish the models.
    """
    groups: dict[tuple[Any, ...], list[float]] = {}
    for record in records:
        for text, by_length in record.get("losses", {}).items():
            for tokens, loss_there in by_length.items():
                key = (*(record[name] for name in columns), text, int(tokens))
                groups.setdefault(key, []).append(float(loss_there))
    return pa.Table.from_pylist([
        {
            **dict(zip((*columns, "text", "tokens"), key, strict=True)), "seeds": len(losses), "loss": fmean(losses),
            "deviation": stdev(losses) if len(losses) > 1 else math.nan,
        }
        for key, losses in groups.items()
    ])  # fmt: skip


def _plain(value: Any) -> Any:
    """Convert numbers to float, so that a column has one type."""
    return value if value is None or isinstance(value, bool | str) else float(value)


def without_offsets(figure: Figure) -> None:
    """Write full numbers at the ticks, not differences from an offset such as +5.288."""
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            formatter = axis.get_major_formatter()
            if isinstance(formatter, ScalarFormatter):
                formatter.set_useOffset(False)
