"""Results of a search, written to its folder when all trials are finished; trains the best recipes with more seeds.

result.json            all trials, the best of them, and the confirmation
recipe.toml            the best recipe by the first objective, for `train lm --recipe` and `attnorm.patch`
front/TRIAL.toml       every recipe of the Pareto front, if there are several objectives
trials.parquet         all trials: parameters, objectives, state      importance.json   importance of each choice
objectives.svg         trials in the plane of the first two objectives, or the best value so far
confirm/               a sweep: the best mixed and the best uniform recipe with several seeds
"""

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from attnorm.figures import save_figure_files
from attnorm.files import write_json
from attnorm.models.layer_normalizer import write_recipe_file
from attnorm_lab.runs.folder import states, write_table
from attnorm_lab.runs.plan import Item, Plan
from attnorm_lab.runs.run import sweep
from attnorm_lab.runs.search.plan import COMMAND, SearchPlan

RESULT, RECIPE = "result.json", "recipe.toml"
ENOUGH = 8  # finished trials for an importance


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
    _write_trials(out, result)
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


def _write_trials(out: Path, result: SearchResult) -> None:
    rows = [
        {
            "trial": trial.number, "state": trial.state, "learning_rate": trial.learning_rate,
            "recipe": " ".join(f"{layers}:{spec}" for layers, spec in trial.recipe.items()), **trial.values,
            "uniform": trial.uniform, "item": trial.item,
        }
        for trial in result.trials
    ]  # fmt: skip
    write_table(out / "trials.parquet", rows)


def _write_recipe(path: Path, plan: SearchPlan, trial: TrialResult) -> None:
    numbers = ", ".join(f"{name} {value:.5g}" for name, value in trial.values.items())
    note = (
        f"attnorm lab search, trial {trial.number}: {numbers}\n"
        "One random seed. Compare with other seeds before you use it."
    )
    write_recipe_file(path, trial.recipe, trial.learning_rate, note)


def _draw(plan: SearchPlan, result: SearchResult) -> Figure:
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    done = [trial for trial in result.trials if trial.values]
    first = plan.objectives[0]
    second = plan.objectives[1] if len(plan.objectives) > 1 else None
    for uniform, color, label in ((True, "#3a49b0", "one normalizer"), (False, "#a4430c", "mixed recipe")):
        group = [trial for trial in done if trial.uniform == uniform]
        x = [trial.values[second] if second else trial.number for trial in group]
        axes.scatter(x, [trial.values[first] for trial in group], color=color, label=label, s=22, alpha=0.8)
    if second:
        front = sorted([trial.values[second], trial.values[first]] for trial in result.front)
        axes.plot(*zip(*front, strict=True), color="#1c6b52", lw=1, label="Pareto front")
    axes.set(xlabel=second or "trial", ylabel=first)
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
