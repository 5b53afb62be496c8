"""Read the normalizers of a saved model: from its weights, or from the two files that earlier versions wrote.

    *.attnorm_recipe.json           bytes of JSON: {"format": 2, "path", "normalizer", "options", "heads"}
    *.attnorm_normalizer.*          values of the normalizer; in adapters of PEFT: *.attnorm_recipe.values.*

Format 1, which is only read:

    attnorm.json          {"format": 1, "modules": {path: {"normalizer", "options", "heads"}},
                           "weights": {file: digest}, "values": SHA-256 digest of attnorm.safetensors or null}
    attnorm.safetensors   values of the normalizers, if they have any

The digests of format 1 tie its files to the weights: another model may have been saved into the folder since.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from attnorm.models.dispatch import NORMALIZER
from attnorm.models.private_names import COMPILED_PREFIX, find_file
from attnorm.models.recipe import (
    MAX_BYTES,
    MAX_MODULES,
    RECIPE,
    Recipe,
    RecipeError,
    parse_json,
    read_recipe,
    validate_mapping,
    validate_recipe,
)

RECIPE_FILE = "attnorm.json"
VALUES_FILE = "attnorm.safetensors"
FORMAT_1 = 1
SAMPLED = 4096  # bytes of each weight in a digest of format 1

FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.(safetensors|bin)")  # no folder, hidden file or escape sequence
DIGEST = re.compile(r"[0-9a-f]{1,128}")
OURS = re.compile(rf"^(?:(.*)\.)?(?:{RECIPE}\.(json)|(?:{NORMALIZER}|{RECIPE}\.values)\.(.+))$")
# What PEFT, torch.compile and data-parallel wrappers put in front of the paths of their model.
WRAPPERS = re.compile(rf"^(?:base_model\.model\.|module\.|{re.escape(COMPILED_PREFIX)})+")


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
    if not groups:
        return [*_format_1(directory, where)]
    if isinstance(digest, str) and values_digest(weights) != digest:
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


def remove_format_1(folder: Path) -> None:
    """Remove the files that an earlier version left in a folder."""
    for name in (RECIPE_FILE, VALUES_FILE):
        (folder / name).unlink(missing_ok=True)


def _format_1(directory: Any, where: Mapping[str, Any]) -> Iterator[SavedNormalizer]:
    file = find_file(directory, RECIPE_FILE, **where)
    if file is None:
        return
    recipes, digests, digest = read_recipe_file(file)
    for name, expected in digests.items():
        weights = find_file(directory, name, **where)
        if weights is None or _file_digest(weights) != expected:
            raise ValueError(
                f"{directory}: expected the weights that {RECIPE_FILE} was written with, got "
                f"{'no' if weights is None else 'another'} {name}. If another model was saved here, delete "
                f"{RECIPE_FILE} and {VALUES_FILE}; if the same model was only converted, delete the entry 'weights' of "
                f"{RECIPE_FILE}."
            )
    values_file = find_file(directory, VALUES_FILE, **where)
    if values_file is None and digest is not None:
        raise ValueError(f"{directory}: expected {VALUES_FILE} beside {RECIPE_FILE}, got none. Copy it there.")
    values = {} if values_file is None else _read_values(values_file, digest)
    for path, recipe in recipes.items():
        module_values = {
            key.removeprefix(f"{path}."): value for key, value in values.items() if key.startswith(f"{path}.")
        }
        yield SavedNormalizer(path, recipe, module_values)


def read_recipe_file(file: Path) -> tuple[dict[str, Recipe], dict[str, str], str | None]:
    """Read attnorm.json: recipes by module path, digests by file name, and the digest of attnorm.safetensors."""
    if (size := file.stat().st_size) > MAX_BYTES:
        raise ValueError(f"{file}: expected at most {MAX_BYTES:,} bytes, got {size:,}.")
    try:
        content = parse_json(file.read_bytes(), file.name)
        if content.get("format") != FORMAT_1:
            raise RecipeError("format", str(FORMAT_1), content.get("format"))
        modules = validate_mapping("modules", content.get("modules"), MAX_MODULES)
        weights = validate_mapping("weights", content.get("weights", {}), MAX_MODULES)
        recipes = {path: validate_recipe(path, part) for path, part in modules.items()}
        digests = dict(map(_digest, weights.items()))
    except RecipeError as error:
        raise ValueError(f"{file} is damaged: {error}. Copy it again or save the model again.") from None
    digest = content.get("values")
    return recipes, digests, digest if isinstance(digest, str) else None


def _digest(entry: tuple[str, Any]) -> tuple[str, str]:
    name, digest = entry
    if not FILE_NAME.fullmatch(name):
        raise RecipeError("weights", "names of .safetensors files in the same folder", name)
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise RecipeError(f"weights[{name!r}]", "a digest in hexadecimal digits", digest)
    return name, digest


def _read_values(file: Path, digest: str | None) -> dict[str, Tensor]:
    actual = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest is not None and actual != digest:
        raise ValueError(f"{file} is damaged: expected the SHA-256 digest {digest}, got {actual}. Copy it again.")
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or incomplete ({error}). Copy it again.") from None


def _file_digest(path: Path) -> str:
    """Return a digest of names, shapes, dtypes and some bytes of every weight in a safetensors file."""
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        if start > path.stat().st_size:
            raise ValueError(f"{path} is damaged: expected a header within the file, got {start - 8:,} bytes")
        header: dict[str, Any] = json.loads(file.read(start - 8))
        digest = hashlib.sha256()
        for name, about in sorted(header.items()):
            if name != "__metadata__":
                first, last = about["data_offsets"]
                file.seek(start + first + max(0, (last - first - SAMPLED) // 2))
                digest.update(f"{name} {about['dtype']} {about['shape']}".encode())
                digest.update(file.read(min(last - first, SAMPLED)))
    return digest.hexdigest()
