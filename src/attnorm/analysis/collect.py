"""Measure every attention call of a forward pass and turn it into rows of the tables, one layer at a time.

Numbers are summarised per head at once, so that the numbers per row of a few layers only are in memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pyarrow as pa
from torch import Tensor

from attnorm.analysis.collect_rows import pool_rows, row_columns, summarise_rows
from attnorm.analysis.collect_sampled import ByNormalizer, DrawnAhead, draw_ahead, sampled_columns, sampled_weights
from attnorm.analysis.reads import Tokens, listed_reads, token_columns
from attnorm.analysis.settings import AnalysisSettings
from attnorm.analysis.store import FinishedLayers, MeasuredLayer
from attnorm.analysis.tables import SCHEMAS, Columns, layer_table, part_table
from attnorm.engines.device_sync import arrival
from attnorm.engines.threads import MAX_THREADS
from attnorm.metrics.call import AttentionCall, can_be_stacked, outline, reads_heads, same_shape, size, stacked
from attnorm.metrics.logits import known_n
from attnorm.metrics.normalized import as_normalizer, resolve_normalizers
from attnorm.metrics.rows import RowStatistics, measure_rows
from attnorm.metrics.sampling import Sequences, length_bins, sequences
from attnorm.normalizers.contract import Normalizer

SAMPLED = {"vectors", "sensitivity", "coverage"}  # groups of metrics on sampled rows
STACKED_BYTES = 2**28  # queries, keys and values, times normalizers, that wait on a GPU to be measured together
SAMPLED_WEIGHTS = 2**21  # of sampled rows of layers that are measured together
Before = tuple[int, int]  # heads and key/value heads of a layer's earlier calls


class Collector:
    """Pass it to `models.observe` as the function that gets every call; `tables` returns what was measured.

    On a GPU, where a short layer takes less time than the program needs to ask for it, calls of the same shape wait and
    are measured as one call that has the heads of all of them.
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
        """tokens: queries that are not padding, by kind of attention (sequences.query_masks). texts: their text.

        finished: layers on the disk, which are not measured again; new layers are added to it. together: whether calls
        on a GPU may wait for others; then their tensors must not change until `finish`.
        """
        self.settings = settings
        self.normalizers = normalizers
        self.tokens = tokens
        self.after_layer = after_layer
        self.texts: Tokens = texts or {}
        self.found = 0  # layers read from the disk
        self.repeats = False  # a layer attended more than once (differential attention)
        self._heads: dict[tuple[str, int], Before] = {}  # heads and key/value heads of each layer so far
        self._finished = finished
        self._layers: list[MeasuredLayer] = []
        self._waiting: list[AttentionCall] = []  # to be measured together, with these tokens
        self._waiting_tokens: Tensor | None = None
        self._ahead: list[DrawnAhead] = []  # random numbers of the calls that wait
        self._pool: ThreadPoolExecutor | None = None
        self._unfinished: list[Callable[[], None]] = []  # their numbers are on the way from the GPU
        self._calls = 0
        self._together = together and not any(one is not None and reads_heads(one) for one in normalizers.values())

    def __call__(self, call: AttentionCall) -> None:
        before = self._heads.get((call.kind, call.layer), (0, 0))
        self._heads[call.kind, call.layer] = before[0] + call.query_BHQD.shape[1], before[1] + call.key_BGKD.shape[1]
        self.repeats |= before[0] > 0
        found = None if self._finished is None else self._finished.find(self._calls, call)
        self._calls += 1
        waits = found is None and not before[0] and self._together and can_be_stacked(call)
        if self._waiting and not (waits and same_shape(self._waiting[0], call)):
            self._measure_waiting()
        if waits:
            self._waiting.append(call)
            self._waiting_tokens = self.tokens.get(call.kind)
            self._draw_ahead(call)
            # The numbers of all normalizers are in memory together.
            if len(self.normalizers) * sum(map(size, self._waiting)) >= STACKED_BYTES:
                self._measure_waiting()
            return
        self._make_tables()
        if found is None:
            self._measure([call], before, self.tokens.get(call.kind))()
        else:
            self.found += 1
            self._add(found)

    def finish(self) -> None:
        """Measure what waits, and wait for the GPU."""
        self._measure_waiting()
        self._make_tables()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    @property
    def longest(self) -> int:
        """Visible keys of any row of the finished layers."""
        return max((layer.longest for layer in self._layers), default=0)

    def tables(self, text: str, length: int, window: int = 0) -> dict[str, pa.Table]:
        """The tables of the finished layers."""
        fixed = {"text": text, "length": length, "window": window}
        tokens = token_columns(self.texts) if self.settings.read_keys else []
        layers = [*(layer.tables for layer in self._layers), {"tokens": layer_table(SCHEMAS["tokens"], tokens)}]
        return {
            name: part_table(schema, [tables[name] for tables in layers if name in tables], fixed)
            for name, schema in SCHEMAS.items()
        }

    def _measure_waiting(self) -> None:
        """The GPU measures these calls while the numbers of those before them become tables."""
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
        """Measure calls of the same shape, all at once. The result makes the tables when the numbers have arrived."""
        call = stacked(calls)
        items = list(sequences(call, tokens, self.settings.rows))
        choices = list(self.normalizers.values())
        statistics = [measure_rows(item.call, choices, item.rows, self.settings.top_n) for item in items]
        longest = max((_longest(item, found) for item, found in zip(items, statistics, strict=True)), default=0)
        outlines = [outline(one) for one in calls]
        if not longest:
            return lambda: self._keep(outlines, [MeasuredLayer(0, {}) for _ in outlines])
        bins = length_bins(longest)
        sampled = self._sampled(calls, tokens, statistics, bins[0], ahead)
        reads = listed_reads(call, tokens, self.normalizers, self.settings, self.texts)
        summaries = {
            name: summarise_rows(
                pool_rows([found[name] for found in statistics]), bins, self.settings.top_n, len(calls)
            )
            for name in self.normalizers
        }
        worst = {name: _worst_norm(call, one, bins[0][1]) for name, one in self.normalizers.items()}
        kv_heads = call.key_BGKD.shape[1]
        wait = arrival(call.query_BHQD.device)

        def make_tables() -> None:
            wait()
            read, from_sampled = reads(), sampled()
            layers: list[dict[str, list[pa.Table]]] = [{} for _ in outlines]
            for name, summary in summaries.items():
                columns = row_columns(summary, self.settings.top_n, kv_heads)
                columns["heads"]["worst_norm"] = worst[name]
                columns |= {"reads": read[name]} if name in read else {}
                for table, of_layers in _numbered(outlines, name, columns, from_sampled[name], before):
                    for tables, of_layer in zip(layers, of_layers, strict=True):
                        tables.setdefault(table, []).append(of_layer)
            found = [{table: pa.concat_tables(parts) for table, parts in tables.items()} for tables in layers]
            self._keep(outlines, [MeasuredLayer(longest, tables) for tables in found])

        return make_tables

    def _keep(self, calls: Sequence[AttentionCall], layers: Sequence[MeasuredLayer]) -> None:
        if self._finished is not None:
            for number, (call, layer) in enumerate(zip(calls, layers, strict=True), start=len(self._layers)):
                self._finished.keep(number, call, layer)
        for layer in layers:
            self._add(layer)

    def _sampled(
        self,
        calls: Sequence[AttentionCall],
        tokens: Tensor | None,
        statistics: Sequence[Mapping[str, RowStatistics]],
        longest_bin: tuple[int, int],
        ahead: Sequence[DrawnAhead],
    ) -> Callable[[], ByNormalizer]:
        """Measure sampled rows. The result returns by normalizer what they add to the tables, for all layers."""
        found: ByNormalizer = {name: {} for name in self.normalizers}
        if not SAMPLED & {*self.settings.metrics}:
            return lambda: found
        at_once = max(1, SAMPLED_WEIGHTS // max(1, sampled_weights(calls[0], self.settings)))
        inside: list[Tensor] | None = None
        parts = []
        for start in range(0, len(calls), at_once):
            some = calls[start : start + at_once]
            items = list(sequences(stacked(some), tokens, self.settings.rows))
            inside = inside or self._inside(items, statistics, longest_bin)
            long = [Sequences(item.call, item.rows[which]) for item, which in zip(items, inside, strict=True)]
            drawn = ahead[start : start + at_once]
            parts.append(sampled_columns(long, some, self.normalizers, self.settings, drawn))

        def columns() -> ByNormalizer:
            arrived = [part() for part in parts]
            return {
                name: {table: _joined([part[name][table] for part in arrived]) for table in arrived[0][name]}
                for name in self.normalizers
            }

        return columns

    def _inside(
        self,
        items: Sequence[Sequences],
        statistics: Sequence[Mapping[str, RowStatistics]],
        longest_bin: tuple[int, int],
    ) -> list[Tensor]:
        """Which rows of each item have the most visible keys; without a mask the GPU need not be asked."""
        first = next(iter(self.normalizers))
        found = []
        for item, of_rows in zip(items, statistics, strict=True):
            n = known_n(item.call, item.rows)
            n = of_rows[first].n.flatten(0, 1).amax(0).cpu() if n is None else n
            found.append(n >= longest_bin[0])
        return found


def _longest(item: Sequences, found: Mapping[str, RowStatistics]) -> int:
    """Visible keys of any row; without a mask the GPU need not be asked."""
    n = known_n(item.call, item.rows)
    if n is not None and len(n):
        return int(n.max())
    return max((int(one.n.max()) for one in found.values() if one.n.numel()), default=0)


def _numbered(
    calls: Sequence[AttentionCall],
    normalizer: str,
    rows: Mapping[str, Columns],
    sampled: Mapping[str, Columns],
    before: Before,
) -> Iterator[tuple[str, list[pa.Table]]]:
    """Yield each table with its rows for every call. Columns have the heads of all calls.

    Heads of a layer's second call continue the numbers; it has no coverage of its own.
    """
    heads, kv_heads = calls[0].query_BHQD.shape[1], calls[0].key_BGKD.shape[1]
    layers = np.array([call.layer for call in calls])
    for table in dict.fromkeys([*rows, *sampled]):
        if table == "coverage" and before[0]:
            continue
        columns = {**rows.get(table, {}), **sampled.get(table, {})}
        if table in rows:
            which = columns["head"] // heads
            columns |= {"head": columns["head"] % heads + before[0]}
        else:
            which = np.repeat(np.arange(len(calls)), len(next(iter(columns.values()))) // len(calls))
            columns |= {"head": columns["head"] + before[0]} if "head" in columns else {}
        if "kv_head" in columns:
            columns["kv_head"] = columns["kv_head"] % kv_heads + before[1]
        key = {"normalizer": normalizer, "kind": calls[0].kind, "layer": layers[which]}
        whole = layer_table(SCHEMAS[table], [{**columns, **key}])
        edges = np.searchsorted(which, np.arange(len(calls) + 1))
        yield table, [whole.slice(start, stop - start) for start, stop in pairwise(edges.tolist())]


def _joined(columns: Sequence[Columns]) -> Columns:
    """Columns of some layers, then those of others."""
    return {name: np.concatenate([one[name] for one in columns]) for name in columns[0]} if columns else {}


def _worst_norm(call: AttentionCall, choice: Normalizer | None, n: int) -> float:
    """Return the largest Jacobian norm that the normalizer can have with its parameters; NaN if it is not known."""
    (resolved,) = resolve_normalizers(call, [choice])
    bound = as_normalizer(resolved, call).lipschitz(n) if n > 1 else None
    return float("nan") if bound is None else float(bound)
