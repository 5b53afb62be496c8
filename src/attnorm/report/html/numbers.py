"""Numbers as people write them: 1,024; 0.0031; 12 %; 27.5 million. The script does the same (script/format.js)."""

import math
from typing import Any

MISSING = "–"
_RAISED = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


def number(value: float | None) -> str:
    """Three digits, whole numbers in full; a word or a power of ten where zeros would have to be counted."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    size = float(f"{abs(value):.2e}")
    if size >= 1e12 or size < 1e-4:
        mantissa, exponent = f"{value:.1e}".split("e")
        return _minus(f"{mantissa.removesuffix('.0')} × 10{str(int(exponent)).translate(_RAISED)}")
    for large, word in ((1e9, "billion"), (1e6, "million")):
        if size >= large:
            return _minus(f"{_digits(value / large)} {word}")
    if size >= 10_000 and not float(value).is_integer():
        return _minus(f"{math.copysign(size, value):,.0f}")
    return _minus(f"{value:,.0f}" if float(value).is_integer() else _digits(value))


def _digits(value: float) -> str:
    """Three significant digits of a number between 0.0001 and 10,000."""
    return f"{value:,.{max(0, 2 - math.floor(math.log10(float(f'{abs(value):.2e}'))))}f}"


def share(value: float | None) -> str:
    """Per cent, without digits that nobody reads."""
    if value is None or not math.isfinite(value):
        return MISSING
    percent = 100 * value
    if 0 < abs(percent) < 0.05:
        return "<0.1 %"
    return _minus(f"{percent:.1f}".removesuffix(".0") if abs(percent) < 9.95 else f"{percent:.0f}") + " %"


def plain(value: Any) -> str:
    """Any value of the manifest."""
    match value:
        case None:
            return MISSING
        case bool():
            return "yes" if value else "no"
        case int():
            return _minus(f"{value:,}")
        case float():
            return number(value)
        case dict() if not value:
            return MISSING
        case list() | tuple():
            return ", ".join(plain(one) for one in value) or MISSING
        case _:
            return str(value)


def _minus(text: str) -> str:
    return text.replace("-", "−")
