"""Files are whole or absent, a killed part keeps its finished layers, and never those of another run."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from transformers import PreTrainedModel

from attnorm.analysis import collect, store
from attnorm.analysis.analyze import AnalysisProgress, analyze
from attnorm.analysis.tables import TABLES, Part
from tests.analysis.tables_of import tables
from tests.analysis.tiny_models import diffllama, gpt2, ids


def part(key: str = "k" * 64, **numbers: float) -> Part:
    return Part(key, {"text": "t", "length": 16, "tokens": 16, "seconds": 0.1}, tables(**numbers))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def bits(tables: dict[str, pa.Table]) -> dict[str, object]:
    """What NaN, infinities and denormals hide from ==: the bytes of every number."""
    return {
        f"{name}.{column}": values.to_numpy().tobytes() if values.type == pa.float64() else values.to_pylist()
        for name, table in tables.items()
        for column, values in zip(table.column_names, table.columns, strict=True)
    }


def test_a_part_comes_back_bit_for_bit(tmp_path: Path) -> None:
    written = part()
    store.write_part(tmp_path, written)
    read = store.read_part(tmp_path, written.key)
    assert read is not None
    assert read.about == {"key": written.key, **written.about}
    for name, table in written.tables.items():
        assert read.tables[name].schema.equals(table.schema)
    assert bits(read.tables) == bits(written.tables)
    assert store.finished_parts(tmp_path) == 1


def test_a_part_that_was_never_written_is_none(tmp_path: Path) -> None:
    assert store.read_part(tmp_path, "missing") is None
    assert store.finished_parts(tmp_path) == 0


@pytest.mark.parametrize("fails_at", [1, 3, 6])
def test_a_full_disk_leaves_no_half_part_and_says_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    store.write_part(tmp_path, part("a" * 64))
    written, real = 0, store._write_bytes

    def failing(path: Path, content: bytes) -> None:
        nonlocal written
        written += 1
        if written == fails_at:
            real(path, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(path, content)

    monkeypatch.setattr(store, "_write_bytes", failing)
    with pytest.raises(OSError, match="disk is full") as caught, store.explained_when_full(tmp_path):
        store.write_part(tmp_path, part("b" * 64))
    assert caught.value.errno == errno.ENOSPC
    assert str(tmp_path) in str(caught.value)
    assert "1 finished part is kept" in str(caught.value)
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["a" * 64]


def test_other_errors_of_the_disk_are_not_called_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), store.explained_when_full(tmp_path):
        raise PermissionError(errno.EACCES, "denied")


def test_what_a_killed_process_left_is_no_part(tmp_path: Path) -> None:
    leftover = tmp_path / "parts" / f".{'k' * 64}-abc"
    leftover.mkdir(parents=True)
    (leftover / "heads.parquet").write_bytes(b"half")
    assert store.finished_parts(tmp_path) == 0
    assert store.read_part(tmp_path, "k" * 64) is None


def test_a_part_from_another_process_stays_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    store.write_part(tmp_path, part(row_sum=1.0))
    store.write_part(tmp_path, part(row_sum=2.0))
    kept = store.read_part(tmp_path, part().key)
    assert kept is not None
    assert kept.tables["heads"]["row_sum"].to_pylist() == [1.0, 1.0]
    store.write_part(tmp_path, part(row_sum=2.0), replace=True)
    kept = store.read_part(tmp_path, part().key)
    assert kept is not None
    assert kept.tables["heads"]["row_sum"].to_pylist() == [2.0, 2.0]


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    store.write_part(tmp_path, part())
    damaged = tmp_path / "parts" / part().key / "heads.parquet"
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"heads\.parquet"):
        store.read_part(tmp_path, part().key)


def test_a_part_of_other_columns_is_refused(tmp_path: Path) -> None:
    other = part()
    other.tables["coverage"] = other.tables["coverage"].drop_columns(["union"])
    store.write_part(tmp_path, other)
    with pytest.raises(ValueError, match=r"coverage\.parquet"):
        store.read_part(tmp_path, other.key)


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "\x00"])
def test_a_manifest_of_something_else_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=r"manifest\.json"):
        store.read_json(tmp_path / "manifest.json")


def test_json_refuses_what_other_readers_could_not_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not JSON compliant|Out of range"):
        store.write_json(tmp_path / "a.json", {"value": float("nan")})
    assert names(tmp_path) == []
    store.write_json(tmp_path / "a.json", {"name": "Ω 😀"})
    assert store.read_json(tmp_path / "a.json") == {"name": "Ω 😀"}


def test_drafts_of_killed_processes_go_and_those_of_running_ones_stay(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    target = tmp_path / "heads [1].parquet"
    left, at_work = (tmp_path / f".{target.name}.{process}.tmp" for process in (gone.pid, os.getppid()))
    others = [tmp_path / f".other.parquet.{gone.pid}.tmp", tmp_path / f".{target.name}.notes.tmp"]
    for path in (left, at_work, *others):
        path.write_bytes(b"half")
    store.write_file(target, b"whole")
    assert target.read_bytes() == b"whole"
    assert not left.exists()
    assert at_work.exists()
    assert all(path.exists() for path in others)


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
