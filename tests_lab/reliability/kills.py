"""Resumable commands that are killed with SIGKILL at random moments, started again, and compared with a quiet run."""

import glob
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Command:
    """A command of the command line that continues what an earlier start left in its folder."""

    name: str
    argv: Callable[[Path, Path], list[str]]  # folder of the run, folder of its inputs
    result: Callable[[Path], Any]  # what must not depend on kills
    begun: str  # pattern of a file in the folder that exists when a part of the work is done and a part is not


@dataclass
class Tally:
    """What was tried and what was lost."""

    command: str
    trials: int = 0
    kills: int = 0
    too_late: int = 0  # the command had finished before the kill
    leftovers: int = 0  # trials that leave temporary files after the last, undisturbed start
    lost: list[str] = field(default_factory=list)


def _analysis(folder: Path) -> Any:
    from attnorm.analysis.result import Analysis

    found = Analysis.load(folder)
    return {name: repr(table.to_pylist()) for name, table in found.tables.items()} | {
        "verdict": repr(found.verdict),
        "report": (folder / "report.html").is_file(),
    }


def _language_model(folder: Path) -> Any:
    losses = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{name: one[name] for name in one if "second" not in name and "time" not in name} for one in losses]
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    return [(one.get("step"), one.get("loss")) for one in kept], weights


def _retrieval(folder: Path) -> Any:
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return sorted(repr({**one, "train_seconds": None}) for one in records)


def _evaluation(folder: Path) -> Any:
    from attnorm.evaluation.result import Evaluation

    found = Evaluation.load(folder)
    parts = sorted(repr({**part.as_dict(), "seconds": None}) for part in found.parts)
    return parts, found.record["sides"], found.record["items"], (folder / "evaluation.html").is_file()


def _clrs(folder: Path) -> Any:
    record = json.loads((folder / "training.json").read_text())
    measured = {name: record["result"][name] for name in ("steps", "tokens", "held_out_loss", "exact", "entropy")}
    losses = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    weights = hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()
    return record["run"], measured, [(one["step"], one["loss"]) for one in losses], weights


def _reproduction(folder: Path) -> Any:
    found = {}
    for path in sorted(folder.rglob("*")):
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue  # drafts of a killed process; counted as leftovers
        if path.suffix in (".csv", ".svg", ".png", ".parquet"):
            found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.suffix == ".json" and "findings" in (record := json.loads(path.read_text())):
            found[str(path.relative_to(folder))] = repr((record["findings"], record["words"]))
    assert found
    return found


def _train_lm(out: Path, inputs: Path) -> list[str]:
    (inputs / "train.txt").write_text("A rose is a rose, and a thorn is a thorn.\n\n" * 200)
    (inputs / "valid.txt").write_text("A rose is a rose is a rose.\n\n" * 20)
    sizes = "--layers 1 --heads 2 --width 16 --context 16 --vocab 300 --batch 4 --steps 60 --checkpoint-every 5"
    return ["lab", "train", "lm", str(inputs / "train.txt"), "--valid", str(inputs / "valid.txt"), "--out", str(out),
            "--device", "cpu", "--eval-every", "20", *sizes.split()]  # fmt: skip


COMMANDS = {
    one.name: one
    for one in (
        Command(
            "analyze",
            lambda out, _: ["analyze", "--lengths", "16,32,48", "--windows", "2", "--rows", "8", "--metrics",
                            "core", "--device", "cpu", "--out", str(out)],
            _analysis,
            "parts/[!.]*",
        ),
        Command("train lm", _train_lm, _language_model, "checkpoints/*"),
        Command(
            "train retrieval",
            lambda out, _: ["lab", "train", "retrieval", "--out", str(out), "--device", "cpu", "--normalizers",
                            "softmax,ssmax", "--seeds", "2", "--steps", "60", "--batch", "8", "--width", "8", "--sizes",
                            "4,32,64", "--sets", "32", "--checkpoint-every", "10"],
            _retrieval,
            "checkpoints/*/*",
        ),
        Command(
            "train clrs",
            lambda out, _: ["lab", "train", "clrs", "--quick", "--out", str(out), "--device", "cpu", "--steps", "40",
                            "--batch", "4", "--width", "16", "--layers", "1", "--test-with", "hard",
                            "--checkpoint-every", "5", "--save-model"],
            _clrs,
            "checkpoints/*",
        ),
        Command(
            "evaluate",
            lambda out, _: ["evaluate", "bundled", "--normalizer", "ssmax", "--tasks",
                            "perplexity,pass-key", "--lengths", "32,64", "--limit", "4", "--device", "cpu", "--out",
                            str(out)],
            _evaluation,
            "parts/[!.]*",
        ),
        Command(
            "reproduce",
            lambda out, _: ["lab", "reproduce", "fig1", "fig4", "--quick", "--device", "cpu", "--out", str(out)],
            _reproduction,
            "fig1",
        ),
    )
}  # fmt: skip


class Runner:
    """Starts commands as a user does, each in a new interpreter."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def run(self, argv: list[str], kill_after: float | None = None, kill_at: Path | None = None) -> tuple[int, float]:
        """Exit code (-9 after a kill) and seconds. Kill after so many seconds, or as soon as a file fits a pattern."""
        began = time.monotonic()
        with self._log.open("a") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "attnorm", *argv], env=self._environment, stdout=log, stderr=log
            )
            while child.poll() is None:
                late = kill_after is not None and time.monotonic() - began >= kill_after
                if late or (kill_at is not None and glob.glob(str(kill_at))):  # noqa: PTH207 - an absolute pattern
                    child.kill()
                    child.wait()
                time.sleep(0.002)
        return child.returncode, time.monotonic() - began


def kill_and_resume(command: Command, runner: Runner, folder: Path, *, trials: int, kills: int, seed: int) -> Tally:
    """Trials of so many kills each, at moments drawn over the length of an undisturbed run; the last start is quiet."""
    moments = random.Random(f"{command.name} {seed}")
    inputs = folder / "inputs"
    inputs.mkdir(parents=True)
    quiet = folder / "quiet"
    code, seconds = runner.run(command.argv(quiet, inputs))
    if code != 0:
        raise RuntimeError(f"expected the undisturbed `attnorm {command.name}` to end with 0, got {code}. See the log.")
    expected = command.result(quiet)
    tally = Tally(command.name)
    for trial in range(trials):
        out = folder / f"trial-{trial}"
        for _ in range(kills):
            code, _ = runner.run(command.argv(out, inputs), moments.uniform(0.02, 0.8 * seconds))
            tally.kills += code == -9
            tally.too_late += code != -9
        code, _ = runner.run(command.argv(out, inputs))
        tally.trials += 1
        problem = _problem(command, out, code, expected)
        if problem:
            tally.lost.append(f"trial {trial}, seed {seed}: {problem}")
        tally.leftovers += bool(leftovers(out))
        if not problem:
            shutil.rmtree(out)
    return tally


def kill_in_the_middle(command: Command, runner: Runner, folder: Path) -> Tally:
    """One kill as soon as a part of the work is on the disk, at whatever speed the machine runs."""
    inputs, quiet, out = folder / "inputs", folder / "quiet", folder / "killed"
    inputs.mkdir(parents=True)
    if runner.run(command.argv(quiet, inputs))[0] != 0:
        raise RuntimeError(f"expected the undisturbed `attnorm {command.name}` to end with 0. See the log.")
    tally = Tally(command.name, trials=1)
    code, _ = runner.run(command.argv(out, inputs), kill_at=out / command.begun)
    tally.kills, tally.too_late = int(code == -9), int(code != -9)
    code, _ = runner.run(command.argv(out, inputs))
    tally.lost += [problem] if (problem := _problem(command, out, code, command.result(quiet))) else []
    tally.leftovers += bool(leftovers(out))
    return tally


def leftovers(out: Path) -> list[Path]:
    """Temporary files and folders in the output; the lock file of a run stays, held by nobody."""
    return [path for path in out.rglob("*") if path.name.startswith((".", "tmp")) and path.name != ".lock"]


def _problem(command: Command, out: Path, code: int, expected: Any) -> str:
    if code != 0:
        return f"the start after the kills ended with {code}"
    try:
        found = command.result(out)
    except (OSError, ValueError, KeyError, AssertionError) as error:
        return f"the result cannot be read: {error}"
    return "" if found == expected else "the result differs from that of the undisturbed run"
