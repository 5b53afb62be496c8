"""Text for people: names from other people's files made safe to show, and the closest known name for a wrong one.

Terminals obey escape sequences and HTML pages obey bidirectional controls; names and tokens may contain both. So every
control or format character becomes a visible one. Pages run no code of others: `render_page` escapes every value.
"""

import base64
import difflib
import hashlib
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

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


def power_of_ten(value: float) -> str:
    """Format with two digits: 2.3 × 10¹⁸."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')} × 10{str(int(exponent)).translate(_RAISED)}"


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """Return "did you mean 'x'?" for the closest known name, or the list of known names if none is close."""
    names = list(known)
    close = difflib.get_close_matches(str(name), names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(map(repr, names))}"
