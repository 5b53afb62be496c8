"""An analysis as JSON: the verdict and one object per head. Quantiles and curves are in the Parquet files only."""

import math
from typing import Any

from attnorm.analysis.result import Analysis
from attnorm.analysis.tables import HEAD_KEY, VERDICT_COLUMNS
from attnorm.metrics.catalogue import PER_HEAD, PER_ROW

COUNTS = ("kv_head", "rows", "broken_rows", "n_low", "n_high")


def analysis_as_dict(analysis: Analysis) -> dict[str, Any]:
    names = [*(name for name, _ in HEAD_KEY), *COUNTS, *PER_ROW, *PER_HEAD, *(name for name, _ in VERDICT_COLUMNS)]
    value: dict[str, Any] = finite(
        {
            "verdict": analysis.verdict.as_dict(),
            "manifest": analysis.manifest,
            "heads": analysis.heads.select(names).to_pylist(),
        }
    )
    return value


def finite(value: Any) -> Any:
    """Replace NaN and infinities by None, at any depth, because JSON has none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return value
