"""Measure dispersion: which lengths, the tables of one pass, numbers per head, and where the ceiling binds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from attnorm.analysis import store
from attnorm.analysis.collect import Collector
from attnorm.analysis.collect_rows import SHORTEST_IN_SLOPE
from attnorm.analysis.settings import AnalysisSettings, settings_of
from attnorm.analysis.verdicts.reach import binding_length
from attnorm.metrics.call import AttentionCall
from attnorm.models.query_key_origin import before_rotation
from attnorm.report_data import number
from attnorm.theory.dispersion import horizon, least_squares_line
from attnorm_lab.experiments.experiment import ExperimentSubject, Floats, ProgressCallback
from attnorm_lab.experiments.model_runs import run_forward_pass

LENGTHS, QUICK_LENGTHS = (256, 512, 1024, 2048, 4096, 8192), (256, 512)
RUNS, CONTENT = "as it runs", "without rotation"  # the logits of the model, and those before positions rotate them
CEILING_LENGTHS = {"1k": 1024, "8k": 8192, "128k": 131_072, "1M": 1_048_576}
KEYS = {"all keys": "", "without the sink": "_without_sink"}
Key = tuple[int, str]  # length of the pass, which logits
COPIED = (
    "layer", "head", "kv_head", "rows", "n_high", "gap_slope", "gap_slope_error", "gap_slope_without_sink",
    "sink_mass_q50", "entropy_nats_q50", "entropy_ratio_q50", "entropy_ratio_without_sink_q50", "max_weight_q50",
    "logit_spread_q50", "logit_spread_without_sink_q50", "horizon_q50",
)  # fmt: skip
TABLES = ("heads", "by_length")


@dataclass(frozen=True)
class PassLengths:
    """Tokens of the main pass and of one beyond the model's context, and the reasons if they are not longer."""

    main: int
    beyond: int | None
    why_not_limit: str = ""  # empty: the main pass is as long as the model's context
    why_not_beyond: str = ""

    @property
    def sentence(self) -> str:
        """A sentence of the summary."""
        further = f", and {self.beyond:,} beyond the model's context" if self.beyond else ""
        reasons = [reason for reason in (self.why_not_limit, self.why_not_beyond) if reason]
        why = f" ({'; '.join(dict.fromkeys(reasons))})" if reasons else ""
        return f"Measured on {self.main:,} tokens{further}{why}."


def main_lengths(limit: int | None, *, quick: bool, longest: int | None) -> tuple[int, ...]:
    """Return lengths for the main pass; the last is preferred.

    limit: context length of the model; None: any length. longest: the option of the user.
    """
    if quick:
        return QUICK_LENGTHS
    most = LENGTHS[-1] if longest is None else longest
    most = most if limit is None else min(most, limit)
    return (*(length for length in LENGTHS if length < most), most)


def choose_pass_lengths(
    main: int, limit: int | None, *, hard: bool, tokens: int, quick: bool, longest: int | None, model: str
) -> PassLengths:
    """Decide whether there is a pass beyond the model's context, and give the reason if not.

    main: length of the main pass. hard: the model cannot exceed its limit. tokens: of the text, at least.
    """
    if limit is None:
        further = "" if quick or longest is not None else "; use --longest TOKENS for more"
        return PassLengths(main, None, "", f"{model} has no fixed context length{further}")
    if main < limit:
        context_phrase = f"{model} has a context of {limit:,}"
        if quick:
            why = f"{context_phrase}: --quick uses small sizes only"
        elif tokens < min(limit, longest or LENGTHS[-1]):
            why = f"{context_phrase}, and the text ends at {tokens:,}"
        else:
            why = f"{context_phrase}: use --longest {limit if hard else 2 * limit}"
        return PassLengths(main, None, why, why)
    if hard:
        return PassLengths(main, None, "", f"{model} has no positions beyond {limit:,}")
    if quick:
        return PassLengths(main, None, "", "--quick does not exceed the model's context")
    beyond = 2 * limit if longest is None else longest
    if beyond <= limit:
        return PassLengths(main, None, "", f"--longest {longest} does not exceed the model's context")
    if tokens < beyond:
        return PassLengths(main, None, "", f"the text ends at {tokens:,} tokens, and {beyond:,} are needed")
    return PassLengths(main, beyond)


def head_table(tables: Mapping[str, pa.Table]) -> pa.Table:
    """Return one row per head: slopes, entropy, spread, horizon, and the length from which the ceiling binds.

    weight_slope: slope of the log of the largest weight on log n (-1: it falls as 1/n). entropy_slope: slope of the
    entropy in nats (1: as uniform attention).
    """
    curves: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in tables["by_length"].to_pylist():
        curves.setdefault((row["layer"], row["head"]), []).append(row)
    rows = []
    for row in tables["heads"].to_pylist():
        curve = curves[row["layer"], row["head"]]
        record = {name.removesuffix("_q50"): row[name] for name in COPIED} | {"length": row["length"]}
        record["entropy_slope"] = _slope(curve, "entropy_nats")
        record["weight_slope"] = _slope(curve, "max_weight", logarithm=True)
        for suffix in KEYS.values():
            spread = number(row, f"logit_spread{suffix}")
            reach = float("nan") if spread is None else float(horizon(spread))
            record[f"horizon{suffix}"] = reach
            record[f"binding_length{suffix}"] = (
                float("nan") if spread is None else binding_length(curve, f"logit_spread{suffix}", reach)
            )
        rows.append(record)
    return pa.Table.from_pylist(rows)


def bound_shares(heads: Mapping[Key, pa.Table], curves: Mapping[Key, pa.Table]) -> pa.Table:
    """Return the shares of heads whose ceiling binds at 1k, 8k, 128k and 1M keys: no key can have half of the weight.

    measured: from the spread of rows of about that length, if there are any. as_measured: if the spread of the longest
    rows stayed constant. growing: if it keeps growing as sqrt(log n), an extrapolation.
    """
    rows = []
    for key, table in heads.items():
        for keys, suffix in KEYS.items():
            as_measured, later = (column(table, f"{name}{suffix}") for name in ("horizon", "binding_length"))
            for name, n in CEILING_LENGTHS.items():
                rows.append(
                    {
                        "length": key[0], "logits": key[1], "keys": keys, "at": name, "n": n,
                        "measured": _measured_share(curves[key], suffix, n),
                        "as_measured": _share(as_measured < n, as_measured), "growing": _share(later < n, later),
                    }
                )  # fmt: skip
    return pa.Table.from_pylist(rows)


def kv_effect(heads: pa.Table, generator: np.random.Generator, draws: int = 999) -> dict[str, Any]:
    """Test whether query heads that share keys have similar slopes.

    Returns the variance within groups over that within layers, and how often random groups have less.
    """
    layer, group, slope = (column(heads, name) for name in ("layer", "kv_head", "gap_slope"))
    known = np.isfinite(slope)
    layer, group, slope = layer[known], group[known], slope[known]
    sizes = {len(set(group[layer == index])) for index in set(layer)}
    if not len(slope) or len(slope) == len({*zip(layer, group, strict=True)}):
        return {"applies": False, "groups_per_layer": max(sizes, default=0)}
    ratio = _variance_ratio(layer, group, slope)
    null = []
    for _ in range(draws):
        shuffled = group.copy()
        for index in set(layer):
            shuffled[layer == index] = generator.permutation(shuffled[layer == index])
        null.append(_variance_ratio(layer, shuffled, slope))
    return {
        "applies": True,
        "groups_per_layer": max(sizes),
        "within_groups_over_within_layers": ratio,
        "random_groups": float(np.mean(null)),
        "p_value": float((1 + np.sum(np.array(null) <= ratio)) / (1 + draws)),
    }


def column(table: pa.Table, name: str) -> Floats:
    return np.asarray(table.column(name).to_numpy(zero_copy_only=False), dtype=np.float64)


def share(values: Floats, above: float) -> float:
    """Return the share of the known values that are at least `above`."""
    known = values[~np.isnan(values)]
    return float((known >= above).mean()) if len(known) else float("nan")


def bins(curves: pa.Table) -> list[tuple[float, pa.Table]]:
    """Split the curves by bins of n, shortest first: mean n, and the rows of all heads."""
    low = column(curves, "n_low")
    return [
        (float(column(part, "n").mean()), part)
        for start in np.unique(low)
        for part in (curves.filter(pa.array(low == start)),)
    ]


def _measured_share(curves: pa.Table, suffix: str, n: int) -> float:
    low, high = column(curves, "n_low"), column(curves, "n_high")
    rows_at_n = curves.filter(pa.array((low <= n) & (n <= high)))
    if not rows_at_n.num_rows:
        return float("nan")
    spread = column(rows_at_n, f"logit_spread{suffix}_q50")
    return _share(horizon(torch.from_numpy(spread.copy())).numpy() < n, spread)


def _share(binds: NDArray[np.bool_], known: Floats) -> float:
    usable = ~np.isnan(known)
    return float(binds[usable].mean()) if usable.any() else float("nan")


def _slope(curve: Sequence[Mapping[str, Any]], name: str, *, logarithm: bool = False) -> float:
    used = [
        (row["n"], value) for row in curve if row["n"] >= SHORTEST_IN_SLOPE and (value := number(row, name)) is not None
    ]
    if len(used) < 3:
        return float("nan")
    n, y = torch.tensor(used, dtype=torch.float64).T
    return float(least_squares_line(n.log(), y.clamp(min=1e-300).log() if logarithm else y).slope)


def _variance_ratio(layer: Floats, group: Floats, slope: Floats) -> float:
    """Return the variance within groups over the variance within layers, with degrees of freedom."""

    def spread(labels: Floats) -> float:
        _, index = np.unique(labels, return_inverse=True)
        size = np.bincount(index)
        means = np.bincount(index, slope) / size
        return float(((slope - means[index]) ** 2).sum() / max(1, len(slope) - len(size)))

    return spread(layer * (group.max() + 1) + group) / max(spread(layer), 1e-12)


@dataclass(frozen=True)
class Pass:
    """The tables of one pass: for each variant the heads and the curves against n."""

    length: int
    variants: Mapping[str, Mapping[str, pa.Table]]  # RUNS, and CONTENT where the model rotates


def measure(subject: ExperimentSubject, progress: ProgressCallback, length: int, rows: int, folder: Path) -> Pass:
    """Run one pass and keep its tables in the folder; read them from there if they are complete."""
    done = folder / f"{length}-{rows}"
    if (done / "finished").exists():
        names = [variant for variant in (RUNS, CONTENT) if (done / f"{variant}-heads.parquet").exists()]
        return Pass(
            length,
            {
                variant: {name: store.read_table(done / f"{variant}-{name}.parquet") for name in TABLES}
                for variant in names
            },
        )
    settings = _settings(rows, subject.seed)
    runs, content = (Collector(settings, {"model": None}, {}, lambda _: None) for _ in range(2))
    rotated = False
    with before_rotation(subject.loaded().model) as before:

        def on_call(call: AttentionCall) -> None:
            nonlocal rotated
            runs(call)
            plain = before.of(call)
            if plain is not None:
                content(plain)
                rotated = True

        run_forward_pass(subject, length, on_call, progress, f"{length:,} tokens")
    collectors = {RUNS: runs, CONTENT: content} if rotated else {RUNS: runs}
    name = subject.passages()[0].name
    variants = {
        variant: {table: collector.tables(name, length)[table] for table in TABLES}
        for variant, collector in collectors.items()
    }
    done.mkdir(parents=True, exist_ok=True)
    for variant, tables in variants.items():
        for table, content_of in tables.items():
            store.write_table(done / f"{variant}-{table}.parquet", content_of)
    (done / "finished").touch()
    return Pass(length, variants)


def _settings(rows: int, seed: int) -> AnalysisSettings:
    return settings_of(
        normalizers={"model": None}, top_n=(1,), rows=rows, vectors="values", vector_rows=None, metrics="core",
        temperatures=(1.0,), seed=seed,
    )  # fmt: skip
