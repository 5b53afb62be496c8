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


def _shown(character: str) -> str:
    if character in _NAMED:
        return _NAMED[character]
    if character < " ":
        return chr(0x2400 + ord(character))
    if unicodedata.category(character) in _HIDDEN:
        return f"⟨U+{ord(character):04X}⟩"
    return character
