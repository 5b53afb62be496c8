"""Train a small language model on text files in a folder: `train_lm`, and the `Run` of its steps.

Text -> byte-level BPE -> tokens on disk -> random windows -> AdamW with a cosine schedule -> a Hugging Face folder.
Started by torchrun or `accelerate launch`, several processes share every batch (training/device.py).

The windows of a step depend only on the seed and the step, and checkpoints are atomic. So an interrupted run continues
exactly where it stopped; on a CPU its weights are identical to those of one long run.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attnorm.arithmetic import round_up
from attnorm.files import write_json
from attnorm.normalizers.spec import read_settings
from attnorm.run_folder import only_process, read_record, require_only, require_same_run
from attnorm.training.checkpoints import (
    METRICS,
    StopRequest,
    TrainingInterrupted,
    finished_checkpoints,
    keep_metrics,
    load_checkpoint,
    log_entry,
    save_checkpoint,
)
from attnorm.training.device import MemoryPeak, Processes, accelerated, check_accelerate, chosen_device
from attnorm.training.lm.attention import Attention, check_attention, in_training, without_compiled_blocks
from attnorm.training.lm.data import (
    Corpus,
    check_length,
    check_sizes,
    describe_texts,
    prepare,
    training_windows,
    validation_windows,
)
from attnorm.training.lm.evaluate import check_lengths, evaluation_lengths, validation_loss
from attnorm.training.lm.export import export
from attnorm.training.lm.model import RECORD, LMSettings, build_model, check_normalizer
from attnorm.training.lm.step import TrainingStep, whole_windows

if TYPE_CHECKING:
    from accelerate import Accelerator


CHECKPOINTS = "checkpoints"
LOG_EVERY = 10  # steps; reading the loss synchronizes with the GPU
QUICK_VALIDATION = 64  # windows of the validation loss while training; the final loss uses all


@dataclass(frozen=True)
class LMProgress:
    """Progress of a run: `done` of `total` steps, or tokens of an unknown total (None)."""

    stage: str
    done: int
    total: int | None = None
    metrics: dict[str, float] | None = None


LMCallback = Callable[[LMProgress], None]


def train_lm(
    texts: Sequence[Path],
    valid: Path,
    out: Path,
    settings: LMSettings,
    *,
    data: Path | None = None,
    device: str | None = None,
    compiled: bool = False,
    attention: Attention = "engine",
    resume: bool = True,
    evaluate_every: int = 250,
    checkpoint_every: int = 250,
    lengths: Sequence[int] | None = None,
    max_minutes: float | None = None,
    sample_tokens: int = 0,
    note: str = "",
    command: str = "",
    report: LMCallback = lambda progress: None,
) -> dict[str, Any]:
    """Train the model in `out`, or continue; return the record that training.json holds.

    Args:
        compiled: Compile the repeating blocks of the model.
        attention: How patched layers compute attention while training: with the engine that attnorm.attention chooses,
            or "dense", over the whole matrix of weights, which is faster for many normalizers if it fits.
        data: Folder for the encoded texts, which several runs may share (default: `out/data`).
        lengths: Lengths in tokens at which the finished model is evaluated, besides the training length (default: 1, 2
            and 4 times that, if the model has positions and the text is long enough).
        max_minutes: Stop training after this time, counted from the call; then evaluate and export. The same call
            continues later.
        sample_tokens: Tokens of generated text in sample.txt.
        note: Source and licence of the text, for the model card.
        command: The command line, for the model card.

    Raises:
        ImportError: accelerate is not installed.
        ValueError: Wrong settings or files, a text too short for one window, a folder with another run, a loss that is
            not finite, or several processes.
        TrainingInterrupted: Ctrl-C or SIGTERM; a checkpoint was written.
    """
    started = time.monotonic()
    processes = Processes.launched()
    for name, value in (("evaluate_every", evaluate_every), ("checkpoint_every", checkpoint_every)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if sample_tokens < 0:
        raise ValueError(f"expected 0 or more sample tokens, got {sample_tokens}")
    check_lengths(lengths or (), settings)
    check_normalizer(settings)
    check_attention(attention, settings)
    check_accelerate(several=True)
    if settings.batch % processes.count:
        raise ValueError(
            f"expected a batch that {processes.count} processes can share equally, got {settings.batch} windows. Use "
            f"--batch {round_up(settings.batch, processes.count)}."
        )
    torch_device = chosen_device(device, processes.local_rank)
    source = describe_texts(texts, valid)
    check_sizes(texts, valid, settings.context)
    require_own(out)  # in every process, before they meet and the first one writes its lock into it
    with processes.connected(torch_device), only_process(out) if processes.first else nullcontext():
        record = processes.by_first(lambda: open_run(out, {**settings.as_dict(), **source}, resume=resume))
        if _is_finished(record, settings, lengths):
            return record

        def encode() -> Corpus:
            return prepare(
                texts, valid, data or out / "data", vocab=settings.vocab, seed=settings.seed,
                progress=lambda what, tokens: report(LMProgress(what, tokens)),
            )  # fmt: skip

        processes.by_first(lambda: encode().folder)
        corpus = encode()  # reads what process 0 has written
        check_length(corpus.train, settings.context, "training")
        check_length(corpus.valid, settings.context, "validation")
        measured = evaluation_lengths(lengths, settings, corpus.valid)

        deadline = math.inf if max_minutes is None else started + 60 * max_minutes
        with accelerated(torch_device, settings.dtype, several=True) as accelerator, StopRequest() as stop:
            run = Run(out, settings, corpus, accelerator, compiled=compiled, attention=attention, processes=processes)
            report(LMProgress("training", run.step, settings.steps))  # the first steps may have to be compiled
            for entry in run.steps(deadline, stop, evaluate_every, checkpoint_every):
                report(LMProgress("training", run.step, settings.steps, entry))
        if processes.any(stop.asked):
            raise TrainingInterrupted(run.step)
        report(LMProgress("evaluating", run.step, settings.steps))
        return processes.by_first(
            lambda: export(
                out, run.model, corpus, settings, record, steps=run.step, seconds=run.seconds, device=torch_device,
                lengths=measured, sample_tokens=sample_tokens, note=note, command=command,
            )
        )  # fmt: skip


def _is_finished(record: dict[str, Any], settings: LMSettings, lengths: Sequence[int] | None) -> bool:
    """Whether all steps are done and the model was evaluated at all these lengths."""
    result = record["result"]
    if not result or result["steps"] != settings.steps:
        return False
    return {*(lengths or ())} <= {entry["length"] for entry in result["validation"].get("by_length", ())}


def open_run(out: Path, identity: dict[str, Any], *, resume: bool) -> dict[str, Any]:
    """Return the record of the run with these settings in the folder; create it if the folder is new or empty.

    Raises:
        ValueError: The folder holds another run, or files of something else.
    """
    path = out / RECORD
    record = read_record(path, ("run",), "choose another folder with --out, or remove this one")
    if record is None:
        require_own(out)
        return _new_record(path, identity)
    started = any((out / CHECKPOINTS).glob("*")) or record.get("result")
    unsaved = "" if started else "; that run has saved nothing yet: unless it is running now, remove the folder"
    remedy = f"Choose another folder with --out, or give the same settings to continue that run{unsaved}"
    usual = {"normalizer": "softmax", "normalizer_options": {}, "recipe": {}, "output": "softmax"}
    current, recorded = ({**usual, **values} for values in (identity, read_settings(record["run"])))
    require_same_run(current, recorded, f"{out} holds another run", remedy, _format_files)
    if resume:
        return record
    shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)
    (out / METRICS).unlink(missing_ok=True)
    return _new_record(path, identity)


def require_own(out: Path) -> None:
    """Raise ValueError if the folder holds files and no training run."""
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


class Run:
    """A training run in a folder; it resumes from the last checkpoint if there is one."""

    def __init__(
        self,
        out: Path,
        settings: LMSettings,
        corpus: Corpus,
        accelerator: "Accelerator",
        *,
        compiled: bool = False,
        attention: Attention = "engine",
        processes: Processes | None = None,
    ) -> None:
        self.out, self.settings, self.corpus, self.accelerator = out, settings, corpus, accelerator
        self.compiled, self.attention, self.processes = compiled, attention, processes or Processes()
        # Not prepared by accelerate: it would wrap `forward` permanently, and the loss calls the base model.
        self.model = build_model(settings, corpus.vocabulary, corpus.end_of_text).to(accelerator.device)
        self.update = TrainingStep(
            self.model, settings, accelerator, compiled=compiled, attention=attention, processes=self.processes
        )
        self.optimizer = self.update.optimizer
        self.step, self.seconds = 0, 0.0
        if done := self.processes.by_first(lambda: finished_checkpoints(out / CHECKPOINTS)):
            state = load_checkpoint(done[-1], self.model, self.optimizer, accelerator.device)
            self.step, self.seconds = state["step"], state["seconds"]
        self.processes.by_first(lambda: keep_metrics(out / METRICS, self.step))
        self.quick = validation_windows(corpus.valid, settings.context, QUICK_VALIDATION)

    def steps(
        self, deadline: float, stop: StopRequest, evaluate_every: int, checkpoint_every: int | None
    ) -> Generator[dict[str, float], None, None]:
        """Train until the last step, the deadline or a request to stop; yield the log entries.

        An entry is checked to be finite before a checkpoint is written, so no checkpoint holds a broken model.
        checkpoint_every: None for no checkpoints.
        """
        try:
            with (
                in_training(self.model, compiled=self.compiled, attention=self.attention, dtype=self.settings.dtype),
                whole_windows(),
            ):
                yield from self._steps(deadline, stop, evaluate_every, checkpoint_every)
        finally:
            del self.update  # before the processes are disconnected
            self.optimizer.zero_grad()  # a captured step keeps its gradients; evaluation needs their memory

    def _steps(
        self, deadline: float, stop: StopRequest, evaluate_every: int, checkpoint_every: int | None
    ) -> Generator[dict[str, float], None, None]:
        """The loop of `steps`, inside its contexts."""
        self.model.train()
        losses: list[torch.Tensor] = []
        memory, clock = MemoryPeak(self.accelerator.device), time.monotonic()
        highest = 0  # peak memory of all steps; torch does not count the memory of captured steps
        path = self.out / METRICS if self.processes.first else Path(os.devnull)
        with path.open("a", encoding="utf-8") as log:
            ending = self.step == self.settings.steps
            while not ending:
                rate = learning_rate(self.step, self.settings)
                loss, norm = self._update(rate)
                losses.append(loss)
                self.step += 1
                complete = self.step == self.settings.steps
                ending = complete or self.processes.any(stop.asked or time.monotonic() >= deadline)
                evaluate = complete or self.step % evaluate_every == 0
                save = checkpoint_every is not None and (ending or self.step % checkpoint_every == 0)
                if evaluate or ending or save or self.step % LOG_EVERY == 0:
                    entry = self._entry(losses, rate, norm)
                    elapsed = time.monotonic() - clock
                    entry["tokens_per_second"] = round(len(losses) * self.settings.tokens_per_step / elapsed, 1)
                    self.seconds += elapsed
                    if (peak := memory.bytes()) is not None:
                        entry["peak_memory_bytes"] = highest = max(highest, peak)
                    if evaluate:
                        entry["valid_loss"] = self.processes.by_first(self._quick_loss)
                    log.write(json.dumps(entry) + "\n")
                    log.flush()
                    yield entry
                    if save:
                        self.processes.by_first(self._save)
                    memory.restart()
                    losses, clock = [], time.monotonic()

    def _update(self, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
        settings = self.settings
        windows = training_windows(
            self.corpus.train, seed=settings.seed, step=self.step, batch=settings.batch, context=settings.context
        )
        windows = self.processes.share(windows)
        if self.accelerator.device.type == "cuda":
            windows = windows.pin_memory()
        return self.update(windows.to(self.accelerator.device, non_blocking=True), rate)

    def _entry(self, losses: list[torch.Tensor], rate: float, norm: torch.Tensor) -> dict[str, Any]:
        loss, settings = self.processes.mean(torch.stack(losses).mean()), self.settings
        tokens = self.step * settings.tokens_per_step
        return log_entry(self.step, tokens, loss, norm, rate, highest_rate=settings.learning_rate)

    def _quick_loss(self) -> float:
        self.model.eval()
        with without_compiled_blocks(self.model, self.settings):
            loss = validation_loss(self.model, self.quick, self.accelerator.device, getattr(torch, self.settings.dtype))
        self.model.train()
        return round(loss, 5)

    def _save(self) -> None:
        save_checkpoint(self.out / CHECKPOINTS, self.model, self.optimizer, self.step, {"seconds": self.seconds})


def learning_rate(step: int, settings: LMSettings) -> float:
    """Return the learning rate of a step, counted from 0; the first and the last are above 0."""
    warmup = min(settings.warmup, settings.steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / (warmup + 1)
    progress = (step - warmup + 1) / (settings.steps - warmup + 1)
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
