"""Train and measure every model of a plan. Each finished model is stored as one record, so an interrupted run resumes.

`records_of` is the entry point; `train_and_measure` does the work for one model.
"""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from attnorm.analysis.analyze import analyze
from attnorm.experiments.language_models.evaluate import attention_statistics, losses_at, observed_windows
from attnorm.experiments.language_models.experiment import texts_of
from attnorm.experiments.language_models.train import free_memory, learned, machine
from attnorm.experiments.language_models.workspace import (
    ModelPlan,
    Texts,
    Workspace,
    on_this_machine,
    prepare_texts,
    read_results,
)
from attnorm.experiments.subject import ExperimentSubject, ProgressCallback
from attnorm.provenance import settings_hash
from attnorm.training.checkpoints import StopRequest, TrainingInterrupted
from attnorm.training.device import accelerated, chosen_device
from attnorm.training.lm.attention import Attention, fastest_attention, in_training, without_compiled_blocks
from attnorm.training.lm.model import ANY_LENGTH, LMSettings
from attnorm.training.lm.train import METRICS, Run, speed_and_memory

RECORDS = "records.jsonl"  # optional file in the output folder: records from another machine, plain or .xz
MEASUREMENTS_IN_TRAINING = 8  # how often a model is measured while it is trained
MEASURED_IN_TRAINING = ("entropy_ratio", "max_weight", "jacobian_norm", "logit_spread")
KEPT_OF_HEADS = (
    "entropy_ratio", "effective_keys", "max_weight", "sink_mass", "gap_slope", "gap_slope_without_sink", "horizon",
    "n_high", "jacobian_norm",
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


def records_of(plan: GridPlan, subject: ExperimentSubject, progress: ProgressCallback, parts: Path) -> list[Record]:
    """Return the record of every model and seed of the plan; train models without a record."""
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
        unigram = _unigram_loss(workspace)
        for done, (key, model, seed) in enumerate(missing):
            progress(f"training {model.label}, seed {seed}", done, len(missing))
            with workspace.claimed(f"{model.label}-seed-{seed}") as acquired:
                if acquired and key not in _known_records(workspace, parts):  # another process may have finished it
                    record = train_and_measure(plan, model, seed, texts, parts, chosen_device(subject.device))
                    ended = record["valid_loss"]
                    workspace.add(record | {"unigram_loss": unigram, "diverged": ended is None or ended > unigram})
    known = _known_records(workspace, parts)
    return [known[key] for key in keys if key in known]


def _known_records(workspace: Workspace[GridPlan], parts: Path) -> dict[str, Record]:
    files = [parts.parent.parent / name for name in (RECORDS, f"{RECORDS}.xz")]
    elsewhere = [record for file in files if file.exists() for record in read_results(file)]
    records = [record for record in [*elsewhere, *workspace.results()] if record.get("stage") == "model"]
    return {_record_key(record["label"], record["settings"]): record for record in records}


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
    plan: GridPlan, model: GridModel, seed: int, texts: Texts, parts: Path, device: torch.device
) -> Record:
    """Train one model from scratch and measure it. A run that diverges also gives a record."""
    settings = settings_of(plan, model, seed)
    attention = fastest_attention(model.normalizer, device)
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
            for entry in run.steps(math.inf, stop, max(1, settings.steps // MEASUREMENTS_IN_TRAINING), None):
                if plan.looks and "valid_loss" in entry:
                    looks.append({"step": entry["step"], **measure_heads(run.model, windows[:1], device)})
                    run.model.train()
        except ValueError as error:  # a loss that is not finite
            problem = str(error)
        if stop.asked:
            raise TrainingInterrupted(run.step)
    course = [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]
    losses = [entry["valid_loss"] for entry in course if "valid_loss" in entry]
    record: Record = {
        "stage": "model", "label": model.label, **model.columns, "seed": seed, "normalizer": model.normalizer,
        "valid_loss": losses[-1] if problem is None else None, "lowest_loss": min(losses, default=None),
        "problem": problem,
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
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
    return record


def measure_model(
    plan: GridPlan, model: Any, settings: LMSettings, texts: Texts, windows: torch.Tensor, attention: Attention,
    device: torch.device,
) -> Record:  # fmt: skip
    """Return losses by length on every held-out text, and the tables of attnorm.analyze as lists of numbers."""
    lengths = plan if ANY_LENGTH[settings.architecture] else replace(plan, longer=(1,))
    with in_training(model, attention=attention), without_compiled_blocks(model, settings):
        losses = {name: losses_at(lengths, model, settings, tokens, device) for name, tokens in texts.held_out.items()}
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
    """Return the means of a few row statistics over all heads."""
    means: Mapping[str, float] = attention_statistics(model, windows, device)["mean"]
    return {name: means[name] for name in MEASURED_IN_TRAINING if name in means}
