"""Train a small language model on text files.

Text -> byte-level BPE -> tokens on disk -> random windows -> AdamW with a cosine schedule -> a Hugging Face folder.
The windows of a step depend only on the seed and the step, so a run that was interrupted continues as if it had not
been; on a CPU its weights are the same to the last bit.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnorm.training.architectures import build_model, check_normalizer
from attnorm.training.checkpoints import finished_checkpoints, load_checkpoint, save_checkpoint
from attnorm.training.compilation import compile_blocks, compiled_training, without_compiled_blocks
from attnorm.training.evaluation import predicted_loss, validation_loss, window_loss
from attnorm.training.export import export
from attnorm.training.interruption import StopRequest, TrainingInterrupted
from attnorm.training.lengths import check_lengths, evaluation_lengths
from attnorm.training.memory import MemoryPeak
from attnorm.training.optimization import LARGEST_GRADIENT, learning_rate, make_optimizer
from attnorm.training.run_folder import CHECKPOINTS, METRICS, keep_metrics, open_run
from attnorm.training.settings import Settings
from attnorm.training.tokens import Corpus, describe_texts, prepare
from attnorm.training.windows import check_length, training_windows, validation_windows

LOG_EVERY = 10  # steps; reading the loss makes the GPU wait
QUICK_VALIDATION = 64  # windows looked at while training; the final figures use all


@dataclass(frozen=True)
class Progress:
    """Where a run is: `done` of `total` steps, or tokens of a total not known beforehand."""

    stage: str
    done: int
    total: int | None = None
    metrics: dict[str, float] | None = None


Report = Callable[[Progress], None]


def train_lm(
    texts: Sequence[Path],
    valid: Path,
    out: Path,
    settings: Settings,
    *,
    data: Path | None = None,
    device: str | None = None,
    compiled: bool = False,
    resume: bool = True,
    evaluate_every: int = 250,
    checkpoint_every: int = 250,
    lengths: Sequence[int] | None = None,
    max_minutes: float | None = None,
    sample_tokens: int = 0,
    note: str = "",
    command: str = "",
    report: Report = lambda progress: None,
) -> dict[str, Any]:
    """Trains, or continues to train, the model in `out`; returns the record that training.json holds.

    Args:
        data: Folder for the encoded texts, which several runs may share; `out/data` otherwise.
        lengths: Lengths in tokens at which the finished model is evaluated, beside the training length; 1, 2 and 4
            times that if not given, as far as the model has positions and the text is long enough.
        max_minutes: Train no step after this long, counted from the call; evaluate and write what is there. The same
            call later continues.
        sample_tokens: Length of a passage that the trained model writes into sample.txt.
        note: Where the text comes from and under which licence, for the model card.
        command: How this was called, for the model card.

    Raises:
        ValueError: Wrong settings or files, a text too short for one window, a folder that holds another run, or a loss
            that is no longer finite.
        TrainingInterrupted: Ctrl-C or SIGTERM; a checkpoint was written.
    """
    started = time.monotonic()
    for name, value in (("evaluate_every", evaluate_every), ("checkpoint_every", checkpoint_every)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if sample_tokens < 0:
        raise ValueError(f"the sample must not have a negative number of tokens, got {sample_tokens}")
    check_lengths(lengths or (), settings)
    check_normalizer(settings)
    place = chosen_device(device)
    source = describe_texts(texts, valid)
    record = open_run(out, {**settings.as_dict(), **source}, resume=resume)
    if _is_finished(record, settings, lengths):
        return record

    corpus = prepare(
        texts, valid, data or out / "data", vocab=settings.vocab, seed=settings.seed,
        progress=lambda what, tokens: report(Progress(what, tokens)),
    )  # fmt: skip
    check_length(corpus.train, settings.context, "training")
    check_length(corpus.valid, settings.context, "validation")
    measured = evaluation_lengths(lengths, settings, corpus.valid)

    run = _Run(out, settings, corpus, place, compiled)
    deadline = math.inf if max_minutes is None else started + 60 * max_minutes
    with StopRequest() as stop, compiled_training(run.model) if compiled else nullcontext():
        for entry in run.steps(deadline, stop, evaluate_every, checkpoint_every):
            report(Progress("training", run.step, settings.steps, entry))
    if stop.asked:
        raise TrainingInterrupted(run.step)
    report(Progress("evaluating", run.step, settings.steps))
    return export(
        out, run.model, corpus, settings, record, steps=run.step, seconds=run.seconds, device=place,
        lengths=measured, sample_tokens=sample_tokens, note=note, command=command,
    )  # fmt: skip


def _is_finished(record: dict[str, Any], settings: Settings, lengths: Sequence[int] | None) -> bool:
    """All steps are done, and the model was evaluated at every length that is asked for."""
    result = record["result"]
    if not result or result["steps"] != settings.steps:
        return False
    return {*(lengths or ())} <= {each["length"] for each in result["validation"].get("by_length", ())}


def chosen_device(name: str | None) -> torch.device:
    """The device of this name; a GPU where none is named and there is one.

    Raises:
        ValueError: Not a device, or none that this machine has.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"cannot use device {name!r}: {str(error).splitlines()[0]}; try cpu") from None
    return device


class _Run:
    """A model in training: its weights, its optimizer and the number of steps done."""

    def __init__(self, out: Path, settings: Settings, corpus: Corpus, device: torch.device, compiled: bool) -> None:
        self.out, self.settings, self.corpus, self.device = out, settings, corpus, device
        self.model = build_model(settings, corpus.vocabulary, corpus.end_of_text).to(device)
        self.optimizer = make_optimizer(self.model, settings)
        self.step, self.seconds = 0, 0.0
        if done := finished_checkpoints(out / CHECKPOINTS):
            state = load_checkpoint(done[-1], self.model, self.optimizer, device)
            self.step, self.seconds = state["step"], state["seconds"]
        keep_metrics(out / METRICS, self.step)
        self.loss: Callable[..., Any] = predicted_loss
        if compiled:
            self.loss = torch.compile(predicted_loss, dynamic=False)
            compile_blocks(self.model, settings)
        self.quick = validation_windows(corpus.valid, settings.context, QUICK_VALIDATION)

    def steps(
        self, deadline: float, stop: StopRequest, evaluate_every: int, checkpoint_every: int
    ) -> Iterator[dict[str, float]]:
        """Trains until the last step, the deadline or a request to stop; yields what it logs.

        What is saved is logged first, and what is logged is finite: no checkpoint holds a model that has broken down.
        """
        self.model.train()
        losses: list[torch.Tensor] = []
        memory, clock = MemoryPeak(self.device), time.monotonic()
        with (self.out / METRICS).open("a", encoding="utf-8") as log:
            ending = self.step == self.settings.steps
            while not ending:
                rate = learning_rate(self.step, self.settings)
                loss, norm = self._update(rate)
                losses.append(loss)
                self.step += 1
                complete = self.step == self.settings.steps
                ending = complete or stop.asked or time.monotonic() >= deadline
                evaluate = complete or self.step % evaluate_every == 0
                save = ending or self.step % checkpoint_every == 0
                if evaluate or save or self.step % LOG_EVERY == 0:
                    entry = self._entry(losses, rate, norm)
                    elapsed = time.monotonic() - clock
                    entry["tokens_per_second"] = round(len(losses) * self.settings.tokens_per_step / elapsed, 1)
                    self.seconds += elapsed
                    if (peak := memory.bytes()) is not None:
                        entry["peak_memory_bytes"] = peak
                    if evaluate:
                        entry["valid_loss"] = self._quick_loss()
                    log.write(json.dumps(entry) + "\n")
                    log.flush()
                    yield entry
                    if save:
                        self._save()
                    memory.restart()
                    losses, clock = [], time.monotonic()

    def _update(self, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
        settings = self.settings
        windows = training_windows(
            self.corpus.train, seed=settings.seed, step=self.step, batch=settings.batch, context=settings.context
        )
        if self.device.type == "cuda":
            windows = windows.pin_memory()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        dtype = getattr(torch, settings.dtype)
        with torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
            loss = window_loss(self.model, windows.to(self.device, non_blocking=True), self.loss)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach(), norm

    def _entry(self, losses: list[torch.Tensor], rate: float, norm: torch.Tensor) -> dict[str, float]:
        loss, length = float(torch.stack(losses).mean()), float(norm)
        if not math.isfinite(loss + length):
            raise ValueError(
                f"at step {self.step} the loss is {loss} and the norm of the gradient {length}; start over in a new "
                f"folder with a lower learning rate (now {self.settings.learning_rate}) or a longer warmup"
            )
        tokens = self.step * self.settings.tokens_per_step
        return {
            "step": self.step, "tokens": tokens, "loss": round(loss, 5),
            "learning_rate": rate, "gradient_norm": round(length, 5),
        }  # fmt: skip

    def _quick_loss(self) -> float:
        self.model.eval()
        with without_compiled_blocks(self.model, self.settings):
            loss = validation_loss(self.model, self.quick, self.device, getattr(torch, self.settings.dtype))
        self.model.train()
        return round(loss, 5)

    def _save(self) -> None:
        save_checkpoint(self.out / CHECKPOINTS, self.model, self.optimizer, self.step, {"seconds": self.seconds})
