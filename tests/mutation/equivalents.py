"""Mutants that change nothing observable, as equivalents.toml lists them."""

import ast
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from tests.mutation.mutants import ROOT, Mutant

LIST = Path(__file__).with_suffix(".toml")


@cache
def entries(kind: str) -> list[dict[str, Any]]:
    """The entries of one kind: "equivalent" (one change of a line) or "constant" (every change of a constant)."""
    found: list[dict[str, Any]] = tomllib.loads(LIST.read_text(encoding="utf-8"))[kind]
    return found


def reason(mutant: Mutant) -> str | None:
    """Why a mutant changes nothing observable; None if it is not listed."""
    listed = [entry for entry in entries("equivalent") if names(entry, mutant)]
    listed += [entry for entry in entries("constant") if any(mutant.line in lines for lines in _places(entry, mutant))]
    return str(listed[0]["reason"]) if listed else None


def names(entry: dict[str, Any], mutant: Mutant) -> bool:
    """Whether an entry of the kind "equivalent" is about this mutant."""
    same = (entry["path"], entry["line"], entry["change"]) == (mutant.path, mutant.text, mutant.change)
    return same and entry.get("which", mutant.which) == mutant.which


def _places(entry: dict[str, Any], mutant: Mutant) -> list[range]:
    return [definition(entry["path"], name) for name in entry["names"]] if entry["path"] == mutant.path else []


@cache
def definition(path: str, name: str) -> range:
    """The lines that define a constant of a module; empty if none do."""
    for node in ast.parse((ROOT / path).read_bytes()).body:
        if isinstance(node, ast.Assign):
            targets = {one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)}
            if name in targets:
                return range(node.lineno, (node.end_lineno or 0) + 1)
    return range(0)
