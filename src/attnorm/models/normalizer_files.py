"""The two files that lie beside the weights of a patched model, and what ties them to those weights.

    attnorm.json          {"format": 1,
                           "modules": {path: {"normalizer": name, "options": {...}, "heads": [...] or null}},
                           "weights": {file: digest},
                           "values": SHA-256 digest of attnorm.safetensors or null}
    attnorm.safetensors   what the normalizers hold, if they hold anything

The digests say which weights the normalizers were saved with: a folder into which somebody saved another model, with a
transformers that knows nothing of attnorm, must not get the normalizers of the old one.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from attnorm.models.patch_state import Recipe
from attnorm.models.recipe_schema import FORMAT, read_recipe_file

RECIPE_FILE = "attnorm.json"
VALUES_FILE = "attnorm.safetensors"
WEIGHTS = "*model*.safetensors"  # of a model, or of adapters
SAMPLED = 4096  # bytes of each weight: training changes all of them, and large models are not read twice


def write(folder: Path, recipes: Mapping[str, Recipe], values: Mapping[str, Tensor]) -> None:
    modules = {path: {"normalizer": r.name, "options": r.options, "heads": r.heads} for path, r in recipes.items()}
    weights = {path.name: weights_digest(path) for path in sorted(folder.glob(WEIGHTS))}
    if values:
        save_file(dict(values), folder / f"{VALUES_FILE}.part", metadata={"format": "pt"})
        (folder / f"{VALUES_FILE}.part").replace(folder / VALUES_FILE)
    else:
        (folder / VALUES_FILE).unlink(missing_ok=True)
    digest = hashlib.sha256((folder / VALUES_FILE).read_bytes()).hexdigest() if values else None
    content = {"format": FORMAT, "modules": modules, "weights": weights, "values": digest}
    replace_file(folder / RECIPE_FILE, json.dumps(content, indent=2).encode())


def remove(folder: Path) -> None:
    """What an earlier model left there."""
    for name in (RECIPE_FILE, VALUES_FILE):
        (folder / name).unlink(missing_ok=True)


def replace_file(path: Path, content: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content)
    part.replace(path)


def read_recipes(file: str) -> tuple[dict[str, Recipe], dict[str, str]]:
    """The recipes by path, and the digests of the weights that they belong to."""
    return read_recipe_file(file)


def values_digest(file: str) -> str | None:
    """The digest that attnorm.json has of attnorm.safetensors; None in files of earlier versions."""
    found = json.loads(Path(file).read_text(encoding="utf-8")).get("values")
    return found if isinstance(found, str) else None


def read_values(file: str, digest: str | None = None) -> dict[str, Tensor]:
    """What the normalizers hold; raises ValueError where the file has another digest than the given one."""
    found = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    if digest is not None and found != digest:
        raise ValueError(
            f"{file} is damaged: expected the SHA-256 digest {digest}, found {found}. Copy it again or save the model "
            "again"
        )
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or cut short ({error}); save the model again") from None


def check_weights(directory: str, digests: Mapping[str, str], files: Iterable[tuple[str, str | None]]) -> None:
    """files: where the weights are now, by the names that the digests have; None where they are gone."""
    for name, file in files:
        if file is None or weights_digest(Path(file)) != digests[name]:
            what = "is gone" if file is None else "holds others"
            raise ValueError(
                f"{directory}: {RECIPE_FILE} was written with other weights ({name} {what}), so its normalizers may "
                f"not be this model's. If another model was saved here, delete {RECIPE_FILE} and {VALUES_FILE}; if the "
                f"same model was only converted, delete the entry 'weights' of {RECIPE_FILE}"
            )


def weights_digest(path: Path) -> str:
    """Of names, shapes, dtypes and some bytes of every weight in a safetensors file."""
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
