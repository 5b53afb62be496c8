"""A trial in a worker: train, report the validation loss on the way, and stop if other trials were better by then.

Optuna prunes studies with one objective only. So every search has a second study, of the validation loss while
training, which decides about pruning whatever the objectives are.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnorm.sweep.tasks import train_lm_item
from attnorm.sweep.work import Pruned

if TYPE_CHECKING:
    from attnorm.training.lm.run import LMProgress

STUDY, PRUNING = "search", "search-pruning"
HOW = "search"  # key of an item's values that says where its studies are
STARTUP_TRIALS = 5  # that run to their end before any is pruned
JOURNAL = "study.journal"


def check_optuna() -> None:
    """Raise ImportError if Optuna is not installed."""
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise ImportError("search needs Optuna, which is not installed. Run: pip install 'attnorm[search]'") from None


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Without Optuna's log lines and its warnings about experimental features."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", category=optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)


def open_storage(out: Path, url: str | None) -> Any:
    """The journal in the folder, or a database by its URL.

    Raises:
        ValueError: The database cannot be reached.
    """
    import optuna
    from optuna.storages.journal import JournalFileBackend

    if url is None:
        return optuna.storages.JournalStorage(JournalFileBackend(str(out / JOURNAL)))
    try:
        return optuna.storages.RDBStorage(url)
    except Exception as error:  # each database driver has its own
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"cannot open the database {url!r} ({reason}). Correct --storage, or leave it out.") from None


def run_trial(values: Mapping[str, Any], out: Path, shared: Path) -> list[dict[str, Any]]:
    """Train the model of a trial; raises Pruned if it is stopped early."""
    given = dict(values)
    how = given.pop(HOW, None)
    if how is None or not how["prune"]:
        return train_lm_item(given, out, shared)
    import optuna

    with quiet_optuna():
        study = optuna.load_study(
            study_name=PRUNING,
            storage=open_storage(shared, how["storage"]),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=STARTUP_TRIALS, n_warmup_steps=0),
        )
        trial = study.ask()
        last: list[float] = []

        def report(progress: "LMProgress") -> None:
            metrics = progress.metrics or {}
            if "valid_loss" not in metrics or progress.done == progress.total:
                return
            last.append(metrics["valid_loss"])
            trial.report(metrics["valid_loss"], progress.done)
            if trial.should_prune():
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                raise Pruned([{"loss": metrics["valid_loss"], "steps_done": progress.done}])

        rows = train_lm_item(given, out, shared, report)
        study.tell(trial, rows[0]["loss"])
        return rows
