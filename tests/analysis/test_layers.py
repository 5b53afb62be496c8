"""A killed part keeps its finished layers: they are not measured again, and never mixed with those of another run."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from attnorm.analysis import collect, store
from attnorm.analysis.analyze import AnalysisProgress, analyze
from attnorm.analysis.tables import TABLES
from tests.analysis.tiny_models import diffllama, gpt2, ids

ROOT = Path(__file__).resolve().parents[2]
OPTIONS: dict[str, Any] = {"lengths": (32,), "windows": 1, "metrics": "all", "top_n": (1, 5)}


class Stop(Exception):  # noqa: N818
    pass


def stopping_at(layer: int) -> Any:
    def progress(state: AnalysisProgress) -> None:
        if state.layers_done == layer:
            raise Stop

    return progress


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers that are measured from here on."""
    seen: list[int] = []
    real = collect.measure_rows

    def counting(call: Any, *arguments: Any) -> Any:
        seen.append(call.layer)
        return real(call, *arguments)

    monkeypatch.setattr(collect, "measure_rows", counting)
    return seen


def table_bytes(folder: Path) -> dict[str, bytes]:
    return {name: (folder / f"{name}.parquet").read_bytes() for name in TABLES}


def layer_files(folder: Path) -> list[Path]:
    return sorted((folder / store.PARTS).glob(".*.layers/*"))


def stopped(folder: Path, model: PreTrainedModel, layer: int, **options: Any) -> None:
    with pytest.raises(Stop):
        analyze(model, ids(64), out=folder, progress=stopping_at(layer), **OPTIONS | options)


SCRIPT = """
import sys, time
from attnorm.analysis import store
from attnorm.analysis.analyze import analyze
from tests.analysis.tiny_models import gpt2, ids

store.SECONDS_BETWEEN_WRITES = 0.0

def progress(state):
    if state.layers_done == 3:
        print("third layer", flush=True)
        time.sleep(60)

analyze(
    gpt2(layers=5), ids(64), out=sys.argv[1], lengths=(32,), windows=1, metrics="all", top_n=(1, 5), progress=progress
)
"""


def test_kill_9_loses_only_the_layer_in_flight(tmp_path: Path, measured: list[int]) -> None:
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    command = [sys.executable, "-c", SCRIPT, str(killed)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "third layer\n"
        child.kill()
    measured.clear()
    assert len(layer_files(killed)) == 3

    states: list[AnalysisProgress] = []
    analyze(gpt2(layers=5), ids(64), out=killed, progress=states.append, **OPTIONS)
    assert measured == [3, 4]
    assert max(state.layers_found for state in states) == 3
    analyze(gpt2(layers=5), ids(64), out=undisturbed, **OPTIONS)
    assert table_bytes(killed) == table_bytes(undisturbed)
    assert not list(killed.rglob(".*"))


@pytest.mark.parametrize("model", [gpt2, diffllama])
def test_an_error_in_the_pass_leaves_the_finished_layers(tmp_path: Path, measured: list[int], model: Any) -> None:
    """DiffLlama attends twice in each layer, and the heads of the second call are numbered on."""
    stopped(tmp_path / "stopped", model(), 1)
    assert len(layer_files(tmp_path / "stopped")) == 1
    measured.clear()
    analyze(model(), ids(64), out=tmp_path / "stopped", **OPTIONS)
    again = len(measured)
    measured.clear()
    analyze(model(), ids(64), out=tmp_path / "whole", **OPTIONS)
    assert again == len(measured) - 1
    assert table_bytes(tmp_path / "stopped") == table_bytes(tmp_path / "whole")


def test_resume_false_measures_every_layer(tmp_path: Path, measured: list[int]) -> None:
    stopped(tmp_path, gpt2(), 1)
    measured.clear()
    analyze(gpt2(), ids(64), out=tmp_path, resume=False, **OPTIONS)
    assert measured == [0, 1]


def test_a_damaged_layer_is_measured_again(tmp_path: Path, measured: list[int]) -> None:
    analyze(gpt2(layers=3), ids(64), out=tmp_path / "whole", **OPTIONS)
    stopped(tmp_path / "damaged", gpt2(layers=3), 2)
    first, second = layer_files(tmp_path / "damaged")
    content = bytearray(first.read_bytes())
    content[-9] ^= 1
    first.write_bytes(content)
    second.write_bytes(second.read_bytes()[:40])
    measured.clear()
    with pytest.warns(UserWarning, match=r"\.layers.*measured again"):
        analyze(gpt2(layers=3), ids(64), out=tmp_path / "damaged", **OPTIONS)
    assert measured == [0, 1, 2]
    assert table_bytes(tmp_path / "damaged") == table_bytes(tmp_path / "whole")


def test_layers_of_another_run_are_not_used(tmp_path: Path, measured: list[int]) -> None:
    """Even where somebody copies their files to the right place."""
    stopped(tmp_path / "seed 0", gpt2(), 2)
    stopped(tmp_path / "seed 1", gpt2(seed=1), 2)
    for other, own in zip(layer_files(tmp_path / "seed 1"), layer_files(tmp_path / "seed 0"), strict=True):
        own.write_bytes(other.read_bytes())
    measured.clear()
    analyze(gpt2(), ids(64), out=tmp_path / "seed 0", **OPTIONS)
    assert measured == [0, 1]
    analyze(gpt2(), ids(64), out=tmp_path / "whole", **OPTIONS)
    assert table_bytes(tmp_path / "seed 0") == table_bytes(tmp_path / "whole")


def test_a_layer_in_the_place_of_another_is_not_used(tmp_path: Path, measured: list[int]) -> None:
    stopped(tmp_path, gpt2(), 2)
    first, second = layer_files(tmp_path)
    second.write_bytes(first.read_bytes())
    measured.clear()
    analyze(gpt2(), ids(64), out=tmp_path, **OPTIONS)
    assert measured == [1]


def test_layers_of_other_versions_are_not_used(
    tmp_path: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(tmp_path, gpt2(), 2)
    measured.clear()
    monkeypatch.setattr(store, "versions", lambda: {"torch": "1.0"})
    analyze(gpt2(), ids(64), out=tmp_path, **OPTIONS)
    assert measured == [0, 1]


def test_a_short_part_writes_no_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    real = store.write_file

    def listing(path: Path, content: bytes) -> None:
        written.append(path.parent.name)
        real(path, content)

    monkeypatch.setattr(store, "write_file", listing)
    monkeypatch.setattr(store, "SECONDS_BETWEEN_WRITES", 600.0)  # a busy machine may need the usual 5 for this part
    analyze(gpt2(), ids(64), out=tmp_path, **OPTIONS)
    assert not [name for name in written if name.endswith(".layers")]
