"""The recipe of a normalizer (name, options, heads), and how it is written into a state dict and read back.

A state dict may come from an untrusted source. What we read from it becomes names of normalizers, sizes of parameters
and lists to iterate over. Therefore this file checks type and size of everything before it is used.
"""

import json
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attnorm.models.patched_attention import register
from attnorm.normalizers.spec import read_options

RECIPE = "attnorm_recipe"  # name of the submodule that holds it
FORMAT = 2  # version of the saved recipes; version 1 was the file attnorm.json

MAX_BYTES = 16 * 2**20  # a thousand layers took half a megabyte in attnorm.json
MAX_MODULES = 10_000
MAX_HEADS = 4096
MAX_OPTIONS = 64
MAX_ITEMS = 256  # of one list: coefficients, or one number for each head
MAX_DEPTH = 4
MAX_CHARACTERS = 1024
MAX_NUMBER = 2**40


@dataclass(frozen=True)
class Recipe:
    """How to build the normalizer of an attention module; `name` is None if the user passed an object."""

    name: str | None
    options: dict[str, Any] = field(default_factory=dict)
    heads: tuple[int, ...] | None = None  # the heads that it applies to; None: all

    def to_json(self) -> dict[str, Any]:
        """Return plain values; `options` is None if JSON cannot represent them."""
        try:
            options = json.loads(json.dumps(self.options, allow_nan=False))
        except (TypeError, ValueError):
            options = None
        return {"normalizer": self.name, "options": options, "heads": None if self.heads is None else [*self.heads]}


class SavedRecipe(nn.Module):
    """A submodule that writes a recipe into the state dict of every model that contains it, as bytes of JSON.

    The JSON also holds the path of the attention module within the saved model, because transformers renames weights of
    some models when it saves them. Loading a state dict does not change the recipe.
    """

    json: Tensor

    def __init__(self, recipe: Recipe, configs: tuple[Any, ...] = ()) -> None:
        nn.Module.__init__(self)
        self.recipe = recipe
        self.configs = configs  # model configs that list this recipe
        self.register_buffer("json", self._encode_recipe(""))
        self.register_state_dict_pre_hook(_write_path)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_keep_recipe)  # type: ignore[no-untyped-call]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickle, and register our attention function: this process may not have patched a model."""
        nn.Module.__setstate__(self, state)
        register()

    def _encode_recipe(self, path: str) -> Tensor:
        content = json.dumps({"format": FORMAT, "path": path, **self.recipe.to_json()})
        return torch.frombuffer(bytearray(content.encode()), dtype=torch.uint8)


def _write_path(saved: Any, prefix: str, keep_vars: bool) -> None:
    saved.json = saved._encode_recipe(prefix.removesuffix(f"{RECIPE}.").removesuffix(".")).to(saved.json.device)


def _keep_recipe(saved: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    state_dict[f"{prefix}json"] = saved.json


class RecipeError(ValueError):
    """Raised for content that no version of attnorm writes."""

    def __init__(self, where: str, expected: str, found: Any) -> None:
        super().__init__(f"{where}: expected {expected}, got {reprlib.repr(found)}")


def read_recipe(content: Tensor) -> tuple[str, Recipe]:
    """Return path and recipe from the bytes that a SavedRecipe wrote.

    Raises:
        RecipeError: The content is invalid, or larger than any normalizer needs.
    """
    if content.dtype != torch.uint8 or content.dim() != 1:
        raise RecipeError("recipe", "bytes of JSON", content.dtype)
    fields = parse_json(content.numpy().tobytes(), "recipe")
    if fields.get("format") != FORMAT:
        raise RecipeError("format", f"{FORMAT}; was it written by a newer attnorm?", fields.get("format"))
    path = fields.get("path")
    if not isinstance(path, str) or len(path) > MAX_CHARACTERS or not path.isprintable():
        raise RecipeError("path", "the path of an attention module", path)
    if fields.get("normalizer", "") is None:
        raise RecipeError(path, "the name of a normalizer; one that was given as an object cannot be restored", None)
    return path, validate_recipe(path, fields)


def parse_json(content: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object; raise RecipeError for anything else."""
    if len(content) > MAX_BYTES:
        raise RecipeError(where, f"at most {MAX_BYTES:,} bytes", len(content))
    try:
        parsed = json.loads(content.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RecipeError(where, "JSON", type(error).__name__) from None
    if not isinstance(parsed, dict):
        raise RecipeError(where, "an object of JSON", parsed)
    return parsed


def validate_recipe(path: str, part: Any) -> Recipe:
    where = f"modules[{reprlib.repr(path)}]"
    if not isinstance(part, dict) or not {"normalizer", "options", "heads"} <= part.keys():
        raise RecipeError(where, "an object with normalizer, options and heads", part)
    name = part["normalizer"]
    if not isinstance(name, str) or not 0 < len(name) <= MAX_CHARACTERS or not name.isprintable():
        raise RecipeError(f"{where}.normalizer", "the name of a normalizer", name)
    options = validate_mapping(f"{where}.options", part["options"], MAX_OPTIONS)
    for option, value in options.items():
        _validate_value(f"{where}.options.{option}", value, MAX_DEPTH)
    if (count := options.get("heads")) is not None and not _is_count(count, 1, MAX_HEADS):
        raise RecipeError(f"{where}.options.heads", f"a whole number from 1 to {MAX_HEADS:,}", count)
    return Recipe(name, read_options(name, options), _validate_heads(f"{where}.heads", part["heads"]))


def validate_mapping(where: str, value: Any, most: int) -> Mapping[str, Any]:
    if not isinstance(value, dict) or len(value) > most:
        raise RecipeError(where, f"an object of at most {most:,} entries", value)
    for key in value:
        if len(key) > MAX_CHARACTERS or not key.isprintable():
            raise RecipeError(where, f"printable keys of at most {MAX_CHARACTERS:,} characters", key)
    return value


def _validate_heads(where: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    fits = isinstance(value, list) and len(value) <= MAX_HEADS
    if not fits or not all(_is_count(head, 0, MAX_HEADS - 1) for head in value):
        raise RecipeError(where, f"null or a list of head indices below {MAX_HEADS:,}", value)
    return tuple(value)


def _validate_value(where: str, value: Any, depth: int) -> None:
    """Raise RecipeError unless the value is a number, a text, None, or a short list or object of these."""
    checks: dict[type, Callable[[Any], bool]] = {
        type(None): lambda _: True,
        bool: lambda _: True,
        int: lambda number: abs(number) <= MAX_NUMBER,
        float: math.isfinite,
        str: lambda text: len(text) <= MAX_CHARACTERS and text.isprintable(),
        list: lambda items: len(items) <= MAX_ITEMS and depth > 0,
        dict: lambda entries: len(entries) <= MAX_OPTIONS and depth > 0,
    }
    if not checks[type(value)](value):
        raise RecipeError(where, f"a finite value, or at most {MAX_ITEMS} of them, {MAX_DEPTH} levels deep", value)
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _validate_value(where, inner, depth - 1)


def _is_count(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _no_constant(name: str) -> Any:
    raise ValueError(f"expected a finite number, got {name}")
