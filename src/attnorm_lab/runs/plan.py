"""Plans: a TOML file that names a command and the values to combine; every combination is one item.

    command = "train lm"                  analyze, train lm, train retrieval or reproduce
    [grid]                                lists; every combination of their entries is one item
    normalizer = ["softmax", "entmax15"]
    seed = [0, 1, 2]
    [options]                             values that all items share
    texts = ["book.txt"]
    [resources]                           of one item: cpus, gpus, memory_gb

An item is identified by the hash of its command and values. Files count by their content, so a moved file is the same
item and a changed file is another one. Relative paths start at the folder of the plan.
"""

import itertools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from attnorm.models.layer_normalizer import SUFFIX, read_recipe_file
from attnorm.provenance import file_hash, settings_hash
from attnorm.text import did_you_mean
from attnorm_lab.runs.tasks import TASKS, Task

MAX_ITEMS = 100_000
ID_LENGTH = 16
TABLES = ("grid", "options", "resources", "slurm")
MODEL_FILES = ("*config.json", "*.safetensors", "*.bin", "tokenizer*", "vocab*", "merges.txt")


@dataclass(frozen=True)
class Resources:
    """Resources that one item needs. memory_gb None: unknown."""

    cpus: float = 1
    gpus: float = 0
    memory_gb: float | None = None

    @property
    def threads(self) -> int:
        return max(1, int(self.cpus))


@dataclass(frozen=True)
class Item:
    """One run: a command with its values. `varied` has the values of the grid, for labels and tables."""

    id: str
    command: str
    values: dict[str, Any]
    varied: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return ", ".join(f"{name} {format_value(value)}" for name, value in self.varied.items()) or self.command

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Plan:
    command: str
    items: tuple[Item, ...]
    resources: Resources
    slurm: dict[str, Any]
    content: dict[str, Any]
    """Grid and options as they were written, for messages about another plan."""


def read_plan(path: Path) -> Plan:
    """Read and check a plan.

    Raises:
        ValueError: Not a plan, an unknown key, a value of the wrong kind, or a file that cannot be read.
    """
    content = read_toml(path)
    require_known(path.name, content, ("command", *TABLES))
    command = content.get("command")
    if command not in TASKS:
        hint = did_you_mean(command, TASKS) if isinstance(command, str) else f"known are {', '.join(TASKS)}"
        raise ValueError(f"{path.name}: expected a command, got {command!r}; {hint}")
    for table in TABLES:
        if not isinstance(content.get(table, {}), dict):
            raise ValueError(f"{path.name}: expected a table [{table}], got {content[table]!r}")
    task, grid, options = TASKS[command], content.get("grid", {}), content.get("options", {})
    require_known(f"{path.name}, [grid]", grid, task.parameters)
    require_known(f"{path.name}, [options]", options, task.parameters)
    try:
        items = expand(task, grid, options, path.parent)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None
    resources = read_resources(path.name, content.get("resources", {}))
    return Plan(command, items, resources, content.get("slurm", {}), {"grid": grid, "options": options})


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        ValueError: It cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the plan {path}: {error.strerror}. Check the path.") from None
    except ValueError as error:
        raise ValueError(f"{path}: expected a plan in TOML, got an error: {error}.") from None


def require_known(where: str, table: Mapping[str, Any], known: Any) -> None:
    """Raise ValueError for the first unknown key, with a suggestion."""
    for name in table:
        if name not in known:
            raise ValueError(f"{where}: unknown key {name!r}; {did_you_mean(name, known)}")


def expand(task: Task, grid: Mapping[str, Any], options: Mapping[str, Any], folder: Path) -> tuple[Item, ...]:
    """Return one item per combination of the grid; items with the same model are neighbors.

    Raises:
        ValueError: A wrong value, a value twice, or too many combinations.
    """
    for name, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"expected a list of values for grid.{name}, got {values!r}")
        if name in options:
            raise ValueError(f"expected {name} in [grid] or in [options], got it in both. Remove one.")
    if (count := math.prod(len(values) for values in grid.values())) > MAX_ITEMS:
        raise ValueError(f"expected at most {MAX_ITEMS:,} items, got {count:,}. Split the plan.")
    names = sorted(grid, key=lambda name: name != "model")
    items: dict[str, Item] = {}
    for combination in itertools.product(*(grid[name] for name in names)):
        varied = dict(zip(names, combination, strict=True))
        item = make_item(task, {**options, **varied}, {name: varied[name] for name in grid}, folder)
        if item.id in items:
            raise ValueError(f"expected every combination once, got {item.label} twice. Remove duplicate values.")
        items[item.id] = item
    return tuple(items.values())


def make_item(task: Task, values: Mapping[str, Any], varied: Mapping[str, Any], folder: Path) -> Item:
    """Check the values of one item and identify it.

    Raises:
        ValueError: A value is missing or wrong.
    """
    if missing := [name for name in task.required if name not in values]:
        raise ValueError(f"expected a value for {missing[0]} in [grid] or [options], got none. Add it.")
    read, identity = {}, {}
    for name, value in values.items():
        read[name], identity[name] = _read_value(name, value, task.parameters[name], folder)
    task.check(read)
    key = settings_hash({"command": task.command, "values": identity})[:ID_LENGTH]
    return Item(key, task.command, read, {name: format_value(value) for name, value in varied.items()})


def _read_value(name: str, value: Any, kind: str, folder: Path) -> tuple[Any, Any]:
    """Return the value for the command, and what identifies it."""
    if kind == "model" and isinstance(value, str):
        local = folder / Path(value).expanduser()
        return (str(local.resolve()), _model_identity(local)) if local.exists() else (value, value)
    if kind == "file" and isinstance(value, str):
        path = (folder / Path(value).expanduser()).resolve()
        if not path.is_file():
            raise ValueError(f"expected a file for {name}, got {value!r}, which is not in {folder.resolve()}")
        return str(path), {"name": path.name, "sha256": file_hash(path)}
    if kind == "files" and isinstance(value, list) and value:
        parts = [_read_value(name, part, "file", folder) for part in value]
        return [path for path, _ in parts], [identity for _, identity in parts]
    if kind == "normalizer" and isinstance(value, str) and value.endswith(SUFFIX):
        layers = read_recipe_file(folder / Path(value).expanduser()).layers
        return layers, layers
    if not KINDS[kind][1](value):
        raise ValueError(f"expected {KINDS[kind][0]} for {name}, got {value!r}")
    if kind == "number":
        value = float(value)
    return value, value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list_of(kind: Any) -> Any:
    return lambda value: isinstance(value, list) and bool(value) and all(map(kind, value))


KINDS: dict[str, tuple[str, Any]] = {
    "model": ("the name or folder of a model", lambda value: isinstance(value, str)),
    "file": ("the path of a file", lambda value: False),
    "files": ("a list of paths", lambda value: False),
    "normalizer": (
        "a normalizer such as topk:k=4, a recipe file or a recipe",
        lambda value: isinstance(value, str) or (isinstance(value, dict) and bool(value)),
    ),
    "integer": ("an integer", _is_integer),
    "number": ("a number", _is_number),
    "word": ("a string", lambda value: isinstance(value, str)),
    "switch": ("true or false", lambda value: isinstance(value, bool)),
    "integers": ("a list of integers", _is_list_of(_is_integer)),
    "words": ("a list of strings", _is_list_of(lambda value: isinstance(value, str))),
    "integer or word": ("an integer or a word", lambda value: _is_integer(value) or isinstance(value, str)),
    "table": ("a table", lambda value: isinstance(value, dict)),
}


def _model_identity(path: Path) -> dict[str, Any]:
    """Identify a local model by what is loaded from it: a model that was trained again has files of the same sizes."""
    files = [path] if path.is_file() else sorted({file for name in MODEL_FILES for file in path.glob(name)})
    stated = ((file, file.stat()) for file in files if file.is_file())
    return {
        "name": path.name,
        "files": {file.name: _hash_once(file, at.st_size, at.st_mtime_ns) for file, at in stated},
    }


@cache
def _hash_once(path: Path, size: int, modified: int) -> str:
    """Hash the file once per plan, not once per item."""
    return file_hash(path)


def read_resources(where: str, table: Mapping[str, Any]) -> Resources:
    """Read the table [resources].

    Raises:
        ValueError: An unknown key, or not a number in its range.
    """
    require_known(f"{where}, [resources]", table, Resources.__dataclass_fields__)
    for name, value in table.items():
        if not _is_number(value) or value < 0 or (value == 0 and name != "gpus"):
            raise ValueError(f"{where}: expected a number above 0 for resources.{name}, got {value!r}")
    return Resources(**table)


def format_value(value: Any) -> Any:
    """A value of the grid as a cell of a table: files without their folders, recipes as text."""
    if isinstance(value, dict):
        return " ".join(f"{key}:{element}" for key, element in value.items())
    if isinstance(value, list):
        return ", ".join(str(format_value(element)) for element in value)
    return (
        Path(value).name
        if isinstance(value, str) and "/" in value and value.endswith((".txt", ".xz", SUFFIX))
        else value
    )
