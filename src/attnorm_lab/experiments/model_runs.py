"""Run a model for an experiment: keep rows of attention of every head, and compute losses with other normalizers.

`run_forward_pass` passes on each attention call. `last_rows` returns the last row of every head: weights and the
vectors that they mix, the values after the head's projection or the layer inputs (`vectors="inputs"`). `sample_rows`
keeps whole rows of logits, for experiments that apply several maps to one row.

`losses` are those of a language model with another normalizer, without training, in nats per token. Only the second
half of each window counts, where every context is long. Windows differ far more in their loss than in the change that a
normalizer causes, so the change is computed window by window.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from attnorm.arithmetic import student_half_width
from attnorm.metrics.call import AttentionCall, logit_blocks
from attnorm.metrics.normalized import as_normalizer, resolve_normalizers, rows_block
from attnorm.metrics.sampling import evenly_spaced, length_bins, rows_to_measure
from attnorm.metrics.vectors import Vectors
from attnorm.models.dispatch import attention_sites
from attnorm.models.forward_pass import run
from attnorm.models.observe import observe
from attnorm.models.patch import swap
from attnorm.normalizers.contract import Normalizer
from attnorm.theory.geometry import on_sphere
from attnorm.theory.selection import SelectedRows, at_least_float32, top_n_indices
from attnorm_lab.experiments.experiment import ExperimentSubject, Floats, ProgressCallback, Verdict, no_progress
from attnorm_lab.training.lm.evaluate import predicted_loss


def run_forward_pass(
    subject: ExperimentSubject,
    length: int,
    on_call: Callable[[AttentionCall], None],
    progress: ProgressCallback,
    what: str,
    *,
    start: int = 0,
    inputs: bool = False,
    encoders: bool = False,
) -> None:
    """Run the model over `length` tokens of the first text; `on_call` gets every causal attention call.

    start: index of the first token.
    inputs: record the layer inputs that the keys were projected from.
    encoders: also pass calls in which every query sees all keys.
    """
    loaded = subject.loaded()
    kinds = ("decoder", "encoder") if encoders else ("decoder",)
    layers = len(attention_sites(loaded.model))
    seen = 0

    def count_call(call: AttentionCall) -> None:
        nonlocal seen
        if call.kind in kinds:
            on_call(call)
            seen += 1
        progress(what, min(seen, layers), layers)

    with observe(loaded.model, count_call, inputs=inputs):
        run(loaded, _inputs_from(start, subject.model_inputs(start + length)))
    if not seen:
        raise ValueError(f"expected a model with causal attention, got {loaded.name}. Use a causal language model.")


def _inputs_from(start: int, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    tokens = inputs["input_ids"].shape[1]
    return {
        name: value[:, start:] if value.dim() == 2 and value.shape[1] == tokens else value
        for name, value in inputs.items()
    }


def longest_rows(call: AttentionCall, count: int) -> Tensor:
    """Return `count` queries, evenly spaced in the longest half octave of contexts, including the last."""
    queries, keys = call.query_BHQD.shape[-2], call.key_BGKD.shape[-2]
    n = torch.arange(queries) + 1 + keys - queries
    return evenly_spaced((n >= length_bins(keys)[0][0]).nonzero().squeeze(-1), count)


_TENSORS = ("weights", "vectors", "visible")


@dataclass(frozen=True)
class LastRows:
    """The last row of the heads of one layer, grouped by the vectors that they share (grouped-query attention)."""

    layer: int
    weights: Tensor  # (g, h / g, L)
    vectors: Tensor  # (g, L, d)
    visible: Tensor  # (g, h / g, L)

    @property
    def heads(self) -> int:
        return self.weights.shape[0] * self.weights.shape[1]

    @property
    def keys(self) -> int:
        """Number of visible keys, of the row that sees most."""
        return int(self.visible.sum(-1).max())

    def selected(self, most: int) -> SelectedRows:
        """Select the `most` heaviest keys; `with_indices(.indices[..., :N])` gives the top N of them."""
        indices = top_n_indices(self.weights, most, self.visible)
        return SelectedRows(self.weights, self.vectors, self.visible, indices, one_row_per_set=False)

    def on_sphere(self) -> "LastRows":
        return replace(self, vectors=on_sphere(self.vectors))

    def permuted(self, generator: torch.Generator) -> "LastRows":
        """Permute every head's weights over its visible keys, so that they are independent of the vectors."""
        scores = torch.rand(self.weights.shape, generator=generator, dtype=torch.float64)
        return replace(self, weights=permute_weights(self.weights, self.visible, scores))


def permute_weights(weights: Tensor, visible: Tensor, scores: Tensor) -> Tensor:
    """Permute the weights of each row over its visible keys, in the order of random scores below 1."""
    by_score = torch.where(visible, scores, 2.0).argsort(dim=-1)  # hidden keys last
    in_order = visible.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(weights).scatter(-1, by_score, weights.gather(-1, in_order))


def last_rows(
    subject: ExperimentSubject,
    length: int,
    *,
    start: int = 0,
    vectors: Vectors = "values",
    progress: ProgressCallback = no_progress,
) -> list[LastRows]:
    """Run one forward pass over `length` tokens of the first text from token `start` on, without cross-attention."""
    layers: list[LastRows] = []
    run_forward_pass(
        subject, length, lambda call: layers.append(_last_row(call, vectors)), progress,
        f"running the model on {length} tokens", start=start, inputs=vectors == "inputs", encoders=True,
    )  # fmt: skip
    return layers


def join_layers(layers: Sequence[LastRows]) -> list[LastRows]:
    """Concatenate layers of the same shape: the same numbers from fewer and larger operations."""
    by_shape: dict[tuple[torch.Size, torch.Size], list[LastRows]] = {}
    for layer in layers:
        by_shape.setdefault((layer.weights.shape, layer.vectors.shape), []).append(layer)
    return [
        LastRows(same[0].layer, *(torch.cat([getattr(layer, name) for layer in same]) for name in _TENSORS))
        for same in by_shape.values()
    ]


def _last_row(call: AttentionCall, vectors: Vectors) -> LastRows:
    values = call.value_BGKE if vectors == "values" else call.inputs_BKC
    if values is None:
        raise ValueError("expected a model whose layer inputs can be recorded, got another one. Use vectors='values'.")
    if vectors == "inputs":
        values = values[:, None]
    row = torch.tensor([call.query_BHQD.shape[-2] - 1], device=call.query_BHQD.device)
    (normalizer,) = resolve_normalizers(call, [None])
    with torch.no_grad():
        (block,) = logit_blocks(call, row, all_heads=True)
        # In float64: weights that float32 rounds to 0, sums over a thousand keys, differences of nearly equal lengths.
        view = rows_block(call, block)
        weights = as_normalizer(normalizer, call).weights(view.with_logits(view.logits.double()))[0].double()
        keys = slice(block.first_key, block.first_key + weights.shape[-1])
        x = at_least_float32(values[0, :, keys])
        x = pad(x, (0, 0, 0, weights.shape[-1] - x.shape[-2]))
        visible = block.visible.expand(weights.shape)
        groups = x.shape[0]
        shape = (groups, -1, weights.shape[-1])
        weights, visible = weights.reshape(shape).cpu(), visible.reshape(shape).cpu()
        x = torch.where(visible.any(-2).unsqueeze(-1), x.double().cpu(), 0.0)
    seen = visible.flatten(0, 1).any(0)  # without the padding
    return LastRows(call.layer, weights[..., seen], x[:, seen], visible[..., seen])


@dataclass(frozen=True)
class SampledRows:
    """M rows of up to L keys: the same rows of every head, head after head."""

    logits: Tensor  # (M, L), 0 if hidden; scaled as in the model
    visible: Tensor  # (M, L), boolean
    layer: Tensor  # (M,)
    head: Tensor  # (M,)

    @property
    def n(self) -> Tensor:
        return self.visible.sum(-1)

    def where(self, selection: Tensor) -> "SampledRows":
        return SampledRows(self.logits[selection], self.visible[selection], self.layer[selection], self.head[selection])


def sample_rows(subject: ExperimentSubject, progress: ProgressCallback, length: int, rows: int) -> SampledRows:
    """Sample `rows` rows of every head, spread over context lengths up to `length`."""
    logits: list[Tensor] = []
    visible: list[Tensor] = []
    layers: list[Tensor] = []
    heads: list[Tensor] = []

    def on_call(call: AttentionCall) -> None:
        row_indices = rows_to_measure(rows, call.query_BHQD.shape[-2], causal=call.causal)
        for block in logit_blocks(call, row_indices.to(call.query_BHQD.device), all_heads=True):
            count, block_rows, width = block.logits.shape
            seen = block.visible.expand(block.logits.shape)
            padded = block.logits.new_zeros(count, block_rows, length)
            padded[..., block.first_key : block.first_key + width] = torch.where(seen, block.logits, 0.0)[..., :length]
            mask = seen.new_zeros(count, block_rows, length)
            mask[..., block.first_key : block.first_key + width] = seen[..., :length]
            logits.append(padded.flatten(0, 1).cpu())
            visible.append(mask.flatten(0, 1).cpu())
            layers.append(torch.full((count * block_rows,), call.layer))
            heads.append(torch.arange(count).repeat_interleave(block_rows))

    run_forward_pass(subject, length, on_call, progress, "rows of every head")
    return SampledRows(torch.cat(logits), torch.cat(visible), torch.cat(layers), torch.cat(heads))


AS_IT_RUNS = "as it runs"


@dataclass(frozen=True)
class WindowMean:
    """Mean of one number per window."""

    value: float
    error: float  # standard error
    windows: int

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval by Student's t."""
        reach = student_half_width(self.error, self.windows)
        return self.value - reach, self.value + reach

    def __str__(self) -> str:
        return f"{self.value:+.3f} ± {self.error:.3f}"


def mean(values: Floats) -> WindowMean:
    """Return the mean of two or more windows."""
    return WindowMean(float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values))), len(values))


def judge_loss_change(change: WindowMean, little: float, much: float) -> tuple[Verdict, str]:
    """Judge whether a loss stays the same: "reproduces" below `little`, "does not" above `much`, else "partly".

    little, much: changes in nats per token. Also return the interval in words.
    """
    low, high = change.interval
    verdict: Verdict = "reproduces" if high < little else "does not" if low >= much else "partly"
    crossed = [f"{line:g}" for line in (little, much) if low < line <= high]
    across = f", across our line at {' and '.join(crossed)}" if crossed else ""
    return verdict, f"mean ± standard error of {change.windows} windows, 95 % interval {low:.3f} to {high:.3f}{across}"


def windows_of(subject: ExperimentSubject, length: int, count: int) -> Tensor:
    """Return consecutive windows of the first text, (windows, length), at most `count`.

    A text that is too short for two windows is cut into two shorter ones: an interval needs two.
    """
    tokens = subject.tokens(count * length)
    if tokens < 2 * length:
        length, count = tokens // 2, 2
    count = min(count, tokens // length)
    return subject.model_inputs(count * length)["input_ids"][0].reshape(count, length)


@torch.inference_mode()
def losses(
    subject: ExperimentSubject,
    progress: ProgressCallback,
    normalizers: Mapping[str, Normalizer | None],
    windows: Sequence[Tensor] | Tensor,
) -> dict[str, Floats]:
    """Return one loss per window for each normalizer, put into every layer; None is the unchanged model."""
    model = subject.loaded().model
    losses_by_name: dict[str, Floats] = {}
    for index, (name, normalizer) in enumerate(normalizers.items()):

        def report(done: int, name: str = name, index: int = index) -> None:
            progress(f"loss: {name}", index * len(windows) + done, len(normalizers) * len(windows))

        with nullcontext() if normalizer is None else swap(model, normalizer, warm_start=False):
            losses_by_name[name] = _losses(model, windows, report)
    return losses_by_name


def _losses(model: Any, windows: Sequence[Tensor] | Tensor, report: Callable[[int], None]) -> Floats:
    values = []
    for index, window in enumerate(windows):
        report(index)
        half = len(window) // 2
        hidden = model.base_model(input_ids=window[None, :-1], use_cache=False).last_hidden_state[:, half:]
        values.append(float(predicted_loss(hidden, model.get_output_embeddings(), window[None, half + 1 :])))
    return np.array(values)
