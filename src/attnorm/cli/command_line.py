"""The call of this program, for the records it leaves."""

import shlex
import sys
from pathlib import Path


def command_line() -> str:
    """The call as a reader may repeat it: files by their names alone, whatever folder they lay in."""
    return shlex.join(["attnorm", *map(_without_folder, sys.argv[1:])])


def _without_folder(word: str) -> str:
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return f"{option}{equals}{Path(value).name}" if _is_path(value) else word


def _is_path(word: str) -> bool:
    """A model on the hub has a slash in its name as well, and a note may say anything."""
    if word.startswith(("/", "./", "../", "~")):
        return True
    try:
        return "/" in word and Path(word).parent.is_dir()
    except (OSError, ValueError):  # too long for a name, or a null byte
        return False
