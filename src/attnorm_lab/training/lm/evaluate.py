"""Evaluate a language model: its losses at several lengths, its attention statistics, and the losses of unigram and
bigram counts as baselines.

At any length every token of the text except the first is predicted exactly once. So losses at different lengths are
means over the same tokens; only the visible context differs.

Baselines: unigram p(b) = (c(b) + 1) / (sum c + V), and a bigram interpolated with it, p(b | a) = (c(a, b) + k p(b)) /
(c(a) + k). k is the best of a few values *on the validation text itself*: the comparison favors the baseline.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch.nn import functional as F

from attnorm.evaluation.windows import Tokens, validation_windows
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.rows import measure_rows
from attnorm.metrics.sampling import evenly_spaced, length_bins
from attnorm.models.output_head import MixtureHead
from attnorm_lab.training.lm.data import check_length
from attnorm_lab.training.lm.model import ANY_LENGTH, LMSettings

EVALUATION_BATCH = 16
VOCABULARY_STEP = 64  # sizes of the output layer that suit matrix units
LONGER = (1, 2, 4)  # times the training length
STRENGTHS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
AT_ONCE = 2**22  # tokens of the training text in memory
STATISTICS_ROWS = 64  # per head and window
STATISTICS = (
    "entropy_nats", "entropy_ratio", "effective_keys", "max_weight", "sink_mass", "logit_spread", "jacobian_norm",
    "row_sum",
)  # fmt: skip
Floats = np.ndarray[Any, np.dtype[np.float64]]
Counts = np.ndarray[Any, np.dtype[np.int64]]


def predicted_loss(
    hidden: Float[torch.Tensor, "batch length width"],
    head: Any,
    targets: Int64[torch.Tensor, "batch length"],
) -> Float[torch.Tensor, ""]:
    """Return the mean cross entropy in nats per token.

    A function of its own so that it can be compiled alone: the logits are the largest array of a small model's step.
    head: the output layer, linear or a mixture.
    """
    if isinstance(head, MixtureHead):
        return head.loss(hidden, targets)
    logits = output_logits(hidden, head.weight, VOCABULARY_STEP if head.weight.is_cuda else 1)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def output_logits(hidden: torch.Tensor, weight: torch.Tensor, step: int) -> torch.Tensor:
    """Return the logits of every token, from a product whose number of columns is a multiple of `step`.

    GPT-2 has 50,257 tokens: matrix units are slow if rows do not start at multiples of 16 bytes.
    """
    vocabulary = weight.shape[0]
    if vocabulary % step:
        weight = F.pad(weight, (0, 0, 0, -vocabulary % step))
    return F.linear(hidden, weight)[..., :vocabulary]


def window_loss(model: Any, windows: Int64[torch.Tensor, "batch window"], loss: Callable[..., Any]) -> Any:
    """Return the loss of every token of the windows except the first, given the tokens before it in the window."""
    hidden = model.base_model(input_ids=windows[:, :-1], use_cache=False).last_hidden_state
    return loss(hidden, model.get_output_embeddings(), windows[:, 1:])


@torch.inference_mode()
def validation_loss(
    model: Any, windows: Sequence[torch.Tensor], device: torch.device, dtype: torch.dtype, batch_size: int | None = None
) -> float:
    """Return nats per token over all windows; every token has the same weight."""
    total, count = 0.0, 0
    together = batch_size or EVALUATION_BATCH
    for start in range(0, len(windows), together):
        group = windows[start : start + together]
        for length in sorted({len(window) for window in group}, reverse=True):
            batch = torch.stack([window for window in group if len(window) == length]).to(device)
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                mean = float(window_loss(model, batch, predicted_loss))
            predicted = batch.shape[0] * (length - 1)
            total, count = total + mean * predicted, count + predicted
    return total / count


def losses_by_length(
    model: Any, valid: Tokens, lengths: Sequence[int], settings: LMSettings, device: torch.device
) -> dict[int, float]:
    """Return nats per token in float32 for windows of each length, with as many tokens per batch as in training."""
    return {
        length: validation_loss(
            model,
            validation_windows(valid, length),
            device,
            torch.float32,
            batch_size=max(1, EVALUATION_BATCH * settings.context // length),
        )
        for length in lengths
    }


def losses_at(
    longer: Sequence[int], model: Any, settings: LMSettings, tokens: Tokens, count: int, device: torch.device
) -> dict[str, float]:
    """Return nats per token by window length, over the same `count` pieces of a text at every length.

    longer: the lengths, as multiples of the training length.
    """
    longest = max(longer) * settings.context
    chunks = spread_chunks(tokens, longest, count)
    dtype = getattr(torch, settings.dtype)
    losses = {}
    for times in longer:
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
        raise ValueError(
            f"expected a held-out text of at least {length + 1} tokens for a loss at length {length}, got "
            f"{len(tokens)}. Use more text or a smaller length."
        )
    starts = np.linspace(0, fitting - 1, min(count, fitting)).round().astype(int) * length
    return [torch.from_numpy(tokens[start : start + length + 1].astype(np.int64)) for start in starts]


def observed_windows(tokens: Tokens, count: int, context: int) -> torch.Tensor:
    return torch.stack([chunk[:context] for chunk in spread_chunks(tokens, context, count)])


def check_lengths(lengths: Sequence[int], settings: LMSettings) -> None:
    """Check that the model can be evaluated at these lengths.

    Raises:
        ValueError: A length below 1, or beyond the positions of the model.
    """
    for length in lengths:
        if length < 1:
            raise ValueError(f"expected lengths of at least 1 for the evaluation, got {length}.")
        if length > settings.context and not ANY_LENGTH[settings.architecture]:
            others = " or ".join(name for name, unlimited in ANY_LENGTH.items() if unlimited)
            raise ValueError(
                f"{settings.architecture} has {settings.context} positions, so that it cannot be evaluated at "
                f"length {length}. Remove that length, or train another architecture ({others})."
            )


def evaluation_lengths(lengths: Sequence[int] | None, settings: LMSettings, valid: Tokens) -> list[int]:
    """Return the lengths to evaluate at, always including the training length.

    lengths: None for 1, 2 and 4 times the training length, if model and text are long enough.

    Raises:
        ValueError: The text is shorter than one of the lengths.
    """
    if lengths is None:
        times = LONGER if ANY_LENGTH[settings.architecture] else LONGER[:1]
        longer = [factor * settings.context for factor in times]
        return [length for length in longer if length == settings.context or length < len(valid) - 1]
    for length in lengths:
        check_length(valid, length, "validation")
    return sorted({settings.context, *lengths})


@torch.no_grad()  # not inference mode: the Jacobians of some maps take a derivative
def attention_statistics(model: Any, windows: torch.Tensor, device: torch.device) -> dict[str, Any]:
    """Return row statistics of all heads: means over everything, and by layer and head; windows (count, length).

    The rows are those of the longest half octave, as in `attnorm.analyze`.
    """
    from attnorm.models.observe import observe  # loads accelerate

    length = windows.shape[1]
    shortest, _ = length_bins(length)[0]
    rows = evenly_spaced(torch.arange(shortest - 1, length), STATISTICS_ROWS)
    by_layer: dict[int, list[dict[str, torch.Tensor]]] = {}

    def on_call(call: AttentionCall) -> None:
        (statistics,) = measure_rows(call, [None], rows, (1,)).values()
        kept = (name for name in STATISTICS if name in statistics.values)
        means = {name: statistics.values[name].double().nanmean((0, 2)).cpu() for name in kept}
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


@dataclass(frozen=True)
class Baselines:
    """Nats per token, over every token of the validation text except the first."""

    unigram: float
    bigram: float
    bigram_strength: float


def baselines(train: Tokens, valid: Tokens, vocabulary: int) -> Baselines:
    counts = _token_counts(train, vocabulary)
    probabilities = (counts + 1) / (counts.sum() + vocabulary)
    before, after = valid[:-1].astype(np.int64), valid[1:].astype(np.int64)

    pairs, occurrences = np.unique(before * vocabulary + after, return_counts=True)
    contexts, targets = pairs // vocabulary, pairs % vocabulary
    together = _pair_counts(train, pairs, vocabulary)
    as_context = counts - np.bincount(train[-1:], minlength=vocabulary)  # nothing follows the last token
    losses = {
        strength: _mean_loss(
            (together + strength * probabilities[targets]) / (as_context[contexts] + strength), occurrences
        )
        for strength in STRENGTHS
    }
    best = min(losses, key=lambda strength: losses[strength])
    return Baselines(unigram=_mean_loss(probabilities[targets], occurrences), bigram=losses[best], bigram_strength=best)


def _mean_loss(probabilities: Floats, occurrences: Counts) -> float:
    return float(-(np.log(probabilities) * occurrences).sum() / occurrences.sum())


def _token_counts(tokens: Tokens, vocabulary: int) -> Counts:
    counts = np.zeros(vocabulary, dtype=np.int64)
    for start in range(0, len(tokens), AT_ONCE):
        counts += np.bincount(tokens[start : start + AT_ONCE], minlength=vocabulary)
    return counts


def _pair_counts(tokens: Tokens, pairs: Counts, vocabulary: int) -> Counts:
    """Count each of the sorted pairs; there is no V x V table, so a large vocabulary fits."""
    counts = np.zeros(len(pairs), dtype=np.int64)
    for seen in _pairs_of(tokens, vocabulary):
        index = np.searchsorted(pairs, seen)
        index[index == len(pairs)] = 0
        counts += np.bincount(index[pairs[index] == seen], minlength=len(pairs))
    return counts


def _pairs_of(tokens: Tokens, vocabulary: int) -> Iterator[Counts]:
    for start in range(0, len(tokens) - 1, AT_ONCE):
        ids = tokens[start : start + AT_ONCE + 1].astype(np.int64)
        yield ids[:-1] * vocabulary + ids[1:]
