"""CONTRIBUTING.md, followed to the letter in a copy of the package, adds a normalizer that works everywhere."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()

USE = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import attnorm
from attnorm.cli.normalizers import describe_all, promises

assert attnorm.__file__.startswith(sys.argv[3])
report = attnorm.check_normalizer("taylor")
assert "reference" in {check.name for check in report.checks}

q, k, v = (torch.randn(1, 2, 9, 8, dtype=torch.float64) for _ in range(3))
logits = q @ k.mT / 8**0.5
expected = (1 + logits + logits**2 / 2) / (1 + logits + logits**2 / 2).sum(-1, keepdim=True) @ v
torch.testing.assert_close(attnorm.attention(q, k, v, "taylor"), expected)

torch.manual_seed(0)
sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
config = LlamaConfig(**sizes, initializer_range=0.5)  # logits large enough for softmax and its series to differ
model, ids = LlamaForCausalLM(config).eval(), torch.arange(12)[None]
with torch.no_grad():
    before = model(ids).logits
    attnorm.patch(model, "taylor")
    after = model(ids).logits
    assert not torch.allclose(before, after)
    attnorm.save_pretrained(model, sys.argv[1])
    torch.testing.assert_close(attnorm.from_pretrained(sys.argv[1])(ids).logits, after)

(described,) = (one for one in describe_all() if one.name == "taylor")
print(described.name, described.paper, described.url, described.summary, promises(described), sep="|")
exec(sys.argv[2])
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", CONTRIBUTING, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of src with the file of step 1 and the line of step 2."""
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "src", root / "src")  # with its bytecode
    file, line, *_ = blocks("python")
    (path,) = re.findall(r"\*\*1\. The file\.\*\* `(.*?)`", CONTRIBUTING)
    (root / path).write_text(file)
    registry = root / "src" / "attnorm" / "normalizers" / "registry.py"
    text = registry.read_text()
    end = text.index("\n    ]\n}", text.index("BUILT_IN"))
    registry.write_text(text[:end] + "\n" + line.rstrip("\n") + text[end:])
    return root


def run(copy: Path, *arguments: str) -> str:
    variables = {**os.environ, "PYTHONPATH": str(copy / "src")}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout


def test_it_is_checked_computed_patched_saved_and_listed(copy: Path, tmp_path: Path) -> None:
    """And the command of step 3 passes every check."""
    (command,) = re.findall(r'^python -c "(.*check_normalizer.*)"$', CONTRIBUTING, flags=re.MULTILINE)
    printed = run(copy, "-c", USE, str(tmp_path / "saved"), command, str(copy / "src"))
    listed, _, report = printed.partition("\n")
    assert re.match(r"taylor: (\d+) of \1 checks passed", report)
    name, paper, url, summary, promises = listed.split("|")
    assert (name, paper, url) == ("taylor", "de Brebisson & Vincent 2016", "https://arxiv.org/abs/1511.05042")
    assert "softmax" in summary
    assert promises


@pytest.mark.nightly  # 14 s of CPU; the test above uses it in every way in every run
def test_the_tests_find_it_in_the_registry(copy: Path) -> None:
    """No test keeps a table of its own: each of these files has cases for the new normalizer."""
    names = ["normalizers/test_reference", "attention/test_reference", "models/test_warm_start", "metrics/test_rows"]
    files = [f"tests/{name}.py" for name in names]
    report = run(copy, "-m", "pytest", "-n0", "-q", "-rp", "-k", "taylor", *files)
    for file in files:
        assert f"PASSED {file}" in report


def test_the_code_is_formatted(copy: Path) -> None:
    pytest.importorskip("ruff")
    (path,) = re.findall(r"\*\*1\. The file\.\*\* `(.*?)`", CONTRIBUTING)
    for command in (["check"], ["format", "--check"]):
        run(copy, "-m", "ruff", *command, "--config", "pyproject.toml", str(copy / path))
