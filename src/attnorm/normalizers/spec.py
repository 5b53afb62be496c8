"""A normalizer and its options in one word: topk:k=4, entmax:alpha=1.3:learned=true."""

import json
from typing import Any


def parse_spec(spelling: str) -> tuple[str, dict[str, Any]]:
    """'entmax:alpha=1.3:learned=true' -> "entmax" and its options; what is neither number nor truth is a word.

    Raises:
        ValueError: An option without a value, twice, or one that is not the user's to choose.
    """
    name, *parts = (part.strip() for part in spelling.split(":"))
    options: dict[str, Any] = {}
    for part in parts:
        key, equals, value = (word.strip() for word in part.partition("="))
        if not (key and equals and value) or key in options or key == "heads":
            raise ValueError(
                f"options of a normalizer are written name:key=value:key=value, each key once, `heads` not among them; "
                f"got {part!r} in {spelling!r}"
            )
        options[key] = parse_value(value)
    return name, options


def parse_value(word: str) -> Any:
    """'1.3' -> 1.3, 'true' -> True; what is neither number nor truth is a word."""
    try:
        return json.loads(word.lower())
    except json.JSONDecodeError:
        return word
