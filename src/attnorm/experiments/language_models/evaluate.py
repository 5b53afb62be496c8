"""Tests of a trained model: losses at longer lengths, pass keys, and attention statistics.

Attention statistics are means over rows of similar length, those of the longest half octave, as in `attnorm.analyze`.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnorm.experiments.language_models.train import Worker, free_memory, machine, trained_model, unfinished_variants
from attnorm.experiments.language_models.workspace import ModelPlan
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.normalized import NoRowsError
from attnorm.metrics.rows import measure_rows
from attnorm.metrics.sampling import evenly_spaced, length_bins
from attnorm.models.observe import observe
from attnorm.training.lm.attention import in_training
from attnorm.training.lm.data import Tokens
from attnorm.training.lm.evaluate import EVALUATION_BATCH, validation_loss
from attnorm.training.lm.model import LMSettings
from attnorm.training.needle import among_many, find_keys, fine_tune, split_filler, summary
from attnorm.training.pass_keys import Wording

ROWS = 64  # per head and window
KEPT = (
    "entropy_nats", "entropy_ratio", "effective_keys", "max_weight", "sink_mass", "logit_spread", "jacobian_norm",
    "row_sum",
)  # fmt: skip


def measure(worker: Worker, normalizer: str, seed: int = 0) -> None:
    """Measure losses by length on every held-out text and attention statistics, also with replacements at inference.

    A mechanism has no rows of logits and therefore no statistics.
    """
    variants = unfinished_variants(worker.workspace, "measure", normalizer, seed)
    if not variants:
        return
    worker.check_time()
    model, settings = trained_model(worker, normalizer, seed)
    for instead in variants:
        began = time.monotonic()
        with _with_normalizer(model, instead, settings), in_training(model, attention=worker.attention(normalizer)):
            losses = {
                name: losses_at(worker.workspace.plan, model, settings, tokens, worker.device)
                for name, tokens in worker.texts.held_out.items()
            }
            windows = observed_windows(worker.texts.valid, worker.workspace.plan.observed, settings.context)
            try:
                statistics = attention_statistics(model, windows, worker.device)
            except NoRowsError:  # a mechanism, such as `linear`
                statistics = None
        worker.workspace.add(
            {
                "stage": "measure", "normalizer": normalizer, "at_inference": instead, "seed": seed,
                "losses": losses, "attention_statistics": statistics,
                "wall_seconds": round(time.monotonic() - began, 1), **machine(worker.device),
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


def losses_at(
    plan: ModelPlan, model: Any, settings: LMSettings, tokens: Tokens, device: torch.device
) -> dict[str, float]:
    """Return nats per token by window length, over the same tokens at every length."""
    longest = max(plan.longer) * settings.context
    chunks = spread_chunks(tokens, longest, plan.chunks)
    dtype = getattr(torch, settings.dtype)
    losses = {}
    for times in plan.longer:
        length = times * settings.context
        windows = [chunk[start : start + length + 1] for chunk in chunks for start in range(0, longest, length)]
        together = max(1, EVALUATION_BATCH * settings.context // length)
        losses[str(length)] = round(validation_loss(model, windows, device, dtype, together), 5)
    return losses


def spread_chunks(tokens: Tokens, length: int, count: int) -> list[torch.Tensor]:
    """Return up to `count` pieces of length + 1 tokens, evenly spread over the text without overlap.

    Raises:
        ValueError: The text is shorter than one piece.
    """
    fitting = (len(tokens) - 1) // length
    if not fitting:
        raise ValueError(f"a held-out text has {len(tokens)} tokens; a loss at {length} needs {length + 1}")
    starts = np.linspace(0, fitting - 1, min(count, fitting)).round().astype(int) * length
    return [torch.from_numpy(tokens[start : start + length + 1].astype(np.int64)) for start in starts]


def observed_windows(tokens: Tokens, count: int, context: int) -> torch.Tensor:
    return torch.stack([chunk[:context] for chunk in spread_chunks(tokens, context, count)])


@contextmanager
def _with_normalizer(model: Any, instead: str | None, settings: LMSettings) -> Iterator[None]:
    from attnorm.models.patch import swap

    context: Any = (
        nullcontext() if instead is None else swap(model, instead, warm_start=False, train_length=settings.context)
    )
    with context:
        yield


@torch.no_grad()  # not inference mode: the Jacobians of some maps take a derivative
def attention_statistics(model: Any, windows: Tensor, device: torch.device) -> dict[str, Any]:
    """Return row statistics of all heads: means over everything, and by layer and head; windows (count, length)."""
    length = windows.shape[1]
    shortest, _ = length_bins(length)[0]
    rows = evenly_spaced(torch.arange(shortest - 1, length), ROWS)
    by_layer: dict[int, list[dict[str, Tensor]]] = {}

    def on_call(call: AttentionCall) -> None:
        (statistics,) = measure_rows(call, [None], rows, (1,)).values()
        means = {
            name: statistics.values[name].double().nanmean((0, 2)).cpu() for name in KEPT if name in statistics.values
        }
        by_layer.setdefault(call.layer, []).append(means)

    model.eval()
    with observe(model, on_call):
        for window in windows:
            model.base_model(input_ids=window[None].to(device), use_cache=False)
    names = next(iter(by_layer.values()))[0]
    heads = {
        name: [torch.stack([means[name] for means in by_layer[layer]]).nanmean(0) for layer in sorted(by_layer)]
        for name in names
    }
    return {
        "windows": len(windows),
        "length": length,
        "rows": len(rows),
        "mean": {name: _round_or_none(torch.stack(layers).nanmean().item()) for name, layers in heads.items()},
        "heads": {
            name: [[_round_or_none(x) for x in layer.tolist()] for layer in layers] for name, layers in heads.items()
        },
    }


def _round_or_none(number: float) -> float | None:
    """Round to five digits; None for NaN, which JSON does not have."""
    return None if number != number else float(f"{number:.5g}")
