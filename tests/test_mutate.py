"""tools/mutate.py: which mutants it makes, and where those of the list are found again."""

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The tool, for a project with one file."""
    spec = importlib.util.spec_from_file_location("mutate", ROOT / "tools" / "mutate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "src" / "attnorm" / "room").mkdir(parents=True)
    return module


SOURCE = """
def cut(rows, low, high, quiet: bool = False):
    if rows < 3 and not quiet:
        raise ValueError("x" + str(rows - 1))
    return min(low, rows) / high if quiet else find(low, high)
"""
CHANGED = [
    "def cut(rows, low, high, quiet: bool = True):",
    "    if rows >= 3 and not quiet:",
    "    if rows < 4 and not quiet:",
    "    if rows < 3 and quiet:",
    "    if rows < 3 or not quiet:",
    "    return min(high, rows) / high if quiet else find(low, high)",
    "    return min(low, rows) * high if quiet else find(low, high)",
    "    return min(low, rows) / high if not quiet else find(low, high)",
    "    return min(low, rows) / high if quiet else find(high, low)",
    "    return min(low, rows) / high if quiet else find(high, high)",
    "    return min(low, rows) / high if quiet else find(low, low)",
    "    return min(low, rows) / low if quiet else find(low, high)",
]


def test_one_thing_of_one_line_is_changed(mutate: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "src" / "attnorm" / "room" / "file.py"
    path.write_text(SOURCE)
    diffs = [mutate.mutant_of(path, change) for change in mutate.changes(SOURCE)]
    assert sorted(line[1:] for diff in diffs for line in diff.splitlines()[3:] if line[0] == "+") == sorted(CHANGED)
    assert all(ast.parse(mutate.applied(diff)[1]) for diff in diffs)


def test_a_mutant_follows_its_file_and_ends_with_its_line(mutate: ModuleType, tmp_path: Path) -> None:
    old, new = (tmp_path / "src" / "attnorm" / name / "file.py" for name in ("room", "other"))
    old.write_text(SOURCE)
    diff = mutate.mutant_of(old, next(mutate.changes(SOURCE)))
    new.parent.mkdir()
    old.rename(new)
    new.write_text("import math\n" + SOURCE)
    assert mutate.applied(diff)[0] == new
    new.write_text(SOURCE.replace("quiet: bool = False", "silent: bool = False"))
    assert mutate.applied(diff) is None


def test_each_mutant_of_the_list_names_its_test(mutate: ModuleType) -> None:
    for diff, test in mutate.read_frozen():
        before, after = (side.splitlines() for side in mutate._sides(diff))
        assert sum(a != b for a, b in zip(before, after, strict=True)) == 1
        assert test.startswith("tests")
