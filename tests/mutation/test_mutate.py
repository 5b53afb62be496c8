"""The mutation script: every mutant is valid Python that differs in one place, and the map names tests that exist."""

import ast
import json
import sys

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


def test_the_map_names_tests_that_exist_for_every_file() -> None:
    known = json.loads(mutate.TESTS.read_text())
    assert all((ROOT / test).exists() for tests in known.values() for test in tests)
    assert all((ROOT / key).exists() for key in known)
    for path in FILES:
        assert mutate.tests_of(path.relative_to(ROOT).as_posix())


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
