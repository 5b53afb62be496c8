"""Measure the logit spread of every head of a model, and collect the models in tables next to the printed one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from attnorm.experiments.experiment import ExperimentSubject, Floats, ProgressCallback
from attnorm.experiments.model_runs import longest_rows, run_forward_pass
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.normalized import MODEL
from attnorm.metrics.rows import measure_rows
from attnorm.models.dispatch import attention_sites
from attnorm.models.query_key_origin import projections
from attnorm.theory.dispersion import horizon, proposition31_bound

# Velickovic et al. 2024: range, mean and standard deviation over heads.
PRINTED = {"Gemma 2B": (2.28, 14.78, 5.69, 2.05), "Gemma 7B": (0.09, 32.74, 5.82, 2.61)}
READINGS = {
    "last": "last row",
    "mean": "mean of the longest rows",
    "last_without_sink": "last row, first key left out",
}
FIRST = 16  # keys: the shortest context


@dataclass(frozen=True)
class Spreads:
    """One model: one number per head, and (heads, lengths) against the number of keys."""

    model: str
    text: str
    layer: Floats
    head: Floats
    readings: dict[str, Floats]
    bound: Floats  # Proposition 3.1 at the last row; NaN where the projections cannot be read
    n: Floats
    against_n: Floats

    @property
    def keys(self) -> int:
        """Number of keys of the last row."""
        return int(self.n[-1])

    @property
    def last(self) -> Floats:
        return self.readings["last"]

    @property
    def bound_ratio(self) -> Floats:
        """The bound over the spread, for heads with a known bound."""
        known = ~np.isnan(self.bound)
        return np.asarray(self.bound[known] / self.last[known])

    def at(self, keys: int) -> Floats:
        """Return the spread of every head with this many keys."""
        return np.asarray(self.against_n[:, self.n.tolist().index(keys)])


def common_keys(all_spreads: Sequence[Spreads]) -> int:
    """Return the longest context at which all models were measured."""
    return int(max(set.intersection(*(set(spreads.n.tolist()) for spreads in all_spreads))))


def spread_table(all_spreads: Sequence[Spreads]) -> pa.Table:
    """Return the paper's rows as printed, then one per model; cells that the paper does not have are empty."""
    rows: list[dict[str, Any]] = [
        {
            "model": model, "smallest": low, "largest": high, "mean": mean, "deviation": deviation,
            "horizon_of_mean": float(horizon(mean)),
        }
        for model, (low, high, mean, deviation) in PRINTED.items()
    ]  # fmt: skip
    rows += [_row(spreads, common_keys(all_spreads)) for spreads in all_spreads]
    return pa.Table.from_pylist([{name: row.get(name) for name in rows[-1]} for row in rows])


def _row(spreads: Spreads, common: int) -> dict[str, Any]:
    ratio = spreads.bound_ratio
    return {
        "model": spreads.model, "text": spreads.text, "keys": spreads.keys, "heads": len(spreads.head),
        "smallest": float(spreads.last.min()), "largest": float(spreads.last.max()),
        **_moments("", spreads.last), "horizon_of_mean": float(horizon(float(spreads.last.mean()))),
        **_moments("_longest_rows", spreads.readings["mean"]),
        **_moments("_without_first_key", spreads.readings["last_without_sink"]),
        "common_keys": common, **_moments("_at_common_keys", spreads.at(common)),
        "proposition31_heads": len(ratio), "proposition31_holds": int((ratio >= 1).sum()),
        "proposition31_median_ratio": float(np.median(ratio)) if len(ratio) else None,
    }  # fmt: skip


def _moments(reading: str, values: Floats) -> dict[str, float]:
    return {f"mean{reading}": float(np.nanmean(values)), f"deviation{reading}": float(np.nanstd(values))}


def heads_table(all_spreads: Sequence[Spreads]) -> pa.Table:
    """Return one row per head; lengths beyond a model's context are empty."""
    return pa.concat_tables([_heads(spreads) for spreads in all_spreads], promote_options="default")


def _heads(spreads: Spreads) -> pa.Table:
    return pa.table(
        {
            "model": [spreads.model] * len(spreads.head),
            "layer": spreads.layer.astype(np.int64), "head": spreads.head.astype(np.int64),
            **{f"spread_{name}": values for name, values in spreads.readings.items()},
            "proposition31_bound": spreads.bound,
            **{f"spread_at_{n:.0f}": spreads.against_n[:, index] for index, n in enumerate(spreads.n)},
        }
    )  # fmt: skip


def measure(subject: ExperimentSubject, progress: ProgressCallback, length: int, rows: int) -> Spreads:
    modules = [module for module, _ in attention_sites(subject.loaded().model).items()]
    numbered = {getattr(module, "layer_idx", None): module for module in modules}
    lengths = lengths_up_to(length)
    columns: dict[str, list[Floats]] = {name: [] for name in ("layer", "head", "bound", "against_n", *READINGS)}

    def on_call(call: AttentionCall) -> None:
        long = longest_rows(call, rows)
        row_indices = torch.unique(torch.cat([long, torch.from_numpy(lengths) - 1]))
        values = measure_rows(call, [None], row_indices, (1,))[MODEL].values
        spread, without_sink = (
            values[name][0].double().cpu().numpy() for name in ("logit_spread", "logit_spread_without_sink")
        )
        heads = len(spread)
        columns["layer"].append(np.full(heads, call.layer, dtype=np.float64))
        columns["head"].append(np.arange(heads, dtype=np.float64))
        columns["last"].append(spread[:, -1])
        columns["mean"].append(np.nanmean(spread[:, torch.isin(row_indices, long).numpy()], 1))
        columns["last_without_sink"].append(without_sink[:, -1])
        columns["against_n"].append(spread[:, torch.isin(row_indices, torch.from_numpy(lengths) - 1).numpy()])
        columns["bound"].append(_bound(call, numbered.get(call.layer, modules[min(call.layer, len(modules) - 1)])))

    name = subject.loaded().name
    run_forward_pass(subject, length, on_call, progress, f"spread of every head of {name}", inputs=True)
    joined = {name: np.concatenate(values) for name, values in columns.items()}
    return Spreads(
        model=name,
        text=subject.passages()[0].name,
        layer=joined["layer"],
        head=joined["head"],
        readings={name: joined[name] for name in READINGS},
        bound=joined["bound"],
        n=lengths.astype(np.float64),
        against_n=joined["against_n"],
    )


def lengths_up_to(length: int) -> NDArray[np.int64]:
    """Return lengths half an octave apart from a fixed start, so that models of different context share lengths."""
    steps = FIRST * 2 ** (np.arange(2 * np.log2(length / FIRST)) / 2)
    return np.unique([*steps.round().astype(np.int64), length])


def _bound(call: AttentionCall, module: Any) -> Floats:
    projected = projections(module, call)
    heads = call.query_BHQD.shape[1]
    if projected is None or call.inputs_BKC is None or call.bias is not None or call.softcap is not None:
        return np.full(heads, np.nan)
    x = call.inputs_BKC[0].float()
    bound = proposition31_bound(
        projected.query_weight, projected.key_weight, x[-1:], x, query_bias=projected.query_bias,
        key_bias=projected.key_bias,
        scaling=call.scale,
    )  # fmt: skip
    return bound[:, 0].double().cpu().numpy()
