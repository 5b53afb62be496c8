"""A text file, plain or packed with xz."""

import lzma
import os
from io import TextIOWrapper
from pathlib import Path


def read_text(path: Path) -> str:
    """What the file holds, without a byte order mark.

    Raises:
        ValueError: No such file, not UTF-8, or not what its name says.
    """
    try:
        with open_text(path) as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); convert it") from None
    except (lzma.LZMAError, EOFError):
        raise ValueError(f"{path} is no xz file, or it is cut off; pack it again") from None
    except OSError as error:
        raise ValueError(f"cannot read the text {path}: {error.strerror}") from None


def text_name(path: Path) -> str:
    """The path as results carry it: a file name may be any bytes, and tables and manifests hold text."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def open_text(path: Path) -> TextIOWrapper:
    """Without a byte order mark; what is wrong with the file shows where it is read."""
    return lzma.open(path, "rt", encoding="utf-8-sig") if path.suffix == ".xz" else path.open(encoding="utf-8-sig")
