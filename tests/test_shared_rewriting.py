"""Workers that divide the rewriting of assertions."""

from pathlib import Path

import pytest
from _pytest.assertion import rewrite

from tests.shared_rewriting import rewrite_share


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
