"""Choose how attention is computed in training: time a few steps of each way on random tokens.

The ways are the engine that attnorm.attention chooses, and dense attention over the whole matrix of weights, both in
compiled blocks. The faster one is recorded for all later runs; a way that fails is reported.
"""

import contextlib
import json
import math
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from attnorm.experiments.language_models.train import ATTENTION, RESCALED_SOFTMAX, Log, free_memory, machine
from attnorm.experiments.language_models.workspace import WAIT_TO_WRITE, LMWorkspace
from attnorm.files import write_json
from attnorm.normalizers.spec import parse_spec
from attnorm.training.device import accelerated, chosen_device
from attnorm.training.interruption import StopRequest
from attnorm.training.lm.attention import Attention
from attnorm.training.lm.data import Corpus
from attnorm.training.lm.train import LOG_EVERY, Run

STEPS = 2 * LOG_EVERY
IN_BLOCKS = ("kneemax",)  # its engine is much slower: used only if the matrix does not fit
MOST_SECONDS = 60  # of one trial


def choose_engines(
    workspace: LMWorkspace, normalizers: Sequence[str] | None = None, *, max_minutes: float | None = None,
    device: str | None = None, log: Log = lambda words: None,
) -> None:  # fmt: skip
    """Record speed and memory of every way as results, and the fastest way of each normalizer for later runs."""
    where = chosen_device(device)
    torch.set_float32_matmul_precision("high")
    deadline = math.inf if max_minutes is None else time.monotonic() + 60 * max_minutes
    for normalizer in workspace.plan.chosen(list(normalizers or ())):
        speeds: dict[Attention, float] = {}
        ways: tuple[Attention, ...] = ("engine",) if normalizer in RESCALED_SOFTMAX else ("dense", "engine")
        with workspace.claimed(f"trial-{normalizer}") as mine:
            if not mine or workspace.results(stage="trial", normalizer=normalizer):
                continue
            for way in ways:
                if time.monotonic() >= deadline or (
                    way == "engine" and speeds and parse_spec(normalizer)[0] in IN_BLOCKS
                ):
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
        entries = list(run.steps(time.monotonic() + MOST_SECONDS, stop, STEPS + 1, None))
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
