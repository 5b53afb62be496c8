"""Collect the records of a plan: existing ones from disk, and the missing ones by training.

records.jsonl of a GPU run has everything that tables and figures need. On a machine without a GPU its missing records
are not trained again; they are left out and named in the summary.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from attnorm.engines.threads import one_thread
from attnorm.experiments.retrieval.plan import RetrievalPlan, Training
from attnorm.experiments.subject import ProgressCallback
from attnorm.files import read_jsonl
from attnorm.training.device import chosen_device
from attnorm.training.retrieval.records import RECORDS, Record
from attnorm.training.retrieval.run import RetrievalProgress, train_retrieval
from attnorm.training.retrieval.trained_seeds import run_key

DEVICES = ("cuda", "cpu")
WORTH_COMPILING = 2000  # steps


@dataclass(frozen=True)
class Found:
    """The records of a training; some may be missing if it could not be trained here."""

    training: Training
    records: list[Record]
    complete: bool

    def tested_with(self, name: str) -> list[Record]:
        return [record for record in self.records if record["tested_with"] == name]


def collect(
    plan: RetrievalPlan, folder: Path, known: Iterable[Path], device: str | None, progress: ProgressCallback
) -> list[Found]:
    """Return the records of all trainings, in the order of the plan; write new ones to `folder`.

    Args:
        known: Files of records, .jsonl or .jsonl.xz, which may not exist.
        device: Where to train and whose records to use (default: that of the records, else a GPU if there is one).
    """
    there = [record for path in (folder / RECORDS, *known) for record in read_jsonl(path)]
    here = chosen_device(device).type
    chosen = here if device is not None else _made_on(plan, there) or here
    device_name = device if chosen == here else chosen
    found = []
    for number, training in enumerate(plan.trainings):
        progress(f"{training.section}: {training.label}", number, len(plan.trainings))
        records = _of(training, plan.seeds, there, chosen)
        if len(records) < _wanted(training, plan.seeds) and chosen in (here, "cpu"):
            with one_thread():
                records = train_retrieval(
                    [training.normalizer], folder, task=training.task, seeds=plan.seeds, recipe=training.recipe,
                    trials=training.trials, device=device_name, compiled=_compiled(training),
                    report=_training_progress(progress, training, number, len(plan.trainings)),
                ).records  # fmt: skip
            there += records
        found.append(Found(training, records, len(records) == _wanted(training, plan.seeds)))
    progress("", len(plan.trainings), len(plan.trainings))
    return found


def _of(training: Training, seeds: Sequence[int], records: Iterable[Record], device: str) -> list[Record]:
    """Return the records of these tests without duplicates, sorted by test, size and seed."""
    key = run_key(training.task, training.normalizer, training.recipe, device)
    mine = {
        (training.trials.names.index(record["tested_with"]), record["size"], record["seed"]): record
        for record in records
        if record.get("run") == key and record["seed"] in seeds and training.trials.asked(record)
    }
    return [mine[device_name] for device_name in sorted(mine)]


def _wanted(training: Training, seeds: Sequence[int]) -> int:
    return len(seeds) * len(training.trials.sizes) * len(training.trials.names)


def _made_on(plan: RetrievalPlan, records: Sequence[Record]) -> str | None:
    """Return the device of most of the plan's records; data differ between CPU and GPU, so all must come from one."""
    counts = {device: sum(len(_of(t, plan.seeds, records, device)) for t in plan.trainings) for device in DEVICES}
    most = max(counts, key=lambda device: counts[device])
    return most if counts[most] else None


def _compiled(training: Training) -> bool | None:
    """Return the trainer's default, or False if compiling would take longer than the steps."""
    return None if training.recipe.steps >= WORTH_COMPILING else False


def _training_progress(
    progress: ProgressCallback, training: Training, number: int, of: int
) -> Callable[[RetrievalProgress], None]:
    def report(now: RetrievalProgress) -> None:
        progress(f"{training.section}: {training.label}, {now.stage} {now.done:,} of {now.total:,}", number, of)

    return report
