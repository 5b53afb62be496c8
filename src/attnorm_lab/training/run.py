"""The base of all trainers: the record of a run in its folder, optimizer, schedule, updates, and the training loop.

    training.json   the settings of the run and, at the end, its result
    metrics.jsonl   the log
    checkpoints/    weights and optimizer state, from which the run resumes

A trainer derives from `TrainingRun` and defines an update.

On a GPU, a `WeightUpdate` computes loss and gradients from the fourth step on as a CUDA graph. At a thousand tokens a
GPU computes faster than Python starts its kernels. A graph records them once and starts them all with one call. It
holds addresses, not values: inputs are copied to where the recorded step read them, and gradients stay where it wrote
them.
"""

import json
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from attnorm.files import write_json
from attnorm.run_folder import read_record, require_only, require_same_run
from attnorm_lab.training.checkpoints import (
    METRICS,
    StopRequest,
    finished_checkpoints,
    keep_metrics,
    load_checkpoint,
    log_entry,
    save_checkpoint,
)
from attnorm_lab.training.device import MemoryPeak, Processes

RECORD = "training.json"
CHECKPOINTS = "checkpoints"
LOG_EVERY = 10  # steps; reading the loss synchronizes with the GPU
BETAS = (0.9, 0.95)
LARGEST_GRADIENT = 1.0  # norm over all parameters, for gradient clipping
STEPS_BEFORE = 3  # steps without capture: they compile kernels, which a capture cannot do


def open_run(out: Path, identity: dict[str, Any], *, resume: bool) -> dict[str, Any]:
    """Return the record of the run with these settings in the folder; create it if the folder is new or empty.

    Raises:
        ValueError: The folder contains another run, or files of something else.
    """
    path = out / RECORD
    record = read_record(path, ("run",), "Choose another folder with --out, or remove this one.")
    if record is None:
        require_own(out)
        return _new_record(path, identity)
    started = any((out / CHECKPOINTS).glob("*")) or record.get("result")
    unsaved = "" if started else "; that run has saved nothing yet: unless it is running now, remove the folder"
    remedy = f"Choose another folder with --out, or give the same settings to continue that run{unsaved}"
    usual = {"normalizer": "softmax", "normalizer_options": {}, "recipe": {}, "output": "softmax"}
    current, recorded = ({**usual, **values} for values in (identity, record["run"]))
    require_same_run(current, recorded, f"{out} contains another run", remedy, _format_files)
    if resume:
        return record
    shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)
    (out / METRICS).unlink(missing_ok=True)
    return _new_record(path, identity)


def require_own(out: Path) -> None:
    """Raise ValueError if the folder contains files and no training run."""
    if not (out / RECORD).is_file():
        require_only(out, (), "files, but no training run")


def _new_record(path: Path, identity: dict[str, Any]) -> dict[str, Any]:
    record = {"run": identity, "result": None}
    write_json(path, record)
    return record


def _format_files(value: Any) -> str:
    """Show files by their names, without their hashes."""
    if isinstance(value, dict) and "name" in value:
        return str(value["name"])
    if isinstance(value, list):
        return " and ".join(map(_format_files, value))
    return str(value)


class Schedule(Protocol):
    """The settings that optimizer and learning rates need."""

    @property
    def steps(self) -> int: ...
    @property
    def warmup(self) -> int: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...


def learning_rate(step: int, settings: Schedule) -> float:
    """Return the learning rate of a step, counted from 0; the first and the last are above 0."""
    warmup = min(settings.warmup, settings.steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / (warmup + 1)
    progress = (step - warmup + 1) / (settings.steps - warmup + 1)
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def make_optimizer(model: torch.nn.Module, settings: Schedule) -> torch.optim.AdamW:
    from attnorm.models.dispatch import NORMALIZER

    decaying: list[torch.nn.Parameter] = []
    free: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        # Normalizers learn scales and thresholds, which should not decay to 0; second queries are a projection.
        decays = parameter.dim() > 1 and (NORMALIZER not in name.split(".") or name.endswith(".second.weight"))
        (decaying if decays else free).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decaying, "weight_decay": settings.weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=BETAS, fused=decaying[0].is_cuda)


class WeightUpdate:
    """One update per call. A subclass computes the loss with all gradients, and says whether that can be captured."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.captured: CapturedStep | None = None
        self._calls = 0

    def __call__(self, rate: float, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Change the weights; return the loss and the norm of the gradient before clipping, on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self._calls == STEPS_BEFORE and self._can_be_captured():
            with self._capturing():
                self.captured = capture(self._gradients, *inputs)
            if self.captured is None:
                self.optimizer.zero_grad()
        self._calls += 1
        loss = (self._gradients if self.captured is None else self.captured)(*inputs)
        norm = self._clip()
        self.optimizer.step()
        if self.captured is None:
            self.optimizer.zero_grad()
        return loss, norm

    def _gradients(self, *inputs: Tensor) -> Tensor:
        """Set the gradients of all parameters; return the loss."""
        raise NotImplementedError

    def _clip(self) -> Tensor:
        """Clip the gradients; return their norm before."""
        raise NotImplementedError

    def _can_be_captured(self) -> bool:
        raise NotImplementedError

    def _capturing(self) -> AbstractContextManager[None]:
        """Return a context for the capture."""
        return nullcontext()


class CapturedStep:
    """Call it like the captured step. Do not set the gradients to None afterwards; every call overwrites them.

    Measure peak memory in earlier steps: torch does not count what a graph uses when it runs again.
    """

    def __init__(self, step: Callable[..., Tensor], *inputs: Tensor) -> None:
        """Capture a step. step: computes the loss of the inputs and all gradients, which must be None before."""
        self._inputs = [tensor.clone() for tensor in inputs]
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._loss = step(*self._inputs)

    def __call__(self, *inputs: Tensor) -> Tensor:
        for captured, tensor in zip(self._inputs, inputs, strict=True):
            if tensor.shape != captured.shape:  # copy_ would repeat a single window
                raise ValueError(
                    f"expected an input of the captured shape {tuple(captured.shape)}, got {tuple(tensor.shape)}. "
                    "Make a new step for another shape."
                )
            captured.copy_(tensor, non_blocking=True)
        self._graph.replay()
        return self._loss.clone()


def capture(step: Callable[..., Tensor], *inputs: Tensor) -> CapturedStep | None:
    """Return the captured step; None, with a warning, if it cannot be captured. Some gradients may be set then."""
    try:
        return CapturedStep(step, *inputs)
    except RuntimeError as error:  # e.g. a normalizer of the user's waits for the GPU, which a graph cannot contain
        reason = str(error).partition("\n")[0]
        warnings.warn(f"training continues without a CUDA graph, which is slower: {reason}", stacklevel=3)
        return None


class TrainingRun:
    """The model, its optimizer and the steps done; it resumes from the last checkpoint of the folder, if any.

    A subclass has `_update`, which also counts the tokens.
    """

    def __init__(
        self,
        out: Path,
        schedule: Schedule,
        model: Any,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        processes: Processes | None = None,
    ) -> None:
        self.out, self.schedule, self.model, self.optimizer, self.device = out, schedule, model, optimizer, device
        self.processes = processes or Processes()
        self.step, self.seconds, self.tokens = 0, 0.0, 0
        self._losses: list[Tensor] = []  # of the steps since the last entry that an uninterrupted run has too
        if done := self.processes.by_first(lambda: finished_checkpoints(out / CHECKPOINTS)):
            state = load_checkpoint(done[-1], model, optimizer, device)
            self.step, self.seconds, self.tokens = state["step"], state["seconds"], state.get("tokens", 0)
            self._losses = list(torch.tensor(state["losses"], device=device))
        # An uninterrupted run has no entry at a step where only a request or the deadline ended training.
        self.processes.by_first(lambda: keep_metrics(out / METRICS, self.step - bool(self._losses)))

    def _update(self, rate: float) -> tuple[Tensor, Tensor]:
        """Change the weights; return the loss and the norm of the gradient before clipping, on the device."""
        raise NotImplementedError

    def _validation_loss(self) -> float:
        raise NotImplementedError

    def _state(self) -> dict[str, Any]:
        """Return what a checkpoint contains besides weights, optimizer state and step."""
        return {"seconds": self.seconds}

    def _logged_steps(
        self,
        deadline: float,
        stop: StopRequest,
        *,
        checkpoint_every: int | None,
        checkpoint_if_stopped: bool = False,
        evaluate_every: int | None = None,
    ) -> Generator[dict[str, float], None, None]:
        """Train until the last step, the deadline or a request to stop; yield the log entries.

        An entry is checked to be finite before a checkpoint is written, so no checkpoint contains a broken model.

        Args:
            checkpoint_every: Steps between checkpoints; the last step has one too. None for no checkpoints.
            checkpoint_if_stopped: Write a checkpoint if training stops early, also without `checkpoint_every`.
            evaluate_every: Steps between validation losses; the last step has one too. None for no validation loss.
        """
        self.model.train()
        memory, clock, tokens = MemoryPeak(self.device), time.monotonic(), self.tokens
        highest = 0  # peak memory of all steps; torch does not count the memory of captured steps
        path = self.out / METRICS if self.processes.first else Path(os.devnull)
        with path.open("a", encoding="utf-8") as log:
            ending = self.step == self.schedule.steps
            while not ending:
                rate = learning_rate(self.step, self.schedule)
                loss, norm = self._update(rate)
                self._losses.append(loss)
                self.step += 1
                complete = self.step == self.schedule.steps
                ending = complete or self.processes.any(stop.requested or time.monotonic() >= deadline)
                evaluate = evaluate_every is not None and (complete or self.step % evaluate_every == 0)
                planned = checkpoint_every is not None and (complete or self.step % checkpoint_every == 0)
                save = planned or (checkpoint_every is not None and ending)
                save |= checkpoint_if_stopped and ending and (stop.requested or not complete)
                regular = evaluate or complete or planned or self.step % LOG_EVERY == 0
                if regular or ending:
                    losses = self.processes.mean(torch.stack(self._losses))
                    entry = log_entry(
                        self.step, self.tokens, losses.mean(), norm, rate, highest_rate=self.schedule.learning_rate
                    )
                    self._losses = [] if regular else list(losses)
                    elapsed = time.monotonic() - clock
                    entry["tokens_per_second"] = round((self.tokens - tokens) / elapsed, 1)
                    self.seconds += elapsed
                    if (peak := memory.bytes()) is not None:
                        entry["peak_memory_bytes"] = highest = max(highest, peak)
                    if evaluate:
                        entry["valid_loss"] = self.processes.by_first(self._validation_loss)
                    log.write(json.dumps(entry) + "\n")
                    log.flush()
                    yield entry
                    if save:
                        self.processes.by_first(self._save)
                    memory.restart()
                    clock, tokens = time.monotonic(), self.tokens

    def _save(self) -> None:
        record = {**self._state(), "losses": [float(loss) for loss in self._losses]}
        save_checkpoint(self.out / CHECKPOINTS, self.model, self.optimizer, self.step, record)
