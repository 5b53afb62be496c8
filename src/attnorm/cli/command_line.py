"""The call of this program, for the records it leaves."""

import shlex
import sys
from pathlib import Path


def command_line() -> str:
    """The call as a reader may repeat it: files by their names alone, whatever folder they lay in."""
    words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    return shlex.join(["attnorm", *words])
