"""Benchmark training steps: with other normalizers against softmax, and with AttentionMonitor against without it."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from attnorm_lab.bench.analyze import Shape, random_model, tokens
from attnorm_lab.bench.promises import SPEEDUPS
from attnorm_lab.bench.results import Result
from attnorm_lab.bench.timing import Bench, time_alone, time_alternating

if TYPE_CHECKING:
    from attnorm_lab.training.lm.model import LMSettings  # loads transformers, which the command does not need to start

GPT2: dict[str, Any] = {
    "layers": 12, "heads": 12, "width": 768, "context": 1024, "vocab": 50304, "batch": 16, "dtype": "bfloat16",
}  # fmt: skip
QUICK: dict[str, Any] = {"layers": 2, "heads": 2, "width": 32, "context": 64, "vocab": 512, "batch": 2}
TRAINED = (
    "ssmax", "log_scaled", "sink", "softmax1", "sigmoid", "relu", "softpick", "scale_invariant",
    "adaptive_temperature", "sa_softmax", "stick_breaking", "entmax15", "sparsemax", "asentmax", "kneemax:knee=0.25",
    "entmax:alpha=1.3", "topk", "alibi", "nearmax",
)  # fmt: skip
WITHOUT = "the step without"
EVERY = 50  # the default of AttentionMonitor


def compare_training(bench: Bench) -> Iterator[Result]:
    """Yield the ratios on a CUDA device, with compiled blocks; quick: two normalizers on any machine, not compiled."""
    from attnorm_lab.training.lm.model import LMSettings

    if not torch.cuda.is_available() and not bench.quick:
        bench.notes.append("training was not measured: this machine has no CUDA device")
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plain = LMSettings(**(QUICK if bench.quick else GPT2))
    theirs_ms = _time_step(plain, device, bench.quick)
    table = (
        f"Training, GPT-2 with {plain.layers} layers x {plain.heads} heads, width {plain.width // plain.heads}, "
        f"{plain.batch} x {plain.context:,} tokens a step, {plain.dtype}, {device.type}"
    )
    for name in TRAINED[: 2 if bench.quick else None]:
        ours_ms = _time_step(replace(plain, normalizer=name), device, bench.quick)
        numbers = {"ours_ms": ours_ms, "theirs_ms": theirs_ms, "speedup": theirs_ms / ours_ms}
        yield bench.result(table, f"{name}, a step", numbers, {"speedup": SPEEDUPS["training"]}, "softmax")


def _time_step(settings: "LMSettings", device: torch.device, quick: bool) -> float:
    """Return the median step (forward, backward, clipping, AdamW) in milliseconds.

    Models are timed one after the other: torch searches the compiled blocks of all of them in every call.
    """
    from attnorm.models.private_names import whole_windows
    from attnorm_lab.training.device import accelerated
    from attnorm_lab.training.lm.attention import in_training
    from attnorm_lab.training.lm.model import build_model
    from attnorm_lab.training.lm.train import TrainingStep
    from attnorm_lab.training.run import STEPS_BEFORE

    torch._dynamo.reset()
    model = build_model(settings, settings.vocab, 0).to(device).train()
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(settings.vocab, (settings.batch, settings.context + 1), generator=generator).to(device)
    compiled = not quick
    with (
        accelerated(device, settings.dtype) as accelerator,
        in_training(model, compiled=compiled, dtype=settings.dtype),
        whole_windows(),
    ):
        update = TrainingStep(model, settings, accelerator, compiled=compiled)

        def step() -> None:
            update(settings.learning_rate, windows)
            if device.type == "cuda":
                torch.cuda.synchronize()

        for _ in range(1 if quick else STEPS_BEFORE + 2):
            step()
        return time_alone(step, rounds=1 if quick else 9)


def measure_monitor(bench: Bench) -> Iterator[Result]:
    """Yield the ratios for softmax and for a patched model; on a GPU, if there is one, also with bfloat16 autocast.

    Autocast makes the step shorter but not the monitor, so the promise is hardest to keep there.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = Shape(64, layers=2, heads=2) if bench.quick else Shape(512)
    batch = 2 if bench.quick or device == "cpu" else 32
    for half in (False, True) if device == "cuda" else (False,):
        where = f"{device}{', bfloat16 autocast' if half else ''}"
        table = f"Training, GPT-2 with random weights, {shape}, L = {shape.length:,}, batch of {batch}, AdamW, {where}"
        for normalizer in (None, "ssmax"):
            timed = _time_monitor(normalizer, shape, batch, device, half, 1 if bench.quick else 7)
            plain_ms, runs = timed["theirs_ms"], normalizer or "softmax"
            yield bench.result(table, f"{runs}: a step with the monitor", timed, against=WITHOUT)
            # Between logging steps the monitor does nothing: these are plain steps.
            per_step = {
                "ours_ms": ((EVERY - 1) * plain_ms + timed["ours_ms"]) / EVERY, "theirs_ms": plain_ms,
                "speedup": EVERY / (EVERY - 1 + 1 / timed["speedup"]),
            }  # fmt: skip
            what = f"{runs}: one step in {EVERY} with it, per step"
            yield bench.result(table, what, per_step, {"speedup": SPEEDUPS["monitor"]}, WITHOUT)


def _time_monitor(
    normalizer: str | None, shape: Shape, batch: int, device: str, half: bool, rounds: int
) -> dict[str, float]:
    from attnorm.models.patch import patch
    from attnorm.monitor.alerts import AttentionAlert
    from attnorm.monitor.monitor import AttentionMonitor

    model = random_model(shape).to(device).train()
    if normalizer is not None:
        patch(model, normalizer, train_length=shape.length)
    ids = tokens(batch * shape.length).reshape(batch, shape.length).to(device)
    step = training_step(model, ids, half=half)
    monitor = AttentionMonitor(every=1)

    def watched_step() -> None:
        with monitor.step(model):
            step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AttentionAlert)  # random weights select at random
        return time_alternating(watched_step, step, rounds=rounds)[0]


def training_step(model: Any, ids: Tensor, *, half: bool = False) -> Callable[[], None]:
    """Return a training step: forward, backward and AdamW, synchronized."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def step() -> None:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=half):
            logits = model(input_ids=ids).logits
        cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if ids.is_cuda:
            torch.cuda.synchronize()

    return step
