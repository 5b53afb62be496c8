"""The page about the architecture names packages, files, functions and classes that exist."""

import ast
import re
import tomllib
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("attnorm", "attnorm_lab")
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PAGE = re.sub(r"`src/attnorm(_lab)?/`", "", PAGE)
TABLES = re.search(r"^## Packages\n(.*?)(?=^## )", PAGE, re.M | re.S)[1].split("|---|---|")[1:]  # type: ignore[index]
# `path.py`: `name`, where several names of one file may follow: `path.py`: `name` and `name`
NAMED = re.findall(r"`([\w/]+\.py)`:\s+((?:`\w+`(?:,| and)?\s*)+)", PAGE)


def located(path: str) -> Path:
    return next(file for name in PACKAGES if (file := ROOT / "src" / name / path).exists())


@cache
def names(path: str) -> set[str]:
    """Functions, classes and methods that a file defines."""
    tree = ast.parse(located(path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}


@pytest.mark.parametrize("path", sorted({*re.findall(r"`([\w/]+(?:/|\.py))`", PAGE)}))
def test_every_path_exists(path: str) -> None:
    assert located(path)


@pytest.mark.parametrize(("path", "listed"), NAMED)
def test_every_function_and_class_is_in_its_file(path: str, listed: str) -> None:
    assert {*re.findall(r"`(\w+)`", listed)} <= names(path)


def test_the_page_names_functions() -> None:
    assert len(NAMED) > 40


@pytest.mark.parametrize(("package", "table"), [*zip(PACKAGES, TABLES, strict=True)], ids=PACKAGES)
def test_the_table_of_packages_has_all_of_them_in_the_order_of_their_layers(package: str, table: str) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (contract,) = (one for one in settings["contracts"] if one.get("containers") == [package])
    layers = [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]
    shown = [re.findall(r"`(\w+)(?:/|\.py)`", line.split("|")[1]) for line in table.splitlines() if line[:3] == "| `"]
    below = {name: depth for depth, layer in enumerate(layers) for name in layer}
    assert {name for row in shown for name in row} == {*below} - {"__main__"}
    depths = [[below[name] for name in row] for row in shown]
    assert all(max(above) <= min(under) for above, under in pairwise(depths))
