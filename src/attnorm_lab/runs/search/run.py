"""Run a search: Optuna proposes recipes, the engines of a sweep train them, and the study stores the results.

The driver (`search`): a trial that was running when the driver ended is continued by the next one, under the same
number. So no trial is lost and none is run twice; a recipe that was trained before is not trained again.

A worker (`run_trial`): train, report the validation loss on the way, and stop if other trials were better by then.
Optuna prunes studies with one objective only. So every search has a second study, of the validation loss while
training, which decides about pruning whatever the objectives are.
"""

import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnorm.files import write_json
from attnorm.run_folder import make_writable, only_process, read_record, require_only, require_same_run
from attnorm_lab.runs.engines import Engine, Outcome, WorkerDied, check_engine, open_engine
from attnorm_lab.runs.folder import (
    FORMAT,
    PAGE,
    RECORD,
    TABLE,
    merged_rows,
    states,
    write_failure,
    write_page,
    write_table,
)
from attnorm_lab.runs.plan import Item
from attnorm_lab.runs.run import OutcomeCallback, Pruned, work_in
from attnorm_lab.runs.search.plan import COMMAND, SearchPlan
from attnorm_lab.runs.search.results import SearchResult, confirm, is_uniform, summarize
from attnorm_lab.runs.tasks import train_lm_item
from attnorm_lab.training.device import check_accelerate

if TYPE_CHECKING:
    from attnorm_lab.training.lm.train import LMProgress

SEARCH = "search.json"
STUDY, PRUNING = "search", "search-pruning"
HOW = "search"  # key of an item's values that says where its studies are
STARTUP_TRIALS = 5  # that run to their end before any is pruned
JOURNAL = "study.journal"
REPLACES, DIVERGED = "replaces", "diverged"  # attributes of trials: the failed trial that this one tries again; true


def search(
    plan: SearchPlan,
    out: Path,
    *,
    on: str = "local",
    workers: int | None = None,
    address: str | None = None,
    storage: str | None = None,
    retries: int = 3,
    report: OutcomeCallback = lambda outcome, done, total: None,
) -> SearchResult:
    """Run trials until the plan's number is reached; then train the winners with several seeds.

    storage: URL of a database for the studies (default: a journal in the folder).

    Raises:
        ValueError: The folder contains another search, or the engine or the database cannot be used.
        ImportError: Optuna, accelerate or the library of the engine is not installed.
    """
    check_optuna()
    check_accelerate()
    check_engine(on)
    with only_process(out), quiet_optuna():
        _open_folder(out, plan)
        study = _open_study(out, plan, storage)
        items: dict[int, Item] = {}
        replaced = _retry_failed(study)
        for trial in study.get_trials(deepcopy=False):
            if trial.number not in replaced:
                _add_item(plan, study, trial, items, storage)
        if len(items) < plan.trials or _running_trials(study):
            work = work_in(out, on, plan.resources.threads, run_trial)
            engine = open_engine(on, out, plan.resources, work, workers=workers, address=address, slurm=plan.slurm)
            _run_trials(plan, out, study, items, engine, storage, retries, report)
        _write_items(out, plan, items)
        all_items = list(items.values())
        rows = merged_rows(out, all_items)
        write_table(out / TABLE, rows)
        write_page(out / PAGE, states(out, all_items), rows, title="Search")
        result = summarize(plan, out, study, items)
    if plan.confirm_seeds and result.best is not None:
        result = replace(
            result,
            confirmation=confirm(plan, out, result, on=on, workers=workers, address=address, retries=retries),
        )
        result.write(out)
    return result


def _open_folder(out: Path, plan: SearchPlan) -> None:
    record = read_record(out / SEARCH, ("content",), "Choose another folder.")
    if record is None:
        require_only(out, (), "files, but no search")
        make_writable(out)
    else:  # more trials or seeds continue a search
        current, previous = ({**content, "trials": 0, "confirm": {}} for content in (plan.content, record["content"]))
        require_same_run(current, previous, f"{out} contains another search", "Choose another folder")
    write_json(out / SEARCH, {"format": FORMAT, "content": plan.content})


def _open_study(out: Path, plan: SearchPlan, url: str | None) -> Any:
    import optuna

    storage = open_storage(out, url)
    optuna.create_study(study_name=PRUNING, storage=storage, direction="minimize", load_if_exists=True)
    study = optuna.create_study(study_name=STUDY, storage=storage, directions=plan.directions, load_if_exists=True)
    done = len(study.get_trials(deepcopy=False))
    study.sampler = optuna.samplers.TPESampler(
        seed=plan.seed + done, multivariate=True, group=True, constant_liar=True, n_startup_trials=10
    )
    for parameters in uniform_parameters(plan):  # a driver may have ended after the first ones
        study.enqueue_trial(parameters, skip_if_exists=True)
    return study


def _retry_failed(study: Any) -> set[int]:
    """Queue the parameters of every failed trial again; return the trials that others replace.

    A full disk or a killed worker says nothing about a recipe. A trial that diverged would diverge again.
    """
    from optuna.trial import TrialState

    trials = study.get_trials(deepcopy=False)
    replaced = {trial.user_attrs[REPLACES] for trial in trials if REPLACES in trial.user_attrs}
    for trial in trials:
        lasting = DIVERGED in trial.user_attrs or "learning_rate" not in trial.params or trial.number in replaced
        if trial.state == TrialState.FAIL and not lasting:
            study.enqueue_trial(trial.params, user_attrs={REPLACES: trial.number})
            replaced.add(trial.number)
    return replaced


def uniform_parameters(plan: SearchPlan) -> list[dict[str, Any]]:
    """Return trials with one normalizer in all layers, at a few learning rates: the baseline of mixed recipes."""
    low, high = plan.learning_rate
    trials = []
    for number in range(plan.uniform):
        rate = low * (high / low) ** ((number + 0.5) / plan.uniform)
        for name in plan.normalizers:
            parameters: dict[str, Any] = {"learning_rate": rate}
            for group in range(len(plan.groups)):
                parameters[plan.parameter(group)] = name
                for option, (least, most) in plan.ranges.get(name, {}).items():
                    parameters[f"{plan.parameter(group)} {name}.{option}"] = (least + most) / 2
            trials.append(parameters)
    return trials[: plan.trials]


def _add_item(plan: SearchPlan, study: Any, trial: Any, items: dict[int, Item], storage: str | None) -> None:
    """Remember the item of a trial; first draw the parameters that are missing because the driver ended."""
    from optuna.trial import Trial, TrialState

    if trial.state == TrialState.WAITING:
        return
    if trial.state == TrialState.RUNNING:
        plan.suggest(Trial(study, trial._trial_id))  # keeps what was drawn
        trial = study.get_trials(deepcopy=False)[trial.number]
    recipe, rate = plan.recipe(trial.params), trial.params["learning_rate"]
    words = " ".join(f"{layers}:{spec}" for layers, spec in recipe.items())
    kind = "one normalizer" if is_uniform(recipe) else "mixed"
    varied = {"trial": trial.number, "kind": kind, "recipe": words, "learning_rate": float(f"{rate:.4g}")}
    item = plan.item(recipe, rate, varied)
    items[trial.number] = replace(item, values={**item.values, HOW: {"storage": storage, "prune": plan.prune}})


def _running_trials(study: Any) -> list[int]:
    from optuna.trial import TrialState

    return [trial.number for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))]


def _run_trials(
    plan: SearchPlan,
    out: Path,
    study: Any,
    items: dict[int, Item],
    engine: Engine,
    storage: str | None,
    retries: int,
    report: OutcomeCallback,
) -> None:
    """Run all trials on the engine; a trial whose worker process dies is run again, up to `retries` times."""
    waiting = [number for number in _running_trials(study) if number in items]
    running: dict[Future[list[Outcome]], int] = {}
    attempts: dict[int, int] = {}
    kill = True
    try:
        while True:
            while len(running) < engine.slots and (waiting or len(items) < plan.trials):
                number = waiting.pop(0) if waiting else _new_trial(plan, study, items, storage)
                _write_items(out, plan, items)
                running[engine.submit([items[number]])] = number
            if not running:
                break
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                number = running.pop(future)
                try:
                    (outcome,) = future.result()
                except WorkerDied as died:
                    attempts[number] = attempts.get(number, 0) + 1
                    if attempts[number] <= retries:
                        waiting.append(number)
                        continue
                    outcome = Outcome(items[number].id, str(died))
                    write_failure(out, items[number], outcome.error, "")
                _tell_study(plan, study, number, outcome)
                done = len(items) - len(running) - len(waiting)
                report(outcome, done, plan.trials)
        kill = False
    finally:
        engine.close(kill=kill)


def _new_trial(plan: SearchPlan, study: Any, items: dict[int, Item], storage: str | None) -> int:
    number: int = study.ask().number
    _add_item(plan, study, study.get_trials(deepcopy=False)[number], items, storage)
    return number


def _tell_study(plan: SearchPlan, study: Any, number: int, outcome: Outcome) -> None:
    from optuna.trial import Trial, TrialState

    if outcome.error:
        if outcome.diverged:
            Trial(study, study.get_trials(deepcopy=False)[number]._trial_id).set_user_attr(DIVERGED, True)
        study.tell(number, state=TrialState.FAIL)
    elif outcome.pruned:
        study.tell(number, state=TrialState.PRUNED)
    else:
        study.tell(number, plan.values(outcome.rows[0]))


def _write_items(out: Path, plan: SearchPlan, items: dict[int, Item]) -> None:
    """Write the items of the trials, so that `attnorm lab sweep --status` shows them.

    Trials with the same recipe share an item.
    """
    listed = {item.id: item.as_dict() for item in items.values()}
    write_json(out / RECORD, {"format": FORMAT, "command": COMMAND, "content": plan.content, "items": listed})


def check_optuna() -> None:
    """Raise ImportError if Optuna is not installed."""
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise ImportError("search needs Optuna, which is not installed. Run: pip install 'attnorm[lab]'") from None


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Silence Optuna's log lines and its warnings about experimental features."""
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
    options = dict(values)
    how = options.pop(HOW, None)
    if how is None or not how["prune"]:
        return train_lm_item(options, out, shared)
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

        rows = train_lm_item(options, out, shared, report)
        study.tell(trial, rows[0]["loss"])
        return rows
