"""Normalizer specifications: a name with options, such as topk:k=4 or entmax:alpha=1.3:learned=true.

An option may name a part with options of its own, joined by +, as in composed:scale=ssmax:map=kneemax+knee=0.25.
"""

import json
from collections.abc import Mapping
from typing import Any


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """Parse 'entmax:alpha=1.3:learned=true' into "entmax" and its options.

    Raises:
        ValueError: An option without a value, given twice, or `heads`, which the model decides.
    """
    name, *parts = (part.strip() for part in spec.split(":"))
    options: dict[str, Any] = {}
    for part in parts:
        key, equals, value = (word.strip() for word in part.partition("="))
        if key == "heads":
            raise ValueError(
                f"expected no heads in {spec!r}: their number comes from the model. Remove {part!r}. Without a model, "
                f"write attnorm.get({name!r}, heads={value})."
            )
        if not (key and equals and value) or key in options:
            raise ValueError(f"expected options as name:key=value:key=value, each key once, got {part!r} in {spec!r}.")
        options[key] = parse_value(value)
    return name, options


def with_options(spec: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name of a specification, and its options together with others.

    Raises:
        ValueError: As `parse_spec`, or an option in both.
    """
    name, written = parse_spec(spec)
    if twice := [option for option in written if option in options]:
        raise ValueError(f"expected {twice[0]} once, got it in {spec!r} and as {twice[0]}=. Remove one of them.")
    return name, {**written, **options}


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
