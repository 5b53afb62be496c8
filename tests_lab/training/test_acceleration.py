"""All trainers run on accelerate; what the environment or other code of the process configured changes nothing."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from typer.testing import CliRunner

from attnorm.cli import app
from attnorm_lab.training.device import accelerated
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


def test_every_trainer_steps_through_accelerate(
    train: Train, texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("autocast", "backward"):
        whole = getattr(accelerate.Accelerator, name)

        def counted(self: Any, *args: Any, name: str = name, whole: Any = whole) -> Any:
            calls.append(name)
            return whole(self, *args)

        monkeypatch.setattr(accelerate.Accelerator, name, counted)
    train(tmp_path / "run", steps=3, architecture="llama", context=64)
    assert (calls.count("autocast"), calls.count("backward")) == (3, 3)
    train_needle(tmp_path / "run", texts[0], NeedleTask(steps=2, batch=2, questions=1, longer=(1,)), device="cpu")
    assert (calls.count("autocast"), calls.count("backward")) == (5, 5)
    trained(steps=4)
    assert (calls.count("autocast"), calls.count("backward")) == (9, 9)


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
