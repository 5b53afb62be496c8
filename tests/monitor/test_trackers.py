"""The trackers themselves, where they are installed: what their files hold afterwards, under which name and step.

pip install tensorboard wandb mlflow trackio
"""

import json
import sqlite3
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attnorm.monitor.alerts import AlertThresholds
from attnorm.monitor.monitor import AttentionMonitor
from tests.models.tiny import llama
from tests.monitor.training import trainer_of

pytestmark = pytest.mark.filterwarnings("ignore::attnorm.monitor.alerts.AttentionAlert")

Curves = dict[str, list[tuple[int, float]]]  # by name: the step and the value of each point


def _tensorboard(folder: Path) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(next(folder.rglob("events.out.tfevents.*"))))
    events.Reload()
    return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def _mlflow(folder: Path) -> Curves:
    """The file store has one file for each metric, and a line `time value step` for each point."""
    curves: Curves = {}
    for metrics in folder.glob("mlruns/*/*/metrics"):
        for file in filter(Path.is_file, metrics.rglob("*")):
            points = [line.split() for line in file.read_text().splitlines()]
            curves[file.relative_to(metrics).as_posix()] = [(int(step), float(value)) for _, value, step, *_ in points]
    return curves


def _wandb(folder: Path) -> Curves:
    from wandb.proto import wandb_internal_pb2

    rows = []
    for record in _wandb_records(next(folder.rglob("run-*.wandb")).read_bytes()):
        message = wandb_internal_pb2.Record.FromString(record)
        if message.WhichOneof("record_type") == "history":
            items = message.history.item
            rows.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
    return _curves(rows)


def _wandb_records(content: bytes) -> Iterator[bytes]:
    """An offline run is a log in the format of LevelDB: blocks of 32 KiB, and records that may go over several."""
    offset, record = 7, b""
    while offset + 7 <= len(content):
        if 2**15 - offset % 2**15 < 7:  # no room for a header
            offset += 2**15 - offset % 2**15
            continue
        _, length, kind = struct.unpack_from("<IHB", content, offset)
        record += content[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


def _trackio(folder: Path) -> Curves:
    with sqlite3.connect(next(folder.rglob("*.db"))) as database:
        rows = database.execute("SELECT metrics FROM metrics ORDER BY id").fetchall()
    return _curves([json.loads(metrics) for (metrics,) in rows])


def _curves(rows: list[dict[str, float]]) -> Curves:
    """Rows that name their step themselves."""
    curves: Curves = {}
    for row in rows:
        for name, value in row.items():
            if "train/global_step" in row and not name.startswith("_"):
                curves.setdefault(name, []).append((int(row["train/global_step"]), value))
    return curves


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing leaves the folder, let alone the machine."""
    variables = {
        "HOME": tmp_path / "home",
        "WANDB_DIR": tmp_path,
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "TRACKIO_DIR": tmp_path / "trackio",
    }
    (tmp_path / "home").mkdir()
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    return tmp_path


@pytest.mark.parametrize(
    ("tracker", "prefix", "read"),
    [
        ("tensorboard", "train/", _tensorboard),
        ("wandb", "train/", _wandb),
        ("mlflow", "", _mlflow),
        ("trackio", "train/", _trackio),
    ],
)
def test_the_numbers_are_in_its_files(local: Path, tracker: str, prefix: str, read: Callable[[Path], Curves]) -> None:
    package = pytest.importorskip(tracker, reason=f"{tracker} is not installed")
    trainer = trainer_of(
        llama(), local / "run", report_to=[tracker], gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=2
    )
    monitor = AttentionMonitor(thresholds=AlertThresholds(dispersed_entropy=0.1)).attach(trainer)
    trainer.train()
    if tracker == "wandb":
        package.finish()
    curves = read(local)
    assert [step for step, _ in curves[f"{prefix}loss"]] == [3, 6]
    assert {name for name in curves if "attn/" in name} == {prefix + name for name in monitor.numbers}
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    for name in monitor.numbers:
        steps, values = zip(*curves[prefix + name], strict=True)
        assert steps == (3, 6), name
        assert values == pytest.approx([entry[name] for entry in logged], rel=1e-6), name
    assert {alert.kind for alert in monitor.alerts} >= {"dispersion"}
    assert curves[f"{prefix}attn/alert/dispersion"] == [(3, 2.0), (6, 2.0)]


def test_passed_to_the_constructor_it_comes_too_late_and_says_for_whom(local: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    trainer = trainer_of(llama(), local, AttentionMonitor(), report_to=["tensorboard"])
    with pytest.warns(UserWarning, match=r"tensorboard.*monitor\.attach\(trainer\)"):
        trainer.train()
    assert not [name for name in _tensorboard(local) if "attn/" in name]


@pytest.mark.parametrize("late", [False, True])
def test_attached_it_is_in_front_whenever_the_others_came(local: Path, late: bool) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from transformers.integrations import TensorBoardCallback

    monitor = AttentionMonitor()
    trainer = trainer_of(llama(), local, *([] if late else [TensorBoardCallback(), monitor]))
    monitor.attach(trainer)
    if late:
        trainer.add_callback(TensorBoardCallback())
    trainer.train()
    assert [step for step, _ in _tensorboard(local)["train/attn/layer_00/entropy_mean"]] == [3, 6]
