"""Search plans: which values vary between trials, the objectives, and how a trial becomes a training run.

objectives = ["loss", "loss at 4x"]     also retrieval and tokens_per_second; several: a Pareto front
trials = 60
[space]
groups = ["0-1", "2-3"]                 layers that share a normalizer; "each" for one group per layer
normalizers = ["softmax", "ssmax", "entmax"]
learning_rate = [0.001, 0.01]           from, to; drawn on a logarithmic scale
uniform = 2                             learning rates at which every normalizer alone is tried first
[space.options.entmax]
alpha = [1.1, 2.0]                      from, to
[options]                               as in a sweep of train lm
[confirm]
seeds = 5                               train the best mixed and the best uniform recipe again
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnorm.models.layer_normalizer import compact, parse_layers
from attnorm.normalizers.registry import entry_of
from attnorm.text import did_you_mean
from attnorm_lab.runs.plan import Item, Resources, make_item, read_resources, read_toml, require_known
from attnorm_lab.runs.tasks import TASKS, lm_settings

COMMAND = "train lm"
TIMES = 4  # training lengths of "loss at 4x"
DIRECTIONS = {"loss": "minimize", "loss at 4x": "minimize", "retrieval": "maximize", "tokens_per_second": "maximize"}
KEYS = ("objectives", "trials", "seed", "prune", "space", "options", "resources", "slurm", "confirm")
SPACE = ("groups", "normalizers", "learning_rate", "uniform", "options")
NEEDLE: dict[str, Any] = {"longer": [1]}  # of objective `retrieval`, if the plan does not say


@dataclass(frozen=True)
class SearchPlan:
    objectives: tuple[str, ...]
    trials: int
    seed: int
    prune: bool
    groups: tuple[tuple[int, ...], ...]
    normalizers: tuple[str, ...]
    ranges: dict[str, dict[str, tuple[float, float]]]  # normalizer -> option -> from, to
    learning_rate: tuple[float, float]
    uniform: int
    confirm_seeds: int
    options: dict[str, Any]
    resources: Resources
    slurm: dict[str, Any]
    folder: Path
    content: dict[str, Any]

    @property
    def directions(self) -> list[str]:
        return [DIRECTIONS[name] for name in self.objectives]

    def suggest(self, trial: Any) -> None:
        """Let an Optuna trial choose every parameter; an option only where its normalizer is chosen."""
        for number in range(len(self.groups)):
            name = trial.suggest_categorical(self.parameter(number), list(self.normalizers))
            for option, (low, high) in self.ranges.get(name, {}).items():
                trial.suggest_float(f"{self.parameter(number)} {name}.{option}", low, high)
        trial.suggest_float("learning_rate", *self.learning_rate, log=True)

    def parameter(self, number: int) -> str:
        """Name of a group's normalizer among the parameters of a trial."""
        first, last = self.groups[number][0], self.groups[number][-1]
        return f"layer {first}" if first == last else f"layers {first}-{last}"

    def recipe(self, parameters: Mapping[str, Any]) -> dict[str, str]:
        """Return the recipe of a trial.

        Raises:
            KeyError: A parameter is missing: the driver ended while the trial was drawn.
        """
        specs: dict[int, str] = {}
        for number, layers in enumerate(self.groups):
            name = parameters[self.parameter(number)]
            drawn = {
                option: parameters[f"{self.parameter(number)} {name}.{option}"] for option in self.ranges.get(name, {})
            }
            spec = name + "".join(f":{option}={value:.4g}" for option, value in drawn.items())
            specs |= dict.fromkeys(layers, spec)
        return compact([specs[layer] for layer in sorted(specs)])

    def item(self, recipe: Mapping[str, str], learning_rate: float, varied: Mapping[str, Any], **values: Any) -> Item:
        """The training run of a recipe."""
        normalizer = next(iter(recipe.values())) if len(recipe) == 1 else dict(recipe)
        item_values = {
            **self.options,
            "normalizer": normalizer,
            "learning_rate": float(f"{learning_rate:.6g}"),
            **values,
        }
        return make_item(TASKS[COMMAND], item_values, varied, self.folder)

    def values(self, row: Mapping[str, Any]) -> list[float]:
        """Return the objectives of a finished run."""
        context = lm_settings({**self.options, "normalizer": "softmax"}).context
        columns = {"loss at 4x": f"loss at {TIMES * context}", "retrieval": f"keys found at {context}"}
        return [float(row[columns.get(name, name)]) for name in self.objectives]


def read_search_plan(path: Path) -> SearchPlan:
    """Read and check a search plan.

    Raises:
        ValueError: Not a plan, an unknown key, or a wrong value.
    """
    content = read_toml(path)
    try:
        return _parse_plan(path, content)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None


def _parse_plan(path: Path, content: dict[str, Any]) -> SearchPlan:
    """Validate the content of a plan file and return the plan."""
    require_known("plan", content, KEYS)
    space = _table(content, "space")
    require_known("[space]", space, SPACE)
    confirm = _table(content, "confirm")
    require_known("[confirm]", confirm, ("seeds",))
    options = dict(_table(content, "options"))
    require_known("[options]", options, TASKS[COMMAND].parameters)
    for name in ("normalizer", "learning_rate"):
        if name in options:
            raise ValueError(f"expected {name} in [space] only, got it in [options] too. Remove it from [options].")
    objectives = content.get("objectives", ["loss"])
    if not isinstance(objectives, list) or not objectives or len(set(map(str, objectives))) < len(objectives):
        raise ValueError(f"expected a list of different objectives, got {objectives!r}")
    for name in objectives:
        if name not in DIRECTIONS:
            raise ValueError(f"unknown objective {name!r}; {did_you_mean(name, DIRECTIONS)}")
    settings = lm_settings({**options, "normalizer": "softmax"})
    if "loss at 4x" in objectives:
        options["eval_lengths"] = sorted({*options.get("eval_lengths", ()), TIMES * settings.context})
    if "retrieval" in objectives:
        options["needle"] = {**NEEDLE, **options.get("needle", {})}
    names = space.get("normalizers")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"expected a list of normalizers in [space], got {names!r}")
    for name in names:
        entry_of(name.partition(":")[0])
    ranges = _ranges(_table(space, "options"), names)
    plan = SearchPlan(
        objectives=tuple(objectives), trials=_count("trials", content.get("trials", 60), 1),
        seed=_count("seed", content.get("seed", 0), 0), prune=bool(content.get("prune", True)),
        groups=_groups(space.get("groups", "each"), settings.layers), normalizers=tuple(names), ranges=ranges,
        learning_rate=_range("learning_rate", space.get("learning_rate"), least=1e-12),
        uniform=_count("uniform", space.get("uniform", 1), 0),
        confirm_seeds=_count("seeds", confirm.get("seeds", 0), 0),
        options=options, resources=read_resources("plan", _table(content, "resources")),
        slurm=_table(content, "slurm"), folder=path.parent,
        content={
            name: space if name == "space" else content[name]
            for name in KEYS if name in content and name not in ("resources", "slurm")
        },
    )  # fmt: skip
    for name in names:  # every normalizer is tried before anything runs
        middle = "".join(f":{option}={(low + high) / 2:.4g}" for option, (low, high) in ranges.get(name, {}).items())
        plan.item({f"0-{settings.layers - 1}": name + middle}, plan.learning_rate[0], {})
    return plan


def _table(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = content.get(name, {})
    if not isinstance(table, dict):
        raise ValueError(f"expected a table [{name}], got {table!r}")
    return table


def _count(name: str, value: Any, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"expected an integer of at least {least} for {name}, got {value!r}")
    return value


def _range(name: str, value: Any, least: float = -math.inf) -> tuple[float, float]:
    numbers = isinstance(value, list) and all(isinstance(number, int | float) for number in value)
    if not numbers or len(value) != 2 or not least <= value[0] < value[1]:
        raise ValueError(f"expected two numbers, from and to, for {name}, got {value!r}")
    return float(value[0]), float(value[1])


def _ranges(table: Mapping[str, Any], names: list[str]) -> dict[str, dict[str, tuple[float, float]]]:
    require_known("[space.options]", table, names)
    return {
        name: {option: _range(f"{name}.{option}", value) for option, value in _table(table, name).items()}
        for name in table
    }


def _groups(value: Any, layers: int) -> tuple[tuple[int, ...], ...]:
    if value == "each":
        return tuple((layer,) for layer in range(layers))
    if not isinstance(value, list) or not value:
        raise ValueError(f'expected groups of layers such as ["0-1", "2-3"], or "each", got {value!r}')
    groups = tuple(parse_layers(group) for group in value)
    if sorted(layer for group in groups for layer in group) != list(range(layers)):
        raise ValueError(f"expected groups that hold each of the {layers} layers once, got {value!r}")
    if any(group != tuple(range(group[0], group[-1] + 1)) for group in groups):
        raise ValueError(f"expected neighboring layers in each group, got {value!r}")
    return groups
