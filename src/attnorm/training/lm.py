"""Train a small language model on text files.

Text -> byte-level BPE -> tokens on disk -> random windows -> AdamW with a cosine schedule -> a Hugging Face folder.
The windows of a step depend only on the seed and the step, so a run that was interrupted continues as if it had not
been; on a CPU its weights are the same to the last bit.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnorm.training.acceleration import accelerated, check_accelerate
from attnorm.training.architectures import check_normalizer
from attnorm.training.compilation import Attention, check_attention
from attnorm.training.devices import chosen_device
from attnorm.training.export import export
from attnorm.training.interruption import StopRequest, TrainingInterrupted
from attnorm.training.lengths import check_lengths, evaluation_lengths
from attnorm.training.run import Run
from attnorm.training.run_folder import open_run
from attnorm.training.run_lock import locked_folder
from attnorm.training.settings import Settings
from attnorm.training.tokens import describe_texts, prepare
from attnorm.training.windows import check_length

__all__ = ["Progress", "Report", "chosen_device", "train_lm"]


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
    attention: Attention = "engine",
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
        compiled: Compile the repeating blocks of the model.
        attention: How a replaced softmax is computed while training: by the engine that attnorm.attention would choose,
            or "dense", over the whole matrix of weights: faster for many normalizers, if it fits.
        data: Folder for the encoded texts, which several runs may share; `out/data` otherwise.
        lengths: Lengths in tokens at which the finished model is evaluated, beside the training length; 1, 2 and 4
            times that if not given, as far as the model has positions and the text is long enough.
        max_minutes: Train no step after this long, counted from the call; evaluate and write what is there. The same
            call later continues.
        sample_tokens: Length of a passage that the trained model writes into sample.txt.
        note: Where the text comes from and under which licence, for the model card.
        command: How this was called, for the model card.

    Raises:
        ImportError: accelerate is not installed.
        ValueError: Wrong settings or files, a text too short for one window, a folder that holds another run, a loss
            that is no longer finite, or several processes.
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
    check_attention(attention, settings)
    check_accelerate()
    place = chosen_device(device)
    source = describe_texts(texts, valid)
    with locked_folder(out):
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

        deadline = math.inf if max_minutes is None else started + 60 * max_minutes
        with accelerated(place, settings.dtype) as accelerator, StopRequest() as stop:
            run = Run(out, settings, corpus, accelerator, compiled=compiled, attention=attention)
            report(Progress("training", run.step, settings.steps))  # the first steps may have to be compiled
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
