"""Text files, plain or packed with xz, read in pieces that may be tokenized apart."""

import hashlib
import lzma
from collections.abc import Iterator
from pathlib import Path

from attnorm.models.text_files import open_text

PIECE = 2**18  # characters


def pieces(path: Path, size: int = PIECE) -> Iterator[str]:
    """The text in order, cut after line ends: joined they are the whole of it.

    A cut after the last newline of a run changes no token, because the tokenizer never joins a newline with what
    follows it. Only a text without newlines is cut at a space, or anywhere where it has none.

    Raises:
        ValueError: No such file, not UTF-8, or not what its name says.
    """
    _check_file(path)
    rest = ""
    try:
        with open_text(path) as file:
            while block := file.read(size):
                rest += block
                cut = _cut(rest)
                if cut:
                    yield rest[:cut]
                    rest = rest[cut:]
        if rest:
            yield rest
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason}); convert it first, e.g. with iconv") from None
    except (lzma.LZMAError, EOFError):
        raise ValueError(f"{path} is no xz file, or it is cut off; pack it again, or name a plain .txt") from None


def fingerprint(path: Path) -> str:
    """SHA-256 of the file's bytes.

    Raises:
        ValueError: No such file.
    """
    _check_file(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name the text files in it")
    if not path.is_file():
        raise ValueError(f"no such text file: {path}")


def _cut(text: str) -> int:
    """Where the text may end for now; 0 where it may not.

    The last run of newlines is no place if it ends the text: more of them may follow.
    """
    newline = text.rstrip("\n").rfind("\n") + 1
    if newline:
        return newline
    if len(text) < 4 * PIECE:
        return 0
    return max(text.rfind(" "), 0) or len(text)
