"""The costly numbers, from a few of the longest rows: distances, separability, isotropy, sensitivity, coverage."""

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from attnorm.analysis.columns import Columns
from attnorm.analysis.sequences import Sequences, visible_keys
from attnorm.analysis.settings import AnalysisSettings, vector_rows_at
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
    """By normalizer, what the longest rows add to each table; `top_n` and `heads` in the order of heads (and N)."""
    chosen = [_sample(one, settings) for one in longest if len(one.rows)]
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


def _sample(one: Sequences, settings: AnalysisSettings) -> Sequences:
    return Sequences(one.call, spread(one.rows, vector_rows_at(settings, one.call.key_BGKD.shape[-2])))


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
    """Standard error of separability - null over the compared rows, (H, N); NaN from fewer than two of them."""
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
    """Per head, that of the vectors of its key/value head; sequences averaged."""
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
            f"the inputs behind the keys of {call.kind} layer {call.layer} cannot be seen in this model; "
            "use vectors='values'"
        )


def _pooled(
    chosen: Sequence[Sequences],
    normalizers: Mapping[str, Normalizer | None],
    measure: Callable[[Sequences, Choices, torch.Generator], Numbers],
    seed: str,
) -> dict[str, dict[str, np.ndarray]]:
    """Numbers (B, H, R, M) of each sequence -> (H, rows of all sequences, M)."""
    choices = list(normalizers.values())
    parts = [measure(one, choices, _generator(seed, one.call)) for one in chosen]
    return {
        name: {column: np.concatenate([_by_head(part[name][column]) for part in parts], axis=1) for column in numbers}
        for name, numbers in parts[0].items()
    }


def _by_head(values: Tensor) -> np.ndarray:
    return np.asarray(values.double().cpu().transpose(0, 1).flatten(1, 2).numpy())


def _over_rows(reduce: Callable[..., np.ndarray], values: np.ndarray) -> np.ndarray:
    """Over axis 1, NaN left out; NaN where nothing is left."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy's words for exactly that
        return reduce(values, axis=1)


def _generator(seed: str, call: AttentionCall) -> torch.Generator:
    """The same for a layer whatever else is measured, and for each sequence of a batch as if it were alone."""
    digest = hashlib.sha256(f"{seed} {call.kind} {call.layer}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
