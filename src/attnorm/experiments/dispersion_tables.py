"""The numbers of the dispersion experiment per head, and for how many heads the ceiling binds at which length."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from attnorm.analysis.collect import SHORTEST_IN_SLOPE
from attnorm.analysis.verdicts.ceiling import binding_length
from attnorm.analysis.verdicts.rows import number
from attnorm.experiments.arrays import Floats
from attnorm.theory.dispersion import horizon, least_squares_line

RUNS, CONTENT = "as it runs", "without rotation"  # the logits of the model, and those before positions rotate them
LENGTHS = {"1k": 1024, "8k": 8192, "128k": 131_072, "1M": 1_048_576}
KEYS = {"all keys": "", "without the sink": "_without_sink"}
Key = tuple[int, str]  # length of the pass, which logits

COPIED = (
    "layer", "head", "kv_head", "rows", "n_high", "gap_slope", "gap_slope_error", "gap_slope_without_sink",
    "sink_mass_q50", "entropy_nats_q50", "entropy_ratio_q50", "entropy_ratio_without_sink_q50", "max_weight_q50",
    "logit_spread_q50", "logit_spread_without_sink_q50", "horizon_q50",
)  # fmt: skip


def head_table(tables: Mapping[str, pa.Table]) -> pa.Table:
    """One row per head: slopes, entropy, spread, horizon, and the length from which the ceiling will bind.

    weight_slope is that of the log of the largest weight on log n (-1: it falls as 1/n), entropy_slope that of the
    entropy in nats (1: as uniform attention).
    """
    curves: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in tables["by_length"].to_pylist():
        curves.setdefault((row["layer"], row["head"]), []).append(row)
    rows = []
    for row in tables["heads"].to_pylist():
        curve = curves[row["layer"], row["head"]]
        found = {name.removesuffix("_q50"): row[name] for name in COPIED} | {"length": row["length"]}
        found["entropy_slope"] = _slope(curve, "entropy_nats")
        found["weight_slope"] = _slope(curve, "max_weight", logarithm=True)
        for suffix in KEYS.values():
            spread = number(row, f"logit_spread{suffix}")
            reach = float("nan") if spread is None else float(horizon(spread))
            found[f"horizon{suffix}"] = reach
            found[f"binding_length{suffix}"] = (
                float("nan") if spread is None else binding_length(curve, f"logit_spread{suffix}", reach)
            )
        rows.append(found)
    return pa.Table.from_pylist(rows)


def bound_shares(heads: Mapping[Key, pa.Table], curves: Mapping[Key, pa.Table]) -> pa.Table:
    """Shares of heads whose ceiling binds at 1k, 8k, 128k and 1M keys: no key can have half of the weight.

    `measured` from the spread of the rows of about that length, where there are any; `as measured` if the spread of the
    longest rows stayed as it is; `growing` if it goes on growing as sqrt(log n), an extrapolation.
    """
    rows = []
    for key, table in heads.items():
        for keys, suffix in KEYS.items():
            now, later = (column(table, f"{name}{suffix}") for name in ("horizon", "binding_length"))
            for name, n in LENGTHS.items():
                rows.append(
                    {
                        "length": key[0], "logits": key[1], "keys": keys, "at": name, "n": n,
                        "measured": _measured(curves[key], suffix, n),
                        "as_measured": _share(now < n, now), "growing": _share(later < n, later),
                    }
                )  # fmt: skip
    return pa.Table.from_pylist(rows)


def kv_effect(heads: pa.Table, generator: np.random.Generator, draws: int = 999) -> dict[str, Any]:
    """Do query heads that share their keys have like slopes? Variance within groups over that within layers, and how
    often random groups of the same sizes have less."""
    layer, group, slope = (column(heads, name) for name in ("layer", "kv_head", "gap_slope"))
    known = np.isfinite(slope)
    layer, group, slope = layer[known], group[known], slope[known]
    sizes = {len(set(group[layer == one])) for one in set(layer)}
    if not len(slope) or len(slope) == len({*zip(layer, group, strict=True)}):
        return {"applies": False, "groups_per_layer": max(sizes, default=0)}
    found = _within(layer, group, slope)
    null = []
    for _ in range(draws):
        dealt = group.copy()
        for one in set(layer):
            dealt[layer == one] = generator.permutation(dealt[layer == one])
        null.append(_within(layer, dealt, slope))
    return {
        "applies": True,
        "groups_per_layer": max(sizes),
        "within_groups_over_within_layers": found,
        "random_groups": float(np.mean(null)),
        "p_value": float((1 + np.sum(np.array(null) <= found)) / (1 + draws)),
    }


def column(table: pa.Table, name: str) -> Floats:
    return np.asarray(table.column(name).to_numpy(zero_copy_only=False), dtype=np.float64)


def median(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else float("nan")


def share(values: Floats, above: float) -> float:
    """Of the known values, those of at least so much."""
    known = values[~np.isnan(values)]
    return float((known >= above).mean()) if len(known) else float("nan")


def bins(curves: pa.Table) -> list[tuple[float, pa.Table]]:
    """The curves cut by bins of n, from the shortest: mean n, and the rows of all heads."""
    low = column(curves, "n_low")
    return [
        (float(column(part, "n").mean()), part)
        for one in np.unique(low)
        for part in (curves.filter(pa.array(low == one)),)
    ]


def _measured(curves: pa.Table, suffix: str, n: int) -> float:
    low, high = column(curves, "n_low"), column(curves, "n_high")
    here = curves.filter(pa.array((low <= n) & (n <= high)))
    if not here.num_rows:
        return float("nan")
    spread = column(here, f"logit_spread{suffix}_q50")
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


def _within(layer: Floats, group: Floats, slope: Floats) -> float:
    """Mean square around the groups' means over mean square around the layers' means, degrees of freedom counted."""

    def spread(which: Floats) -> float:
        _, place = np.unique(which, return_inverse=True)
        size = np.bincount(place)
        means = np.bincount(place, slope) / size
        return float(((slope - means[place]) ** 2).sum() / max(1, len(slope) - len(size)))

    return spread(layer * (group.max() + 1) + group) / max(spread(layer), 1e-12)
