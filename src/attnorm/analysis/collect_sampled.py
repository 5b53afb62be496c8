"""The costly metrics, on sampled rows of a layer: distances, separability, isotropy, sensitivity, coverage."""

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from attnorm.analysis.collect_rows import by_head
from attnorm.analysis.sequences import Sequences, visible_keys
from attnorm.analysis.settings import AnalysisSettings, sampled_rows_at
from attnorm.analysis.tables import Columns
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.coverage import measure_coverage
from attnorm.metrics.isotropy import isotropy
from attnorm.metrics.sampling import spread
from attnorm.metrics.sensitivity import measure_sensitivity
from attnorm.metrics.vectors import measure_vectors
from attnorm.normalizers.contract import Normalizer

Choices = Sequence[Normalizer | None]
Numbers = dict[str, dict[str, Tensor]]  # normalizer -> column -> (B, H, R, M)
ByNormalizer = dict[str, dict[str, Columns]]  # normalizer -> table -> columns


def sampled_columns(
    longest: Sequence[Sequences], normalizers: Mapping[str, Normalizer | None], settings: AnalysisSettings
) -> ByNormalizer:
    """Return by normalizer and table the columns from sampled rows of `longest`, ordered by head (and N)."""
    chosen = [
        Sequences(one.call, spread(one.rows, sampled_rows_at(settings, one.call.key_BGKD.shape[-2])))
        for one in longest
        if len(one.rows)
    ]
    found: ByNormalizer = {name: {} for name in normalizers}
    if not chosen:
        return found
    if "vectors" in settings.metrics:
        _check_vectors(chosen[0].call, settings)
        shape = _isotropy(chosen, settings)
        for name, columns in _vectors(chosen, normalizers, settings).items():
            found[name] |= {"heads": shape, "top_n": columns}
    if "sensitivity" in settings.metrics:
        for name, columns in _sensitivity(chosen, normalizers, settings).items():
            found[name]["sensitivity"] = columns
    if "coverage" in settings.metrics:
        for name, columns in _coverage(chosen, normalizers, settings).items():
            found[name]["coverage"] = columns
    return found


def _vectors(
    chosen: Sequence[Sequences], normalizers: Mapping[str, Normalizer | None], settings: AnalysisSettings
) -> dict[str, Columns]:
    def measure(one: Sequences, choices: Choices, generator: torch.Generator) -> Numbers:
        return measure_vectors(one.call, choices, one.rows, settings.top_n, settings.vectors, generator)

    pooled = _pooled(chosen, normalizers, measure, f"{settings.seed} vectors")
    return {
        name: {column: _over_rows(np.nanmean, value).ravel() for column, value in numbers.items()}
        | {"rows": (~np.isnan(numbers["d_tilde"])).sum(1).ravel()}
        | {"separability_excess_error": _excess_error(numbers).ravel()}
        for name, numbers in pooled.items()
    }


def _excess_error(numbers: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the standard error of separability - null over the compared rows, (H, N); NaN with fewer than two."""
    excess = numbers["separability"] - numbers["separability_null"]
    count = (~np.isnan(excess)).sum(1)
    spread = _over_rows(np.nanvar, excess) * count / np.maximum(count - 1, 1)
    return np.where(count > 1, np.sqrt(spread / np.maximum(count, 1)), np.nan)


def _sensitivity(
    chosen: Sequence[Sequences], normalizers: Mapping[str, Normalizer | None], settings: AnalysisSettings
) -> dict[str, Columns]:
    def measure(one: Sequences, choices: Choices, generator: torch.Generator) -> Numbers:
        return measure_sensitivity(one.call, choices, one.rows, settings.temperatures, settings.epsilons, generator)

    heads, temperatures = chosen[0].call.query_BHQD.shape[1], np.array(settings.temperatures)
    key: Columns = {
        "head": np.repeat(np.arange(heads), len(temperatures)),
        "temperature": np.tile(temperatures, heads),
    }
    columns: dict[str, Columns] = {}
    for name, numbers in _pooled(chosen, normalizers, measure, f"{settings.seed} sensitivity").items():
        columns[name] = {
            **key,
            "rows": (~np.isnan(numbers["jacobian_norm"])).sum(1).ravel(),
            "jacobian_norm_max": _over_rows(np.nanmax, numbers["jacobian_norm"]).ravel(),
            "bound": _over_rows(np.nanmax, numbers["bound"]).ravel(),
        }
        means = {column: value for column, value in numbers.items() if column != "bound"}
        columns[name] |= {column: _over_rows(np.nanmean, value).ravel() for column, value in means.items()}
    return columns


def _coverage(
    chosen: Sequence[Sequences], normalizers: Mapping[str, Normalizer | None], settings: AnalysisSettings
) -> dict[str, Columns]:
    parts = [measure_coverage(one.call, list(normalizers.values()), one.rows, settings.top_n) for one in chosen]
    columns: dict[str, Columns] = {}
    for name in normalizers:
        rows = sum(part[name].rows for part in parts)
        columns[name] = {"top_n": np.array(settings.top_n), "rows": np.full(len(settings.top_n), rows)}
        for column in ("per_head", "union", "independent"):
            shares = [
                getattr(part[name], column).double().numpy() * part[name].rows for part in parts if part[name].rows
            ]
            columns[name][column] = np.sum(shares, axis=0) / rows if rows else np.full(len(settings.top_n), np.nan)
    return columns


def _isotropy(chosen: Sequence[Sequences], settings: AnalysisSettings) -> Columns:
    """Return the isotropy of each head's key/value vectors, averaged over sequences."""
    heads = chosen[0].call.query_BHQD.shape[1]
    found: dict[str, list[np.ndarray]] = {"mean_cosine": [], "effective_rank": [], "smallest_distance": []}
    for one in chosen:
        inputs = one.call.inputs_BKC
        vectors = inputs[:, None] if settings.vectors == "inputs" and inputs is not None else one.call.value_BGKE
        shape = isotropy(vectors, visible_keys(one.call), seed=settings.seed)
        for name, values in found.items():
            values.append(getattr(shape, name).double().cpu().numpy())
    means = {name: _over_rows(np.nanmean, np.concatenate(values).T[:, :, None])[:, 0] for name, values in found.items()}
    return {name: np.repeat(mean, heads // len(mean)) for name, mean in means.items()}


def _check_vectors(call: AttentionCall, settings: AnalysisSettings) -> None:
    if settings.vectors == "inputs" and call.inputs_BKC is None:
        raise ValueError(
            f"vectors='inputs': the inputs of {call.kind} layer {call.layer} cannot be observed in this model. "
            "Use vectors='values'."
        )


def _pooled(
    chosen: Sequence[Sequences],
    normalizers: Mapping[str, Normalizer | None],
    measure: Callable[[Sequences, Choices, torch.Generator], Numbers],
    seed: str,
) -> dict[str, dict[str, np.ndarray]]:
    """Measure every sequence and join the numbers (B, H, R, M) to (H, rows of all sequences, M)."""
    choices = list(normalizers.values())
    parts = [measure(one, choices, _generator(seed, one.call)) for one in chosen]
    return {
        name: {column: np.concatenate([by_head(part[name][column]) for part in parts], axis=1) for column in numbers}
        for name, numbers in parts[0].items()
    }


def _over_rows(reduce: Callable[..., np.ndarray], values: np.ndarray) -> np.ndarray:
    """Reduce axis 1 without NaN; NaN if nothing is left."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy warns about rows of NaN
        return reduce(values, axis=1)


def _generator(seed: str, call: AttentionCall) -> torch.Generator:
    """Return a generator that depends on seed and layer only, so that no other choice changes the numbers."""
    digest = hashlib.sha256(f"{seed} {call.kind} {call.layer}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
