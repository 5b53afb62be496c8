"""Text that somebody else wrote, as one line in which every character can be seen.

Tokens and names come from files. A terminal obeys escape sequences, and a page obeys bidirectional controls; here both
become ordinary characters.
"""

import unicodedata

_NAMED = {"\n": "⏎", "\t": "⇥", "\r": "␍", "\x7f": "␡"}
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}  # controls, formats, surrogates, not assigned, separators


def visible(text: str, longest: int | None = None) -> str:
    """The text with control and format characters spelled out, cut to `longest` characters with an ellipsis.

    >>> visible("a\\x1b[31mb\\u202ec\\n")
    'a␛[31mb⟨U+202E⟩c⏎'
    """
    if longest is not None and len(text) > longest:
        text = text[: longest - 1] + "…"
    return "".join(_shown(character) for character in text)


def visible_lines(text: str) -> str:
    """The text as it is safe to print: line breaks stay, other control and format characters are spelled out.

    >>> visible_lines("one\\n\\x1b[31mtwo")
    'one\\n␛[31mtwo'
    """
    return text if text.isascii() and text.isprintable() else "\n".join(map(visible, text.split("\n")))


def escaped_json(text: str) -> str:
    """JSON text with the hidden characters of its strings as \\u escapes: the same value, safe to print."""
    return "".join(_json_escape(character) if _is_hidden(character) else character for character in text)


def _json_escape(character: str) -> str:
    if character == "\n":  # between the values: in a string it is escaped already
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
