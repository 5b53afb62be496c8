"""The folder of one run: what it trains, how far it is, and the refusal to mix it with another."""

import json
import shutil
from pathlib import Path
from statistics import median
from typing import Any

from attnorm.training import atomic
from attnorm.training.settings import differences

RECORD = "training.json"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
CLEAR_RISE = 0.05  # nats per token


def open_run(out: Path, identity: dict[str, Any], *, resume: bool) -> dict[str, Any]:
    """Claims the folder for the run of this identity; returns its record, as it was left by an earlier start.

    Raises:
        ValueError: The folder holds another run, or files that are no run.
    """
    record_path = out / RECORD
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; name a folder for the output")
    if not record_path.exists():
        if out.is_dir() and any(not path.name.startswith(".") for path in out.iterdir()):
            raise ValueError(f"{out} holds files, but no training run; choose an empty or a new folder")
        return _begin(record_path, identity)
    try:
        record: dict[str, Any] = json.loads(record_path.read_text(encoding="utf-8"))
        theirs = record["run"]
    except (json.JSONDecodeError, KeyError, TypeError):
        raise ValueError(f"{record_path} is damaged; choose another folder, or remove this one") from None
    if theirs != identity:
        begun = any((out / CHECKPOINTS).glob("*")) or record.get("result")
        lost = "" if begun else "; that run has saved nothing yet: unless it is running now, remove the folder"
        raise ValueError(
            f"{out} holds another run: {'; '.join(differences(identity, theirs))}. "
            f"Choose another folder, or give the same settings to continue that run{lost}"
        )
    if resume:
        return record
    shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)
    (out / METRICS).unlink(missing_ok=True)
    return _begin(record_path, identity)


def _begin(path: Path, identity: dict[str, Any]) -> dict[str, Any]:
    record = {"run": identity, "result": None}
    atomic.write_json(path, record)
    return record


def loss_rise(path: Path) -> dict[str, float] | None:
    """Where the validation loss was lowest, if it has risen clearly since: a learning rate too high, or a text learned
    by heart. None for a sound run."""
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    measured = [entry for entry in entries if "valid_loss" in entry]
    if not measured:
        return None
    lowest = min(measured, key=lambda entry: entry["valid_loss"])
    last = measured[-1]["valid_loss"]
    if last < lowest["valid_loss"] + CLEAR_RISE:
        return None
    return {"lowest": lowest["valid_loss"], "at_step": lowest["step"], "last": last}


def speed_and_memory(path: Path) -> dict[str, float | int | None]:
    """The median of the logged speeds, which compiling at the start does not move, and the highest peak of memory."""
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    speeds = [entry["tokens_per_second"] for entry in entries]
    peaks = [entry["peak_memory_bytes"] for entry in entries if entry.get("peak_memory_bytes") is not None]
    return {
        "tokens_per_second": median(speeds) if speeds else None,
        "peak_memory_bytes": max(peaks, default=None),
    }


def keep_metrics(path: Path, step: int) -> None:
    """Drops what was logged after the checkpoint of `step`: those steps are about to be done again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:  # the line during which the program was killed
            break
        if entry["step"] <= step:
            kept.append(line + "\n")
    atomic.write_text(path, "".join(kept))
