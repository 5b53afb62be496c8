"""`Collector`: measure every attention call of a forward pass and convert it to rows of the tables, layer by layer.

Statistics of rows are summarized per head immediately, so that only those of a few layers are in memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pyarrow as pa
from torch import Tensor

from attnorm.analysis.collect_rows import pool_rows, row_columns, summarize_rows
from attnorm.analysis.collect_sampled import ByNormalizer, DrawnAhead, draw_ahead, sampled_columns, sampled_weights
from attnorm.analysis.reads import Tokens, listed_reads, token_columns
from attnorm.analysis.settings import AnalysisSettings
from attnorm.analysis.store import FinishedLayers, MeasuredLayer
from attnorm.analysis.tables import SCHEMAS, Columns, layer_table, part_table
from attnorm.engines.execution import MAX_THREADS, arrival
from attnorm.metrics.call import (
    AttentionCall,
    call_bytes,
    can_be_stacked,
    has_parameters_per_head,
    known_n,
    same_shape,
    stack_calls,
    without_data,
)
from attnorm.metrics.normalized import as_normalizer, resolve_normalizers
from attnorm.metrics.rows import RowStatistics, measure_rows
from attnorm.metrics.sampling import Sequences, length_bins, sequences
from attnorm.normalizers.contract import Normalizer

SAMPLED = {"vectors", "sensitivity", "coverage"}  # metric groups that are measured on sampled rows
STACKED_BYTES = 2**28  # limit for q, k, v of waiting calls, times the number of normalizers
SAMPLED_WEIGHTS = 2**23  # limit for the weights of sampled rows that are measured together
Before = tuple[int, int]  # numbers of heads and key/value heads in earlier calls of the same layer


class Collector:
    """The `on_call` function of `models.observe`. After the forward pass, `tables` returns what was measured.

    On a GPU a short layer is faster than its kernel launches. Therefore calls of the same shape wait there and are then
    measured as one call with the heads of all of them (`metrics.call.stack_calls`).
    """

    def __init__(
        self,
        settings: AnalysisSettings,
        normalizers: Mapping[str, Normalizer | None],
        tokens: Mapping[str, Tensor],
        after_layer: Callable[[int], None],
        texts: Tokens | None = None,
        finished: FinishedLayers | None = None,
        *,
        together: bool = True,
    ) -> None:
        """Create a collector for one forward pass.

        tokens: queries that are not padding, by kind of attention (sampling.query_masks). texts: text of the tokens.
        finished: layers on disk, which are not measured again; new layers are added. after_layer: called with the
        number of finished layers. together: whether calls on a GPU may wait for others; their tensors must not change
        until `finish`.
        """
        self.settings = settings
        self.normalizers = normalizers
        self.tokens = tokens
        self.after_layer = after_layer
        self.texts: Tokens = texts or {}
        self.found = 0  # layers read from the disk
        self.repeats = False  # whether a layer made more than one attention call (differential attention)
        self._heads: dict[tuple[str, int], Before] = {}  # (kind, layer) -> heads and key/value heads so far
        self._finished = finished
        self._layers: list[MeasuredLayer] = []
        self._waiting: list[AttentionCall] = []  # calls that will be measured together
        self._waiting_tokens: Tensor | None = None
        self._ahead: list[DrawnAhead] = []  # random numbers of the waiting calls
        self._pool: ThreadPoolExecutor | None = None
        self._unfinished: list[Callable[[], None]] = []  # functions that make tables once numbers are on the CPU
        self._calls = 0
        self._together = together and not any(
            normalizer is not None and has_parameters_per_head(normalizer) for normalizer in normalizers.values()
        )

    def __call__(self, call: AttentionCall) -> None:
        before = self._heads.get((call.kind, call.layer), (0, 0))
        self._heads[call.kind, call.layer] = before[0] + call.query_BHQD.shape[1], before[1] + call.key_BGKD.shape[1]
        self.repeats |= before[0] > 0
        layer_on_disk = None if self._finished is None else self._finished.find(self._calls, call)
        self._calls += 1
        waits = layer_on_disk is None and not before[0] and self._together and can_be_stacked(call)
        if self._waiting and not (waits and same_shape(self._waiting[0], call)):
            self._measure_waiting()
        if waits:
            self._waiting.append(call)
            self._waiting_tokens = self.tokens.get(call.kind)
            self._draw_ahead(call)
            # The numbers of all normalizers are in memory at the same time.
            if len(self.normalizers) * sum(map(call_bytes, self._waiting)) >= STACKED_BYTES:
                self._measure_waiting()
            return
        self._make_tables()
        if layer_on_disk is None:
            self._measure([call], before, self.tokens.get(call.kind))()
        else:
            self.found += 1
            self._add(layer_on_disk)

    def finish(self) -> None:
        """Measure the waiting calls, and wait for the GPU."""
        self._measure_waiting()
        self._make_tables()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    @property
    def longest(self) -> int:
        """Largest number of visible keys of a row."""
        return max((layer.longest for layer in self._layers), default=0)

    def tables(self, text: str, length: int, window: int = 0) -> dict[str, pa.Table]:
        """Return the tables of the finished layers."""
        fixed = {"text": text, "length": length, "window": window}
        tokens = token_columns(self.texts) if self.settings.read_keys else []
        layers = [*(layer.tables for layer in self._layers), {"tokens": layer_table(SCHEMAS["tokens"], tokens)}]
        return {
            name: part_table(schema, [tables[name] for tables in layers if name in tables], fixed)
            for name, schema in SCHEMAS.items()
        }

    def _measure_waiting(self) -> None:
        """Start to measure the waiting calls on the GPU, then make the tables of the calls before them."""
        calls, self._waiting = self._waiting, []
        ahead, self._ahead = self._ahead, []
        if not calls:
            return
        make_tables = self._measure(calls, (0, 0), self._waiting_tokens, ahead)
        self._make_tables()
        self._unfinished.append(make_tables)

    def _draw_ahead(self, call: AttentionCall) -> None:
        if {"vectors", "sensitivity"} <= {*self.settings.metrics} and self._waiting_tokens is None:
            self._pool = self._pool or ThreadPoolExecutor(MAX_THREADS)
            drawn = draw_ahead(call, self.settings, self._pool, self._ahead[-1].rows if self._ahead else None)
            self._ahead += [] if drawn is None else [drawn]

    def _make_tables(self) -> None:
        while self._unfinished:
            self._unfinished.pop()()

    def _add(self, layer: MeasuredLayer) -> None:
        self._layers.append(layer)
        self.after_layer(len(self._layers))

    def _measure(
        self,
        calls: Sequence[AttentionCall],
        before: Before,
        tokens: Tensor | None,
        ahead: Sequence[DrawnAhead] = (),
    ) -> Callable[[], None]:
        """Measure calls of the same shape at once. The returned function waits for the numbers and makes the tables."""
        call = stack_calls(calls)
        items = list(sequences(call, tokens, self.settings.rows))
        choices = list(self.normalizers.values())
        statistics = [measure_rows(item.call, choices, item.rows, self.settings.top_n) for item in items]
        longest = max(
            (
                _longest_row(item, statistics_of_item)
                for item, statistics_of_item in zip(items, statistics, strict=True)
            ),
            default=0,
        )
        calls_without_data = [without_data(original) for original in calls]
        if not longest:
            return lambda: self._store_layers(calls_without_data, [MeasuredLayer(0, {}) for _ in calls_without_data])
        bins = length_bins(longest)
        sampled = self._measure_sampled(calls, tokens, statistics, bins[0], ahead)
        reads = listed_reads(call, tokens, self.normalizers, self.settings, self.texts)
        summaries = {
            name: summarize_rows(
                pool_rows([by_normalizer[name] for by_normalizer in statistics]), bins, self.settings.top_n, len(calls)
            )
            for name in self.normalizers
        }
        worst = {name: _worst_norm(call, normalizer, bins[0][1]) for name, normalizer in self.normalizers.items()}
        kv_heads = call.key_BGKD.shape[1]
        wait = arrival(call.query_BHQD.device)

        def make_tables() -> None:
            wait()
            read, from_sampled = reads(), sampled()
            layers: list[dict[str, list[pa.Table]]] = [{} for _ in calls_without_data]
            for name, summary in summaries.items():
                columns = row_columns(summary, self.settings.top_n, kv_heads)
                columns["heads"]["worst_norm"] = worst[name]
                columns |= {"reads": read[name]} if name in read else {}
                for table, of_layers in _split_by_layer(calls_without_data, name, columns, from_sampled[name], before):
                    for tables, of_layer in zip(layers, of_layers, strict=True):
                        tables.setdefault(table, []).append(of_layer)
            joined = [{table: pa.concat_tables(parts) for table, parts in tables.items()} for tables in layers]
            self._store_layers(calls_without_data, [MeasuredLayer(longest, tables) for tables in joined])

        return make_tables

    def _store_layers(self, calls: Sequence[AttentionCall], layers: Sequence[MeasuredLayer]) -> None:
        if self._finished is not None:
            for number, (call, layer) in enumerate(zip(calls, layers, strict=True), start=len(self._layers)):
                self._finished.keep(number, call, layer)
        for layer in layers:
            self._add(layer)

    def _measure_sampled(
        self,
        calls: Sequence[AttentionCall],
        tokens: Tensor | None,
        statistics: Sequence[Mapping[str, RowStatistics]],
        longest_bin: tuple[int, int],
        ahead: Sequence[DrawnAhead],
    ) -> Callable[[], ByNormalizer]:
        """Measure sampled rows. The returned function gives their table columns by normalizer, for all layers."""
        no_columns: ByNormalizer = {name: {} for name in self.normalizers}
        if not SAMPLED & {*self.settings.metrics}:
            return lambda: no_columns
        at_once = max(1, SAMPLED_WEIGHTS // max(1, sampled_weights(calls[0], self.settings)))
        inside: list[Tensor] | None = None
        parts = []
        for start in range(0, len(calls), at_once):
            stacked = calls[start : start + at_once]
            items = list(sequences(stack_calls(stacked), tokens, self.settings.rows))
            inside = inside or self._rows_in_longest_bin(items, statistics, longest_bin)
            long = [
                Sequences(item.call, item.rows[in_longest_bin])
                for item, in_longest_bin in zip(items, inside, strict=True)
            ]
            drawn = ahead[start : start + at_once]
            parts.append(sampled_columns(long, stacked, self.normalizers, self.settings, drawn))

        def columns() -> ByNormalizer:
            collected = [part() for part in parts]
            return {
                name: {table: _concatenate([part[name][table] for part in collected]) for table in collected[0][name]}
                for name in self.normalizers
            }

        return columns

    def _rows_in_longest_bin(
        self,
        items: Sequence[Sequences],
        statistics: Sequence[Mapping[str, RowStatistics]],
        longest_bin: tuple[int, int],
    ) -> list[Tensor]:
        """Return which rows of each item are in the longest bin. Synchronizes only if there is a mask."""
        first = next(iter(self.normalizers))
        in_longest_bin = []
        for item, of_rows in zip(items, statistics, strict=True):
            n = known_n(item.call, item.rows)
            n = of_rows[first].n.flatten(0, 1).amax(0).cpu() if n is None else n
            in_longest_bin.append(n >= longest_bin[0])
        return in_longest_bin


def _longest_row(item: Sequences, statistics: Mapping[str, RowStatistics]) -> int:
    """Return the largest number of visible keys of a row. Synchronizes only if there is a mask."""
    n = known_n(item.call, item.rows)
    if n is not None and len(n):
        return int(n.max())
    return max((int(rows.n.max()) for rows in statistics.values() if rows.n.numel()), default=0)


def _split_by_layer(
    calls: Sequence[AttentionCall],
    normalizer: str,
    rows: Mapping[str, Columns],
    sampled: Mapping[str, Columns],
    before: Before,
) -> Iterator[tuple[str, list[pa.Table]]]:
    """Yield each table, divided into one table per call. The columns have the heads of all calls.

    If a layer makes a second call, its heads are numbered after those of the first, and it has no coverage.
    """
    heads, kv_heads = calls[0].query_BHQD.shape[1], calls[0].key_BGKD.shape[1]
    layers = np.array([call.layer for call in calls])
    for table in dict.fromkeys([*rows, *sampled]):
        if table == "coverage" and before[0]:
            continue
        columns = {**rows.get(table, {}), **sampled.get(table, {})}
        if table in rows:
            call_index = columns["head"] // heads
            columns |= {"head": columns["head"] % heads + before[0]}
        else:
            call_index = np.repeat(np.arange(len(calls)), len(next(iter(columns.values()))) // len(calls))
            columns |= {"head": columns["head"] + before[0]} if "head" in columns else {}
        if "kv_head" in columns:
            columns["kv_head"] = columns["kv_head"] % kv_heads + before[1]
        key = {"normalizer": normalizer, "kind": calls[0].kind, "layer": layers[call_index]}
        table_of_calls = layer_table(SCHEMAS[table], [{**columns, **key}])
        edges = np.searchsorted(call_index, np.arange(len(calls) + 1))
        yield table, [table_of_calls.slice(start, stop - start) for start, stop in pairwise(edges.tolist())]


def _concatenate(columns: Sequence[Columns]) -> Columns:
    """Concatenate the columns of several layers."""
    return {name: np.concatenate([part[name] for part in columns]) for name in columns[0]} if columns else {}


def _worst_norm(call: AttentionCall, choice: Normalizer | None, n: int) -> float:
    """Return the largest Jacobian norm that the normalizer can have with its parameters; NaN if it is not known."""
    (resolved,) = resolve_normalizers(call, [choice])
    bound = as_normalizer(resolved, call).lipschitz(n) if n > 1 else None
    return float("nan") if bound is None else float(bound)
