"""Train a small language model on text files.

Text -> byte-level BPE -> tokens on disk -> random windows -> AdamW with a cosine schedule -> a Hugging Face folder.
An interrupted run continues exactly where it stopped; on a CPU its weights are identical to those of one long run.
Started by torchrun or `accelerate launch`, several processes share every batch (training/device.py).
"""

import math
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnorm.files import write_json
from attnorm.normalizers.former_defaults import read_settings
from attnorm.run_folder import only_process, read_record, require_only, require_same_run
from attnorm.training.checkpoints import StopRequest, TrainingInterrupted
from attnorm.training.device import Processes, accelerated, check_accelerate, chosen_device
from attnorm.training.lm.attention import Attention, check_attention
from attnorm.training.lm.data import Corpus, check_length, check_sizes, describe_texts, prepare
from attnorm.training.lm.evaluate import check_lengths, evaluation_lengths
from attnorm.training.lm.export import export
from attnorm.training.lm.model import RECORD, LMSettings, check_normalizer
from attnorm.training.lm.train import CHECKPOINTS, METRICS, Run

__all__ = ["LMProgress", "Report", "chosen_device", "train_lm"]


@dataclass(frozen=True)
class LMProgress:
    """Progress of a run: `done` of `total` steps, or tokens of an unknown total (None)."""

    stage: str
    done: int
    total: int | None = None
    metrics: dict[str, float] | None = None


Report = Callable[[LMProgress], None]


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
    report: Report = lambda progress: None,
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
            f"--batch {-(-settings.batch // processes.count) * processes.count}."
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
    record = read_record(path, ("run",), "choose another folder, or remove this one")
    if record is None:
        require_own(out)
        return _new_record(path, identity)
    started = any((out / CHECKPOINTS).glob("*")) or record.get("result")
    unsaved = "" if started else "; that run has saved nothing yet: unless it is running now, remove the folder"
    remedy = f"Choose another folder, or give the same settings to continue that run{unsaved}"
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
