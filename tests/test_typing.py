"""The package is typed (py.typed), so a type checker that reads a user's code must accept what the documents tell."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "docs/normalizers.md")

RIGHT = """
import torch
from typing import assert_type

import attnorm

assert_type(attnorm.get("ssmax", heads=8), attnorm.Normalizer)
assert_type(attnorm.get("linear"), attnorm.Mechanism)
assert_type(attnorm.get("softmax").lipschitz(10), float | None)


def unknown_until_it_runs(name: str) -> None:
    assert_type(attnorm.get(name), attnorm.Normalizer | attnorm.Mechanism)


attnorm.normalize(torch.zeros(1, 4), attnorm.get("entmax", alpha=1.3))
attnorm.check_normalizer(attnorm.get("topk", k=2))
"""

# Each must be refused, or the types say nothing.
WRONG = """
import torch

import attnorm

q = torch.zeros(1, 1, 4, 8)
attnorm.normalize(q, attnorm.get("linear"))
attnorm.compose(attnorm.get("gaussian"))
attnorm.attention(q, q, q, is_causal=True)
"""


def mypy(folder: Path, **sources: str) -> str:
    """With the project's own settings and cache, which `make test` fills at its start: seconds, not half a minute."""
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    command = [sys.executable, "-m", "mypy", *(str(folder / f"{name}.py") for name in sources)]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "src")}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True).stdout


# One run for both, since it starts for seconds.
@pytest.mark.slow
@pytest.mark.timeout(1800)  # catches a hang, on a busy machine too
def test_mypy_accepts_the_documents_code_and_refuses_q_k_v_where_a_row_of_logits_is_given(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    sources = {
        f"{Path(document).stem}_{number}": code
        for document in DOCUMENTS
        for number, code in enumerate(
            re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), flags=re.MULTILINE | re.DOTALL)
        )
    }
    assert all(any(name.startswith(Path(document).stem) for name in sources) for document in DOCUMENTS)
    output = mypy(tmp_path, right=RIGHT, wrong=WRONG, **sources)
    refused = [("wrong", number) for number, line in enumerate(WRONG.splitlines(), 1) if line.startswith("attnorm.")]
    errors = {
        (Path(path).stem, int(line)) for path, line in re.findall(r"^(.+\.py):(\d+): error", output, re.MULTILINE)
    }
    assert sorted(errors) == refused, output
    assert f"checked {len(sources) + 2} source files" in output
