"""Blocks of consecutive rows: what the numbers of a verdict vary by inside one window.

Neighbouring rows see nearly the same keys, so resampling single rows would claim too much certainty. The longest rows
are cut into blocks of consecutive ones, and each block keeps the medians of the numbers that verdicts are decided by.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from torch import Tensor

from attnorm.analysis.columns import Columns
from attnorm.analysis.tables import BLOCK_METRICS, BLOCK_NORM
from attnorm.metrics.rows import RowStatistics

BLOCKS = 8  # at most, per window
FEWEST_ROWS = 2  # of a block


def block_columns(rows: RowStatistics, longest_bin: tuple[int, int]) -> Columns:
    """One entry per head and block of the rows with n in the bin; none where rows are too few for two blocks."""
    n, broken = _by_head(rows.n), _by_head(rows.broken).astype(bool)
    heads = _by_head(rows.values[BLOCK_METRICS[0]]).shape[0]
    inside = np.broadcast_to((n >= longest_bin[0]) & (n <= longest_bin[1]) & ~broken, (heads, n.shape[1]))
    used = np.flatnonzero(inside.any(0))
    count = min(BLOCKS, len(used) // FEWEST_ROWS)
    chunks = np.array_split(used, count) if count > 1 else []
    columns: Columns = {
        "head": np.repeat(np.arange(heads), len(chunks)),
        "block": np.tile(np.arange(len(chunks)), heads),
        "rows": _over_chunks(chunks, heads, lambda chunk: inside[:, chunk].sum(1)).astype(np.int64),
    }
    for name in BLOCK_METRICS:
        values = np.where(inside, _by_head(rows.values[name]), np.nan)
        columns[name] = _over_chunks(chunks, heads, partial(_quantile, values, 0.5))
        if name == "jacobian_norm":
            columns[BLOCK_NORM] = _over_chunks(chunks, heads, partial(_quantile, values, 0.75))
    return columns


def _over_chunks(chunks: list[np.ndarray], heads: int, measure: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """(heads x chunks,), heads outermost."""
    if not chunks:
        return np.zeros(0)
    return np.stack([measure(chunk) for chunk in chunks], axis=1).reshape(heads * len(chunks))


def _by_head(values: Tensor) -> np.ndarray:
    """(B, H, R) -> (H, B x R), the rows of each sequence in their order."""
    return np.asarray(values.double().cpu().transpose(0, 1).flatten(1, 2).numpy())


def _quantile(values: np.ndarray, share: float, chunk: np.ndarray) -> np.ndarray:
    """Linear quantile of each head's numbers in the chunk, NaN left out; NaN where none is left."""
    ordered = np.sort(values[:, chunk], axis=1)  # NaN comes last
    count = (~np.isnan(ordered)).sum(1)
    place = share * np.maximum(count - 1, 0)
    low, high = np.floor(place).astype(int), np.ceil(place).astype(int)
    heads = np.arange(len(ordered))
    below, above = ordered[heads, low], ordered[heads, high]
    with np.errstate(invalid="ignore"):  # inf - inf: the quantile is infinite
        between = np.where(below == above, below, below + (place - low) * (above - below))
    return np.where(count > 0, between, np.nan)
