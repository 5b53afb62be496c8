"""Run a search: Optuna proposes recipes, the engines of a sweep train them, and the study remembers; then its results.

The driver (`search`): a trial that was running when the driver ended is continued by the next one, under the same
number. So no trial is lost and none is run twice; a recipe that was trained before is not trained again.

A worker (`run_trial`): train, report the validation loss on the way, and stop if other trials were better by then.
Optuna prunes studies with one objective only. So every search has a second study, of the validation loss while
training, which decides about pruning whatever the objectives are.

The results (`summarize`, `confirm`):

recipe.toml            the best recipe by the first objective, for `train lm --recipe` and `attnorm.patch`
front/TRIAL.toml       every recipe of the Pareto front, if there are several objectives
trials.parquet         all trials: parameters, objectives, state      importance.json   importance of each choice
objectives.svg         trials in the plane of the first two objectives, or the best value so far
confirm/               a sweep: the best mixed and the best uniform recipe with several seeds
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from matplotlib.figure import Figure

from attnorm.figures import save_figure_files
from attnorm.files import atomic_replace, write_json
from attnorm.models.layer_normalizer import SEARCH_NOTE, write_recipe_file
from attnorm.run_folder import make_writable, only_process, read_record, require_only, require_same_run
from attnorm.search.plan import COMMAND, SearchPlan, read_content
from attnorm.sweep.engines import Engine, Outcome, Pruned, WorkerDied, open_engine
from attnorm.sweep.folder import FORMAT, PAGE, RECORD, merged_rows, states, write_failure, write_page, write_table
from attnorm.sweep.plan import Item, Plan
from attnorm.sweep.run import sweep
from attnorm.sweep.tasks import train_lm_item

if TYPE_CHECKING:
    from attnorm.training.lm.train import LMProgress

SEARCH = "search.json"
STUDY, PRUNING = "search", "search-pruning"
HOW = "search"  # key of an item's values that says where its studies are
STARTUP_TRIALS = 5  # that run to their end before any is pruned
JOURNAL = "study.journal"
RESULT, RECIPE = "result.json", "recipe.toml"
ENOUGH = 8  # finished trials for an importance
Report = Callable[[Outcome, int, int], None]


def is_uniform(recipe: Mapping[str, str]) -> bool:
    """Whether all layers have the same normalizer, options aside."""
    return len({spec.partition(":")[0] for spec in recipe.values()}) == 1


@dataclass(frozen=True)
class TrialResult:
    number: int
    state: str
    recipe: dict[str, str]
    learning_rate: float
    values: dict[str, float]
    item: str

    @property
    def uniform(self) -> bool:
        return is_uniform(self.recipe)


@dataclass(frozen=True)
class SearchResult:
    trials: list[TrialResult]
    best: TrialResult | None  # by the first objective
    best_mixed: TrialResult | None
    best_uniform: TrialResult | None
    front: list[TrialResult]
    importance: dict[str, dict[str, float]]  # objective -> parameter -> share
    confirmation: dict[str, Any] | None = field(default=None)

    def write(self, out: Path) -> None:
        write_json(out / RESULT, asdict(self))


def summarize(plan: SearchPlan, out: Path, study: Any, items: Mapping[int, Item]) -> SearchResult:
    """Read the study and write the files."""
    trials = [_trial(plan, study, number, item) for number, item in sorted(items.items())]
    done = [trial for trial in trials if trial.state == "complete"]
    result = SearchResult(
        trials=trials,
        best=_best(plan, done),
        best_mixed=_best(plan, [trial for trial in done if not trial.uniform]),
        best_uniform=_best(plan, [trial for trial in done if trial.uniform]),
        front=_front(plan, done),
        importance=_importance(plan, study, len(done)),
    )
    result.write(out)
    _write_table(out, result)
    if result.best is not None:
        _write_recipe(out / RECIPE, plan, result.best)
        for trial in result.front if len(plan.objectives) > 1 else ():
            _write_recipe(out / "front" / f"{trial.number}.toml", plan, trial)
        save_figure_files(lambda: _draw(plan, result), out, "objectives")
    errors = {item_state.item.id: item_state.error for item_state in states(out, items.values()) if item_state.error}
    write_json(out / "importance.json", {"importance": result.importance, "failed": errors})
    return result


def _trial(plan: SearchPlan, study: Any, number: int, item: Item) -> TrialResult:
    frozen = study.get_trials(deepcopy=False)[number]
    values = dict(zip(plan.objectives, frozen.values, strict=True)) if frozen.state.name == "COMPLETE" else {}
    rate = float(f"{frozen.params['learning_rate']:.6g}")
    return TrialResult(number, frozen.state.name.lower(), plan.recipe(frozen.params), rate, values, item.id)


def _best(plan: SearchPlan, done: list[TrialResult]) -> TrialResult | None:
    name, sign = plan.objectives[0], 1 if plan.directions[0] == "minimize" else -1
    return min(done, key=lambda trial: sign * trial.values[name], default=None)


def _front(plan: SearchPlan, done: list[TrialResult]) -> list[TrialResult]:
    """Trials that no other beats in every objective."""
    signs = np.array([1 if direction == "minimize" else -1 for direction in plan.directions])
    costs = [signs * np.array(list(trial.values.values())) for trial in done]
    return [
        trial
        for trial, cost in zip(done, costs, strict=True)
        if not any((other <= cost).all() and (other < cost).any() for other in costs)
    ]


def _importance(plan: SearchPlan, study: Any, done: int) -> dict[str, dict[str, float]]:
    """Share of each choice in what separates the better half of the trials, by PED-ANOVA of Optuna."""
    import optuna

    if done < ENOUGH:
        return {}
    choices = [*(plan.parameter(number) for number in range(len(plan.groups))), "learning_rate"]
    importance = {}
    for number, name in enumerate(plan.objectives):
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=0.5, region_quantile=1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sign = 1 if plan.directions[number] == "minimize" else -1
            shares = optuna.importance.get_param_importances(
                study, evaluator=evaluator, params=choices,
                target=lambda trial, number=number, sign=sign: sign * trial.values[number],
            )  # fmt: skip
        importance[name] = {choice: round(float(share), 4) for choice, share in shares.items()}
    return importance


def _write_table(out: Path, result: SearchResult) -> None:
    rows = [
        {
            "trial": trial.number, "state": trial.state, "learning_rate": trial.learning_rate,
            "recipe": " ".join(f"{layers}:{spec}" for layers, spec in trial.recipe.items()), **trial.values,
            "uniform": trial.uniform, "item": trial.item,
        }
        for trial in result.trials
    ]  # fmt: skip
    names = list(dict.fromkeys(name for row in rows for name in row))
    with atomic_replace(out / "trials.parquet") as draft:
        pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), draft)


def _write_recipe(path: Path, plan: SearchPlan, trial: TrialResult) -> None:
    numbers = ", ".join(f"{name} {value:.5g}" for name, value in trial.values.items())
    note = f"{SEARCH_NOTE} {trial.number}: {numbers}\nOne random seed. Compare with other seeds before you use it."
    write_recipe_file(path, trial.recipe, trial.learning_rate, note)


def _draw(plan: SearchPlan, result: SearchResult) -> Figure:
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    done = [trial for trial in result.trials if trial.values]
    first = plan.objectives[0]
    second = plan.objectives[1] if len(plan.objectives) > 1 else None
    for uniform, colour, label in ((True, "#3a49b0", "one normalizer"), (False, "#a4430c", "mixed recipe")):
        group = [trial for trial in done if trial.uniform == uniform]
        x = [trial.values[second] if second else trial.number for trial in group]
        axes.scatter(x, [trial.values[first] for trial in group], color=colour, label=label, s=22, alpha=0.8)
    if second:
        front = sorted([trial.values[second], trial.values[first]] for trial in result.front)
        axes.plot(*zip(*front, strict=True), color="#1c6b52", lw=1, label="Pareto front")
    axes.set_xlabel(second or "trial")
    axes.set_ylabel(first)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def confirm(plan: SearchPlan, out: Path, result: SearchResult, **where: Any) -> dict[str, Any]:
    """Train the best mixed and the best uniform recipe with seeds that the search did not use."""
    first = int(plan.options.get("seed", 0)) + 1
    seeds = list(range(first, first + plan.confirm_seeds))
    candidates = {"mixed": result.best_mixed, "uniform": result.best_uniform}
    items = [
        plan.item(trial.recipe, trial.learning_rate, {"candidate": name, "seed": seed}, seed=seed)
        for name, trial in candidates.items()
        if trial is not None
        for seed in seeds
    ]
    content = {"grid": {"item": [item.id for item in items]}, "options": {}}
    done = sweep(
        Plan(COMMAND, tuple(items), plan.resources, plan.slurm, content), out / "confirm", extend=True, **where
    )
    rows = {(row["candidate"], row["seed"]): row for row in done.rows}
    confirmation: dict[str, Any] = {"seeds": seeds, "objectives": {}}
    for number, name in enumerate(plan.objectives):
        values = {
            candidate: [plan.values(rows[candidate, seed])[number] for seed in seeds if (candidate, seed) in rows]
            for candidate, trial in candidates.items()
            if trial is not None
        }
        confirmation["objectives"][name] = {"values": values, **_difference(values)}
    return confirmation


def _difference(values: Mapping[str, list[float]]) -> dict[str, float | None]:
    """Mixed minus uniform over the same seeds, with the 95 % confidence interval and p of a paired t-test."""
    from scipy import stats

    mixed, uniform = values.get("mixed", []), values.get("uniform", [])
    if len(mixed) < 2 or len(mixed) != len(uniform):
        return {"difference": None, "half_width": None, "p": None}
    test = stats.ttest_rel(mixed, uniform)
    interval = test.confidence_interval(0.95)
    numbers = {
        "difference": float(np.mean(mixed) - np.mean(uniform)),
        "half_width": float((interval.high - interval.low) / 2),
        "p": float(test.pvalue),
    }
    return {name: value if np.isfinite(value) else None for name, value in numbers.items()}


def search(
    plan: SearchPlan,
    out: Path,
    *,
    on: str = "local",
    workers: int | None = None,
    address: str | None = None,
    storage: str | None = None,
    retries: int = 3,
    report: Report = lambda outcome, done, total: None,
) -> SearchResult:
    """Run trials until the plan's number is reached; then train the winners with several seeds.

    storage: URL of a database for the studies (default: a journal in the folder).

    Raises:
        ValueError: The folder holds another search, or the engine or the database cannot be used.
        ImportError: Optuna or the library of the engine is not installed.
    """
    check_optuna()
    with only_process(out), quiet_optuna():
        _open_folder(out, plan)
        study = _open_study(out, plan, storage)
        items: dict[int, Item] = {}
        for trial in study.get_trials(deepcopy=False):
            _add_item(plan, study, trial, items, storage)
        if len(items) < plan.trials or _running_trials(study):
            engine = open_engine(
                on, out, plan.resources, workers=workers, address=address, slurm=plan.slurm, hook=run_trial
            )
            _run_trials(plan, out, study, items, engine, storage, retries, report)
        _write_items(out, plan, items)
        all_items = list(items.values())
        rows = merged_rows(out, all_items)
        write_table(out, rows)
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
    record = read_record(out / SEARCH, ("content",), "choose another folder")
    if record is None:
        require_only(out, (), "files, but no search")
        make_writable(out)
    else:  # more trials or seeds continue a search
        recorded = read_content(record["content"])
        current, previous = ({**content, "trials": 0, "confirm": {}} for content in (plan.content, recorded))
        require_same_run(current, previous, f"{out} holds another search", "Choose another folder")
        if recorded != record["content"]:  # its study has the choices and items under other names
            raise ValueError(
                f"{out} holds a search of an earlier version, whose normalizers mean "
                f"{', '.join(recorded['space']['normalizers'])}. It cannot be continued. Choose another folder."
            )
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
    try:
        recipe, rate = plan.recipe(trial.params), trial.params["learning_rate"]
    except KeyError:  # an older version gave up such trials
        return
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
    report: Report,
) -> None:
    """Run all trials of the plan on the engine; a trial whose worker dies is tried again up to `retries` times."""
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
    from optuna.trial import TrialState

    if outcome.error:
        study.tell(number, state=TrialState.FAIL)
    elif outcome.pruned:
        study.tell(number, state=TrialState.PRUNED)
    else:
        study.tell(number, plan.values(outcome.rows[0]))


def _write_items(out: Path, plan: SearchPlan, items: dict[int, Item]) -> None:
    """Write the items of the trials, so that `attnorm sweep --status` shows them.

    Trials with the same recipe share an item.
    """
    listed = {item.id: item.as_dict() for item in items.values()}
    write_json(out / RECORD, {"format": FORMAT, "command": COMMAND, "content": plan.content, "items": listed})


def check_optuna() -> None:
    """Raise ImportError if Optuna is not installed."""
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise ImportError("search needs Optuna, which is not installed. Run: pip install 'attnorm[search]'") from None


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
