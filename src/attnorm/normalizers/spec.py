"""Normalizer specifications: a name with options, such as topk:k=4 or entmax:alpha=1.3:learned=true.

An option may name a part with options of its own, joined by +, as in composed:scale=ssmax:map=kneemax+knee=0.25.
"""

import json
from typing import Any


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """Parse 'entmax:alpha=1.3:learned=true' into "entmax" and its options.

    Raises:
        ValueError: An option without a value, given twice, or `heads`, which is set by the caller.
    """
    name, *parts = (part.strip() for part in spec.split(":"))
    options: dict[str, Any] = {}
    for part in parts:
        key, equals, value = (word.strip() for word in part.partition("="))
        if not (key and equals and value) or key in options or key == "heads":
            raise ValueError(
                f"options of a normalizer are written name:key=value:key=value, each key once, `heads` not among them; "
                f"got {part!r} in {spec!r}"
            )
        options[key] = parse_value(value)
    return name, options


def parse_part(spec: str) -> tuple[str, dict[str, Any]]:
    """Parse 'kneemax+knee=0.25', the name of a part of a composition with its options.

    Raises:
        ValueError: An option without a value, given twice, or `heads`, which the caller sets.
    """
    try:
        return parse_spec(spec.replace("+", ":"))
    except ValueError:
        raise ValueError(f"expected a part as name+key=value+key=value, each key once, got {spec!r}.") from None


def parse_value(word: str) -> Any:
    """Parse '1.3' to 1.3 and 'true' to True; anything else is a string."""
    try:
        return json.loads(word.lower())
    except json.JSONDecodeError:
        return word
