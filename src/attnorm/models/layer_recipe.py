"""Layer recipes: one normalizer per layer or group of layers, as a mapping or as a TOML file.

    {"0-3": "softmax", "4-7": "entmax:alpha=1.3"}     layers count from 0; both ends of a range belong to it

Layers that a recipe leaves out, or names `softmax`, keep the softmax of the model. A recipe file has the same mapping
in its table [layers]; `learning_rate` above it is the rate that `attnorm train lm --recipe FILE` uses. Files of
`attnorm search` state the defaults that changed; those of earlier versions are read with the earlier defaults.
"""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from attnorm.files import write_text
from attnorm.normalizers.spec import parse_spec, read_spec, state_spec
from attnorm.text import did_you_mean

SOFTMAX = "softmax"
SUFFIX = ".toml"
SEARCH_NOTE = "attnorm search, trial"  # the first comment of a file that `attnorm search` wrote starts so
MAX_LAYERS = 10_000
RANGE = re.compile(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?")


@dataclass(frozen=True)
class RecipeFile:
    layers: dict[str, str]
    learning_rate: float | None = None


def is_recipe(value: Any) -> bool:
    """Whether a value is a mapping of layers, or the path of a recipe file."""
    return isinstance(value, Mapping | PathLike) or (isinstance(value, str) and value.endswith(SUFFIX))


def layer_groups(recipe: Any) -> dict[tuple[int, ...], Any]:
    """Return the normalizer of each group of layers, which are disjoint.

    recipe: a mapping, or the path of a recipe file.

    Raises:
        ValueError: Not layers, a layer that occurs twice, or no layer at all.
    """
    specs = recipe if isinstance(recipe, Mapping) else read_recipe_file(Path(recipe)).layers
    groups: dict[tuple[int, ...], Any] = {}
    assigned: set[int] = set()
    for key, normalizer in specs.items():
        layers = parse_layers(key)
        if twice := assigned.intersection(layers):
            raise ValueError(f"expected every layer once in a recipe, got layer {min(twice)} again in {key!r}")
        assigned.update(layers)
        groups[layers] = normalizer
    if not groups:
        raise ValueError('expected layers and normalizers, e.g. {"0-3": "softmax", "4-7": "entmax15"}, got none')
    return groups


def parse_layers(key: Any) -> tuple[int, ...]:
    """Parse 4, "4", "0-3" or "0-1,6" to layers.

    Raises:
        ValueError: Something else.
    """
    layers: list[int] = []
    for part in str(key).split(",") if isinstance(key, str | int) and not isinstance(key, bool) else [""]:
        match = RANGE.fullmatch(part)
        first, last = (-1, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
        if not 0 <= first <= last < MAX_LAYERS:
            raise ValueError(f'expected layers such as "3", "0-3" or "0-1,6", got {key!r}')
        layers.extend(range(first, last + 1))
    if len(set(layers)) < len(layers):
        raise ValueError(f"expected every layer once, got {key!r}")
    return tuple(layers)


def specs_by_layer(recipe: Mapping[str, str], count: int) -> list[str]:
    """Return the normalizer of each of `count` layers.

    Raises:
        ValueError: As `layer_groups`, or a layer that a model of so many layers does not have.
    """
    specs = [SOFTMAX] * count
    for layers, spec in layer_groups(recipe).items():
        if max(layers) >= count:
            raise ValueError(f"expected layers from 0 to {count - 1}, got {max(layers)} in a recipe")
        parse_spec(_text(spec))
        for layer in layers:
            specs[layer] = spec
    return specs


def compact(specs: Sequence[str]) -> dict[str, str]:
    """Return the shortest recipe for these layers: adjacent layers with the same normalizer are one range."""
    recipe: dict[str, str] = {}
    start = 0
    for layer in range(1, len(specs) + 1):
        if layer == len(specs) or specs[layer] != specs[start]:
            recipe[str(start) if layer == start + 1 else f"{start}-{layer - 1}"] = specs[start]
            start = layer
    return recipe


def read_recipe_file(path: Path) -> RecipeFile:
    """Read a recipe file.

    Raises:
        ValueError: It cannot be read, or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text)
    except OSError as error:
        raise ValueError(f"cannot read the recipe {path}: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, or not TOML
        raise ValueError(f"{path}: expected a recipe in TOML, got {error}") from None
    keys = ("layers", "learning_rate")
    if unknown := [name for name in content if name not in keys]:
        raise ValueError(f"{path}: unknown key {unknown[0]!r}; {did_you_mean(unknown[0], keys)}")
    layers, rate = content.get("layers"), content.get("learning_rate")
    if not isinstance(layers, dict) or not layers:
        raise ValueError(f'{path}: expected a table [layers] such as "0-3" = "entmax15", got {layers!r}')
    if rate is not None and (not isinstance(rate, int | float) or isinstance(rate, bool) or not rate > 0):
        raise ValueError(f"{path}: expected a learning_rate above 0, got {rate!r}")
    try:
        for spec in layers.values():
            parse_spec(_text(spec))
        layer_groups(layers)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if text.startswith(f"# {SEARCH_NOTE} "):
        layers = {key: read_spec(spec) for key, spec in layers.items()}
    return RecipeFile(layers, None if rate is None else float(rate))


def write_recipe_file(
    path: Path, layers: Mapping[str, str], learning_rate: float | None = None, note: str = ""
) -> None:
    """Write a recipe file; `note` becomes comments at its top."""
    lines = [f"# {line}".rstrip() for line in note.splitlines()]
    if learning_rate is not None:
        lines.append(f"learning_rate = {float(learning_rate)!r}")
    lines += ["[layers]", *(f"{json.dumps(key)} = {json.dumps(state_spec(spec))}" for key, spec in layers.items())]
    write_text(path, "\n".join(lines) + "\n")


def _text(spec: Any) -> str:
    if not isinstance(spec, str) or not spec:
        raise ValueError(f"expected the name of a normalizer, options as in topk:k=4, got {spec!r}")
    return spec
