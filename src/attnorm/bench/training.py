"""Benchmark training with other normalizers: a step of `attnorm train lm` against the same step with softmax."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from attnorm.bench.results import Ratio
from attnorm.bench.timing import time_alone

if TYPE_CHECKING:
    from attnorm.training.lm.model import LMSettings  # loads transformers, which the command does not need to start

LEAST = 0.8  # promised: times the speed of softmax
GPT2: dict[str, Any] = {
    "layers": 12, "heads": 12, "width": 768, "context": 1024, "vocab": 50304, "batch": 16, "dtype": "bfloat16",
}  # fmt: skip
QUICK: dict[str, Any] = {"layers": 2, "heads": 2, "width": 32, "context": 64, "vocab": 512, "batch": 2}
TRAINED: dict[str, dict[str, Any]] = {
    "ssmax": {}, "log_scaled": {}, "sink": {}, "softmax1": {}, "sigmoid": {}, "relu": {}, "softpick": {},
    "scale_invariant": {}, "adaptive_temperature": {}, "sa_softmax": {}, "stick_breaking": {}, "entmax15": {},
    "sparsemax": {}, "asentmax": {}, "kneemax": {"knee": 0.25}, "entmax": {"alpha": 1.3}, "topk": {},
    "alibi": {}, "nearmax": {},
}  # fmt: skip


def compare_training(*, quick: bool = False, notes: list[str]) -> Iterator[Ratio]:
    """Yield the ratios on a CUDA device, with compiled blocks; quick: two normalizers on any machine, not compiled."""
    from attnorm.training.lm.model import LMSettings

    if not torch.cuda.is_available() and not quick:
        notes.append("training was not measured: this machine has no CUDA device")
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plain = LMSettings(**(QUICK if quick else GPT2))
    theirs_ms = _time_step(plain, device, quick)
    topic = (
        f"Training, GPT-2 with {plain.layers} layers x {plain.heads} heads, width {plain.width // plain.heads}, "
        f"{plain.batch} x {plain.context:,} tokens a step, {plain.dtype}, {device.type}"
    )
    for name, options in list(TRAINED.items())[: 2 if quick else None]:
        ours_ms = _time_step(replace(plain, normalizer=name, normalizer_options=options), device, quick)
        label = " ".join([name, *(f"{key}={value}" for key, value in options.items())])
        yield Ratio(
            topic=topic, what=f"{label}, a step", against="softmax", ours_ms=ours_ms, theirs_ms=theirs_ms,
            speedup=theirs_ms / ours_ms, target=None if quick else LEAST,
        )  # fmt: skip


def _time_step(settings: "LMSettings", device: torch.device, quick: bool) -> float:
    """Return the median step (forward, backward, clipping, AdamW) in milliseconds.

    Models are timed one after the other: torch searches the compiled blocks of all of them in every call.
    """
    from attnorm.training.device import accelerated
    from attnorm.training.lm.attention import in_training
    from attnorm.training.lm.captured_step import STEPS_BEFORE, whole_windows
    from attnorm.training.lm.model import build_model
    from attnorm.training.lm.step import TrainingStep

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
            update(windows, settings.learning_rate)
            if device.type == "cuda":
                torch.cuda.synchronize()

        for _ in range(1 if quick else STEPS_BEFORE + 2):
            step()
        return time_alone(step, rounds=1 if quick else 9)
