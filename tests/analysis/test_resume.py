"""An interrupted run goes on where it stopped; a folder holds one run, and what is finished in it is safe."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from attnorm.analysis import store
from attnorm.analysis.analyze import AnalysisProgress, analyze
from attnorm.analysis.result import Analysis
from attnorm.analysis.tables import SCHEMAS
from attnorm.analysis.verdicts import Thresholds
from tests.analysis.tiny_models import gpt2, ids

OPTIONS: dict[str, Any] = {"lengths": (16, 24, 32), "windows": 1, "metrics": "core", "top_n": (1, 5)}
ROOT = Path(__file__).resolve().parents[2]


class Passes:
    """Counts forward passes of a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.lengths: list[int] = []
        model.base_model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: Any, args: Any, kwargs: Any) -> None:
        self.lengths.append(kwargs["input_ids"].shape[1])


class Stop(Exception):  # noqa: N818
    pass


def stop_after(parts: int, error: BaseException) -> Any:
    def progress(state: AnalysisProgress) -> None:
        if state.parts_done == parts and state.layers_done == 1:  # in the middle of the next part
            raise error

    return progress


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rows(analysis: Analysis) -> str:
    return repr({name: table.to_pylist() for name, table in analysis.tables.items()})


@pytest.mark.parametrize("error", [Stop(), KeyboardInterrupt()])
def test_an_interrupted_run_computes_only_what_is_missing(tmp_path: Path, error: BaseException) -> None:
    model, tokens = gpt2(layers=2), ids(64)
    passes = Passes(model)
    with pytest.raises(type(error)):
        analyze(model, tokens, out=tmp_path, progress=stop_after(2, error), **OPTIONS)
    assert passes.lengths == [16, 24, 32]
    assert store.finished_parts(tmp_path) == 2
    with pytest.raises(ValueError, match=r"2 of 3 parts.*resume"):
        Analysis.load(tmp_path)

    states: list[AnalysisProgress] = []
    passes.lengths.clear()
    resumed = analyze(model, tokens, out=tmp_path, progress=states.append, **OPTIONS)
    assert passes.lengths == [32]
    assert [(state.length, state.parts_done) for state in states if state.resumed] == [(16, 1), (24, 2)]
    assert rows(resumed) == rows(analyze(model, tokens, **OPTIONS)) == rows(Analysis.load(tmp_path))


def test_a_finished_run_is_read_not_repeated(tmp_path: Path) -> None:
    model, tokens = gpt2(layers=1), ids(64)
    first = analyze(model, tokens, out=tmp_path, **OPTIONS)
    passes = Passes(model)
    assert rows(analyze(model, tokens, out=tmp_path, **OPTIONS)) == rows(first)
    assert passes.lengths == []
    strict = Thresholds(dispersed_entropy=0.0, near_floor=0.0, dispersed_slope=1.0)
    judged = analyze(model, tokens, out=tmp_path, thresholds=strict, **OPTIONS)
    assert passes.lengths == []
    assert judged.heads["verdict"].to_pylist() != first.heads["verdict"].to_pylist()
    assert rows(Analysis.load(tmp_path)) == rows(judged)
    analyze(model, tokens, out=tmp_path, resume=False, **OPTIONS)
    assert passes.lengths == [16, 24, 32]


def test_resume_false_does_not_believe_the_parts(tmp_path: Path) -> None:
    model, tokens = gpt2(layers=1), ids(64)
    with pytest.raises(Stop):
        analyze(model, tokens, out=tmp_path, progress=stop_after(1, Stop()), **OPTIONS)
    passes = Passes(model)
    analyze(model, tokens, out=tmp_path, resume=False, **OPTIONS)
    assert passes.lengths == [16, 24, 32]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"lengths": (16,)}, "lengths: 16, 24, 32 there, 16 here"),
        ({"seed": 1}, "seed: 0 there, 1 here"),
        ({"normalizers": ("model", "sparsemax")}, "normalizers:"),
        ({"rows": 3}, "rows: auto there, 3 here"),
        ({"inputs": ids(64, seed=5)}, "texts:"),
        ({"model": gpt2(layers=1, seed=3)}, "other weights"),
    ],
)
def test_a_folder_with_another_run_is_refused_and_not_touched(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    asked: dict[str, Any] = {"model": gpt2(layers=1), "inputs": ids(64), "out": tmp_path, **OPTIONS}
    with pytest.raises(Stop):
        analyze(**asked, progress=stop_after(1, Stop()))
    before = files(tmp_path)
    with pytest.raises(FileExistsError, match=f"another run .*{named}"):
        analyze(**asked | change)
    with pytest.raises(FileExistsError, match="another run"):
        analyze(**asked | change, resume=False)
    assert files(tmp_path) == before


def test_a_folder_of_something_else_is_refused_and_not_touched(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "my web app", "icons": []}')
    with pytest.raises(FileExistsError, match=r"manifest\.json of another program"):
        analyze(gpt2(layers=1), ids(64), out=tmp_path, **OPTIONS)
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "heads.parquet").write_bytes(b"mine")
    with pytest.raises(FileExistsError, match=r"heads\.parquet"):
        analyze(gpt2(layers=1), ids(64), out=tmp_path, **OPTIONS)
    assert files(tmp_path) == {"heads.parquet": b"mine"}
    with pytest.raises(FileExistsError, match="got a file"):
        analyze(gpt2(layers=1), ids(64), out=tmp_path / "heads.parquet", **OPTIONS)


def test_a_full_disk_stops_the_run_and_keeps_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = gpt2(layers=1), ids(64)
    real, left = store._write_bytes, 1 + 2 * (len(SCHEMAS) + 1)  # the manifest and two parts

    def full(path: Path, content: bytes) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(path, content)

    monkeypatch.setattr(store, "_write_bytes", full)
    with pytest.raises(OSError, match="2 finished parts") as caught:
        analyze(model, tokens, out=tmp_path, **OPTIONS)
    assert caught.value.errno == errno.ENOSPC
    assert str(tmp_path) in str(caught.value)
    monkeypatch.undo()
    passes = Passes(model)
    analyze(model, tokens, out=tmp_path, **OPTIONS)
    assert passes.lengths == [32]


SCRIPT = """
import sys, time
from attnorm.analysis.analyze import analyze
from tests.analysis.tiny_models import gpt2, ids

def progress(state):
    if state.parts_done == 2 and state.layers_done == 1:
        print("third part", flush=True)
        time.sleep(60)

analyze(
    gpt2(layers=2), ids(64), out=sys.argv[1], lengths=(16, 24, 32), windows=1, metrics="core", top_n=(1, 5),
    progress=progress,
)
"""


def test_kill_9_loses_only_the_part_in_flight(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "third part\n"
        child.kill()
    model = gpt2(layers=2)
    passes = Passes(model)
    resumed = analyze(model, ids(64), out=tmp_path, **OPTIONS)
    assert passes.lengths == [32]
    assert rows(resumed) == rows(analyze(gpt2(layers=2), ids(64), **OPTIONS))
    assert not list(tmp_path.rglob(".*"))


WRITER = """
import sys
from pathlib import Path
from attnorm.analysis import store
from attnorm.analysis.tables import Part
from tests.analysis.tables_of import tables

made = tables(heads=64)
print("go", flush=True)
for number in range(100000):
    store.write_part(Path(sys.argv[1]), Part(f"{number:064d}", {}, made))
"""


def test_kill_9_at_any_moment_leaves_only_whole_parts(tmp_path: Path) -> None:
    """Writes nothing but parts, so that the kill falls into a write."""
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        child.stdout.readline()
        while child.poll() is None and not list(tmp_path.glob("parts/[!.]*")):  # on a busy machine a part takes a while
            time.sleep(0.01)
        time.sleep(0.3)
        child.kill()
    keys = [path.name for path in (tmp_path / "parts").iterdir() if not path.name.startswith(".")]
    assert keys
    for key in keys:
        part = store.read_part(tmp_path, key)
        assert part is not None
        assert part.tables["heads"].num_rows == 64
