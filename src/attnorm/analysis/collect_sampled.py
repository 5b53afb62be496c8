"""Costly metrics on sampled rows of one or more layers: distances, separability, isotropy, sensitivity, coverage.

These functions do not wait for a GPU. They start the computation and return a function; call it later to get the
columns.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attnorm.analysis.settings import AnalysisSettings, sampled_rows_at
from attnorm.analysis.tables import Columns, nan_expected
from attnorm.engines.execution import on_current_stream, sent_to, sent_to_cpu
from attnorm.metrics.call import AttentionCall, known_n, without_data
from attnorm.metrics.reads import coverage_sums
from attnorm.metrics.sampling import Sequences, Source, evenly_spaced, length_bins, sequences, visible_keys
from attnorm.metrics.sensitivity import directions_ahead, measure_sensitivity
from attnorm.metrics.vectors import isotropy, measure_vectors, permutations_ahead
from attnorm.normalizers.contract import Normalizer

Draw = Callable[[AttentionCall, Tensor, torch.Generator], list[Tensor]]
Choices = Sequence[Normalizer | None]
Sources = Sequence[Source]
Numbers = dict[str, dict[str, Tensor]]  # normalizer -> column -> (B, H, R, M)
ByNormalizer = dict[str, dict[str, Columns]]  # normalizer -> table -> columns
VECTORS, SENSITIVITY = "{} vectors", "{} sensitivity"  # with the random seed, they seed the generator of a layer
COVERAGE = ("per_head", "union", "independent")


@dataclass(frozen=True)
class DrawnAhead:
    """Random numbers of one layer for these rows, drawn in other threads while the model runs."""

    rows: Tensor
    permutations: Future[list[Tensor]]
    directions: Future[list[Tensor]]


@dataclass(frozen=True)
class SampledLayers:
    """What is measured: the sampled rows of each sequence, in calls with the heads of all layers."""

    sequences: Sequence[Sequences]
    layers: Sequence[AttentionCall]
    normalizers: Mapping[str, Normalizer | None]
    settings: AnalysisSettings


def draw_ahead(
    call: AttentionCall, settings: AnalysisSettings, pool: Executor, rows: Tensor | None = None
) -> DrawnAhead | None:
    """Start to draw the random numbers that `sampled_columns` needs for a call.

    They are drawn on the CPU, so that all devices use the same numbers: 72 ms per layer at 32,768 tokens on one core.
    The threads that draw them send them to the GPU as well: 15 MB per layer, which would be copied twice before.
    None if the rows of the call are not known without waiting for the GPU. rows: rows of a call of the same shape.
    """
    if rows is None:
        (all_rows,) = sequences(call, None, settings.rows)
        n = known_n(call, all_rows.rows)
        if n is None or not len(n):
            return None
        rows = _sample_rows(call, all_rows.rows[n >= length_bins(int(n.max()))[0][0]], settings)
    shape = without_data(call)
    device = call.query_BHQD.device

    def submit(draw: Draw, seed: str) -> Future[list[Tensor]]:
        generator = _generator(seed.format(settings.seed), call)
        return pool.submit(
            on_current_stream(lambda: [sent_to(device, drawn) for drawn in draw(shape, rows, generator)], device)
        )

    return DrawnAhead(rows, submit(permutations_ahead, VECTORS), submit(directions_ahead, SENSITIVITY))


def sampled_columns(
    longest: Sequence[Sequences],
    layers: Sequence[AttentionCall],
    normalizers: Mapping[str, Normalizer | None],
    settings: AnalysisSettings,
    ahead: Sequence[DrawnAhead] = (),
) -> Callable[[], ByNormalizer]:
    """Measure sampled rows of `longest`, whose calls have the heads of all layers (metrics.call.stack_calls).

    ahead: the random numbers of each layer, where they have been drawn before.

    The result returns by normalizer and table the columns, ordered by layer, head and N. It may be called once the
    numbers have arrived from a GPU: see execution.arrival.
    """
    sampled_sequences = [
        Sequences(item.call, _sample_rows(item.call, item.rows, settings)) for item in longest if len(item.rows)
    ]
    columns_by_normalizer: ByNormalizer = {name: {} for name in normalizers}
    if not sampled_sequences:
        return lambda: columns_by_normalizer
    fits = len(sampled_sequences) == 1 and len(ahead) == len(layers)
    ahead = ahead if fits and all(torch.equal(drawn.rows, sampled_sequences[0].rows) for drawn in ahead) else ()
    sampled = SampledLayers(sampled_sequences, layers, normalizers, settings)
    tables: dict[str, Callable[[], dict[str, Columns]]] = {}
    if "vectors" in settings.metrics:
        _check_vectors(sampled_sequences[0].call, settings)
        tables["heads"] = _isotropy(sampled)
        tables["top_n"] = _vectors(sampled, [drawn.permutations for drawn in ahead])
    if "sensitivity" in settings.metrics:
        tables["sensitivity"] = _sensitivity(sampled, [drawn.directions for drawn in ahead])
    if "coverage" in settings.metrics:
        tables["coverage"] = _coverage(sampled)

    def columns() -> ByNormalizer:
        for table, collected in tables.items():
            for name, columns_of_table in collected().items():
                columns_by_normalizer[name][table] = columns_of_table
        return columns_by_normalizer

    return columns


def sampled_weights(call: AttentionCall, settings: AnalysisSettings) -> int:
    """Return the largest possible number of weights in the sampled rows of a call."""
    batch, heads, queries, _ = call.query_BHQD.shape
    keys = call.key_BGKD.shape[-2]
    return batch * heads * min(sampled_rows_at(settings, keys), queries) * keys


def _sample_rows(call: AttentionCall, rows: Tensor, settings: AnalysisSettings) -> Tensor:
    return evenly_spaced(rows, sampled_rows_at(settings, call.key_BGKD.shape[-2]))


def _vectors(sampled: SampledLayers, ahead: Sequence[Future[list[Tensor]]]) -> Callable[[], dict[str, Columns]]:
    settings = sampled.settings

    def measure(item: Sequences, choices: Choices, sources: Sources) -> Numbers:
        return measure_vectors(item.call, choices, item.rows, settings.top_n, settings.vectors, sources)

    collected = _measure_and_join(sampled, measure, VECTORS, ahead)
    return lambda: {
        name: {column: _reduce_rows(np.nanmean, value).ravel() for column, value in numbers.items()}
        | {"rows": (~np.isnan(numbers["d_tilde"])).sum(1).ravel()}
        | {"separability_excess_error": _excess_error(numbers).ravel()}
        for name, numbers in collected().items()
    }


def _excess_error(numbers: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the standard error of separability - null over the compared rows, (H, N); NaN with fewer than two."""
    excess = numbers["separability"] - numbers["separability_null"]
    count = (~np.isnan(excess)).sum(1)
    spread = _reduce_rows(np.nanvar, excess) * count / np.maximum(count - 1, 1)
    return np.where(count > 1, np.sqrt(spread / np.maximum(count, 1)), np.nan)


def _sensitivity(sampled: SampledLayers, ahead: Sequence[Future[list[Tensor]]]) -> Callable[[], dict[str, Columns]]:
    settings = sampled.settings

    def measure(item: Sequences, choices: Choices, sources: Sources) -> Numbers:
        return measure_sensitivity(item.call, choices, item.rows, settings.temperatures, settings.epsilons, sources)

    collected = _measure_and_join(sampled, measure, SENSITIVITY, ahead)
    heads, temperatures = sampled.sequences[0].call.query_BHQD.shape[1], np.array(settings.temperatures)
    key: Columns = {
        "head": np.repeat(np.arange(heads) % (heads // len(sampled.layers)), len(temperatures)),
        "temperature": np.tile(temperatures, heads),
    }

    def columns_of(numbers: Mapping[str, np.ndarray]) -> Columns:
        means = {column: value for column, value in numbers.items() if column != "bound"}
        return {
            **key,
            "rows": (~np.isnan(numbers["jacobian_norm"])).sum(1).ravel(),
            "jacobian_norm_max": _reduce_rows(np.nanmax, numbers["jacobian_norm"]).ravel(),
            "bound": _reduce_rows(np.nanmax, numbers["bound"]).ravel(),
            **{column: _reduce_rows(np.nanmean, value).ravel() for column, value in means.items()},
        }

    return lambda: {name: columns_of(numbers) for name, numbers in collected().items()}


def _coverage(sampled: SampledLayers) -> Callable[[], dict[str, Columns]]:
    top_n, layers, choices = sampled.settings.top_n, len(sampled.layers), list(sampled.normalizers.values())
    parts = [coverage_sums(item.call, choices, item.rows, top_n, layers) for item in sampled.sequences]
    copies_to_cpu = {name: [tuple(map(sent_to_cpu, part[name])) for part in parts] for name in sampled.normalizers}

    def columns_of(name: str) -> Columns:
        sums, rows = (np.sum([part[index].numpy() for part in copies_to_cpu[name]], axis=0) for index in (0, 1))
        means = np.where(rows[:, None] > 0, sums / np.maximum(rows, 1)[:, None], np.nan)  # (3, layers, N)
        return {
            "top_n": np.tile(top_n, layers),
            "rows": np.repeat(rows, len(top_n)),
            **{column: mean.ravel() for column, mean in zip(COVERAGE, means, strict=True)},
        }

    return lambda: {name: columns_of(name) for name in sampled.normalizers}


def _isotropy(sampled: SampledLayers) -> Callable[[], dict[str, Columns]]:
    """Return the isotropy of each head's key/value vectors, averaged over sequences; the same for all normalizers."""
    settings, heads = sampled.settings, sampled.sequences[0].call.query_BHQD.shape[1]
    names = ("mean_cosine", "effective_rank", "smallest_distance")
    copies_to_cpu = []
    for item in sampled.sequences:
        inputs = item.call.inputs_BKC
        vectors = inputs[:, None] if settings.vectors == "inputs" and inputs is not None else item.call.value_BGKE
        shape = isotropy(vectors, visible_keys(item.call), seed=settings.seed)
        copies_to_cpu.append(sent_to_cpu(torch.stack([getattr(shape, name) for name in names]).double()))

    def columns() -> dict[str, Columns]:
        shapes = np.concatenate([part.numpy() for part in copies_to_cpu], axis=1)  # (3, B, G)
        means = _reduce_rows(np.nanmean, shapes)
        of_heads: Columns = {name: np.repeat(mean, heads // len(mean)) for name, mean in zip(names, means, strict=True)}
        return {name: dict(of_heads) for name in sampled.normalizers}

    return columns


def _check_vectors(call: AttentionCall, settings: AnalysisSettings) -> None:
    if settings.vectors == "inputs" and call.inputs_BKC is None:
        raise ValueError(
            f"vectors='inputs': the inputs of {call.kind} layer {call.layer} cannot be observed in this model. "
            "Use vectors='values'."
        )


def _measure_and_join(
    sampled: SampledLayers,
    measure: Callable[[Sequences, Choices, Sources], Numbers],
    seed: str,
    ahead: Sequence[Future[list[Tensor]]],
) -> Callable[[], dict[str, dict[str, np.ndarray]]]:
    """Measure every sequence. The result joins the numbers (B, H, R, M) to (H, rows of all sequences, M)."""
    choices, seed = list(sampled.normalizers.values()), seed.format(sampled.settings.seed)

    def sources() -> Sources:
        return [future.result() for future in ahead] if ahead else [_generator(seed, layer) for layer in sampled.layers]

    parts = [measure(item, choices, sources()) for item in sampled.sequences]
    columns = list(next(iter(parts[0].values())))
    copies_to_cpu = {
        name: [sent_to_cpu(torch.stack([part[name][column] for column in columns])) for part in parts]
        for name in parts[0]
    }

    def collected() -> dict[str, dict[str, np.ndarray]]:
        numbers_by_normalizer = {}
        for name, sent in copies_to_cpu.items():
            of_heads = [numbers.double().transpose(1, 2).flatten(2, 3).numpy() for numbers in sent]
            numbers_by_normalizer[name] = dict(zip(columns, np.concatenate(of_heads, axis=2), strict=True))
        return numbers_by_normalizer

    return collected


def _reduce_rows(reduce: Callable[..., np.ndarray], values: np.ndarray) -> np.ndarray:
    """Reduce axis 1 without NaN; NaN if nothing is left."""
    with nan_expected():
        return reduce(values, axis=1)


def _generator(seed: str, call: AttentionCall) -> torch.Generator:
    """Return a generator that depends on seed and layer only, so that no other choice changes the numbers."""
    digest = hashlib.sha256(f"{seed} {call.kind} {call.layer}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
