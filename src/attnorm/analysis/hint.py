"""What to say after "unknown name": the nearest known one, or all of them."""

import difflib
from collections.abc import Iterable
from typing import Any


def hint(name: Any, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(str(name), names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(map(repr, names))}"
