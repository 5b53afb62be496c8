"""Trainers run on accelerate, whatever else configured it, and two processes train as one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from typer.testing import CliRunner

from attnorm.cli import app
from attnorm_lab.training.device import Processes, accelerated
from attnorm_lab.training.lm.train import train_lm
from attnorm_lab.training.needle import NeedleTask, train_needle
from attnorm_lab.training.retrieval.data import RetrievalRecipe
from attnorm_lab.training.retrieval.evaluate import Trials
from attnorm_lab.training.retrieval.train import train_retrieval
from tests_lab.training.conftest import tiny
from tests_lab.training.retrieval_stack import CPU, trained

Train = Callable[..., dict[str, Any]]
SMALL: dict[str, Any] = {"architecture": "llama", "layers": 1, "width": 16, "context": 16, "batch": 2, "steps": 5}
HOSTILE = {
    "ACCELERATE_MIXED_PRECISION": "fp16",
    "ACCELERATE_TORCH_DEVICE": "meta",
    "ACCELERATE_USE_CPU": "true",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    "ACCELERATE_DYNAMO_BACKEND": "inductor",
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "LOCAL_RANK": "0",  # as torchrun sets them for its only process
    "RANK": "0",
    "WORLD_SIZE": "1",
}


@pytest.fixture
def somebody_elses() -> Iterator[accelerate.Accelerator]:
    """An Accelerator of the program that calls us, in the middle of an accumulated batch."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    theirs = accelerate.Accelerator(mixed_precision="no", gradient_accumulation_steps=2)
    theirs.gradient_state._set_sync_gradients(False)
    yield theirs
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def weights(out: Path) -> bytes:
    (checkpoint,) = (out / "checkpoints").iterdir()
    return b"".join((checkpoint / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors"))


def precision(accelerator: Any) -> torch.dtype:
    with accelerator.autocast():
        return (torch.ones(1, 1) @ torch.ones(1, 1)).dtype


@pytest.fixture(scope="module")
def plain(train: Train, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What five steps leave, by dtype; both in this process."""
    folder = tmp_path_factory.mktemp("plain")
    for dtype in ("float32", "bfloat16"):
        train(folder / dtype, **SMALL, dtype=dtype)
    return {dtype: weights(folder / dtype) for dtype in ("float32", "bfloat16")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_environment_changes_nothing_and_is_left_alone(
    dtype: str, plain: dict[str, bytes], train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in HOSTILE.items():
        monkeypatch.setenv(name, value)
    train(tmp_path / "run", **SMALL, dtype=dtype)
    assert weights(tmp_path / "run") == plain[dtype]
    assert {name: os.environ.get(name) for name in HOSTILE} == HOSTILE


def test_the_environment_does_not_reach_a_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    def losses() -> list[list[float]]:
        return [trained(steps=5, batch=8, width=8, dtype=dtype).losses for dtype in ("bfloat16", "float32")]

    low, full = losses()
    assert low != full
    for name, value in HOSTILE.items():
        monkeypatch.setenv(name, value)
    assert losses() == [low, full]


def test_an_accelerator_of_the_caller_changes_nothing_and_is_left_alone(
    plain: dict[str, bytes], somebody_elses: accelerate.Accelerator, train: Train, tmp_path: Path
) -> None:
    train(tmp_path / "run", **SMALL, dtype="bfloat16")
    assert weights(tmp_path / "run") == plain["bfloat16"]
    assert plain["bfloat16"] != plain["float32"]
    assert precision(somebody_elses) == torch.float32
    assert not somebody_elses.sync_gradients
    assert somebody_elses.gradient_accumulation_steps == 2
    assert "ACCELERATE_TORCH_DEVICE" not in os.environ


def test_the_state_is_given_back_after_an_error(somebody_elses: accelerate.Accelerator) -> None:
    with pytest.raises(RuntimeError, match="size"), accelerated(CPU, "bfloat16"):
        torch.ones(2) @ torch.ones(3)
    assert precision(somebody_elses) == torch.float32


def test_the_device_is_the_one_that_is_named() -> None:
    with accelerated(torch.device("meta"), "float32") as outer:
        assert outer.device == torch.device("meta")
        with accelerated(CPU, "bfloat16") as inner:
            assert inner.device == CPU
        assert outer.device == torch.device("meta")


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_several_processes_are_refused_before_anything_is_written(
    name: str, texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "2")
    out = tmp_path / "run"
    message = f"{name} is 2.*--num_processes 1"
    with pytest.raises(ValueError, match=message):
        train_lm([texts[0]], texts[1], out, tiny(), device="cpu")
    with pytest.raises(ValueError, match=message):
        train_retrieval(["softmax"], out, recipe=RetrievalRecipe(steps=1), trials=Trials(sizes=(4,)), device="cpu")
    with pytest.raises(ValueError, match=message):
        train_needle("bundled", texts[0], NeedleTask(), device="cpu")
    assert not out.exists()


@pytest.mark.parametrize("command", ["lm", "retrieval", "needle"])
def test_without_accelerate_one_is_told_what_to_install(
    command: str, texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    train, valid, out = str(texts[0]), str(texts[1]), str(tmp_path / "run")
    arguments = {
        "lm": [train, "--valid", valid, "--out", out],
        "retrieval": ["--out", out],
        "needle": ["bundled", "--text", train],
    }
    done = CliRunner().invoke(
        app, ["lab", "train", command, *arguments[command], "--device", "cpu"], env={"COLUMNS": "200"}
    )
    assert done.exit_code == 2
    assert "pip install 'attnorm[lab]'" in done.output
    assert not Path(out).exists()


RECIPE = '[layers]\n"1" = "ssmax"\n'
OPTIONS = "--architecture llama --layers 2 --heads 2 --width 32 --context 32 --vocab 300 --batch 8 --lr 0.01 --warmup 5"
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2"
ACCELERATE = "-m accelerate.commands.launch --cpu --multi_gpu --num_processes 2 --num_machines 1 --main_process_port 0"

MONITORED = """
import sys, torch, attnorm
from torch import distributed
from tests.models.tiny import llama, tokens
distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(llama().train())
with attnorm.AttentionMonitor(every=1).step(model) as found:
    model(tokens(), labels=tokens()).loss.backward()
print(f"rank {distributed.get_rank()}: {bool(found)}", flush=True)
distributed.destroy_process_group()
"""


def launch(launcher: str, texts: tuple[Path, Path], out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    call = [*launcher.split(), "-m", "attnorm", "lab", "train", "lm", str(texts[0]), "--valid", str(texts[1])]
    options = [*OPTIONS.split(), "--out", str(out), "--device", "cpu", *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        [sys.executable, *call, *options], env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def curve(out: Path) -> list[tuple[int, float, float | None]]:
    entries = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(entry["step"], entry["loss"], entry.get("valid_loss")) for entry in entries]


@pytest.mark.timeout(1800)  # catches a hang, on a busy machine too
def test_two_processes_train_as_one(texts: tuple[Path, Path], encoded: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    settings = tiny(architecture="llama", recipe={"1": "ssmax"}, steps=20)
    alone = train_lm(
        [texts[0]], texts[1], tmp_path / "one", settings, data=encoded, device="cpu", evaluate_every=10,
        checkpoint_every=10,
    )  # fmt: skip
    more = ("--recipe", str(recipe), "--steps", "20", "--eval-every", "10", "--checkpoint-every", "10", "--json")
    done = launch(TORCHRUN, texts, tmp_path / "two", *more)
    assert done.returncode == 0, done.stderr
    together = json.loads(done.stdout)  # printed by one process
    assert together["run"] == alone["run"]
    one, two = curve(tmp_path / "one"), curve(tmp_path / "two")
    assert [step for step, *_ in two] == [step for step, *_ in one] == [10, 20]  # logged once
    for (_, loss, valid), (_, other, other_valid) in zip(one, two, strict=True):
        assert abs(loss - other) <= 1e-5
        assert valid is None or abs(valid - other_valid) <= 1e-5
    (checkpoint,) = (tmp_path / "two" / "checkpoints").iterdir()
    assert checkpoint.name == "step-00000020"
    ours, theirs = (
        load_file(tmp_path / name / "checkpoints" / checkpoint.name / "model.safetensors") for name in ("one", "two")
    )
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-4


@pytest.mark.nightly
def test_accelerate_launch_does_the_same(texts: tuple[Path, Path], train: Train, tmp_path: Path) -> None:
    train(tmp_path / "one", architecture="llama", steps=20)
    done = launch(ACCELERATE.replace("--multi_gpu ", ""), texts, tmp_path / "two", "--steps", "20")
    assert done.returncode == 0, done.stderr
    for (_, loss, _), (_, other, _) in zip(curve(tmp_path / "one"), curve(tmp_path / "two"), strict=True):
        assert abs(loss - other) <= 1e-5


def test_a_batch_that_cannot_be_shared_and_other_launchers_are_refused(
    texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WORLD_SIZE": "3", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert Processes.launched() == Processes(1, 3, 1)
    with pytest.raises(ValueError, match="--batch 9"):
        train_lm([texts[0]], texts[1], tmp_path / "run", tiny(batch=8), device="cpu")
    monkeypatch.delenv("RANK")
    with pytest.raises(ValueError, match="WORLD_SIZE is 3"):
        train_lm([texts[0]], texts[1], tmp_path / "run", tiny(batch=9), device="cpu")
    assert not (tmp_path / "run").exists()


def test_every_process_refuses_a_folder_with_other_files(
    texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it waits for the others, which would wait for ever, and before anything is written."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match="no training run"):
        train_lm([texts[0]], texts[1], tmp_path / "run", tiny(batch=8), device="cpu")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_shares_of_a_batch_are_disjoint_and_complete() -> None:
    batch = torch.arange(6)
    assert sorted(torch.cat([Processes(rank, 3).share(batch) for rank in range(3)]).tolist()) == batch.tolist()


@pytest.mark.nightly
def test_the_monitor_measures_in_one_of_two_processes(tmp_path: Path) -> None:
    (tmp_path / "monitored.py").write_text(MONITORED)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([*sys.path])}
    call = [sys.executable, *TORCHRUN.split(), str(tmp_path / "monitored.py")]
    done = subprocess.run(call, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert {"rank 0: True", "rank 1: False"} <= set(done.stdout.splitlines()), done.stdout + done.stderr
