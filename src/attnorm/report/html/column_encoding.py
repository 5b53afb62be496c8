"""Columns of numbers as short strings for the page: half precision with a scale per column, in base64.

Half precision has three digits, which is enough for charts, and a report on 1,728 heads stays below 2 MB. `unpack` in
script/data.js is the inverse. Infinite values become missing values.
"""

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST = 60_000.0  # the largest magnitude of a column is scaled to this; half precision ends at 65,504
FEW = 256  # distinct values that fit into one byte


def packed(values: NDArray[np.float64], *, logarithmic: bool = False) -> dict[str, Any]:
    """Encode a column as a dictionary for JSON.

    {"all": v} if all values are equal, {"levels": [...], "bytes": ...} if there are few values, else {"half": ...} with
    a scale. logarithmic: store the logarithm to base 10, for columns with values such as 1e30.
    """
    finite = np.where(np.isfinite(values), values, np.nan)
    levels, indices = np.unique(finite, return_inverse=True)  # NaN counts as one value
    if len(levels) <= 1:
        return {"all": _rounded(float(levels[0])) if len(levels) else None}
    if len(levels) <= FEW:
        return {"levels": [_rounded(float(level)) for level in levels], "bytes": _text(indices.astype(np.uint8))}
    if logarithmic:
        finite = np.log10(finite, out=np.full_like(finite, np.nan), where=finite > 0)
    scale = float(np.nanmax(np.abs(finite))) / LARGEST or 1.0
    return {"half": _text((finite / scale).astype("<f2")), "scale": scale, "logarithmic": logarithmic}


def packed_whole(values: NDArray[np.integer[Any]]) -> dict[str, Any]:
    """Encode integers from 0 on without rounding."""
    levels, indices = np.unique(values, return_inverse=True)
    if len(levels) <= 1:
        return {"all": int(levels[0]) if len(levels) else None}
    if len(levels) <= FEW:
        return {"levels": levels.tolist(), "bytes": _text(indices.astype(np.uint8))}
    width = 2 if int(levels[-1]) < 2**16 else 4
    return {"whole": _text(values.astype(f"<u{width}")), "width": width}


def _rounded(value: float) -> float | None:
    return None if np.isnan(value) else float(f"{value:.6g}")


def _text(array: NDArray[Any]) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")
