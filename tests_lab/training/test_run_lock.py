"""A run folder belongs to one process at a time, and what a killed process left is removed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnorm.files import remove_abandoned
from attnorm.run_folder import only_process
from attnorm_lab.training.lm.train import train_lm
from attnorm_lab.training.retrieval.data import RetrievalRecipe
from attnorm_lab.training.retrieval.train import train_retrieval
from tests_lab.training.conftest import tiny

HOLD = """
import sys
from pathlib import Path
from attnorm.run_folder import only_process
with only_process(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_run_in_the_folder_is_rejected_and_a_killed_one_leaves_no_lock(
    texts: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-c", HOLD, str(out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="no other process"):
            train_lm([texts[0]], texts[1], out, tiny())
        with pytest.raises(ValueError, match="no other process"):
            train_retrieval(["softmax"], out, recipe=RetrievalRecipe(steps=1, batch=2, width=8))
        assert [path.name for path in out.iterdir()] == [".lock"]
        other.kill()
    with only_process(out):
        pass


def test_the_lock_is_released_by_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), only_process(tmp_path):
        raise KeyError
    with only_process(tmp_path):
        pass


def test_drafts_of_killed_processes_are_removed_and_others_stay(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as running:
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        killed, alive = tmp_path / f".fig1.{ended.pid}.tmp", tmp_path / f".fig2.{running.pid}.tmp"
        own, theirs = tmp_path / f".fig3.{os.getpid()}.tmp", tmp_path / ".notes.tmp"  # another thread may write it
        killed.mkdir()
        (killed / "figure.svg").touch()
        for file in (alive, own, theirs):
            file.touch()
        remove_abandoned(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {alive.name, own.name, theirs.name}
        running.kill()
