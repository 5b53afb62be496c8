"""An analysis that no model made: heads of every verdict, drawn as rows of logits, measured by the formulas of theory.

`synthetic_tables()` gives the five tables of analysis/tables.py (without verdict columns) and `synthetic_manifest()`
the manifest, so that verdicts, terminal and report are tested without a model. Row numbers (entropy, gap, horizon ...)
are true of the drawn logits; distances and separability are made up to look like a model's.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from attnorm.analysis.manifest import SCHEMA
from attnorm.analysis.tables import QUANTILES, SCHEMAS, WINDOWS
from attnorm.analysis.verdicts.thresholds import Thresholds
from attnorm.attention import normalize
from attnorm.metrics.catalogue import PER_ROW
from attnorm.normalizers.ssmax import neutral_s
from attnorm.theory.dispersion import effective_gap_slope, entropy_floor, horizon, sharp_weight_bounds

ROWS = 8  # per bin
TOP_N = (1, 5, 10, 20, 100)
TEMPERATURES = (0.25, 0.5, 1.0, 2.0)
NORMALIZERS = ("model", "ssmax", "entmax15")

Logits = Callable[[int, torch.Generator], Tensor]  # n -> (ROWS, n)


@dataclass(frozen=True)
class Archetype:
    """How a head's logits look among n keys, and how well its top-20 vectors are told apart (null: 0.62 to 0.7)."""

    verdict: str  # what a judge should say
    logits: Logits
    separability: float = 0.86


def _noise(n: int, generator: torch.Generator, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(ROWS, n, generator=generator, dtype=torch.float64)


def _winner(n: int, generator: torch.Generator, height: float, scale: float = 1.0, winners: int = 1) -> Tensor:
    """Keys in the middle of the row stand `height` above noise; a little jitter keeps the rows apart."""
    logits = _noise(n, generator, scale)
    logits[:, n // 2 : n // 2 + winners] = height + 0.2 * _noise(winners, generator)
    return logits


def _selects(n: int, generator: torch.Generator) -> Tensor:
    return _winner(n, generator, height=2.5 + math.log(n))


def _selects_many(n: int, generator: torch.Generator) -> Tensor:
    return _winner(n, generator, height=2.5 + math.log(n), winners=min(32, n // 4))


def _flat(n: int, generator: torch.Generator) -> Tensor:
    return 2 * torch.rand(ROWS, n, generator=generator, dtype=torch.float64)


def _lazy(n: int, generator: torch.Generator) -> Tensor:
    logits = _noise(n, generator)
    logits[:, n - 1] = -14.0  # a wide spread that it does not use
    return logits


def _parked(n: int, generator: torch.Generator) -> Tensor:
    logits = _noise(n, generator)
    logits[:, 0] = 2.5 + math.log(n)
    return logits


def _certain(n: int, generator: torch.Generator) -> Tensor:
    return _winner(n, generator, height=9.0 + math.log(n))


def _torn(n: int, generator: torch.Generator) -> Tensor:
    """Two keys share the row."""
    logits = _noise(n, generator)
    logits[:, n // 2 : n // 2 + 2] = 5.0 + math.log(n)
    return logits


def _selects_beside_a_sink(n: int, generator: torch.Generator) -> Tensor:
    logits = _selects(n, generator)
    logits[:, 0] = logits[:, n // 2] - 0.9
    return logits


def _smeared_beside_a_sink(n: int, generator: torch.Generator) -> Tensor:
    """Looks sharp only because of the sink: 0.4 of the row lies on it and the rest on everything."""
    logits = _flat(n, generator)
    logits[:, 0] = logits[:, 1:].logsumexp(-1) - 0.4
    return logits


def _broken(n: int, generator: torch.Generator) -> Tensor:
    return torch.full((ROWS, n), math.nan, dtype=torch.float64)


ARCHETYPES: dict[str, Archetype] = {
    "selects": Archetype("healthy", _selects),
    "flat": Archetype("dispersed-forced", _flat, separability=0.64),
    "lazy": Archetype("dispersed-by-choice", _lazy, separability=0.69),
    "parked": Archetype("sink-dominated", _parked),
    "certain": Archetype("frozen", _certain),
    "torn": Archetype("sensitive", _torn),
    "muddled": Archetype("healthy", _selects_many, separability=0.65),  # and saturated
    "selects beside a sink": Archetype("healthy", _selects_beside_a_sink),
    "smeared beside a sink": Archetype("dispersed-forced", _smeared_beside_a_sink, separability=0.72),
    "broken": Archetype("broken", _broken),
}

# Layers x heads of the model that is pretended.
CAST: tuple[tuple[str, ...], ...] = (
    ("flat", "flat", "lazy", "selects", "smeared beside a sink", "torn"),
    ("selects", "selects", "lazy", "lazy", "muddled", "selects beside a sink"),
    ("selects", "certain", "selects", "parked", "selects beside a sink", "muddled"),
    ("parked", "parked", "selects", "selects", "torn", "broken"),
)
EXPECTED: dict[tuple[int, int], str] = {
    (layer, head): ARCHETYPES[name].verdict for layer, row in enumerate(CAST) for head, name in enumerate(row)
}


def bins(longest: int) -> list[tuple[int, int]]:
    """Half-octave bins of n, longest first, down to 8 keys."""
    edges = [longest]
    while edges[-1] / math.sqrt(2) >= 8:
        edges.append(round(longest / 2 ** (len(edges) / 2)))
    return [(low + 1, high) for high, low in zip(edges, [*edges[1:], 7], strict=True)]


def row_values(logits: Tensor, weights: Tensor, gain: float) -> dict[str, Tensor]:
    """Every per-row metric of the catalogue, from its definition.

    gain: what a rescaled softmax multiplies the logits by; NaN for a map that has no such limits.
    """
    n = logits.shape[-1]
    spread = logits.amax(-1) - logits.amin(-1)
    reach = spread * gain
    content = weights[:, 1:] / weights[:, 1:].sum(-1, keepdim=True)
    content_logits = logits[:, 1:]
    values = {
        **_of_weights(weights),
        "row_sum": weights.sum(-1),
        "logit_spread": spread,
        "max_logit": logits.amax(-1),
        "weight_ceiling": sharp_weight_bounds(reach, n).upper,
        "entropy_floor": entropy_floor(reach, n),
        "horizon": horizon(reach),
        "horizon_without_sink": horizon((content_logits.amax(-1) - content_logits.amin(-1)) * gain),
        "sink_mass": weights[:, 0],
        **{f"{name}_without_sink": value for name, value in _of_weights(content).items() if name != "entropy_nats"},
        "logit_spread_without_sink": content_logits.amax(-1) - content_logits.amin(-1),
        "jacobian_norm": _norms(weights),
    }
    return {name: values[name] for name in PER_ROW}


def _of_weights(weights: Tensor) -> dict[str, Tensor]:
    n = weights.shape[-1]
    logs = torch.where(weights > 0, torch.log(weights.clamp(min=1e-300)), 0.0)
    entropy = -(weights * logs).sum(-1)
    largest = weights.amax(-1)
    others = (weights.sum(-1) - largest).clamp(min=1e-12)
    return {
        "entropy_nats": entropy,
        "entropy_ratio": entropy / math.log(n),
        "effective_keys": 1 / weights.square().sum(-1),
        "max_weight": largest,
        "effective_gap": torch.log(largest) - torch.log(others) + math.log(n - 1),
    }


def _norms(weights: Tensor) -> Tensor:
    """Norm of diag(p) - p p^T, of the heaviest 8 keys: close enough to look at, and quick."""
    p = weights.topk(min(8, weights.shape[-1]), -1).values
    known = p.isfinite().all(-1)
    p = torch.where(known[:, None], p, 0.0)
    norms: Tensor = torch.linalg.eigvalsh(torch.diag_embed(p) - p[:, :, None] * p[:, None, :])[:, -1]
    return torch.where(known, norms, math.nan)


def _gain(normalizer: str, n: int) -> float:
    return {"model": 1.0, "softmax": 1.0, "ssmax": neutral_s(1024) * math.log(n)}.get(normalizer, math.nan)


def _weights(logits: Tensor, normalizer: str) -> Tensor:
    known = logits.isfinite().all(-1, keepdim=True)
    name = "softmax" if normalizer == "model" else normalizer
    return torch.where(known, normalize(torch.where(known, logits, 0.0), name).detach(), math.nan)


def synthetic_tables(
    *,
    cast: Sequence[Sequence[str]] = CAST,
    texts: Sequence[str] = ("topics",),
    lengths: Sequence[int] = (256, 1024),
    normalizers: Sequence[str] = NORMALIZERS,
    seed: int = 0,
) -> dict[str, pa.Table]:
    """The tables heads, by_length, top_n, sensitivity and coverage, to the schemas, without verdicts."""
    return _tables(tuple(tuple(row) for row in cast), tuple(texts), tuple(lengths), tuple(normalizers), seed)


@cache
def _tables(
    cast: tuple[tuple[str, ...], ...],
    texts: tuple[str, ...],
    lengths: tuple[int, ...],
    normalizers: tuple[str, ...],
    seed: int,
) -> dict[str, pa.Table]:
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in SCHEMAS}
    heads = [(layer, head, name) for layer, names in enumerate(cast) for head, name in enumerate(names)]
    for text in texts:
        for length in lengths:
            rows["tokens"] += synthetic_tokens(text, length)
            drawn = {high: _drawn(heads, high, seed + hash_of(text)) for _, high in bins(length)}
            for normalizer in normalizers:
                key: dict[str, Any] = {"text": text, "length": length, "normalizer": normalizer, "kind": "decoder"}
                _add_heads(rows, key, heads, drawn)
                _add_reads(rows["reads"], key, heads, drawn[length])
                for layer, names in enumerate(cast):
                    _add_coverage(rows["coverage"], {**key, "layer": layer}, len(names), length)
    tables = {name: pa.Table.from_pylist(rows[name], schema=schema) for name, schema in SCHEMAS.items()}
    return {**tables, "windows": WINDOWS.empty_table()}


def hash_of(text: str) -> int:
    return sum(text.encode()) % 97


def _drawn(heads: Sequence[tuple[int, int, str]], n: int, seed: int) -> Tensor:
    """Rows of all heads, one head after the other: (heads * ROWS, n)."""
    generators = [torch.Generator().manual_seed(seed + 1000 * layer + head + 17 * n) for layer, head, _ in heads]
    return torch.cat([ARCHETYPES[name].logits(n, g) for (_, _, name), g in zip(heads, generators, strict=True)])


def _add_heads(
    rows: dict[str, list[dict[str, Any]]],
    key: dict[str, Any],
    heads: Sequence[tuple[int, int, str]],
    drawn: dict[int, Tensor],
) -> None:
    length, normalizer = key["length"], key["normalizer"]
    curves = {
        high: _summaries(row_values(logits, _weights(logits, normalizer), _gain(normalizer, high)), len(heads))
        for high, logits in drawn.items()
    }
    weights = _weights(drawn[length], normalizer).view(len(heads), ROWS, length)
    norms = {T: _norms(_weights(drawn[length] / T, normalizer)).view(len(heads), ROWS) / T for T in TEMPERATURES}
    highs = torch.tensor([float(high) for _, high in bins(length)], dtype=torch.float64)
    for index, (layer, head, name) in enumerate(heads):
        own = {**key, "layer": layer, "head": head}
        bad = bool(weights[index].isnan().any())
        for low, high in bins(length):
            counts = {"n_low": low, "n_high": high, "rows": 0 if bad else ROWS, "n": float(high)}
            rows["by_length"].append(_schema_row("by_length", {**own, **counts, **curves[high][index]}))
        row = {**rows["by_length"][-len(highs)], **curves[length][index], "kv_head": head // 2}
        for gap, column in (("effective_gap", "gap_slope"), ("effective_gap_without_sink", "gap_slope_without_sink")):
            gaps = torch.tensor([curves[high][index][gap] for _, high in bins(length)], dtype=torch.float64)
            fit = effective_gap_slope(gaps, highs)
            row |= {column: float(fit.slope), f"{column}_error": float(fit.slope_standard_error)}
        row["broken_rows"] = ROWS * len(highs) if bad else 0
        if not bad:
            row |= {"mean_cosine": 0.11, "effective_rank": 18.0, "smallest_distance": 0.04}
            row["forced_share"] = float(length > row["horizon_q50"])
        rows["heads"].append(_schema_row("heads", row))
        rows["top_n"] += [_top_n_row(own, ARCHETYPES[name], weights[index], N) for N in TOP_N if length > N]
        rows["sensitivity"] += [_sensitivity_row(own, norms[T][index], T) for T in TEMPERATURES]


def _summaries(values: dict[str, Tensor], heads: int) -> list[dict[str, float]]:
    """Mean and quantiles over each head's rows."""
    stacked = torch.stack(list(values.values())).view(len(values), heads, ROWS)
    shares = torch.tensor([q / 100 for q in QUANTILES], dtype=stacked.dtype)
    numbers = torch.cat([stacked.mean(-1)[None], stacked.quantile(shares, dim=-1)])  # (1 + quantiles, values, heads)
    suffixes = ("_mean", *(f"_q{q:02d}" for q in QUANTILES))
    names = [f"{name}{suffix}" for suffix in suffixes for name in values]
    found = [dict(zip(names, numbers[:, :, head].flatten().tolist(), strict=True)) for head in range(heads)]
    return [one | {name: one[f"{name}_q50"] for name in values} for one in found]


def _top_n_row(key: dict[str, Any], archetype: Archetype, weights: Tensor, N: int) -> dict[str, Any]:
    n = weights.shape[-1]
    A = float(weights.topk(N, -1).values.sum(-1).mean())
    if math.isnan(A):
        return _schema_row("top_n", {**key, "top_n": N, "rows": 0})
    s = 3.0 * A / math.sqrt(N)
    distance = (n - N) * s * (1 + 0.02 * (1 - A))
    null = 0.62 if N > 1 else 1.0
    told_apart = archetype.separability if N > 1 else 1.0
    return _schema_row(
        "top_n",
        {
            **key,
            "top_n": N,
            "rows": ROWS,
            "mass": A,
            "d_tilde": distance,
            "relative_distance": distance / ((n - N) * s),
            "fixed_printed": 2.9 * distance,
            "fixed_tight": 1.04 * distance,
            "random_printed": 5.5 * distance,
            "random_lower": 0.7 * distance,
            "random_upper": 0.93 * distance,
            "separability": told_apart,
            "separability_null": null,
            "separability_null_low": null - 0.08 * (N > 1),
            "separability_null_high": null + 0.08 * (N > 1),
            "separability_sphere": told_apart - 0.03 * (N > 1),
            "separability_sphere_null": null,
            "separability_lower": max(0.0, told_apart - 0.4),
            "separability_upper": min(1.0, told_apart + 0.1),
            "separability_excess_error": 0.02,
        },
    )


def _sensitivity_row(key: dict[str, Any], norms: Tensor, temperature: float) -> dict[str, Any]:
    bound = {"entmax15": 0.87}.get(key["normalizer"], 0.5) / temperature
    return _schema_row(
        "sensitivity",
        {
            **key,
            "temperature": temperature,
            "rows": ROWS,
            "jacobian_norm": float(norms.mean()),
            "jacobian_norm_max": float(norms.max()),
            "bound": bound,
            "gain_0.001": 0.05 * float(norms.mean()),
            "gain_0.1": 0.05 * float(norms.mean()),
            "gain_10": min(0.03 * float(norms.mean()), math.sqrt(2) / 10),
        },
    )


def _add_coverage(rows: list[dict[str, Any]], key: dict[str, Any], heads: int, length: int) -> None:
    for N in TOP_N:
        if length <= N:
            continue
        per_head = 0.9 * N / length
        independent = 1 - (1 - per_head) ** heads
        numbers = {"per_head": per_head, "union": 0.7 * independent, "independent": independent}
        rows.append({**key, "top_n": N, "rows": ROWS, **numbers})


def synthetic_tokens(text: str, length: int) -> list[dict[str, Any]]:
    """A word for each position: the text's name and a number."""
    key = {"text": text, "length": length, "window": 0, "side": "input"}
    return [{**key, "position": at, "token_id": at, "token": f" {text}{at}"} for at in range(length)]


def _add_reads(
    rows: list[dict[str, Any]], key: dict[str, Any], heads: Sequence[tuple[int, int, str]], longest: Tensor
) -> None:
    """The eight heaviest keys of two rows, the last among them, each head's from one drawn row of the longest bin."""
    length = longest.shape[-1]
    for number, (layer, head, _) in enumerate(heads):
        weights = longest[number * ROWS].softmax(-1)
        if not bool(weights.isfinite().all()):
            continue
        for row in (length // 2, length - 1):
            found = weights[: row + 1].topk(8)
            for rank, (weight, at) in enumerate(zip(found.values.tolist(), found.indices.tolist(), strict=True), 1):
                tokens = {"row_token": f" {key['text']}{row}", "key_token": f" {key['text']}{at}"}
                place = {"layer": layer, "head": head, "window": 0, "row": row, "rank": rank, "key": at}
                rows.append({**key, **place, "weight": weight, **tokens})


def _schema_row(table: str, row: dict[str, Any]) -> dict[str, Any]:
    """The row with exactly the schema's columns; numbers that were not made up are NaN."""
    return {name: row.get(name, missing) for name, missing in _missing(table).items()}


@cache
def _missing(table: str) -> dict[str, float | None]:
    return {field.name: math.nan if pa.types.is_floating(field.type) else None for field in SCHEMAS[table]}


def synthetic_manifest(
    *,
    cast: Sequence[Sequence[str]] = CAST,
    texts: Sequence[str] = ("topics",),
    lengths: Sequence[int] = (256, 1024),
    normalizers: Sequence[str] = NORMALIZERS,
    name: str = "pretended/gpt",
) -> dict[str, Any]:
    """What a run writes beside its tables (analysis/manifest.py)."""
    tokens = [{"text": text, "length": length} for text in texts for length in lengths]
    return {
        "schema": SCHEMA,
        "finished": True,
        "created": "2025-01-01T00:00:00+00:00",
        "versions": {"python": "3.12.3", "platform": "Linux", "attnorm": "0.1.0", "torch": "2.13.0"},
        "model": {
            "name": name,
            "revision": "0123456789abcdef0123456789abcdef01234567",
            "class": "GPT2LMHeadModel",
            "model_type": "gpt2",
            "parameters": 7_300_000,
            "dtype": "float32",
            "device": "cpu",
            "layers": len(cast),
            "heads": len(cast[0]),
            "kv_heads": len(cast[0]) // 2,
            "head_dim": 32,
            "max_positions": 1024,
            "position_kind": "learned",
            "attention": "sdpa",
            "fingerprint": "f" * 64,
            "runs": "softmax",
            "runs_details": {},
        },
        "texts": [{"name": text, "sha256": "a" * 64, "size": "51234 characters"} for text in texts],
        "parts": [
            {**part, "key": f"{index:064x}", "tokens": part["length"], "seconds": 1.5}
            for index, part in enumerate(tokens)
        ],
        "settings": {
            "lengths": list(lengths),
            "normalizers": list(normalizers),
            "normalizer_details": {normalizer: normalizer for normalizer in normalizers},
            "top_n": list(TOP_N),
            "rows": "all",
            "vectors": "values",
            "vector_rows": 64,
            "metrics": ["core", "gradient", "vectors", "sensitivity", "coverage"],
            "temperatures": list(TEMPERATURES),
            "epsilons": [0.001, 0.1, 10.0],
            "seed": 0,
        },
        "thresholds": Thresholds().as_dict(),
        "notes": ["Vector metrics are means over 64 rows of the longest bin."],
    }
