"""Train and measure every model of a plan. Each finished model is one record, so an interrupted run resumes."""

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

RECORDS = "records.jsonl"  # in the output folder: records of the same plan from elsewhere, plain or .xz
LOOKS = 8  # how often a model is measured while it is trained
LOOKED_AT = ("entropy_ratio", "max_weight", "jacobian_norm", "logit_spread")
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

    columns: Mapping[str, Any]  # what sets it apart, in words and numbers of the results
    normalizer: str = "softmax"  # with options, as in `topk:k=4`
    settings: Mapping[str, Any] | None = None  # of LMSettings, where they differ from the plan's

    @property
    def label(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.columns.items())


@dataclass(frozen=True, kw_only=True)
class GridPlan(ModelPlan):
    models: tuple[GridModel, ...]
    seeds: tuple[int, ...] = (0,)
    tokens: int = 50_331_648
    rate: float = 1e-3
    metrics: str = "core"  # of attnorm.analyze, on the trained model
    looks: bool = False  # measure attention while training too


def records_of(plan: GridPlan, subject: ExperimentSubject, progress: ProgressCallback, parts: Path) -> list[Record]:
    """Return the record of every model and seed of the plan; train what no record exists for."""
    plan = on_this_machine(plan)
    workspace = Workspace.open(parts, plan)
    wanted = [(model, subject.seed + seed) for seed in plan.seeds for model in plan.models]
    keys = [_key(model.label, settings_of(plan, model, seed).as_dict()) for model, seed in wanted]
    known = _known_records(workspace, parts)
    missing = [(key, *one) for key, one in zip(keys, wanted, strict=True) if key not in known]
    if missing:
        progress("encoding the texts", 0, len(missing))
        train, valid, others = texts_of(subject, parts)
        texts = prepare_texts(workspace, train, valid, others)
        unigram = _unigram_loss(workspace)
        for done, (key, model, seed) in enumerate(missing):
            progress(f"training {model.label}, seed {seed}", done, len(missing))
            with workspace.claimed(f"{model.label}-seed-{seed}") as mine:
                if mine and key not in _known_records(workspace, parts):  # another process may have finished it
                    record = train_and_measure(plan, model, seed, texts, parts, chosen_device(subject.device))
                    ended = record["valid_loss"]
                    workspace.add(record | {"unigram_loss": unigram, "diverged": ended is None or ended > unigram})
    known = _known_records(workspace, parts)
    return [known[key] for key in keys if key in known]


def _known_records(workspace: Workspace[GridPlan], parts: Path) -> dict[str, Record]:
    files = [parts.parent.parent / name for name in (RECORDS, f"{RECORDS}.xz")]
    elsewhere = [record for file in files if file.exists() for record in read_results(file)]
    found = [record for record in [*elsewhere, *workspace.results()] if record["stage"] == "model"]
    return {_key(record["label"], record["settings"]): record for record in found}


def _unigram_loss(workspace: Workspace[GridPlan]) -> float:
    """Of counting words: a model that ends above it has learned nothing."""
    (described,) = workspace.results(stage="texts")
    loss: float = next(iter(described["held_out"].values()))["counting"]["unigram"]
    return loss


def _key(label: str, settings: Mapping[str, Any]) -> str:
    """What identifies a record: the model and all settings, seed included; the dtype is the machine's."""
    return settings_hash({"label": label, **{name: value for name, value in settings.items() if name != "dtype"}})


def settings_of(plan: GridPlan, model: GridModel, seed: int) -> LMSettings:
    others = model.settings or {}
    return plan.model_settings(model.normalizer, rate=plan.rate, tokens=plan.tokens, seed=seed, **others)


def train_and_measure(
    plan: GridPlan, model: GridModel, seed: int, texts: Texts, parts: Path, device: torch.device
) -> Record:
    """Train one model from scratch and measure it; a run that diverges is a result too."""
    settings = settings_of(plan, model, seed)
    attention = fastest_attention(model.normalizer, device)
    folder = parts / "runs" / f"{model.label}-seed-{seed}".replace(" ", "-").replace(":", "-").replace(",", "")
    shutil.rmtree(folder, ignore_errors=True)  # of an interrupted run, which has no checkpoint
    folder.mkdir(parents=True)
    torch.set_float32_matmul_precision("high")
    if plan.compiled:
        torch.compiler.reset()  # graphs of earlier models would be tried at every call of a block
    windows = observed_windows(texts.valid, plan.observed, settings.context)
    looks, problem = [], None
    with accelerated(device, settings.dtype) as accelerator, StopRequest() as stop:
        run = Run(folder, settings, texts.corpus, accelerator, compiled=plan.compiled, attention=attention)
        try:
            for entry in run.steps(math.inf, stop, max(1, settings.steps // LOOKS), None):
                if plan.looks and "valid_loss" in entry:
                    looks.append({"step": entry["step"], **look(run.model, windows[:1], device)})
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
        record |= measured(plan, run.model.eval(), settings, texts, windows, attention, device)
    del run, accelerator  # the accelerator holds the optimizer
    free_memory()
    return record


def measured(
    plan: GridPlan, model: Any, settings: LMSettings, texts: Texts, windows: torch.Tensor, attention: Attention,
    device: torch.device,
) -> Record:  # fmt: skip
    """Losses by length on every held-out text, and the tables of attnorm.analyze as plain numbers."""
    lengths = plan if ANY_LENGTH[settings.architecture] else replace(plan, longer=(1,))
    with in_training(model, attention=attention), without_compiled_blocks(model, settings):
        losses = {name: losses_at(lengths, model, settings, tokens, device) for name, tokens in texts.held_out.items()}
    found = analyze(model, windows, metrics=plan.metrics, read_keys=0)
    return {
        "losses": losses,
        "heads": _plain(found.heads, ("layer", "head", *KEPT_OF_HEADS)),
        "top_n": _plain(found.top_n, ("layer", "head", *KEPT_OF_TOP_N)),
        "coverage": _plain(found.coverage, ("layer", *KEPT_OF_COVERAGE)),
    }


def _plain(table: pa.Table, columns: Sequence[str]) -> dict[str, list[float | None]]:
    """Columns of a table for JSON, which has neither NaN nor infinity."""
    found = table.select(list(columns)).to_pydict()
    return {
        name: [None if one is None or not math.isfinite(one) else float(f"{one:.6g}") for one in column]
        for name, column in found.items()
    }


@torch.no_grad()
def look(model: Any, windows: torch.Tensor, device: torch.device) -> dict[str, float]:
    """Means over all heads of a few row statistics."""
    found: Mapping[str, float] = attention_statistics(model, windows, device)["mean"]
    return {name: found[name] for name in LOOKED_AT if name in found}
