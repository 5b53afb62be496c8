"""Save and load training: checkpoints (safetensors and JSON) from which a run resumes, and the log of metrics.

A checkpoint is a folder with weights, optimizer state and the number of steps done. It is written atomically; the
previous one is removed afterwards. No random state is needed: the data of a step follow from the seed and the step.
Unlike accelerate's `save_state`, this does not pickle: a pickle can run code when it is loaded. SIGINT (Ctrl-C) and
SIGTERM are deferred to the next step, where the state can be saved.

The log has a line per logged step. A resumed run repeats the steps after its checkpoint, so their lines are dropped.
So is the line of a step where only a signal or a time limit ended training: the next line takes its losses along.
"""

import json
import math
import shutil
import signal
import threading
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import torch

from attnorm.files import atomic_replace, read_jsonl, write_json, write_text

METRICS = "metrics.jsonl"
CLEAR_RISE = 0.05  # nats per token above the lowest validation loss


def save_checkpoint(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, record: dict[str, Any]
) -> None:
    """Write `step-<step>` to the folder and remove older ones; `load_checkpoint` returns the JSON `record` again."""
    from safetensors.torch import save

    with atomic_replace(folder / f"step-{step:08d}") as draft:
        draft.mkdir()
        weights = {name: value.detach().contiguous() for name, value in model.named_parameters()}
        for name, tensors in (("model", weights), ("optimizer", _optimizer_tensors(model, optimizer))):
            (draft / f"{name}.safetensors").write_bytes(save(tensors))  # a full disk is then an ordinary OSError
        write_json(draft / "state.json", {"step": step, **record})
    for obsolete in (*finished_checkpoints(folder)[:-1], *folder.glob(".step-*.tmp")):  # of a killed program
        shutil.rmtree(obsolete)


def finished_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, oldest first."""
    return sorted(folder.glob("step-*"), key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def load_checkpoint(
    path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> dict[str, Any]:
    """Restore model and optimizer; return the record with its `step`.

    Raises:
        ValueError: The checkpoint is damaged or belongs to another model.
    """
    moments = _tensors(path / "optimizer.safetensors", device)
    record = read_state(path)
    load_weights(path, model, device)
    parameters = dict(model.named_parameters())
    for key, value in moments.items():
        name, _, moment = key.rpartition("/")
        optimizer.state[parameters[name]][moment] = value
    return record


def read_state(path: Path) -> dict[str, Any]:
    """Return the record of a checkpoint with its `step`, without its tensors.

    Raises:
        ValueError: It cannot be read.
    """
    try:
        record: dict[str, Any] = json.loads((path / "state.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise _unreadable_error(path, error) from None
    return record


def load_weights(path: Path, model: torch.nn.Module, device: torch.device) -> None:
    """Load only the weights of a checkpoint.

    Raises:
        ValueError: As `load_checkpoint`.
    """
    weights = _tensors(path / "model.safetensors", device)
    parameters = dict(model.named_parameters())
    shapes, saved = ({name: tensor.shape for name, tensor in values.items()} for values in (parameters, weights))
    if shapes != saved:
        raise ValueError(
            f"expected a checkpoint of this model, got {path}, which belongs to another one. Choose another output "
            "folder."
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])


def _tensors(path: Path, device: torch.device) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path, device=str(device))
    except (OSError, SafetensorError) as error:
        raise _unreadable_error(path.parent, error) from None


def _unreadable_error(path: Path, error: Exception) -> ValueError:
    return ValueError(f"the checkpoint {path} cannot be read ({error}). Remove it, or train again in a new folder.")


def _optimizer_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{moment}": value.detach().contiguous()
        for name, parameter in model.named_parameters()
        for moment, value in optimizer.state[parameter].items()
    }


class TrainingInterrupted(KeyboardInterrupt):
    """Training was interrupted; the last checkpoint has everything up to `step`."""

    def __init__(self, step: int) -> None:
        super().__init__(f"interrupted after step {step}; the same command continues from there")
        self.step = step


class OutOfTimeError(Exception):
    """The time limit was reached; finished work and the last checkpoint are kept."""


class StopRequest:
    """Context manager: the first signal sets `requested`; a second one has its usual effect."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # only this thread may set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note_signal)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)


class NotFiniteError(ValueError):
    """The loss or its gradient is not finite: the run diverged."""


def log_entry(
    step: int, tokens: int, loss: torch.Tensor, gradient_norm: torch.Tensor, rate: float, *, highest_rate: float
) -> dict[str, Any]:
    """Return the entry of a step for the log. highest_rate: the learning rate of the settings, for the error.

    Raises:
        NotFiniteError: The loss or the norm of the gradient is not finite.
    """
    value, norm = float(loss), float(gradient_norm)
    if not math.isfinite(value + norm):
        raise NotFiniteError(
            f"at step {step} the loss is {value} and the norm of the gradient {norm}. Train again in a new "
            f"folder with a lower learning rate (now {highest_rate}) or a longer warmup."
        )
    return {
        "step": step, "tokens": tokens, "loss": round(value, 5), "learning_rate": rate, "gradient_norm": round(norm, 5),
    }  # fmt: skip


def keep_metrics(path: Path, step: int) -> None:
    """Drop entries after `step`: those steps are repeated, or logged together with later ones."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:  # incomplete line of a killed program
            break
        if entry["step"] <= step:
            kept.append(line + "\n")
    write_text(path, "".join(kept))


def loss_rise(path: Path) -> dict[str, float] | None:
    """Return where the validation loss was lowest, if it has risen clearly since; None otherwise.

    Causes are a learning rate that is too high, or overfitting.
    """
    measured = [entry for entry in read_jsonl(path) if "valid_loss" in entry]
    if not measured:
        return None
    lowest = min(measured, key=lambda entry: entry["valid_loss"])
    last = measured[-1]["valid_loss"]
    if last < lowest["valid_loss"] + CLEAR_RISE:
        return None
    return {"lowest": lowest["valid_loss"], "at_step": lowest["step"], "last": last}


def speed_and_memory(path: Path) -> dict[str, float | int | None]:
    """Return the median of the logged speeds, which ignores compilation, and the highest memory peak."""
    entries = read_jsonl(path)
    speeds = [entry["tokens_per_second"] for entry in entries]
    peaks = [entry["peak_memory_bytes"] for entry in entries if entry.get("peak_memory_bytes") is not None]
    return {"tokens_per_second": median(speeds) if speeds else None, "peak_memory_bytes": max(peaks, default=None)}
