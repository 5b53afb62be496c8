"""Normalizer specifications: a name with options, such as topk:k=4 or entmax:alpha=1.3:learned=true.

An option may name a part with options of its own, joined by +, as in composed:scale=ssmax:map=kneemax+knee=0.25.

Saved files must keep their meaning when a default changes. `kneemax` without options has its knee at the weight 1/4. In
earlier versions the knee was at 1/n. Therefore everything that is saved (models, settings of runs, results) states
`knee` or `share`. A saved `kneemax` with neither comes from an earlier version and means share=1.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from attnorm.normalizers.kneemax import DEFAULT_KNEE


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


@dataclass(frozen=True)
class ChangedDefault:
    """A normalizer whose default options changed."""

    stated_by: tuple[str, ...]  # a record with one of these options does not depend on the default
    now: Mapping[str, Any]
    before: Mapping[str, Any]


CHANGED = {"kneemax": ChangedDefault(("knee", "share"), now={"knee": DEFAULT_KNEE}, before={"share": 1})}
PART_OPTIONS = {  # normalizer -> its option that names another one, such as kneemax+knee=0.1
    "composed": "map",
    "tempered": "map",
    "alibi": "map",
    "laser": "normalizer",
    "forget": "normalizer",
}


def state_options(name: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with today's defaults where they changed, for what is written."""
    return _complete_options(name, options, lambda changed: changed.now)


def read_options(name: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a record with the earlier defaults where it states none."""
    return _complete_options(name, options, lambda changed: changed.before)


def state_spec(spec: str) -> str:
    """Apply `state_options` to a specification: kneemax -> kneemax:knee=0.25."""
    return _complete_spec(spec, ":", lambda changed: changed.now)


def read_spec(spec: str) -> str:
    """Apply `read_options` to a specification: kneemax -> kneemax:share=1."""
    return _complete_spec(spec, ":", lambda changed: changed.before)


def key_spec(spec: str) -> str:
    """Return how earlier versions wrote a specification, for keys of runs: kneemax:share=1 -> kneemax."""
    name = spec.partition(":")[0]
    return name if name in CHANGED and spec == read_spec(name) else spec


def read_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return recorded settings, or a result with its settings, with the earlier defaults where they state none.

    Read are the entries `normalizer` (a specification, or a name with `normalizer_options`), `recipe`, `others` of
    `tests`, and `settings`.
    """
    completed = dict(settings)
    if "normalizer_options" in completed:
        completed["normalizer_options"] = read_options(completed.get("normalizer"), completed["normalizer_options"])
    elif isinstance(completed.get("normalizer"), str):
        completed["normalizer"] = read_spec(completed["normalizer"])
    if isinstance(completed.get("recipe"), dict):  # of layers; a recipe of train retrieval has numbers
        completed["recipe"] = {
            key: read_spec(value) if isinstance(value, str) else value for key, value in completed["recipe"].items()
        }
    if isinstance(completed.get("tests"), dict) and "others" in completed["tests"]:
        completed["tests"] = {**completed["tests"], "others": [*map(read_spec, completed["tests"]["others"])]}
    if isinstance(completed.get("settings"), dict):
        completed["settings"] = read_settings(completed["settings"])
    return completed


Defaults = Callable[[ChangedDefault], Mapping[str, Any]]


def _complete_options(name: str | None, options: Mapping[str, Any], defaults: Defaults) -> dict[str, Any]:
    complete = dict(options)
    part = PART_OPTIONS.get(name or "", "")
    if isinstance(options.get(part), str):
        complete[part] = _complete_spec(options[part], "+", defaults)
    changed = CHANGED.get(name or "")
    if changed is not None and all(options.get(option) is None for option in changed.stated_by):
        complete |= defaults(changed)
    return complete


def _complete_spec(spec: str, between: str, defaults: Defaults) -> str:
    """Add the defaults to a specification. Invalid text is returned unchanged; its user raises the error."""
    name, *parts = spec.split(between)
    changed = CHANGED.get(name.strip())
    if changed is not None:
        parts = [part for part in parts if not _is_null(part, changed)]
        if not any(part.partition("=")[0].strip() in changed.stated_by for part in parts):
            parts += [f"{option}={value}" for option, value in defaults(changed).items()]
    if option := PART_OPTIONS.get(name.strip()):
        parts = [_complete_part(part, option, defaults) for part in parts]
    return between.join([name, *parts])


def _is_null(part: str, changed: ChangedDefault) -> bool:
    """Whether it is knee=null, which states nothing."""
    option, _, value = (word.strip() for word in part.partition("="))
    return option in changed.stated_by and value.lower() == "null"


def _complete_part(part: str, option: str, defaults: Defaults) -> str:
    key, equals, value = part.partition("=")
    return f"{key}={_complete_spec(value, '+', defaults)}" if equals and key.strip() == option else part
