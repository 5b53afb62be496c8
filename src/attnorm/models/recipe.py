"""The recipe of a normalizer (name, options, heads): written into a state dict, and read back from a saved model.

    *.attnorm_recipe.json           bytes of JSON: {"format": 2, "path", "normalizer", "options", "heads"}
    *.attnorm_normalizer.*          values of the normalizer; in adapters of PEFT: *.attnorm_recipe.values.*

A state dict may come from an untrusted source. What we read from it becomes names of normalizers, sizes of parameters
and lists to iterate over. Therefore this file checks type and size of everything before it is used.
"""

import hashlib
import json
import math
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from attnorm.models.dispatch import NORMALIZER
from attnorm.models.patched_attention import register
from attnorm.models.private_names import COMPILED_PREFIX, find_file

RECIPE = "attnorm_recipe"  # name of the submodule that holds it
FORMAT = 2  # version of the saved recipes

MAX_BYTES = 16 * 2**20  # one layer takes half a kilobyte
MAX_HEADS = 4096
MAX_OPTIONS = 64
MAX_ITEMS = 256  # of one list: coefficients, or one number for each head
MAX_DEPTH = 4
MAX_CHARACTERS = 1024
MAX_NUMBER = 2**40

FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.(safetensors|bin)")  # no folder, hidden file or escape sequence
OURS = re.compile(rf"^(?:(.*)\.)?(?:{RECIPE}\.(json)|(?:{NORMALIZER}|{RECIPE}\.values)\.(.+))$")
# What PEFT, torch.compile and data-parallel wrappers put in front of the paths of their model.
WRAPPERS = re.compile(rf"^(?:base_model\.model\.|module\.|{re.escape(COMPILED_PREFIX)})+")


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


@dataclass(frozen=True)
class SavedNormalizer:
    """The normalizer of one attention module, as it was saved."""

    path: str
    recipe: Recipe
    values: Mapping[str, Tensor]


def read_normalizers(
    directory: Any, *, variant: str | None = None, pickles: bool = False, digest: Any = None, **where: Any
) -> list[SavedNormalizer]:
    """Return the normalizers of a folder or hub repository; none for an unpatched model.

    digest: saved result of `values_digest`, if any. pickles: also read weights that are not safetensors.
    """
    weights = read_weights(directory, OURS, variant=variant, pickles=pickles, **where)
    groups = _groups(weights)
    if groups and isinstance(digest, str) and values_digest(weights) != digest:
        raise ValueError(
            f"{directory}: the normalizers' weights are damaged: expected the SHA-256 digest {digest}, got "
            f"{values_digest(weights)}. Copy the weights again or save the model again."
        )
    normalizers = []
    for content, values in groups:
        try:
            path, recipe = read_recipe(content)
        except RecipeError as error:
            raise ValueError(
                f"{directory}: the recipe of a normalizer is damaged ({error}). Save the model again."
            ) from None
        normalizers.append(SavedNormalizer(WRAPPERS.sub("", path), recipe, values))
    return normalizers


def read_weights(
    directory: Any, pattern: re.Pattern[str], *, variant: str | None = None, pickles: bool = False, **where: Any
) -> dict[str, Tensor]:
    """Return the weights of a folder or hub repository whose names match; other weights are not read."""
    weights: dict[str, Tensor] = {}
    for file in _weight_files(directory, pattern, variant, pickles, where):
        weights |= _tensors_of(file, pattern)
    return weights


def values_digest(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the recipes and values in a state dict; it does not depend on module names."""
    digest = hashlib.sha256()
    for content, values in sorted(_groups(state), key=lambda group: group[0].tolist()):
        for key, value in (("", content), *sorted(values.items())):
            plain = value.detach().cpu().contiguous()
            digest.update(f"{key} {plain.dtype} {tuple(plain.shape)}".encode())
            digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _groups(state: Mapping[str, Tensor]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Return recipe and values of each attention module in a state dict."""
    recipes: dict[str, Tensor] = {}
    values: dict[str, dict[str, Tensor]] = {}
    for key, tensor in state.items():
        if (match := OURS.match(key)) is not None:
            module, recipe, name = match.groups()
            if recipe is not None:
                recipes[module or ""] = tensor
            else:
                values.setdefault(module or "", {})[name] = tensor
    return [(recipe, values.get(module, {})) for module, recipe in recipes.items()]


def _weight_files(
    directory: Any, pattern: re.Pattern[str], variant: str | None, pickles: bool, where: Mapping[str, Any]
) -> Iterator[Path]:
    """Yield the files that can hold matching weights; the index of a sharded model names them."""
    named = f".{variant}" if variant else ""
    kinds = [("model", "safetensors"), ("adapter_model", "safetensors")]
    for stem, suffix in [*kinds, *([("pytorch_model", "bin"), ("adapter_model", "bin")] if pickles else [])]:
        index = find_file(directory, f"{stem}.{suffix}.index{named}.json", **where)
        names = {f"{stem}{named}.{suffix}"} if index is None else _files_in_index(index, pattern)
        yield from (file for name in sorted(names) if (file := find_file(directory, name, **where)) is not None)


def _files_in_index(index: Path, pattern: re.Pattern[str]) -> set[str]:
    weights = json.loads(index.read_text(encoding="utf-8")).get("weight_map") or {}
    names = {file for key, file in weights.items() if pattern.search(key)}
    if bad := [name for name in names if not isinstance(name, str) or not FILE_NAME.fullmatch(name)]:
        raise ValueError(f"{index}: expected names of weight files in the same folder, got {bad[0]!r}")
    return names


def _tensors_of(file: Path, pattern: re.Pattern[str]) -> dict[str, Tensor]:
    """Return the weights of a file whose names match; other weights are not read."""
    if file.suffix == ".bin":
        state = torch.load(file, map_location="cpu", weights_only=True)
        return {key: value for key, value in state.items() if pattern.search(key)}
    try:
        with safe_open(file, framework="pt") as weights:
            keys = [key for key in weights.keys() if pattern.search(key)]  # noqa: SIM118 - not a mapping
            for key in keys:
                if key.endswith(f"{RECIPE}.json") and math.prod(weights.get_slice(key).get_shape()) > MAX_BYTES:
                    raise ValueError(f"{file}: expected at most {MAX_BYTES:,} bytes in {key}. Save the model again.")
            return {key: weights.get_tensor(key) for key in keys}
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or incomplete ({error}). Save the model again.") from None


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
    return Recipe(name, dict(options), _validate_heads(f"{where}.heads", part["heads"]))


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
