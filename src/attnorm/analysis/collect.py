"""Measure every attention call of a forward pass and turn it into rows of the tables, one layer at a time.

Numbers are summarised per head at once, so that only one layer's numbers per row are in memory.
"""

from collections.abc import Callable, Iterator, Mapping

import pyarrow as pa
from torch import Tensor

from attnorm.analysis.collect_rows import pool_rows, row_columns
from attnorm.analysis.collect_sampled import sampled_columns
from attnorm.analysis.layers import FinishedLayers, MeasuredLayer
from attnorm.analysis.reads import Tokens, read_columns, token_columns
from attnorm.analysis.sequences import Sequences, sequences
from attnorm.analysis.settings import AnalysisSettings
from attnorm.analysis.tables import SCHEMAS, Columns, layer_table, part_table
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.normalized import as_normalizer, resolve_normalizers
from attnorm.metrics.rows import RowStatistics, measure_rows
from attnorm.metrics.sampling import length_bins
from attnorm.normalizers.contract import Normalizer


class Collector:
    """Pass it to `models.observe` as the function that gets every call; `tables` returns what was measured."""

    def __init__(
        self,
        settings: AnalysisSettings,
        normalizers: Mapping[str, Normalizer | None],
        tokens: Mapping[str, Tensor],
        after_layer: Callable[[int], None],
        texts: Tokens | None = None,
        finished: FinishedLayers | None = None,
    ) -> None:
        """tokens: queries that are not padding, by kind of attention (sequences.query_masks). texts: their text.

        finished: layers on the disk, which are not measured again; new layers are added to it.
        """
        self.settings = settings
        self.normalizers = normalizers
        self.tokens = tokens
        self.after_layer = after_layer
        self.texts: Tokens = texts or {}
        self.longest = 0  # visible keys of any row
        self.found = 0  # layers read from the disk
        self.repeats = False  # a layer attended more than once (differential attention)
        self._calls = 0
        self._heads: dict[tuple[str, int], tuple[int, int]] = {}  # heads and key/value heads of each layer so far
        self._finished = finished
        self._layers: list[MeasuredLayer] = []

    def __call__(self, call: AttentionCall) -> None:
        before = self._heads.get((call.kind, call.layer), (0, 0))
        self.repeats |= before[0] > 0
        found = None if self._finished is None else self._finished.find(self._calls, call)
        layer = self._measure(call, before) if found is None else found
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
            name: part_table(schema, [tables[name] for tables in layers if name in tables], fixed)
            for name, schema in SCHEMAS.items()
        }

    def _measure(self, call: AttentionCall, before: tuple[int, int]) -> MeasuredLayer:
        """before: heads and key/value heads of the layer's earlier calls."""
        tokens = self.tokens.get(call.kind)
        items = list(sequences(call, tokens, self.settings.rows))
        choices = list(self.normalizers.values())
        statistics = [measure_rows(item.call, choices, item.rows, self.settings.top_n) for item in items]
        longest = max((int(stats.n.max()) for found in statistics for stats in found.values()), default=0)
        pieces: dict[str, list[Columns]] = {}
        if longest:
            bins = length_bins(longest)
            first = next(iter(self.normalizers))
            long = [_longest_rows(item, found[first], bins[0]) for item, found in zip(items, statistics, strict=True)]
            sampled = sampled_columns(long, self.normalizers, self.settings)
            reads = read_columns(call, tokens, self.normalizers, self.settings, self.texts)
            for name, normalizer in self.normalizers.items():
                sampled[name] |= {"reads": reads[name]} if name in reads else {}
                rows = pool_rows([found[name] for found in statistics])
                columns = row_columns(rows, bins, self.settings.top_n, call.key_BGKD.shape[1])
                columns["heads"]["worst_norm"] = _worst_norm(call, normalizer, bins[0][1])
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
    """Add the keys of the rows. Heads of a layer's second call continue the numbers; it has no coverage of its own."""
    key = {"normalizer": normalizer, "kind": call.kind, "layer": call.layer}
    shift = dict(zip(("head", "kv_head"), before, strict=True))
    for table in dict.fromkeys([*rows, *sampled]):
        if table == "coverage" and before[0]:
            continue
        columns = {**key, **rows.get(table, {}), **sampled.get(table, {})}
        yield table, columns | {name: columns[name] + first for name, first in shift.items() if name in columns}


def _longest_rows(item: Sequences, found: RowStatistics, longest_bin: tuple[int, int]) -> Sequences:
    inside = (found.n >= longest_bin[0]).flatten(0, 1).any(0).cpu()
    return Sequences(item.call, item.rows[inside])


def _worst_norm(call: AttentionCall, choice: Normalizer | None, n: int) -> float:
    """Return the largest Jacobian norm that the normalizer can have with its parameters; NaN if it is not known."""
    (resolved,) = resolve_normalizers(call, [choice])
    bound = as_normalizer(resolved, call).lipschitz(n) if n > 1 else None
    return float("nan") if bound is None else float(bound)
