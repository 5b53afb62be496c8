"""What is asked of a trained model: its loss on longer texts, a pass key, and how its heads attend."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from attnorm.experiments.language_models.plan import SOFTMAX
from attnorm.experiments.language_models.training import Worker, forget, machine, trained_model
from attnorm.training.compilation import in_training
from attnorm.training.evaluation import EVALUATION_BATCH, validation_loss
from attnorm.training.needle import among_many, find_keys, fine_tune, split_filler, summary
from attnorm.training.passkeys import Wording
from attnorm.training.settings import Settings
from attnorm.training.tokens import Tokens

AS_TRAINED = None  # in the place of a normalizer that is only put in afterwards


def measure(worker: Worker, normalizer: str, seed: int = 0) -> None:
    """Losses by length on every held-out text, and attention statistics; also with what is put in at inference."""
    wanted = _variants(worker, "measure", normalizer, seed)
    if not wanted:
        return
    worker.check_time()
    model, settings = trained_model(worker, normalizer, seed)
    for instead in wanted:
        began = time.monotonic()
        with _swapped(model, instead, settings), in_training(model, attention=worker.attention(normalizer)):
            losses = {
                name: losses_at(worker, model, settings, tokens) for name, tokens in worker.texts.held_out.items()
            }
            statistics = _statistics(
                model, observed_windows(worker.texts.valid, worker.place.plan.observed, settings.context), worker.device
            )
        worker.place.add(
            {
                "stage": "measure", "normalizer": normalizer, "at_inference": instead, "seed": seed,
                "losses": losses, "attention_statistics": statistics,
                "wall_seconds": round(time.monotonic() - began, 1), **machine(worker.device),
            }
        )  # fmt: skip
        found = "; ".join(f"{name} {by_length}" for name, by_length in losses.items())
        worker.say(f"{normalizer}{f' with {instead}' if instead else ''} seed {seed}: {found}")
    del model
    forget()


def needle(worker: Worker, normalizer: str, seed: int = 0) -> None:
    """Fine-tunes the trained model on pass keys and asks for them at longer and longer lengths."""
    wanted = _variants(worker, "needle", normalizer, seed)
    if not wanted:
        return
    worker.check_time()
    plan, device = worker.place.plan, worker.device
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
    for instead in wanted:
        with _swapped(model, instead, settings), in_training(model, attention=worker.attention(normalizer)):
            found = find_keys(model, settings, tested, wording, plan.needle, device)
            many = among_many(model, settings, tested, wording, plan.needle, device)
        worker.place.add(
            {
                "stage": "needle", "normalizer": normalizer, "at_inference": instead, "seed": seed,
                "course": course, "among_many": many, "by_length": summary(found),
                "answers": [each.as_dict() for each in found],
                "tuning_seconds": round(tuned - began, 1), "wall_seconds": round(time.monotonic() - began, 1),
                **machine(device),
            }
        )  # fmt: skip
        by_length = {length: each["exact"] for length, each in summary(found).items()}
        worker.say(f"{normalizer}{f' with {instead}' if instead else ''} seed {seed}: keys found {by_length}, {many}")
    del model
    forget()


def losses_at(worker: Worker, model: Any, settings: Settings, tokens: Tokens) -> dict[str, float]:
    """Nats per token by window length, over the same tokens at every length."""
    plan = worker.place.plan
    longest = max(plan.longer) * settings.context
    chunks = spread_chunks(tokens, longest, plan.chunks)
    dtype = getattr(torch, settings.dtype)
    found = {}
    for times in plan.longer:
        length = times * settings.context
        windows = [chunk[start : start + length + 1] for chunk in chunks for start in range(0, longest, length)]
        together = max(1, EVALUATION_BATCH * settings.context // length)
        found[str(length)] = round(validation_loss(model, windows, worker.device, dtype, together), 5)
    return found


def spread_chunks(tokens: Tokens, length: int, count: int) -> list[torch.Tensor]:
    """Up to `count` pieces of length + 1 tokens, evenly spread over the text without overlap.

    Raises:
        ValueError: The text has not one of them.
    """
    fitting = (len(tokens) - 1) // length
    if not fitting:
        raise ValueError(f"a held-out text has {len(tokens)} tokens; a loss at {length} needs {length + 1}")
    places = np.linspace(0, fitting - 1, min(count, fitting)).round().astype(int) * length
    return [torch.from_numpy(tokens[start : start + length + 1].astype(np.int64)) for start in places]


def observed_windows(tokens: Tokens, count: int, context: int) -> torch.Tensor:
    return torch.stack([chunk[:context] for chunk in spread_chunks(tokens, context, count)])


def _variants(worker: Worker, stage: str, normalizer: str, seed: int) -> list[str | None]:
    """The model as trained and, for softmax, with what is put in its place at inference; less what is done."""
    done = [each["at_inference"] for each in worker.place.results(stage=stage, normalizer=normalizer, seed=seed)]
    swaps = worker.place.plan.at_inference if normalizer == SOFTMAX else ()
    return [variant for variant in (AS_TRAINED, *swaps) if variant not in done]


@contextmanager
def _swapped(model: Any, instead: str | None, settings: Settings) -> Iterator[None]:
    from attnorm.models.patch import swap

    chosen: Any = (
        nullcontext() if instead is None else swap(model, instead, warm_start=False, train_length=settings.context)
    )
    with chosen:
        yield


def _statistics(model: Any, windows: torch.Tensor, device: torch.device) -> dict[str, Any] | None:
    """None on a machine without SciPy, which the room of the theory needs."""
    try:
        from attnorm.experiments.language_models.statistics import attention_statistics
    except ModuleNotFoundError:
        return None
    return attention_statistics(model, windows, device)
