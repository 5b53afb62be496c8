"""Write a patched model as earlier versions saved it: ordinary files, attnorm.json and attnorm.safetensors."""

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from attnorm.models.patch import unpatch
from attnorm.models.patch_state import normalizer_of, patched_modules, recipe_of
from attnorm.models.recipe import _file_digest


def save_format_1(model: Any, folder: Path) -> None:
    """The model is not patched any more afterwards."""
    modules, values = {}, {}
    for path, module in patched_modules(model).items():
        inner = path.removeprefix(f"{model.base_model_prefix}.")
        modules[inner] = recipe_of(module).to_json()
        for key, value in normalizer_of(module).state_dict().items():
            values[f"{inner}.{key}"] = value.detach().clone()
    unpatch(model)
    model.save_pretrained(folder)
    digest = None
    if values:
        save_file(values, folder / "attnorm.safetensors", metadata={"format": "pt"})
        digest = hashlib.sha256((folder / "attnorm.safetensors").read_bytes()).hexdigest()
    weights = {path.name: _file_digest(path) for path in sorted(folder.glob("*model*.safetensors"))}
    content = {"format": 1, "modules": modules, "weights": weights, "values": digest}
    (folder / "attnorm.json").write_text(json.dumps(content))
