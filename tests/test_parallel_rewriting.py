"""Workers that divide the rewriting of assertions."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.assertion import rewrite

from tests.parallel_rewriting import rewrite_share


@pytest.fixture(autouse=True)
def _bytecode_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)


def test_each_worker_stores_its_share_where_pytest_looks_for_it(
    tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / f"test_{number}.py" for number in range(5)]
    for path in files:
        path.write_text("def test_one():\n    assert 1 + 1 == 2\n")
    rewrite_share(pytestconfig, files, 1, 2)
    stored = [tmp_path / "__pycache__" / f"{path.stem}{rewrite.PYC_TAIL}" for path in files]
    found = [rewrite._read_pyc(path, code) for path, code in zip(files, stored, strict=True)]
    assert [code is not None for code in found] == [False, True, False, True, False]
    monkeypatch.delattr(rewrite, "_rewrite_test")
    rewrite_share(pytestconfig, files, 1, 2)  # finds what is stored


def test_a_file_that_cannot_be_parsed_is_left_to_the_collection(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    broken, right = tmp_path / "test_a.py", tmp_path / "test_b.py"
    broken.write_text("def test_one(:\n")
    right.write_text("def test_one():\n    assert True\n")
    rewrite_share(pytestconfig, [broken, right], 0, 1)
    assert [path.name for path in (tmp_path / "__pycache__").iterdir()] == [f"test_b{rewrite.PYC_TAIL}"]


def test_nothing_is_stored_without_rewriting_or_bytecode(
    tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "test_a.py"
    path.write_text("def test_one():\n    assert True\n")
    plain: Any = SimpleNamespace(stash=pytest.Stash())  # as with --assert=plain
    rewrite_share(plain, [path], 0, 1)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    rewrite_share(pytestconfig, [path], 0, 1)
    assert list(tmp_path.iterdir()) == [path]
