"""The package is typed (py.typed), so a type checker that reads a user's code must accept what the documents tell.

On every commit mypy reads tests/typing_examples.py beside the package, and the tests run the documents' code.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "docs/normalizers.md")


@pytest.mark.nightly
def test_mypy_accepts_the_documents_code(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    sources = [
        tmp_path / f"{Path(document).stem}_{number}.py"
        for document in DOCUMENTS
        for number, code in enumerate(
            re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), flags=re.MULTILINE | re.DOTALL)
        )
        if (tmp_path / f"{Path(document).stem}_{number}.py").write_text(code)
    ]
    assert all(any(path.stem.startswith(Path(document).stem) for path in sources) for document in DOCUMENTS)
    command = [sys.executable, "-m", "mypy", *map(str, sources)]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "src")}
    output = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True).stdout
    assert f"no issues found in {len(sources)} source files" in output, output
