"""The instrument works where the laboratory cannot be imported."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys

class Absent:
    def find_spec(name, path=None, target=None):
        if name == "attnorm_lab":
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent)
from attnorm.cli import app

app(sys.argv[1:])
"""


def run(*words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, cwd=folder)


def test_a_model_is_measured_and_the_help_has_no_laboratory(tmp_path: Path) -> None:
    options = ("--lengths", "32", "--windows", "1", "--rows", "8", "--normalizers", "model,ssmax")
    measured = run("analyze", *options, folder=tmp_path)
    assert measured.returncode == 0, measured.stderr
    helped = run("--help")
    assert helped.returncode == 0
    assert "normalizers" in helped.stdout
    assert " lab " not in helped.stdout


@pytest.mark.parametrize("command", ["compare", "report", "evaluate", "normalizers", "doctor"])
def test_every_command_starts(command: str) -> None:
    assert run(command, "--help").returncode == 0
