"""The end of an "unknown name" message: the closest known name, or all of them."""

import difflib
from collections.abc import Iterable
from typing import Any


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """Return "did you mean 'x'?" for the closest known name, or the list of known names if none is close."""
    names = list(known)
    close = difflib.get_close_matches(str(name), names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(map(repr, names))}"
