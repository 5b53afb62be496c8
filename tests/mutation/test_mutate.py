"""The mutation script: mutants are valid Python, differ in one place, and are tried on the tests that call them."""

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attnorm.theory import geometry
from tests.mutation import equivalents, mutants, session
from tests.mutation.mutants import (
    ROOT,
    Function,
    Mutant,
    changed_names,
    function_at,
    mutants_of,
    put_into_functions,
    statement_at,
    uses_of,
)
from tests.mutation.script import mutate
from tests.mutation.session import ENDED, IMPORTS, NOT_DECIDED, CallRecords, Lines, in_a_fork

pytestmark = pytest.mark.nightly  # as the tool itself, which only the nightly run uses

FILES = sorted(path for area in mutate.AREAS for path in (ROOT / "src" / "attnorm" / area).rglob("*.py"))


TRIED = [
    pytest.param(path, marks=[pytest.mark.nightly] if place % 3 else [], id=path.name)
    for place, path in enumerate(FILES[:: max(1, len(FILES) // 6)])
]


@pytest.mark.parametrize("path", TRIED)
def test_every_mutant_is_valid_python_and_differs(path) -> None:  # type: ignore[no-untyped-def]
    plain = ast.dump(ast.parse(path.read_bytes()))
    for mutant in mutants_of(path):
        assert ast.dump(ast.parse(mutant.source())) != plain, mutant.name


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
    ("line", "text", "function"),
    [
        (2, "3", Function()),
        (6, "0.5", Function()),
        (10, "one / 2", Function("Rule.half", "Rule.half", False)),  # comprehensions belong to the function around them
        (12, "row + 1", Function("Rule.cut.<locals>.<lambda>", "Rule.cut", True)),
        (14, "row - 1", Function("Rule.cut.<locals>.inner", "Rule.cut", False)),
        (16, "inner", Function("Rule.cut", "Rule.cut", False)),
    ],
)
def test_the_function_of_a_mutant_is_named_as_its_code_is(
    tmp_path: Path, line: int, text: str, function: Function
) -> None:
    path = tmp_path / "rule.py"
    path.write_text(SOURCE, encoding="utf-8")
    assert function_at(path, line, SOURCE.splitlines()[line - 1].index(text)) == function


GEOMETRY = "src/attnorm/theory/geometry.py"


def mutant_of(name: str, change: str = "") -> tuple[Mutant, Function]:
    """The first mutant of that kind in a function of theory/geometry.py."""
    every = ((one, function_at(one.file, one.line, one.column)) for one in mutants_of(ROOT / GEOMETRY))
    return next((one, function) for one, function in every if function.name == name and change in one.change)


def test_a_mutant_is_tried_on_the_tests_that_run_its_statement_near_cheap_and_different_ones_first() -> None:
    (mutant, function), (other, _) = mutant_of("union_bounds"), mutant_of("union_coverage")
    inside, outside = (f"{GEOMETRY}:union_bounds", mutant.line), (f"{GEOMETRY}:union_coverage", other.line)
    calls = {
        "tests/a/test_other.py::test_cheap": (0.1, [inside]),
        "tests/a/test_coverage.py::test_slow": (5.0, [inside, outside]),
        "tests/a/test_coverage.py::test_quick[0]": (1.0, [inside]),
        "tests/a/test_coverage.py::test_quick[1]": (1.1, [inside]),
        "tests/a/test_coverage.py::test_as_quick": (1.2, [inside]),
        "tests/a/test_coverage.py::test_another_line": (0.1, [(inside[0], mutant.line + 1)]),
        "tests/a/test_coverage.py::test_another_function": (0.1, [outside]),
    }
    tests = CallRecords(
        [
            {
                name: {"seconds": seconds, "lines": {f: [line] for f, line in lines}}
                for name, (seconds, lines) in calls.items()
            }
        ]
    )
    order = [name.partition("::")[2] for name in tests.of(mutant, function, 60.0)]
    assert order == ["test_cheap", "test_quick[0]", "test_as_quick", "test_quick[1]", "test_slow"]
    assert len(tests.of(mutant, function, 3.0)) == 3
    assert not tests.of(*mutant_of("independent_coverage"), 60.0)
    assert not tests.needs_import(mutant, function)
    assert CallRecords([{IMPORTS: {"lines": [inside[0]]}}]).needs_import(mutant, function)


def test_a_changed_constant_is_tried_on_the_tests_that_run_a_line_which_names_it() -> None:
    path = ROOT / "src/attnorm/models/recipe.py"
    mutant = next(one for one in mutants_of(path) if one.text.startswith("MAX_HEADS"))
    used = [(place, line) for place, line in uses_of(mutant) if line != mutant.line]
    assert used
    assert all("MAX_HEADS" in (ROOT / place).read_text().splitlines()[line - 1] for place, line in used)


TESTS = """
CASES = [rule.LIMIT]


def start():
    return rule.cut()


def test_by_a_call():
    start()


def test_by_a_table():
    assert CASES


def test_neither():
    pass
"""


def test_a_changed_constant_or_default_is_tried_on_the_tests_that_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(session, "ROOT", tmp_path)
    rule, tests = tmp_path / "src/attnorm/rule.py", tmp_path / "tests/test_all.py"
    for path, text in ((rule, SOURCE + "\nDOUBLE = 2 * LIMIT\n"), (tests, TESTS)):
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
    function = "src/attnorm/rule.py:Rule.cut"
    names = ["test_by_a_call", "test_by_a_table", "test_neither"]
    lines = {"test_by_a_call": {function: [16]}, "test_by_a_table": {}, "test_neither": {function: [16]}}
    records = CallRecords([{f"tests/test_all.py::{one}": {"seconds": 1.0, "lines": lines[one]} for one in names}])
    changed = {one.change: one for one in mutants_of(rule)}
    limit, default = changed["3 to 4"], changed["+ to -"]
    assert changed_names(limit) == {"LIMIT", "DOUBLE"}
    assert records.of(limit, Function(), 1.0) == ["tests/test_all.py::test_by_a_table"]
    assert changed_names(default) == {"cut"}
    in_default = Function("Rule.cut", "Rule.cut", True)
    assert records.of(default, in_default, 1.0) == ["tests/test_all.py::test_by_a_call"]
    first, further = records.rounds(default, in_default, 1.0, 2.0)
    assert (len(first), len(further), set(first) & set(further)) == (1, 1, set())


def test_the_statement_of_a_place_ends_before_the_body(tmp_path: Path) -> None:
    path = tmp_path / "rule.py"
    path.write_text(
        "def f(x):\n    if (x > 1\n            and x < 3):\n        return [\n            x]\n", encoding="utf-8"
    )
    assert [statement_at(path, line, 20) for line in (2, 3, 4, 5)] == [(2, 3), (2, 3), (4, 5), (4, 5)]


def test_the_lines_that_run_are_recorded() -> None:
    lines = Lines()
    lines.start()
    geometry.independent_coverage(0.5, 2)
    found = lines.stop()
    mutant, _ = mutant_of("independent_coverage")
    assert mutant.line in found[f"{GEOMETRY}:independent_coverage"]
    assert f"{GEOMETRY}:union_bounds" not in found


def test_a_mutant_is_put_into_imported_functions() -> None:
    mutant, _ = mutant_of("independent_coverage", "* to /")

    def work() -> int:
        before = float(geometry.independent_coverage(0.5, 2))
        return 0 if put_into_functions(mutant) and float(geometry.independent_coverage(0.5, 2)) != before else 1

    assert in_a_fork(work, 60, 600) == 0


def test_endless_mutants_are_told_from_a_busy_machine() -> None:
    def forever() -> int:
        while True:
            pass

    assert in_a_fork(forever, 0, 600) == ENDED
    assert in_a_fork(lambda: time.sleep(600) or 0, 60, 0.1) == NOT_DECIDED  # type: ignore[func-returns-value]


SCRIPT = """
import argparse, pathlib, sys
sys.path.insert(0, "tools")
import mutate

mutate.AREAS = {"theory": ["theory/test_coverage.py"]}
out = pathlib.Path(sys.argv[1])
(out / "calls").mkdir()
given = argparse.Namespace(out=out, test_seconds=20.0, further_seconds=60.0, timeout=600.0)
journal = mutate.Journal(out / "results.jsonl")
path = mutate.ROOT / "src/attnorm/theory/geometry.py"
start = path.read_text(encoding="utf-8").split("def independent_coverage")[0].count("\\n") + 1
mutants = [mutant for mutant in mutate.mutants_of(path) if mutant.line > start][:6]
mutate.PRELOADED = ["setuptools", "torch", "numpy", "hypothesis", "jaxtyping", "pytest"]  # what these tests need
mutate.preload()
mutate.try_mutants(mutants, journal, given, float("inf"))
mutate.try_imported(mutants[0], [["tests/theory/test_coverage.py"]], journal, given)
"""


@pytest.mark.nightly  # as the script itself
def test_the_script_kills_mutants_in_imported_functions_and_on_import(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], cwd=ROOT, env=os.environ, check=True)
    found = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [entry["outcome"] for entry in found] == ["killed"] * 7
    assert all(entry["failed"].startswith("tests/theory/test_coverage.py::") for entry in found)


def test_the_folders_of_tests_exist() -> None:
    folders = [folder for several in mutate.AREAS.values() for folder in several]
    assert all(list((ROOT / "tests" / folder).glob("test_*.py")) for folder in folders)


def test_every_equivalent_has_a_reason_and_names_a_mutant() -> None:
    entries = equivalents.entries("equivalent")
    mutants = {path: list(mutants_of(ROOT / path)) for path in {entry["path"] for entry in entries}}
    for entry in entries:
        named = [mutant for mutant in mutants[entry["path"]] if equivalents.names(entry, mutant)]
        assert named, entry
        assert all(equivalents.reason(mutant) for mutant in named), entry
        assert len(named) == 1 or "which" not in entry


def test_a_listed_constant_stands_for_the_mutants_of_its_definition_alone() -> None:
    for entry in equivalents.entries("constant"):
        lines = [set(equivalents.definition(entry["path"], name)) for name in entry["names"]]
        assert all(lines), entry
        left_out = {one.line for one in mutants_of(ROOT / entry["path"]) if equivalents.reason(one) == entry["reason"]}
        assert entry["reason"]
        assert left_out == set().union(*lines)


def test_the_command_line_is_documented(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["mutate.py", "--help"])
    with pytest.raises(SystemExit):
        mutate.main()
    assert "--sample" in capsys.readouterr().out
