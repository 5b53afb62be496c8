"""The schema of attnorm.json: what a file from elsewhere may hold, checked before any of it is used.

A model folder may come from anywhere. Its keys become file names, its numbers become sizes of parameters, its lists
become work: everything is therefore checked for type and size here, and nothing is opened or allocated before.
"""

import json
import math
import re
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attnorm.models.patch_state import Recipe

FORMAT = 1
MOST_BYTES = 16 * 2**20  # a thousand layers take half a megabyte
MOST_MODULES = 10_000
MOST_HEADS = 4096
MOST_OPTIONS = 64
MOST_ITEMS = 256  # of one list: coefficients, or one number for each head
MOST_DEPTH = 4
MOST_CHARACTERS = 1024
MOST_NUMBER = 2**40

FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.safetensors")  # no folder, no hidden file, no escape sequence
DIGEST = re.compile(r"[0-9a-f]{1,128}")


def read_recipe_file(file: str) -> tuple[dict[str, Recipe], dict[str, str]]:
    """Recipes by module path, and digests by file name.

    Raises:
        ValueError: The file is not JSON, is of another format, or holds what no version of attnorm writes.
    """
    size = Path(file).stat().st_size
    if size > MOST_BYTES:
        raise ValueError(f"{file}: expected at most {MOST_BYTES:,} bytes, got {size:,}. Save the model again")
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"{file} is damaged: it is no JSON ({reason}); save the model again") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(
            f"{file} is not of the format {FORMAT} that this attnorm reads; was it written by a newer one?"
        )
    try:
        modules = _mapping("modules", content.get("modules"), MOST_MODULES)
        weights = _mapping("weights", content.get("weights", {}), MOST_MODULES)
        return {path: _recipe(path, part) for path, part in modules.items()}, dict(map(_digest, weights.items()))
    except _SchemaError as error:
        raise ValueError(
            f"{file} is damaged: {error}. Every module needs normalizer, options and heads; save the model again"
        ) from None


class _SchemaError(Exception):
    """What was expected, and what was found."""

    def __init__(self, where: str, expected: str, found: Any) -> None:
        super().__init__(f"{where}: expected {expected}, got {reprlib.repr(found)}")


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _mapping(where: str, value: Any, most: int) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > most:
        raise _SchemaError(where, f"an object of at most {most:,} entries", value)
    for key in value:
        if len(key) > MOST_CHARACTERS or not key.isprintable():
            raise _SchemaError(where, f"printable keys of at most {MOST_CHARACTERS:,} characters", key)
    return value


def _recipe(path: str, part: Any) -> Recipe:
    where = f"modules[{reprlib.repr(path)}]"
    if not isinstance(part, dict) or not {"normalizer", "options", "heads"} <= part.keys():
        raise _SchemaError(where, "an object with normalizer, options and heads", part)
    name = part["normalizer"]
    if not isinstance(name, str) or not 0 < len(name) <= MOST_CHARACTERS or not name.isprintable():
        raise _SchemaError(f"{where}.normalizer", "the name of a normalizer", name)
    options = _mapping(f"{where}.options", part["options"], MOST_OPTIONS)
    for option, value in options.items():
        _plain_value(f"{where}.options.{option}", value, MOST_DEPTH)
    if (count := options.get("heads")) is not None and not _is_count(count, 1, MOST_HEADS):
        raise _SchemaError(f"{where}.options.heads", f"a whole number from 1 to {MOST_HEADS:,}", count)
    return Recipe(name, options, _heads(f"{where}.heads", part["heads"]))


def _heads(where: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    fits = isinstance(value, list) and len(value) <= MOST_HEADS
    if not fits or not all(_is_count(head, 0, MOST_HEADS - 1) for head in value):
        raise _SchemaError(where, f"null or a list of head numbers below {MOST_HEADS:,}", value)
    return tuple(value)


def _plain_value(where: str, value: Any, depth: int) -> None:
    """Numbers, texts and short lists and objects of them."""
    checks: dict[type, Callable[[Any], bool]] = {
        type(None): lambda _: True,
        bool: lambda _: True,
        int: lambda number: abs(number) <= MOST_NUMBER,
        float: math.isfinite,
        str: lambda text: len(text) <= MOST_CHARACTERS and text.isprintable(),
        list: lambda items: len(items) <= MOST_ITEMS and depth > 0,
        dict: lambda entries: len(entries) <= MOST_OPTIONS and depth > 0,
    }
    if not checks[type(value)](value):
        raise _SchemaError(where, f"a finite value, or at most {MOST_ITEMS} of them, {MOST_DEPTH} levels deep", value)
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _plain_value(where, inner, depth - 1)


def _digest(entry: tuple[str, Any]) -> tuple[str, str]:
    name, digest = entry
    if not FILE_NAME.fullmatch(name):
        raise _SchemaError("weights", "names of .safetensors files in the same folder", name)
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise _SchemaError(f"weights[{name!r}]", "a digest in hexadecimal digits", digest)
    return name, digest


def _is_count(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
