"""Train a small language model on text files in a folder: `train_lm`, the `Run` of its steps, and one `TrainingStep`.

Text -> byte-level BPE -> tokens on disk -> random windows -> AdamW with a cosine schedule -> a Hugging Face folder.
Started by torchrun or `accelerate launch`, several processes share every batch (training/device.py).

The windows of a step depend only on the seed and the step, and checkpoints are atomic. So an interrupted run continues
exactly where it stopped; on a CPU its weights are identical to those of one long run.
"""

import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attnorm.arithmetic import round_up
from attnorm.evaluation.windows import validation_windows
from attnorm.models.private_names import whole_windows
from attnorm.run_folder import only_process
from attnorm_lab.training.checkpoints import StopRequest, TrainingInterrupted
from attnorm_lab.training.device import Processes, accelerated, check_accelerate, chosen_device
from attnorm_lab.training.lm.attention import (
    Attention,
    check_attention,
    compile_blocks,
    in_training,
    is_traceable,
    without_compiled_blocks,
)
from attnorm_lab.training.lm.data import (
    Corpus,
    check_length,
    check_sizes,
    describe_texts,
    prepare,
    training_windows,
)
from attnorm_lab.training.lm.evaluate import (
    check_lengths,
    evaluation_lengths,
    predicted_loss,
    validation_loss,
    window_loss,
)
from attnorm_lab.training.lm.export import export
from attnorm_lab.training.lm.model import LMSettings, build_model, check_normalizer
from attnorm_lab.training.run import LARGEST_GRADIENT, TrainingRun, WeightUpdate, make_optimizer, open_run, require_own

if TYPE_CHECKING:
    from accelerate import Accelerator


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
    """Train the model in `out`, or continue; return the record that training.json contains.

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
        note: Source and license of the text, for the model card.
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
        if processes.any(stop.requested):
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


class TrainingStep(WeightUpdate):
    """One update per call. Call it inside `in_training` and `whole_windows`."""

    def __init__(
        self,
        model: Any,
        settings: LMSettings,
        accelerator: "Accelerator",
        *,
        compiled: bool = False,
        attention: Attention = "engine",
        processes: Processes | None = None,
    ) -> None:
        super().__init__(model, accelerator.prepare(make_optimizer(model, settings)))
        self.accelerator, self.compiled, self.attention = accelerator, compiled, attention
        self.dtype = settings.dtype
        self.processes = processes or Processes()
        loss: Callable[..., Any] = predicted_loss
        if compiled:
            loss = torch.compile(predicted_loss, dynamic=False)
            compile_blocks(model, settings)
        self.loss = self.processes.parallel(WindowLoss(model, loss))

    def _gradients(self, *inputs: torch.Tensor) -> torch.Tensor:
        with self.accelerator.autocast():
            loss = self.loss(*inputs)
        self.accelerator.backward(loss)
        detached: torch.Tensor = loss.detach()
        return detached

    def _clip(self) -> torch.Tensor:
        norm: torch.Tensor = self.accelerator.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT)
        return norm

    def _can_be_captured(self) -> bool:
        """Whether a step is nothing but kernels: compiled blocks, attention that is part of them, one process."""
        on_gpu = self.accelerator.device.type == "cuda" and self.processes.count == 1
        return on_gpu and self.compiled and self.attention == "engine" and is_traceable(self.model, self.dtype)


class WindowLoss(torch.nn.Module):
    """The model and its loss as one module, so that torch can average gradients over processes."""

    def __init__(self, model: Any, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, windows: torch.Tensor) -> Any:
        return window_loss(self.model, windows, self.loss)


class Run(TrainingRun):
    """The training run of a language model."""

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
        self.settings, self.corpus, self.accelerator = settings, corpus, accelerator
        self.compiled, self.attention = compiled, attention
        # Not prepared by accelerate: it would wrap `forward` permanently, and the loss calls the base model.
        model = build_model(settings, corpus.vocabulary, corpus.end_of_text).to(accelerator.device)
        self.update = TrainingStep(
            model, settings, accelerator, compiled=compiled, attention=attention, processes=processes
        )
        super().__init__(out, settings, model, self.update.optimizer, accelerator.device, processes)
        self.tokens = self.step * settings.tokens_per_step
        self.quick = validation_windows(corpus.valid, settings.context, QUICK_VALIDATION)

    def steps(
        self, deadline: float, stop: StopRequest, evaluate_every: int, checkpoint_every: int | None
    ) -> Generator[dict[str, float], None, None]:
        """Train until the last step, the deadline or a request to stop; yield the log entries.

        checkpoint_every: None for no checkpoints.
        """
        try:
            with (
                in_training(self.model, compiled=self.compiled, attention=self.attention, dtype=self.settings.dtype),
                whole_windows(),
            ):
                yield from self._logged_steps(
                    deadline, stop, checkpoint_every=checkpoint_every, evaluate_every=evaluate_every
                )
        finally:
            del self.update  # before the processes are disconnected
            self.optimizer.zero_grad()  # a captured step keeps its gradients; evaluation needs their memory

    def _update(self, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
        settings = self.settings
        windows = training_windows(
            self.corpus.train, seed=settings.seed, step=self.step, batch=settings.batch, context=settings.context
        )
        windows = self.processes.share(windows)
        if self.device.type == "cuda":
            windows = windows.pin_memory()
        self.tokens += settings.tokens_per_step
        return self.update(rate, windows.to(self.device, non_blocking=True))

    def _validation_loss(self) -> float:
        self.model.eval()
        with without_compiled_blocks(self.model, self.settings):
            loss = validation_loss(self.model, self.quick, self.device, getattr(torch, self.settings.dtype))
        self.model.train()
        return round(loss, 5)
