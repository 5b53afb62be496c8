"""Benchmark AttentionMonitor: training steps with and without it, alternating."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from attnorm.bench.model_passes import Shape, random_model, tokens
from attnorm.bench.results import Ratio
from attnorm.bench.timing import time_alternating

MOST = 1.03  # promised: times the plain step, at the default setting
EVERY = 25  # the default of AttentionMonitor


def measure_monitor(*, quick: bool = False) -> Iterator[Ratio]:
    """Yield the ratios for softmax and for a patched model; on a GPU, if there is one, also with bfloat16 autocast.

    Autocast makes the step shorter but not the monitor, so the promise is hardest to keep there.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = Shape(64, layers=2, heads=2) if quick else Shape(512)
    batch = 2 if quick or device == "cpu" else 32
    for half in (False, True) if device == "cuda" else (False,):
        for normalizer in (None, "ssmax"):
            yield from _of(normalizer, shape, batch, device, half, quick)


def _of(normalizer: str | None, shape: Shape, batch: int, device: str, half: bool, quick: bool) -> Iterator[Ratio]:
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
        timed = time_alternating(watched_step, step, rounds=1 if quick else 7)
    where = f"{device}{', bfloat16 autocast' if half else ''}"
    topic = f"Training, GPT-2 with random weights, {shape}, L = {shape.length:,}, batch of {batch}, AdamW, {where}"
    runs = normalizer or "softmax"
    yield Ratio(
        topic=topic, what=f"{runs}: a step with the monitor", against="the step without", ours_ms=timed.ours_ms,
        theirs_ms=timed.theirs_ms, speedup=timed.speedup,
    )  # fmt: skip
    # Between logging steps the monitor does nothing: these are plain steps.
    yield Ratio(
        topic=topic, what=f"{runs}: one step in {EVERY} with it, per step", against="the step without",
        ours_ms=((EVERY - 1) * timed.theirs_ms + timed.ours_ms) / EVERY, theirs_ms=timed.theirs_ms,
        speedup=EVERY / (EVERY - 1 + 1 / timed.speedup), target=None if quick else 1 / MOST,
    )  # fmt: skip


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
