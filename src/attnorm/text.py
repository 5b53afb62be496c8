"""Text for people: numbers, safe names from other people's files, and the closest known name for a wrong one.

All outputs write numbers in the same way: 1,024; 0.0031; 12 %; 27.5 million; three significant digits if measured. The
script of the report does the same (report/html/script/format.js).

Terminals obey escape sequences and HTML pages obey bidirectional controls; names and tokens may contain both. So every
control or format character becomes a visible one. Pages run no code of others: `render_page` escapes every value.
"""

import base64
import difflib
import hashlib
import math
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

MISSING = "–"  # a number that is not known

_RAISED = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
_NAMED = {"\n": "⏎", "\t": "⇥", "\r": "␍", "\x7f": "␡"}
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}  # controls, formats, surrogates, not assigned, separators


def visible(text: str, longest: int | None = None) -> str:
    """Return the text on one line with control and format characters spelled out, cut to `longest` characters.

    >>> visible("a\\x1b[31mb\\u202ec\\n")
    'a␛[31mb⟨U+202E⟩c⏎'
    """
    if longest is not None and len(text) > longest:
        text = text[: longest - 1] + "…"
    return "".join(_shown(character) for character in text)


def visible_lines(text: str) -> str:
    """Return the text with line breaks kept and other control and format characters spelled out.

    >>> visible_lines("one\\n\\x1b[31mtwo")
    'one\\n␛[31mtwo'
    """
    return text if text.isascii() and text.isprintable() else "\n".join(map(visible, text.split("\n")))


def escaped_json(text: str) -> str:
    """Return the same JSON with hidden characters in its strings as \\u escapes."""
    return "".join(_json_escape(character) if _is_hidden(character) else character for character in text)


def render_page(
    template: Path,
    *,
    style: str,
    script: str = "",
    images: str = "",
    filters: Mapping[str, Callable[..., str]] | None = None,
    **words: Any,
) -> str:
    """Return a page that works offline, from a template beside the files that it includes.

    Its Content-Security-Policy allows this style sheet and this script by their hashes, images from the sources
    `images`, and nothing else: no name of a text, model or folder can run code or fetch anything.
    """
    from markupsafe import Markup

    environment = _templates(template.parent)
    environment.filters.update(filters or {})
    allowed = {
        "default-src": "'none'",
        "style-src": _policy_hash(style),
        "script-src": _policy_hash(script) if script else "",
        "img-src": images,
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return environment.get_template(template.name).render(
        policy="; ".join(f"{name} {sources}" for name, sources in allowed.items() if sources),
        style=Markup(style),  # unescaped: the policy allows exactly these bytes
        script=Markup(script),
        **words,
    )


@cache
def _templates(folder: Path) -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":"), "ensure_ascii": False}
    return environment


def _policy_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json_escape(character: str) -> str:
    if character == "\n":  # between values: inside strings it is escaped already
        return character
    pairs = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{pairs[at]:02x}{pairs[at + 1]:02x}" for at in range(0, len(pairs), 2))


def _is_hidden(character: str) -> bool:
    return not character.isprintable() and unicodedata.category(character) in _HIDDEN


def _shown(character: str) -> str:
    if character in _NAMED:
        return _NAMED[character]
    if character < " ":
        return chr(0x2400 + ord(character))
    if _is_hidden(character):
        return f"⟨U+{ord(character):04X}⟩"
    return character


def format_number(value: float | None) -> str:
    """Format with three digits; large numbers get a word, very large and very small ones a power of ten."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    size = float(f"{abs(value):.2e}")
    if size >= 1e12 or size < 1e-4:
        return minus_sign(power_of_ten(value))
    for large, word in ((1e9, "billion"), (1e6, "million")):
        if size >= large:
            return minus_sign(f"{_three_digits(value / large)} {word}")
    if size >= 1_000 and not float(value).is_integer():
        return minus_sign(f"{math.copysign(size, value):,.0f}")
    return minus_sign(f"{value:,.0f}" if float(value).is_integer() else _three_digits(value))


def format_percent(share: float | None) -> str:
    """Format a share as a percentage: 12 %; below 10 % with one decimal."""
    if share is None or not math.isfinite(share):
        return MISSING
    percent = 100 * share
    if 0 < abs(percent) < 0.05:
        return "<0.1 %"
    return minus_sign(f"{percent:.1f}".removesuffix(".0") if abs(percent) < 9.95 else f"{percent:.0f}") + " %"


def format_keys(count: float) -> str:
    """Format a number of keys: 8.4, 512, 2,190, 473,000, 27.2 million, 2.1 × 10¹⁵, infinitely many.

    Measured numbers have three digits at most, as rounding errors change further ones. Whole numbers below a million,
    such as lengths, are exact.
    """
    if math.isinf(count):
        return "infinitely many"
    rounded = float(f"{count:.3g}")
    if rounded >= 1e12:
        return power_of_ten(count)
    for size, word in ((1e9, "billion"), (1e6, "million")):
        if rounded >= size:
            return f"{rounded / size:.3g} {word}"
    if count < 10:
        return f"{count:.2g}"
    if count < 1_000:
        return f"{math.floor(count + 0.5):,}"
    return f"{count if float(count).is_integer() else rounded:,.0f}"


def count_words(count: int, noun: str) -> str:
    """Return "1 head" or "3 heads"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def minus_sign(text: str) -> str:
    """Replace the hyphen of a negative number by a minus sign."""
    return text.replace("-", "−")


def _three_digits(value: float) -> str:
    """Return three significant digits of a number between 0.0001 and 1,000."""
    return f"{value:,.{max(0, 2 - math.floor(math.log10(float(f'{abs(value):.2e}'))))}f}"


def power_of_ten(value: float) -> str:
    """Format with two digits: 2.3 × 10¹⁸."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')} × 10{str(int(exponent)).translate(_RAISED)}"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Return a table in GitHub's Markdown; nothing without rows. left: columns of words, the others are aligned right.

    >>> print(markdown_table(["n", "loss"], [["a|b", "2.1"]]))
    | n | loss |
    |---|---:|
    | a\\|b | 2.1 |
    """
    lines = [_table_line(row) for row in rows]
    rule = f"|{'---|' * left}{'---:|' * (len(header) - left)}"
    return "\n".join([_table_line(header), rule, *lines]) if lines else ""


def _table_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """Return "did you mean 'x'?" for the closest known name, or the list of known names if none is close."""
    names = list(known)
    close = difflib.get_close_matches(str(name), names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(map(repr, names))}"
