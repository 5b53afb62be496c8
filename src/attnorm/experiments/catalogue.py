"""Every experiment by name. Modules are imported when an experiment is used, so that the command starts fast.

Each module has an `EXPERIMENT` with the name under which it is listed. `takes` lists the options of the command that an
experiment uses; any other option is an error.
"""

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from attnorm.experiments.experiment import Experiment
from attnorm.suggest import did_you_mean

ALL = "all"
MODEL, TEXT, VALID, ONLY, LONGEST = "--model", "--text", "--valid", "--only", "--longest"
ONE_OF_EACH: Mapping[str, int | None] = {MODEL: 1, TEXT: 1}


@dataclass(frozen=True)
class ExperimentEntry:
    module: str
    what: str  # short description, for a list that imports nothing
    takes: Mapping[str, int | None] = field(
        default_factory=lambda: ONE_OF_EACH
    )  # option -> how many values; None: any number


# The papers' figures, tables and guidelines: "all" runs these, in this order.
PAPERS = {
    "fig1": ExperimentEntry("attnorm.experiments.fig1", "the geometry of selection: a toy and a real head"),
    "fig2": ExperimentEntry(
        "attnorm.experiments.fig2.experiment", "distances, and the critical N by a Kolmogorov-Smirnov test"
    ),
    "fig3": ExperimentEntry("attnorm.experiments.fig3.experiment", "separability of the selected keys, with its nulls"),
    "fig4": ExperimentEntry("attnorm.experiments.fig4", "sensitivity of the weights to the logits against temperature"),
    "dispersion": ExperimentEntry(
        "attnorm.experiments.dispersion.experiment",
        "entropy and effective gap against context length",
        {**ONE_OF_EACH, LONGEST: 1},
    ),
    "spread": ExperimentEntry(
        "attnorm.experiments.spread.experiment",
        "the spread of the logits, next to Proposition 3.1",
        {**ONE_OF_EACH, MODEL: None},
    ),
    "adaptive": ExperimentEntry("attnorm.experiments.adaptive.experiment", "where the adaptive temperature acts"),
    "gradients": ExperimentEntry("attnorm.experiments.gradients", "the toy of section 2.3 and real heads"),
    "guidelines": ExperimentEntry(
        "attnorm.experiments.guidelines.experiment", "each practical guideline: yes, no or partly"
    ),
}
# Experiments that train models for hours: they run only by name.
TRAINED = {
    "retrieval": ExperimentEntry(
        "attnorm.experiments.retrieval.experiment", "models that pick from sets, on sets far larger", {ONLY: None}
    ),
    "language-models": ExperimentEntry(
        "attnorm.experiments.language_models.experiment",
        "small language models of every normalizer",
        {TEXT: None, VALID: None, ONLY: None},
    ),
}
EXPERIMENTS = {**PAPERS, **TRAINED}


def named(names: Iterable[str]) -> list[Experiment]:
    """Return the experiments of these names without duplicates; "all" stands for those of the papers."""
    wanted: list[str] = []
    for name in names:
        wanted += PAPERS if name == ALL else [name]
    if not wanted:
        raise ValueError(f"name an experiment: {', '.join([*EXPERIMENTS, ALL])}")
    return [experiment(name) for name in dict.fromkeys(wanted)]


def experiment(name: str) -> Experiment:
    if name not in EXPERIMENTS:
        raise ValueError(f"no experiment is called {name!r}; {did_you_mean(name, [*EXPERIMENTS, ALL])}")
    module = EXPERIMENTS[name].module
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:  # a library that the experiment needs
            raise
        raise ValueError(
            f"the experiment {name!r} is not part of this installation: there is no module {module}"
        ) from None
    result: Experiment = found.EXPERIMENT
    return result
