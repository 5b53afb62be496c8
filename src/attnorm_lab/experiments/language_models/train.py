"""The plan and its training runs: short ones at several learning rates, then a long one at the best rate."""

import contextlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from attnorm.files import atomic_replace, read_jsonl
from attnorm.models.layer_normalizer import SOFTMAX
from attnorm.models.saving import save_pretrained
from attnorm_lab.experiments.trained_models import ModelPlan, Texts, Workspace, learned
from attnorm_lab.training.checkpoints import (
    METRICS,
    NotFiniteError,
    OutOfTimeError,
    StopRequest,
    TrainingInterrupted,
    finished_checkpoints,
    load_weights,
    read_state,
    speed_and_memory,
    step_of,
)
from attnorm_lab.training.device import accelerated, chosen_device, free_memory, machine
from attnorm_lab.training.lm.attention import Attention, fastest_attention
from attnorm_lab.training.lm.data import as_transformers
from attnorm_lab.training.lm.export import rounded
from attnorm_lab.training.lm.model import LMSettings, build_model, check_normalizer, count_parameters
from attnorm_lab.training.lm.train import Run
from attnorm_lab.training.needle import NeedleTask
from attnorm_lab.training.run import CHECKPOINTS, LOG_EVERY

Log = Callable[[str], None]
OFTEN = 4  # validation losses per main run; short runs have one at the end
SETTLED = 5 * LOG_EVERY  # steps, from the start or a resumed checkpoint, until the speed is known: compiling is over
AS_TRAINED = None  # instead of a normalizer that replaces softmax at inference
ATTENTION = "attention.json"  # how each normalizer is computed while training, from choose_engines


@dataclass(frozen=True, kw_only=True)
class LanguageModelPlan(ModelPlan):
    """Equal conditions for every normalizer: only the normalizer and its learning rate differ."""

    normalizers: tuple[str, ...] = (
        SOFTMAX, "ssmax", "sigmoid", "entmax15", "asentmax", "kneemax:share=1", "kneemax:knee=0.25", "softpick",
        "sa_softmax", "sink", "alibi", "nearmax",
    )  # fmt: skip
    at_inference: tuple[str, ...] = ("adaptive_temperature", "log_scaled")
    """Replace softmax in the trained softmax model; log_scaled equals softmax up to the training length."""
    rates: tuple[float, ...] = (5e-4, 1e-3, 2e-3)
    rate_tokens: int = 5_200_000
    main_tokens: int = 50_331_648
    needle: NeedleTask = field(default_factory=lambda: NeedleTask(steps=400, batch=16))

    def settings(self, normalizer: str, *, rate: float, tokens: int, seed: int) -> LMSettings:
        return self.model_settings(normalizer, rate=rate, tokens=tokens, seed=seed)

    def chosen(self, names: "tuple[str, ...] | list[str] | None") -> tuple[str, ...]:
        """Return the selected normalizers, or all if none is given.

        Raises:
            ValueError: One is not part of the plan.
        """
        if not names:
            return self.normalizers
        unknown = [name for name in names if name not in self.normalizers]
        if unknown:
            raise ValueError(
                f"--only: expected normalizers of the plan ({', '.join(self.normalizers)}), got {unknown[0]!r}."
            )
        return tuple(names)


FULL = LanguageModelPlan()
# GPT-2's shape with rotary positions, so that longer windows can be tried. Its tokenizer is given with --tokenizer.
LARGE = LanguageModelPlan(
    normalizers=(
        SOFTMAX, "ssmax", "entmax15", "asentmax", "sink", "softpick", "sigmoid", "kneemax:knee=0.25", "alibi",
        "nearmax", "gaussian", "soft:landmarks=64:learned=64:normalised=true", "linear",
    ),
    layers=12, heads=12, width=768, vocab=50_257, rates=(6e-4, 1.2e-3), rate_tokens=6_553_600,
    main_tokens=131_072_000,
)  # fmt: skip
QUICK = LanguageModelPlan(
    normalizers=(SOFTMAX, "ssmax", "entmax15"),
    layers=2, heads=2, width=32, context=64, vocab=384, batch=8,
    rates=(3e-3, 1e-2), rate_tokens=5_000, main_tokens=20_000, chunks=4, observed=2,
    needle=NeedleTask(steps=20, batch=8, questions=4, characters=2, longer=(1, 2), depths=(0.2, 0.8)),
    dtype="float32", compiled=False,
)  # fmt: skip


SIZES = {"30M": FULL, "124M": LARGE}


def check_plan(plan: LanguageModelPlan) -> None:
    """Raise ValueError if a model of the plan cannot be trained: an unknown normalizer, or no layer, for example."""
    if not plan.rates:
        raise ValueError("rates: expected at least one learning rate, got none. Set e.g. rates=[0.001].")
    for normalizer in plan.normalizers:
        settings = [plan.settings(normalizer, rate=rate, tokens=plan.main_tokens, seed=0) for rate in plan.rates]
        check_normalizer(settings[0])


LMWorkspace = Workspace[LanguageModelPlan]


class NotReadyError(ValueError):
    """An earlier stage has to run first."""


@dataclass(frozen=True)
class Worker:
    """Everything that a piece of work needs: workspace, texts, device and time limit."""

    workspace: LMWorkspace
    texts: Texts
    device: torch.device
    deadline: float = math.inf
    log: Log = lambda message: None
    whole: bool = False
    """Train no model that cannot be finished and tested before the deadline."""

    @classmethod
    def at(
        cls, workspace: LMWorkspace, texts: Texts, *, device: str | None = None, max_minutes: float | None = None,
        log: Log = lambda message: None, whole: bool = False,
    ) -> "Worker":  # fmt: skip
        deadline = math.inf if max_minutes is None else time.monotonic() + 60 * max_minutes
        torch.set_float32_matmul_precision("high")  # TF32 on GPUs; logits of half precision queries stay exact
        return cls(workspace, texts, chosen_device(device), deadline, log, whole)

    def check_time(self) -> None:
        if time.monotonic() >= self.deadline:
            raise OutOfTimeError

    def attention(self, normalizer: str) -> Attention:
        path = self.workspace.folder / ATTENTION
        recorded: dict[str, Attention] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return recorded.get(normalizer) or fastest_attention(normalizer, self.device)


def try_rates(worker: Worker, normalizer: str, seed: int = 0) -> None:
    """Train a short run at every learning rate of the plan; a second seed uses the choice of the first.

    A run that diverges is a result too. A plan with one rate has nothing to choose.
    """
    plan = worker.workspace.plan
    for rate in plan.rates if len(plan.rates) > 1 else ():
        if worker.workspace.results(stage="rate", normalizer=normalizer, learning_rate=rate):
            continue
        worker.check_time()
        settings = plan.settings(normalizer, rate=rate, tokens=plan.rate_tokens, seed=seed)
        _train(worker, "rate", normalizer, f"rate-{rate:g}-seed-{seed}", settings, checkpoint_every=None)


def best_rate(workspace: LMWorkspace, normalizer: str) -> float:
    """Return the learning rate of the short run with the lowest final loss, or the only one of the plan.

    Raises:
        ValueError: Some runs are missing, or all diverged.
    """
    if len(workspace.plan.rates) == 1:
        return workspace.plan.rates[0]
    tried = {line["learning_rate"]: line for line in workspace.results(stage="rate", normalizer=normalizer)}
    missing = [rate for rate in workspace.plan.rates if rate not in tried]
    if missing:
        raise NotReadyError(
            f"{normalizer} has no short run at the learning rate {missing[0]:g} yet. Run --stage rates first."
        )
    ended: dict[float, float] = {
        rate: line["valid_loss"] for rate, line in tried.items() if line["valid_loss"] is not None
    }
    if not ended:
        raise ValueError(
            f"{normalizer} diverged at every learning rate: {', '.join(f'{rate:g}' for rate in tried)}. Add lower "
            "rates with --set rates=[...]."
        )
    return min(ended, key=lambda rate: ended[rate])


def main_settings(workspace: LMWorkspace, normalizer: str, seed: int) -> LMSettings:
    rate = best_rate(workspace, normalizer)
    return workspace.plan.settings(normalizer, rate=rate, tokens=workspace.plan.main_tokens, seed=seed)


def main_name(seed: int) -> str:
    return f"main-seed-{seed}"


def train_main(worker: Worker, normalizer: str, seed: int = 0) -> None:
    if not worker.workspace.results(stage="main", normalizer=normalizer, seed=seed):
        _train_main(worker, normalizer, seed)


def train_to_test(worker: Worker, normalizer: str, seed: int = 0) -> None:
    """Train the model unless it is finished, or again if it has to be tested and its checkpoint is lost.

    Results may have been copied from another machine without the checkpoints.
    """
    if _must_be_trained(worker.workspace, normalizer, seed):
        _train_main(worker, normalizer, seed)


def check_whole(worker: Worker, normalizer: str, seed: int = 0) -> None:
    """Raise OutOfTimeError, before the short runs, if only whole models are trained and there is no time for this one.

    The first steps of the run decide about a model that is slower than the finished ones.
    """
    if worker.whole and _must_be_trained(worker.workspace, normalizer, seed):
        needed, left = _seconds_needed(worker.workspace, normalizer, seed), worker.deadline - time.monotonic()
        if needed >= left:
            worker.log(
                f"{normalizer} seed {seed}: not started, because it needs {needed:.0f} s and {left:.0f} s are left"
            )
            raise OutOfTimeError


def _must_be_trained(workspace: LMWorkspace, normalizer: str, seed: int) -> bool:
    untested = unfinished_variants(workspace, "measure", normalizer, seed)
    untested += unfinished_variants(workspace, "needle", normalizer, seed)
    trained = workspace.results(stage="main", normalizer=normalizer, seed=seed)
    return not trained or (bool(untested) and _last_checkpoint(workspace, normalizer, seed) is None)


def _last_checkpoint(workspace: LMWorkspace, normalizer: str, seed: int) -> Path | None:
    """Return the checkpoint of the last step of a main run; None if it is lost, or being trained again."""
    saved = _main_checkpoints(workspace, normalizer, seed)
    return saved[-1] if saved and step_of(saved[-1]) == _main_steps(workspace, normalizer) else None


def _main_checkpoints(workspace: LMWorkspace, normalizer: str, seed: int) -> list[Path]:
    return finished_checkpoints(workspace.run_folder(normalizer, main_name(seed)) / CHECKPOINTS)


def _main_steps(workspace: LMWorkspace, normalizer: str) -> int:
    """Return the number of steps of a main run, which its learning rate does not change."""
    plan = workspace.plan
    return plan.settings(normalizer, rate=plan.rates[0], tokens=plan.main_tokens, seed=0).steps


def _train_main(worker: Worker, normalizer: str, seed: int) -> None:
    worker.check_time()
    settings = main_settings(worker.workspace, normalizer, seed)
    # Two checkpoints per run: each takes half a second.
    _train(worker, "main", normalizer, main_name(seed), settings, checkpoint_every=max(1, settings.steps // 2))


def diverged(workspace: LMWorkspace, normalizer: str, seed: int) -> bool:
    """Whether the main run ended with a loss that is not finite, so that there is no model to test."""
    runs = workspace.results(stage="main", normalizer=normalizer, seed=seed)
    return bool(runs) and runs[-1]["valid_loss"] is None


def unfinished_variants(workspace: LMWorkspace, stage: str, normalizer: str, seed: int) -> list[str | None]:
    """Return the variants without a result: the model as trained and, for softmax, its replacements at inference."""
    if diverged(workspace, normalizer, seed):
        return []
    done = [line["at_inference"] for line in workspace.results(stage=stage, normalizer=normalizer, seed=seed)]
    swaps = workspace.plan.at_inference if normalizer == SOFTMAX else ()
    return [variant for variant in (AS_TRAINED, *swaps) if variant not in done]


def _seconds_needed(workspace: LMWorkspace, normalizer: str, seed: int) -> float:
    """Return how long the remaining steps of a main run and its tests take at least; 0 for steps of unknown speed.

    The speed is that of the run's own checkpoint, unless its few steps were spent on compiling, else of this
    normalizer's last record, else of the fastest record.
    `training_seconds` count all parts of a run that was resumed, `wall_seconds` only the last one.
    """
    per_step: dict[str, float] = {
        line["normalizer"]: line["training_seconds"] / line["steps"]
        for line in workspace.results(stage="main")
        if not line["problem"]
    }
    done, seconds = 0, per_step.get(normalizer, min(per_step.values(), default=0.0))
    if saved := _main_checkpoints(workspace, normalizer, seed):
        done = step_of(saved[-1])
        seconds = read_state(saved[-1])["seconds"] / done if done >= SETTLED else seconds
    return (_main_steps(workspace, normalizer) - done) * seconds + (seconds_of_tests(workspace) or 0.0)


def seconds_of_tests(workspace: LMWorkspace) -> float | None:
    """Return the longest time that the tests of one model took; None if no model is tested yet."""
    totals: dict[tuple[str, int], float] = {}
    for stage, combine in (("measure", sum), ("needle", max)):  # the times of needle count from its fine-tuning on
        by_model: dict[tuple[str, int], list[float]] = {}
        for line in workspace.results(stage=stage):
            by_model.setdefault((line["normalizer"], line["seed"]), []).append(line["wall_seconds"])
        for model, seconds in by_model.items():
            totals[model] = totals.get(model, 0.0) + combine(seconds)
    return max(totals.values(), default=None)


def trained_model(worker: Worker, normalizer: str, seed: int) -> tuple[Any, LMSettings]:
    """Load the model of a finished main run in float32.

    Raises:
        ValueError: There is no checkpoint of its last step.
    """
    settings = main_settings(worker.workspace, normalizer, seed)
    last = _last_checkpoint(worker.workspace, normalizer, seed)
    if last is None:
        folder = worker.workspace.run_folder(normalizer, main_name(seed))
        raise NotReadyError(
            f"{folder} has no checkpoint of step {settings.steps}. Run --stage main for {normalizer}, seed "
            f"{seed} first."
        )
    corpus = worker.texts.corpus
    model = build_model(settings, corpus.vocabulary, corpus.end_of_text).to(worker.device)
    load_weights(last, model, worker.device)
    return model.eval(), settings


def export_main(worker: Worker, normalizer: str, seed: int = 0) -> None:
    """Write the trained model as a Hugging Face folder in bfloat16, below `models` in the shared folder."""
    out = worker.workspace.model_folder(normalizer, seed)
    if out.exists():
        return
    model, settings = trained_model(worker, normalizer, seed)
    with atomic_replace(out) as draft:
        save_pretrained(rounded(model, torch.bfloat16), draft)
        as_transformers(worker.texts.corpus.tokenizer, settings.context).save_pretrained(draft)


def _train(
    worker: Worker, stage: str, normalizer: str, name: str, settings: LMSettings, checkpoint_every: int | None
) -> None:  # fmt: skip
    """Train one model, or resume it, and store its record."""
    evaluate_every = settings.steps if stage == "rate" else max(1, settings.steps // OFTEN)
    attention = worker.attention(normalizer)
    folder = worker.workspace.run_folder(normalizer, name)
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    problem = None
    checked = not (worker.whole and stage == "main")
    with accelerated(worker.device, settings.dtype) as accelerator, StopRequest() as stop:
        run = Run(
            folder, settings, worker.texts.corpus, accelerator,
            compiled=worker.workspace.plan.compiled, attention=attention,
        )  # fmt: skip
        settled = run.step + SETTLED
        try:
            with contextlib.closing(run.steps(worker.deadline, stop, evaluate_every, checkpoint_every)) as entries:
                for entry in entries:
                    if "valid_loss" in entry:
                        reached = f"step {run.step} of {settings.steps}, {entry['valid_loss']:.3f}"
                        worker.log(f"{normalizer} {name}: {reached}")
                    if not checked and settled <= run.step < settings.steps:
                        checked = True
                        _check_remaining_time(worker, settings, run.step, entry["tokens_per_second"])
        except NotFiniteError as error:
            problem = str(error)
    if stop.requested:
        raise TrainingInterrupted(run.step)
    if problem is None and run.step < settings.steps:
        raise OutOfTimeError
    course = read_jsonl(folder / METRICS)
    measured = [entry["valid_loss"] for entry in course if "valid_loss" in entry]
    worker.workspace.add(
        {
            "stage": stage, "normalizer": normalizer, "seed": settings.seed, "learning_rate": settings.learning_rate,
            "valid_loss": measured[-1] if problem is None else None, "problem": problem,
            "steps": run.step, "tokens": run.step * settings.tokens_per_step,
            "parameters": count_parameters(run.model),
            **speed_and_memory(folder / METRICS), "training_seconds": round(run.seconds, 1),
            "wall_seconds": round(time.monotonic() - began, 1), "attention": attention,
            "course": [_log_values(entry) for entry in course], "settings": settings.as_dict(),
            "learned": learned(run.model), **machine(worker.device),
        }
    )  # fmt: skip
    del run, accelerator  # the accelerator holds the optimizer
    free_memory()


def _check_remaining_time(worker: Worker, settings: LMSettings, step: int, tokens_per_second: float) -> None:
    """Raise OutOfTimeError if the run and its tests cannot finish at this speed.

    Until a model has been tested, the tests count as a quarter of the whole training.
    """
    per_step = settings.tokens_per_step / tokens_per_second
    tests = seconds_of_tests(worker.workspace)
    needed = (settings.steps - step) * per_step + (settings.steps * per_step / 4 if tests is None else tests)
    left = worker.deadline - time.monotonic()
    if needed > left:
        worker.log(f"stopped, because training and tests need {needed:.0f} s and {left:.0f} s are left")
        raise OutOfTimeError


def _log_values(entry: dict[str, float]) -> list[float | None]:
    return [entry["tokens"], entry["loss"], entry.get("valid_loss")]
