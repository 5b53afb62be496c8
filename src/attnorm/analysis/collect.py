"""Watches the attention calls of one forward pass and turns each into rows of the tables, one layer at a time.

Only one layer's numbers per row are ever in memory: they are summarised per head on the spot.
"""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from attnorm.analysis.blocks import block_columns
from attnorm.analysis.columns import Columns, joined, layer_table
from attnorm.analysis.layers import FinishedLayers, MeasuredLayer
from attnorm.analysis.reading import Tokens, read_columns, token_columns
from attnorm.analysis.sampled import sampled_columns
from attnorm.analysis.sequences import Sequences, sequences
from attnorm.analysis.settings import AnalysisSettings
from attnorm.analysis.tables import QUANTILES, SCHEMAS
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.catalogue import PER_ROW
from attnorm.metrics.normalized import as_normalizer, resolve_normalizers
from attnorm.metrics.rows import RowStatistics, measure_rows
from attnorm.metrics.sampling import length_bins
from attnorm.metrics.summary import Summary, summarise, summarise_all
from attnorm.normalizers.contract import Normalizer
from attnorm.theory.dispersion import effective_gap_slope

SHORTEST_IN_SLOPE = 16  # keys; among fewer the gap is not yet on its line
FEWEST_BINS = 3  # a line through two points has no error

SUMMARISED_AT_ONCE = 2**21  # numbers

_SHARES = tuple(q / 100 for q in QUANTILES)
_QUARTILES = {"q25": QUANTILES.index(25), "q50": QUANTILES.index(50), "q75": QUANTILES.index(75)}


class Collector:
    """Give it to `observe`; ask it for `tables` when the pass is over."""

    def __init__(
        self,
        settings: AnalysisSettings,
        normalizers: Mapping[str, Normalizer | None],
        tokens: Mapping[str, Tensor],
        after_layer: Callable[[int], None],
        texts: Tokens | None = None,
        finished: FinishedLayers | None = None,
    ) -> None:
        """tokens: by kind of attention, which queries are no padding (sequences.query_masks). texts: what they say.

        finished: layers on the disk, which are not measured again; new ones are added to it.
        """
        self.settings = settings
        self.normalizers = normalizers
        self.tokens = tokens
        self.after_layer = after_layer
        self.texts: Tokens = texts or {}
        self.longest = 0  # visible keys of any row
        self.found = 0  # layers that were not measured again
        self.repeats = False  # a layer attended more than once (differential attention)
        self._calls = 0
        self._heads: dict[tuple[str, int], tuple[int, int]] = {}  # of each layer so far: its heads, its key/value heads
        self._finished = finished
        self._layers: list[MeasuredLayer] = []

    def __call__(self, call: AttentionCall) -> None:
        before = self._heads.get((call.kind, call.layer), (0, 0))
        self.repeats |= before[0] > 0
        found = None if self._finished is None else self._finished.find(self._calls, call)
        layer = self._measured(call, before) if found is None else found
        if found is None and self._finished is not None:
            self._finished.keep(self._calls, call, layer)
        self.found += found is not None
        self._layers.append(layer)
        self.longest = max(self.longest, layer.longest)
        self._heads[call.kind, call.layer] = before[0] + call.query_BHQD.shape[1], before[1] + call.key_BGKD.shape[1]
        self._calls += 1
        self.after_layer(self._calls)

    def tables(self, text: str, length: int, window: int = 0) -> dict[str, pa.Table]:
        fixed = {"text": text, "length": length, "window": window}
        tokens = token_columns(self.texts) if self.settings.read_keys else []
        layers = [*(layer.tables for layer in self._layers), {"tokens": layer_table(SCHEMAS["tokens"], tokens)}]
        return {
            name: joined(schema, [tables[name] for tables in layers if name in tables], fixed)
            for name, schema in SCHEMAS.items()
        }

    def _measured(self, call: AttentionCall, before: tuple[int, int]) -> MeasuredLayer:
        """before: heads and key/value heads of the layer's earlier calls."""
        together = list(sequences(call, self.tokens.get(call.kind), self.settings.rows))
        choices = list(self.normalizers.values())
        measured = [measure_rows(one.call, choices, one.rows, self.settings.top_n) for one in together]
        longest = max((int(stats.n.max()) for found in measured for stats in found.values()), default=0)
        pieces: dict[str, list[Columns]] = {}
        if longest:
            bins = length_bins(longest)
            first = next(iter(self.normalizers))
            long = [_longest_rows(one, found[first], bins[0]) for one, found in zip(together, measured, strict=True)]
            sampled = sampled_columns(long, self.normalizers, self.settings)
            reads = read_columns(call, self.tokens.get(call.kind), self.normalizers, self.settings, self.texts)
            for name in self.normalizers:
                sampled[name] |= {"reads": reads[name]} if name in reads else {}
                rows = _pooled([found[name] for found in measured])
                columns = _row_columns(rows, bins, self.settings.top_n, call)
                columns["heads"]["worst_norm"] = _worst_norm(call, self.normalizers[name], bins[0][1])
                for table, piece in _numbered(call, name, columns, sampled[name], before):
                    pieces.setdefault(table, []).append(piece)
        return MeasuredLayer(longest, {table: layer_table(SCHEMAS[table], found) for table, found in pieces.items()})


def _numbered(
    call: AttentionCall,
    normalizer: str,
    rows: Mapping[str, Columns],
    sampled: Mapping[str, Columns],
    before: tuple[int, int],
) -> Iterator[tuple[str, Columns]]:
    """The heads of a layer's second call are numbered on; what its heads cover together is that of the first."""
    key = {"normalizer": normalizer, "kind": call.kind, "layer": call.layer}
    shift = dict(zip(("head", "kv_head"), before, strict=True))
    for table in dict.fromkeys([*rows, *sampled]):
        if table == "coverage" and before[0]:
            continue
        columns = {**key, **rows.get(table, {}), **sampled.get(table, {})}
        yield table, columns | {name: columns[name] + first for name, first in shift.items() if name in columns}


def _pooled(parts: list[RowStatistics]) -> RowStatistics:
    """The rows of all sequences as those of one."""
    if len(parts) == 1:
        return parts[0]
    return RowStatistics(
        n=torch.cat([part.n for part in parts], 2),
        values={name: torch.cat([part.values[name] for part in parts], 2) for name in parts[0].values},
        top_mass=torch.cat([part.top_mass for part in parts], 2),
        broken=torch.cat([part.broken for part in parts], 2),
    )


def _longest_rows(one: Sequences, found: RowStatistics, longest_bin: tuple[int, int]) -> Sequences:
    inside = (found.n >= longest_bin[0]).flatten(0, 1).any(0).cpu()
    return Sequences(one.call, one.rows[inside])


def _row_columns(
    rows: RowStatistics, bins: list[tuple[int, int]], top_n: tuple[int, ...], call: AttentionCall
) -> dict[str, Columns]:
    """What one normalizer's rows give to `heads`, `by_length` and `top_n`."""
    heads = rows.n.shape[1]
    summaries = _summaries(rows, bins)
    n = summarise(rows.n, rows.n, bins, rows.broken, quantiles=())
    return {
        "heads": {
            "head": np.arange(heads),
            "kv_head": np.arange(heads) // (heads // call.key_BGKD.shape[1]),
            "rows": n.rows[:, 0],
            "broken_rows": rows.broken.sum((0, 2)).cpu().numpy(),
            "n_low": bins[0][0],
            "n_high": bins[0][1],
            **_of_longest(summaries),
            **_slopes(summaries, n.mean),
            "forced_share": _forced_share(rows, bins[0]),
        },
        "by_length": _by_length(summaries, n, bins),
        "top_n": _masses(rows, bins[0], top_n, n.rows[:, 0]),
        "blocks": block_columns(rows, bins[0]),
    }


def _summaries(rows: RowStatistics, bins: list[tuple[int, int]]) -> dict[str, Summary]:
    """Of every metric: several at a time, which is faster, but not all of a long layer, which are gigabytes."""
    at_once = max(1, SUMMARISED_AT_ONCE // max(1, rows.n.numel()))
    found: dict[str, Summary] = {}
    for start in range(0, len(PER_ROW), at_once):
        values = {name: rows.values[name] for name in PER_ROW[start : start + at_once]}
        found |= summarise_all(values, rows.n, bins, rows.broken, quantiles=_SHARES)
    return found


def _worst_norm(call: AttentionCall, choice: Normalizer | None, n: int) -> float:
    """The largest Jacobian norm that the normalizer, with its parameters as they are, can have; NaN if not known."""
    (chosen,) = resolve_normalizers(call, [choice])
    bound = as_normalizer(chosen, call).lipschitz(n) if n > 1 else None
    return float("nan") if bound is None else float(bound)


def _of_longest(summaries: Mapping[str, Summary]) -> Columns:
    columns: Columns = {}
    for name, summary in summaries.items():
        columns[name] = summary.quantiles[:, 0, _QUARTILES["q50"]]
        columns[f"{name}_mean"] = summary.mean[:, 0]
        columns |= {f"{name}_q{q:02d}": summary.quantiles[:, 0, place] for place, q in enumerate(QUANTILES)}
    return columns


def _by_length(summaries: Mapping[str, Summary], n: Summary, bins: list[tuple[int, int]]) -> Columns:
    """One row per head and bin that has rows, from the shortest on."""
    heads = len(n.rows)
    low, high = np.array(bins).T
    columns: Columns = {
        "head": np.repeat(np.arange(heads), len(bins)),
        "n_low": np.tile(low, heads),
        "n_high": np.tile(high, heads),
        "rows": n.rows.ravel(),
        "n": n.mean.ravel(),
    }
    for name, summary in summaries.items():
        columns[name] = summary.quantiles[:, :, _QUARTILES["q50"]].ravel()
        columns[f"{name}_mean"] = summary.mean.ravel()
        columns |= {f"{name}_{q}": summary.quantiles[:, :, place].ravel() for q, place in _QUARTILES.items()}
    order = np.lexsort((columns["n_low"], columns["head"]))
    order = order[columns["rows"][order] > 0]
    return {name: column[order] for name, column in columns.items()}


def _slopes(summaries: Mapping[str, Summary], n: np.ndarray) -> Columns:
    """Of the bins' median gaps on log n: medians, since one row with a single positive weight has an infinite gap."""
    columns: Columns = {}
    usable = n >= SHORTEST_IN_SLOPE
    for suffix in ("", "_without_sink"):
        gap = summaries[f"effective_gap{suffix}"].quantiles[:, :, _QUARTILES["q50"]]
        gap = np.where(usable & np.isfinite(gap), gap, np.nan)
        fit = effective_gap_slope(torch.from_numpy(gap), torch.from_numpy(np.where(usable, n, 1.0)))
        enough = fit.points >= FEWEST_BINS
        columns[f"gap_slope{suffix}"] = torch.where(enough, fit.slope, torch.nan).numpy()
        if not suffix:
            columns["gap_slope_error"] = torch.where(enough, fit.slope_standard_error, torch.nan).numpy()
    return columns


def _forced_share(rows: RowStatistics, longest_bin: tuple[int, int]) -> np.ndarray:
    horizon = rows.values["horizon"]
    beyond = torch.where(horizon.isnan(), torch.nan, (rows.n > horizon).double())
    return summarise(beyond, rows.n, [longest_bin], rows.broken, quantiles=()).mean[:, 0]


def _masses(rows: RowStatistics, longest_bin: tuple[int, int], top_n: tuple[int, ...], count: np.ndarray) -> Columns:
    heads = rows.n.shape[1]
    mass = np.stack(
        [
            summarise(rows.top_mass[..., place], rows.n, [longest_bin], rows.broken, quantiles=()).mean[:, 0]
            for place in range(len(top_n))
        ],
        axis=1,
    )
    return {
        "head": np.repeat(np.arange(heads), len(top_n)),
        "top_n": np.tile(top_n, heads),
        "rows": np.repeat(count, len(top_n)),
        "mass": mass.ravel(),
    }
