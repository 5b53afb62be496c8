"""The mutation script: mutants are valid Python, differ in one place, and are tried on the tests that call them."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.script import mutate

ROOT = mutate.ROOT
FILES = sorted(path for area in mutate.AREAS for path in (ROOT / "src" / "attnorm" / area).rglob("*.py"))


@pytest.mark.parametrize("path", FILES[:: max(1, len(FILES) // 12)], ids=lambda path: path.name)
def test_every_mutant_is_valid_python_and_differs(path) -> None:  # type: ignore[no-untyped-def]
    source = path.read_bytes()
    plain = ast.dump(ast.parse(source))
    for mutant in mutate.mutants_of(path):
        changed = source[: mutant.start] + mutant.new.encode() + source[mutant.end :]
        assert ast.dump(ast.parse(changed)) != plain, mutant.name


SOURCE = """
LIMIT = 3


class Rule:
    share: float = 0.5

    @property
    def half(self):
        return [one / 2 for one in self.rows]

    def cut(self, by=lambda row: row + 1):
        def inner(row):
            return row - 1

        return inner
"""


@pytest.mark.parametrize(
    ("line", "text", "name"),
    [
        (2, "3", ""),
        (6, "0.5", ""),
        (10, "one / 2", "Rule.half"),  # a comprehension is code of the function around it
        (12, "row + 1", "Rule.cut.<locals>.<lambda>"),
        (14, "row - 1", "Rule.cut.<locals>.inner"),
        (16, "inner", "Rule.cut"),
    ],
)
def test_the_function_of_a_mutant_is_named_as_its_code_is(tmp_path: Path, line: int, text: str, name: str) -> None:
    path = tmp_path / "rule.py"
    path.write_text(SOURCE, encoding="utf-8")
    assert mutate.function_at(path, line, SOURCE.splitlines()[line - 1].index(text)) == name


def test_a_mutant_is_tried_on_the_tests_that_call_its_function_the_nearest_and_cheapest_first(tmp_path: Path) -> None:
    path = "src/attnorm/theory/coverage.py"
    inside, outside = f"{path}:union_bounds", f"{path}:union_coverage"
    calls = {
        "tests/a/test_other.py::test_cheap": (0.1, [inside]),
        "tests/a/test_coverage.py::test_slow": (5.0, [inside, outside]),
        "tests/a/test_coverage.py::test_quick": (1.0, [inside]),
        "tests/a/test_coverage.py::test_unrelated": (0.1, [outside]),
    }
    record = {name: {"seconds": seconds, "functions": functions} for name, (seconds, functions) in calls.items()}
    (tmp_path / "one.json").write_text(json.dumps(record), encoding="utf-8")
    tests = mutate.Tests([tmp_path / "one.json"])
    mutants = list(mutate.mutants_of(ROOT / path))
    names = {mutate.function_at(ROOT / path, one.line, one.column): one for one in mutants}
    order = [name.partition("::")[2] for name in tests.of(names["union_bounds"], 60.0)]
    assert order == ["test_quick", "test_slow", "test_cheap"]
    assert len(tests.of(names["union_bounds"], 3.0)) == 1
    assert not tests.of(names["independent_coverage"], 60.0)


@pytest.mark.slow
def test_what_a_test_calls_is_recorded(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "tests.mutation.function_calls", "tests/theory/test_coverage.py"]
    out = tmp_path / "calls.json"
    subprocess.run(command, cwd=ROOT, env={**os.environ, "CALLS_OF_TESTS": str(out)}, check=True)
    entry = json.loads(out.read_text())["tests/theory/test_coverage.py::test_the_printed_numbers"]
    assert "src/attnorm/theory/coverage.py:independent_coverage" in entry["functions"]
    assert "src/attnorm/theory/coverage.py:union_coverage" not in entry["functions"]
    assert 0 <= entry["seconds"] < 60


def test_the_folders_of_tests_exist() -> None:
    assert all(list((ROOT / "tests" / folder).glob("test_*.py")) for folder in mutate.AREAS.values())


def test_every_equivalent_has_a_reason_and_exists() -> None:
    named = mutate.equivalents()
    assert all(named.values())
    every = {mutant.name for path in FILES for mutant in mutate.mutants_of(path)}
    assert set(named) <= every


def test_the_command_line_is_documented(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["mutate.py", "--help"])
    with pytest.raises(SystemExit):
        mutate.main()
    assert "--sample" in capsys.readouterr().out
