"""All of it in order, each part resumable, under a time limit.

Every stage takes the normalizers it is for and the minutes it may take, and returns whether all of it is finished. What
is finished is not done again, and what another process is at is left to it: start as many as the machine can bear.
"""

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from attnorm.experiments.language_models.evaluate import measure as measure_one
from attnorm.experiments.language_models.evaluate import needle as needle_one
from attnorm.experiments.language_models.plan import SOFTMAX
from attnorm.experiments.language_models.train import (
    Log,
    OutOfTimeError,
    Worker,
    export_main,
    forget,
    train_main,
    try_rates,
)
from attnorm.experiments.language_models.workspace import Texts, Workspace, prepare_texts, read_texts

Names = Sequence[str] | None
Work = Callable[[Worker, str, int], None]
MOST_PROBLEMS = 3  # a GPU that was full for a moment is worth another try, but not for ever


def prepare(workspace: Workspace, train: Sequence[Path], valid: Path, others: Sequence[Path] = ()) -> Texts:
    """The texts as tokens; everything else needs them."""
    return prepare_texts(workspace, train, valid, others)


def rates(
    workspace: Workspace, normalizers: Names = None, *, max_minutes: float | None = None, device: str | None = None,
    log: Log = lambda words: None,
) -> bool:  # fmt: skip
    """Short runs at every learning rate."""
    return _each(workspace, [try_rates], normalizers, (0,), max_minutes, device, log)


def main(
    workspace: Workspace, normalizers: Names = None, *, seeds: Sequence[int] = (0,), max_minutes: float | None = None,
    device: str | None = None, log: Log = lambda words: None,
) -> bool:  # fmt: skip
    """The long runs, at the best learning rate."""
    return _each(workspace, [train_main], normalizers, seeds, max_minutes, device, log)


def needle(
    workspace: Workspace, normalizers: Names = None, *, seeds: Sequence[int] = (0,), max_minutes: float | None = None,
    device: str | None = None, log: Log = lambda words: None,
) -> bool:  # fmt: skip
    """Fine-tuning on pass keys, and whether they are found."""
    return _each(workspace, [needle_one], normalizers, seeds, max_minutes, device, log)


def measure(
    workspace: Workspace, normalizers: Names = None, *, seeds: Sequence[int] = (0,), max_minutes: float | None = None,
    device: str | None = None, log: Log = lambda words: None,
) -> bool:  # fmt: skip
    """Losses by length and attention statistics."""
    return _each(workspace, [measure_one], normalizers, seeds, max_minutes, device, log)


def export(
    workspace: Workspace, normalizers: Names = None, *, seeds: Sequence[int] = (0,), max_minutes: float | None = None,
    device: str | None = None, log: Log = lambda words: None,
) -> bool:  # fmt: skip
    """The trained models as Hugging Face folders in bfloat16."""
    return _each(workspace, [export_main], normalizers, seeds, max_minutes, device, log)


def everything(
    workspace: Workspace, normalizers: Names = None, *, seeds: Sequence[int] = (0,), max_minutes: float | None = None,
    device: str | None = None, log: Log = lambda words: None,
) -> bool:  # fmt: skip
    """All stages of one normalizer before the next one's, so that a time limit leaves whole results."""
    return _each(
        workspace, [try_rates, train_main, measure_one, needle_one], normalizers, seeds, max_minutes, device, log
    )


def closest(workspace: Workspace, count: int, seed: int = 0) -> tuple[str, ...]:
    """The normalizers whose main runs of the first seed end lowest: those worth a second seed, softmax among them."""
    ended = {
        each["normalizer"]: each["valid_loss"]
        for each in workspace.results(stage="main", seed=seed)
        if each["valid_loss"] is not None
    }
    best = {SOFTMAX, *sorted(ended, key=lambda name: ended[name])[:count]}
    return tuple(name for name in workspace.plan.normalizers if name in best and name in ended)


def _each(
    workspace: Workspace,
    works: Sequence[Work],
    normalizers: Names,
    seeds: Sequence[int],
    max_minutes: float | None,
    device: str | None,
    log: Log,
) -> bool:
    worker = Worker.at(workspace, read_texts(workspace), device=device, max_minutes=max_minutes, log=log)
    finished = True
    for seed in seeds:
        for normalizer in workspace.plan.chosen(list(normalizers or ())):
            if len(workspace.results(stage="problem", normalizer=normalizer, seed=seed)) >= MOST_PROBLEMS:
                finished = False
                continue
            with workspace.claimed(f"{normalizer}-seed-{seed}") as mine:
                finished &= mine and _done(worker, works, normalizer, seed)
    return finished


def _done(worker: Worker, works: Sequence[Work], normalizer: str, seed: int) -> bool:
    try:
        for work in works:
            work(worker, normalizer, seed)
    except OutOfTimeError:
        return False
    except Exception as error:  # whatever a compiler or a full GPU may say: it must not keep the others from their turn
        worker.log(f"{normalizer} seed {seed}: {traceback.format_exc()[-2000:]}")
        worker.workspace.add(
            {"stage": "problem", "normalizer": normalizer, "seed": seed, "problem": f"{type(error).__name__}: {error}"}
        )
        forget()
        return False
    return True
