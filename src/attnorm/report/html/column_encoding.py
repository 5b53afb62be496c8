"""Columns of numbers as short strings: half precision under a scale of their own, in base64.

Three digits are more than a chart shows, and a report of 1,728 heads with all their curves stays below 2 MB. The
script's `unpack` (script/data.js) is the inverse. Infinite and missing values both become missing.
"""

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST = 60_000.0  # what the largest magnitude of a column is scaled to; half precision ends at 65,504
FEW = 256  # distinct values that one byte can name


def packed(values: NDArray[np.float64], *, logarithmic: bool = False) -> dict[str, Any]:
    """The column as a small dictionary for JSON.

    {"all": v} where all values are equal, {"levels": [...], "bytes": ...} where few differ, else {"half": ...} with its
    scale. With `logarithmic`, a half stands for the logarithm to base 10: a horizon may be 1e30.
    """
    finite = np.where(np.isfinite(values), values, np.nan)
    levels, places = np.unique(finite, return_inverse=True)  # NaN counts as one value
    if len(levels) <= 1:
        return {"all": _rounded(float(levels[0])) if len(levels) else None}
    if len(levels) <= FEW:
        return {"levels": [_rounded(float(level)) for level in levels], "bytes": _text(places.astype(np.uint8))}
    if logarithmic:
        finite = np.log10(finite, out=np.full_like(finite, np.nan), where=finite > 0)
    scale = float(np.nanmax(np.abs(finite))) / LARGEST or 1.0
    return {"half": _text((finite / scale).astype("<f2")), "scale": scale, "logarithmic": logarithmic}


def packed_whole(values: NDArray[np.integer[Any]]) -> dict[str, Any]:
    """Whole numbers from 0 up, exactly: positions must not be rounded."""
    levels, places = np.unique(values, return_inverse=True)
    if len(levels) <= 1:
        return {"all": int(levels[0]) if len(levels) else None}
    if len(levels) <= FEW:
        return {"levels": levels.tolist(), "bytes": _text(places.astype(np.uint8))}
    width = 2 if int(levels[-1]) < 2**16 else 4
    return {"whole": _text(values.astype(f"<u{width}")), "width": width}


def _rounded(value: float) -> float | None:
    return None if np.isnan(value) else float(f"{value:.6g}")


def _text(array: NDArray[Any]) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")
