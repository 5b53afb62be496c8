"""All stages of the experiment, each resumable and under a time limit; among them the tests of a trained model.

Every stage takes normalizers and a time limit in minutes, and returns whether all of its work is finished. It does not
repeat finished work and skips work that another process has claimed, so several processes can share one folder.

`choose_engines` first decides how attention is computed in training: it times a few steps on random tokens with the
engine that attnorm.attention chooses, and with dense attention over the whole matrix of weights, both in compiled
blocks. The faster one is recorded for all later runs; a way that fails is reported.
"""

import contextlib
import json
import math
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypedDict, Unpack

import numpy as np
import torch

from attnorm.evaluation.pass_keys import Wording
from attnorm.files import read_jsonl, write_json, write_text
from attnorm.metrics.normalized import NoRowsError
from attnorm.models.layer_normalizer import SOFTMAX
from attnorm.provenance import machine_memory_gb
from attnorm.text import did_you_mean
from attnorm_lab.experiments.language_models.train import (
    ATTENTION,
    LanguageModelPlan,
    LMWorkspace,
    Log,
    NotReadyError,
    Worker,
    check_plan,
    check_whole,
    export_main,
    train_main,
    train_to_test,
    trained_model,
    try_rates,
    unfinished_variants,
)
from attnorm_lab.experiments.trained_models import (
    RESULTS,
    WAIT_TO_WRITE,
    names_of_texts,
    prepare_texts,
    read_texts,
    require_texts,
)
from attnorm_lab.training.checkpoints import OutOfTimeError, StopRequest
from attnorm_lab.training.device import accelerated, check_accelerate, chosen_device, free_memory, machine
from attnorm_lab.training.lm.attention import Attention, fastest_attention, in_training
from attnorm_lab.training.lm.data import Corpus, check_file, read_tokenizer
from attnorm_lab.training.lm.evaluate import attention_statistics, losses_at, observed_windows
from attnorm_lab.training.lm.model import LMSettings, training_memory_gb
from attnorm_lab.training.lm.train import Run
from attnorm_lab.training.needle import among_many, find_keys, fine_tune, split_filler, summary
from attnorm_lab.training.run import LOG_EVERY

Names = Sequence[str] | None
Work = Callable[[Worker, str, int], None]
MAX_PROBLEMS = 3  # attempts: a GPU may have been full for a moment
USABLE_MEMORY = 0.9  # of the machine
LITTLE_MEMORY = 1.0  # GB that need no remark


def measure(worker: Worker, normalizer: str, seed: int = 0) -> None:
    """Measure losses by length on every held-out text and attention statistics, also with replacements at inference.

    A mechanism has no rows of logits and therefore no statistics.
    """
    variants = unfinished_variants(worker.workspace, "measure", normalizer, seed)
    if not variants:
        return
    worker.check_time()
    plan, device = worker.workspace.plan, worker.device
    model, settings = trained_model(worker, normalizer, seed)
    for instead in variants:
        began = time.monotonic()
        with _with_normalizer(model, instead, settings), in_training(model, attention=worker.attention(normalizer)):
            losses = {
                name: losses_at(plan.longer, model, settings, tokens, plan.chunks, device)
                for name, tokens in worker.texts.held_out.items()
            }
            windows = observed_windows(worker.texts.valid, plan.observed, settings.context)
            try:
                statistics = attention_statistics(model, windows, device)
            except NoRowsError:  # a mechanism, such as `linear`
                statistics = None
        worker.workspace.add(
            {
                "stage": "measure", "normalizer": normalizer, "at_inference": instead, "seed": seed,
                "losses": losses, "attention_statistics": statistics,
                "wall_seconds": round(time.monotonic() - began, 1), **machine(device),
            }
        )  # fmt: skip
        losses_text = "; ".join(f"{name} {by_length}" for name, by_length in losses.items())
        worker.log(f"{normalizer}{f' with {instead}' if instead else ''} seed {seed}: {losses_text}")
    del model
    free_memory()


def needle(worker: Worker, normalizer: str, seed: int = 0) -> None:
    """Fine-tune the trained model on pass keys and test it at increasing lengths."""
    variants = unfinished_variants(worker.workspace, "needle", normalizer, seed)
    if not variants:
        return
    worker.check_time()
    plan, device = worker.workspace.plan, worker.device
    model, settings = trained_model(worker, normalizer, seed)
    wording = Wording.of(worker.texts.corpus.tokenizer)
    practised, tested = split_filler(worker.texts.valid, plan.needle, wording, settings.context)
    began = time.monotonic()
    course = fine_tune(
        model, settings, practised, wording, plan.needle, device,
        compiled=plan.compiled, attention=worker.attention(normalizer), deadline=worker.deadline,
    )  # fmt: skip
    worker.check_time()
    tuned = time.monotonic()
    for instead in variants:
        with _with_normalizer(model, instead, settings), in_training(model, attention=worker.attention(normalizer)):
            answers = find_keys(model, settings, tested, wording, plan.needle, device)
            many = among_many(model, settings, tested, wording, plan.needle, device)
        worker.workspace.add(
            {
                "stage": "needle", "normalizer": normalizer, "at_inference": instead, "seed": seed,
                "course": course, "among_many": many, "by_length": summary(answers),
                "answers": [answer.as_dict() for answer in answers],
                "tuning_seconds": round(tuned - began, 1), "wall_seconds": round(time.monotonic() - began, 1),
                **machine(device),
            }
        )  # fmt: skip
        by_length = {length: figures["exact"] for length, figures in summary(answers).items()}
        worker.log(f"{normalizer}{f' with {instead}' if instead else ''} seed {seed}: keys found {by_length}, {many}")
    del model
    free_memory()


def _with_normalizer(model: Any, instead: str | None, settings: LMSettings) -> AbstractContextManager[Any]:
    from attnorm.models.patch import swap

    if instead is None:
        return nullcontext()
    return swap(model, instead, warm_start=False, train_length=settings.context)


STEPS = 2 * LOG_EVERY
MAX_SECONDS = 60  # of one trial


def choose_engines(
    workspace: LMWorkspace, normalizers: Sequence[str] | None = None, *, max_minutes: float | None = None,
    device: str | None = None, log: Log = lambda message: None,
) -> None:  # fmt: skip
    """Record speed and memory of every way as results, and the fastest way of each normalizer for later runs."""
    where = chosen_device(device)
    torch.set_float32_matmul_precision("high")
    deadline = math.inf if max_minutes is None else time.monotonic() + 60 * max_minutes
    for normalizer in workspace.plan.chosen(list(normalizers or ())):
        speeds: dict[Attention, float] = {}
        fused_everywhere = fastest_attention(normalizer, torch.device("cpu")) == "engine"
        ways: tuple[Attention, ...] = ("engine",) if fused_everywhere else ("dense", "engine")
        with workspace.claimed(f"trial-{normalizer}") as acquired:
            if not acquired or workspace.results(stage="trial", normalizer=normalizer):
                continue
            for way in ways:
                if time.monotonic() >= deadline:
                    break
                began = time.monotonic()
                try:
                    figures = _timed_run(workspace, normalizer, way, where)
                    speeds[way] = figures["tokens_per_second"]
                    problem = None
                except Exception as error:  # a compiler or a GPU may raise anything; the other way may work
                    figures, problem = {}, f"{type(error).__name__}: {error}"[:2000]
                    log(traceback.format_exc()[-1500:])
                figures["wall_seconds"] = round(time.monotonic() - began, 1)
                workspace.add(
                    {"stage": "trial", "normalizer": normalizer, "attention": way, "problem": problem, **figures,
                     **machine(where)}
                )  # fmt: skip
                log(f"{normalizer} {way}: {problem or figures}")
                free_memory()
            if speeds:
                _record_choice(workspace, normalizer, max(speeds, key=lambda way: speeds[way]))


def _timed_run(workspace: LMWorkspace, normalizer: str, way: Attention, device: torch.device) -> dict[str, Any]:
    plan = workspace.plan
    settings = replace(
        plan.settings(normalizer, rate=plan.rates[0], tokens=plan.main_tokens, seed=0), steps=STEPS, warmup=STEPS
    )
    with (
        TemporaryDirectory() as folder, accelerated(device, settings.dtype) as accelerator, StopRequest() as stop
    ):  # fmt: skip
        run = Run(
            Path(folder), settings, _random_corpus(plan.vocab, settings.context), accelerator,
            compiled=plan.compiled, attention=way,
        )  # fmt: skip
        entries = list(run.steps(time.monotonic() + MAX_SECONDS, stop, STEPS + 1, None))
    last = entries[-1]
    return {
        "tokens_per_second": last["tokens_per_second"],
        "peak_memory_bytes": last.get("peak_memory_bytes"),
        "loss": last["loss"],
        "with_compiling": len(entries) == 1,
    }


class _Vocabulary:
    """The part of a tokenizer that a run uses."""

    def __init__(self, size: int) -> None:
        self.size = size

    def get_vocab_size(self) -> int:
        return self.size

    def token_to_id(self, token: str) -> int:
        return 0


def _random_corpus(vocabulary: int, context: int) -> Corpus:
    tokens = np.random.default_rng(0).integers(0, vocabulary, size=64 * (context + 2)).astype(np.uint16)
    return Corpus(_Vocabulary(vocabulary), tokens, tokens, {}, Path())


def _record_choice(workspace: LMWorkspace, normalizer: str, way: Attention) -> None:
    path = workspace.folder / ATTENTION
    with workspace.locked("attention", WAIT_TO_WRITE):
        known: dict[str, str] = {}
        with contextlib.suppress(FileNotFoundError):
            known = json.loads(path.read_text(encoding="utf-8"))
        write_json(path, {**known, normalizer: way})


WORKS: dict[str, Sequence[Work]] = {
    "rates": [try_rates],
    "main": [train_main],
    "measure": [measure],
    "needle": [needle],
    "export": [export_main],
    # All of one normalizer before the next, so that a time limit leaves complete results.
    "everything": [check_whole, try_rates, train_to_test, measure, needle],
}
TRAINING = ("try", "rates", "main", "needle", "everything", "second-seed")
STAGES = ("prepare", "try", "rates", "main", "measure", "needle", "export", "everything", "second-seed", "tables")


class Limits(TypedDict, total=False):
    """Keyword arguments of every stage."""

    seeds: Sequence[int]
    max_minutes: float | None
    whole: bool
    device: str | None
    log: Log


def closest(workspace: LMWorkspace, count: int, seed: int = 0) -> tuple[str, ...]:
    """Return softmax and the `count` normalizers whose main runs ended with the lowest loss."""
    ended = {
        line["normalizer"]: line["valid_loss"]
        for line in workspace.results(stage="main", seed=seed)
        if line["valid_loss"] is not None
    }
    best = {SOFTMAX, *sorted(ended, key=lambda name: ended[name])[:count]}
    return tuple(name for name in workspace.plan.normalizers if name in best and name in ended)


def write_tables(folder: Path) -> list[Path]:
    """Write tables.md and the figure from the results of a folder; return their paths.

    Raises:
        ValueError: The folder has no results, or no model is finished.
    """
    from attnorm.figures import save, style
    from attnorm_lab.experiments.language_models.figure import comparison_figure
    from attnorm_lab.experiments.language_models.results import all_tables, contenders

    if not (folder / RESULTS).exists():
        raise ValueError(f"expected the output folder of --stage, got {folder}, which has no {RESULTS}. Check --out.")
    lines = read_jsonl(folder / RESULTS)
    if not contenders(lines):
        raise ValueError(f"{folder / RESULTS} has no model whose losses were measured. Run --stage everything first.")
    tables = folder / "tables.md"
    write_text(tables, all_tables(lines))
    with style():
        return [tables, *save(comparison_figure(contenders(lines)), folder / "language-models")]


def run_stage(
    stage: str,
    folder: Path,
    plan: LanguageModelPlan,
    *,
    texts: Sequence[Path] = (),
    held_out: Sequence[Path] = (),
    tokenizer: Path | None = None,
    only: Names = None,
    count: int = 3,
    **limits: Unpack[Limits],
) -> bool:
    """Run one of STAGES in a folder that several processes may share; return whether all of it is finished.

    texts, held_out: for `prepare`; the first held-out text is the validation text. tokenizer: also for `prepare`.
    count: for `second-seed`, which runs everything for seed 1: how many normalizers besides softmax, if none is named.

    Raises:
        ValueError: Unknown stage, texts missing, or a folder of another plan.
    """
    if stage not in STAGES:
        raise ValueError(f"unknown stage {stage!r}; {did_you_mean(stage, STAGES)}")
    if stage == "prepare" and not (texts and held_out):
        raise ValueError(
            "--stage prepare: expected --text FILE to train on and --valid FILE, a held-out text, got only one or "
            "none. Give both."
        )
    log: Log = limits.get("log", lambda message: None)
    if stage == "tables":
        for path in write_tables(folder):
            log(f"wrote {path}")
        return True
    # A folder belongs to its first plan, so that nothing may be written for a call that cannot work.
    check_plan(plan)
    plan.chosen(list(only or ()))
    if stage != "prepare":
        check_accelerate()
    device = chosen_device(limits.get("device"))
    if stage == "prepare":
        for path in (*texts, *held_out):
            check_file(path)
        names_of_texts(held_out)
        if tokenizer is not None:
            read_tokenizer(tokenizer)
        else:
            log(f"training a tokenizer of {plan.vocab:,} tokens on the text; --tokenizer DIR reads one instead")
    elif stage != "try":
        require_texts(folder)
    if stage in TRAINING and device.type == "cpu":
        check_memory(plan, log)
    workspace = LMWorkspace.open(folder, plan)
    if stage == "prepare":
        prepare_texts(workspace, texts, held_out[0], held_out[1:], tokenizer)
        return True
    if stage == "try":
        choose_engines(
            workspace, only, max_minutes=limits.get("max_minutes"), device=limits.get("device"),
            log=log,
        )  # fmt: skip
        return True
    if stage == "second-seed":
        limits["seeds"] = [1]
        return run_works(workspace, "everything", only or closest(workspace, count), **limits)
    return run_works(workspace, stage, only, **limits)


def check_memory(plan: LanguageModelPlan, log: Log = lambda message: None) -> None:
    """Check that the memory suffices to train on a CPU; log how much a training step takes.

    Raises:
        ValueError: This machine has less.
    """
    needed = training_memory_gb(plan.settings(plan.normalizers[0], rate=plan.rates[0], tokens=1, seed=0))
    memory = machine_memory_gb()
    advice = f"Use a GPU, --size 30M, or --set batch={max(1, plan.batch // 4)}."
    if memory is not None and needed > USABLE_MEMORY * memory:
        raise ValueError(
            f"expected a machine with at least {needed / USABLE_MEMORY:.0f} GB of memory to train these models on a "
            f"CPU, got {memory:.0f} GB. {advice}"
        )
    if needed > LITTLE_MEMORY:
        log(f"training on a CPU takes about {needed:.0f} GB of memory, and far longer than on a GPU. {advice}")


def run_works(
    workspace: LMWorkspace,
    stage: str,
    normalizers: Names = None,
    *,
    seeds: Sequence[int] = (0,),
    max_minutes: float | None = None,
    whole: bool = False,
    device: str | None = None,
    log: Log = lambda message: None,
) -> bool:
    """Do the work of one of WORKS for these normalizers (default: all); return whether all of it is finished.

    whole: train no model that cannot be finished and tested in max_minutes.
    """
    texts = read_texts(workspace)
    worker = Worker.at(workspace, texts, device=device, max_minutes=max_minutes, log=log, whole=whole)
    finished = True
    for seed in seeds:
        for normalizer in workspace.plan.chosen(list(normalizers or ())):
            problems = workspace.results(stage="problem", normalizer=normalizer, seed=seed)
            if len(problems) >= MAX_PROBLEMS:
                log(
                    f"{normalizer} seed {seed}: left out after {len(problems)} problems, the last: "
                    f"{problems[-1]['problem']}. To try again, remove them from {workspace.folder / RESULTS}"
                )
                finished = False
                continue
            with workspace.claimed(f"{normalizer}-seed-{seed}") as acquired:
                finished &= acquired and _try_works(worker, WORKS[stage], normalizer, seed)
    return finished


def _try_works(worker: Worker, works: Sequence[Work], normalizer: str, seed: int) -> bool:
    try:
        for work in works:
            work(worker, normalizer, seed)
    except OutOfTimeError:
        return False
    except NotReadyError as error:  # no attempt: it can work later
        worker.log(f"{normalizer} seed {seed}: {error}")
        return False
    except Exception as error:  # a compiler or a full GPU may raise anything; the other normalizers continue
        worker.log(f"{normalizer} seed {seed}: {traceback.format_exc()[-2000:]}")
        worker.workspace.add(
            {"stage": "problem", "normalizer": normalizer, "seed": seed, "problem": f"{type(error).__name__}: {error}"}
        )
        free_memory()
        return False
    return True
