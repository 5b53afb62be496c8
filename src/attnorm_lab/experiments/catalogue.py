"""The table of all experiments by name, and the command-line options that each of them uses.

The module of an experiment is imported when it is used, so that the command starts fast. Each module has an
`EXPERIMENT`. `check_unused_options` and `check_text_lengths` reject a call before anything runs: for an option that an
experiment does not use, or a text or model that is too short.
"""

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from attnorm.text import did_you_mean
from attnorm_lab.experiments.experiment import Experiment, ExperimentSubject

ALL = "all"
MODEL, TEXT, VALID, ONLY, LONGEST = "--model", "--text", "--valid", "--only", "--longest"
IMAGES, MINUTES = "--images", "--minutes"
ONE_OF_EACH: Mapping[str, int | None] = {MODEL: 1, TEXT: 1}
GRID: Mapping[str, int | None] = {TEXT: None, VALID: None, MINUTES: 1}  # experiments that train a grid of models


@dataclass(frozen=True)
class ExperimentEntry:
    """The entry of an experiment in the table, which does not import its module."""

    module: str
    what: str  # short description
    # Option -> how many values it may have (None: any number).
    takes: Mapping[str, int | None] = field(default_factory=lambda: ONE_OF_EACH)


# The papers' figures, tables and guidelines: "all" runs these, in this order.
PAPERS = {
    "fig1": ExperimentEntry(
        "attnorm_lab.experiments.fig1", "selected keys and the ball around them, in a toy and a real head"
    ),
    "fig2": ExperimentEntry(
        "attnorm_lab.experiments.fig2.experiment",
        "distance of selected keys from the rest, and the critical N (Kolmogorov-Smirnov test)",
    ),
    "fig3": ExperimentEntry("attnorm_lab.experiments.fig3", "separability of the selected keys, compared with chance"),
    "fig4": ExperimentEntry(
        "attnorm_lab.experiments.fig4", "sensitivity of the weights to the logits, against the temperature"
    ),
    "dispersion": ExperimentEntry(
        "attnorm_lab.experiments.dispersion.experiment",
        "entropy and effective gap of heads, against the context length",
        {**ONE_OF_EACH, LONGEST: 1},
    ),
    "spread": ExperimentEntry(
        "attnorm_lab.experiments.spread",
        "spread of the logits of real heads, compared with Proposition 3.1",
        {**ONE_OF_EACH, MODEL: None},
    ),
    "adaptive": ExperimentEntry(
        "attnorm_lab.experiments.adaptive", "adaptive temperature on real heads: where it acts"
    ),
    "gradients": ExperimentEntry(
        "attnorm_lab.experiments.gradients", "gradient sensitivity: the example of section 2.3, and real heads"
    ),
    "guidelines": ExperimentEntry(
        "attnorm_lab.experiments.guidelines.experiment",
        "practical guidelines, each tested on a model: yes, partly or no",
    ),
}
# Questions behind the papers: they run only by name.
MORE = {
    "circuits": ExperimentEntry(
        "attnorm_lab.experiments.circuits",
        "induction, previous-token and retrieval heads, against the context length",
        {**ONE_OF_EACH, LONGEST: 1},
    ),
    "atom-mapping": ExperimentEntry(
        "attnorm_lab.experiments.atom_mapping",
        "the head of RXNMapper that maps atoms: whether the verdicts find it",
        {},
    ),
    "text-max": ExperimentEntry(
        "attnorm_lab.experiments.text_max", "a language model looks for the largest of n numbers", {MODEL: 1}
    ),
}
# Experiments that train models for hours: they run only by name.
TRAINED = {
    "retrieval": ExperimentEntry(
        "attnorm_lab.experiments.retrieval.experiment",
        "models that pick from small sets, tested on far larger ones",
        {ONLY: None},
    ),
    "language-models": ExperimentEntry(
        "attnorm_lab.experiments.language_models.experiment",
        "small language models that differ only in their normalizer",
        {TEXT: None, VALID: None, ONLY: None},
    ),
    "temperature": ExperimentEntry(
        "attnorm_lab.experiments.model_grid.temperature",
        "small language models trained at fixed and learned temperatures",
        GRID,
    ),
    "positions": ExperimentEntry(
        "attnorm_lab.experiments.model_grid.positions",
        "small language models with rotary, ALiBi, learned or no positions",
        GRID,
    ),
    "heads": ExperimentEntry(
        "attnorm_lab.experiments.model_grid.heads",
        "small language models of equal size with 4 to 32 heads per layer",
        GRID,
    ),
    "clrs-text": ExperimentEntry(
        "attnorm_lab.experiments.clrs_text.experiment",
        "algorithms as text, tested on larger problems than in training",
        {TEXT: 1, VALID: 1, ONLY: None},
    ),
    "vision": ExperimentEntry(
        "attnorm_lab.experiments.vision", "image classifiers with softmax, compared with SOFT", {IMAGES: 1, ONLY: None}
    ),
}
EXPERIMENTS = {**PAPERS, **MORE, **TRAINED}


def named(names: Iterable[str]) -> list[Experiment]:
    """Return the experiments of these names without duplicates; "all" stands for those of the papers."""
    requested: list[str] = []
    for name in names:
        requested += PAPERS if name == ALL else [name]
    if not requested:
        raise ValueError(f"expected an experiment, got none. Choose from {', '.join([*EXPERIMENTS, ALL])}.")
    return [experiment(name) for name in dict.fromkeys(requested)]


def experiment(name: str) -> Experiment:
    if name not in EXPERIMENTS:
        raise ValueError(f"unknown experiment {name!r}; {did_you_mean(name, [*EXPERIMENTS, ALL])}")
    module = EXPERIMENTS[name].module
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:  # a library that the experiment needs
            raise
        raise ValueError(
            f"the experiment {name!r} is not part of this installation, which has no module {module}. Install "
            "attnorm again."
        ) from None
    result: Experiment = imported.EXPERIMENT
    return result


NOUNS = {MODEL: "model", TEXT: "text"}


def check_unused_options(experiments: Sequence[Experiment], subject: ExperimentSubject) -> None:
    """Raise ValueError for an option that an experiment ignores: its record would show it as used."""
    models = (subject.model, *subject.others)
    used_options: dict[str, Sequence[str]] = {
        MODEL: models if subject.others else (),  # one may be the default
        TEXT: [path.name for path in subject.texts],
        VALID: [path.name for path in subject.valid],
        ONLY: subject.only,
        IMAGES: () if subject.images is None else (subject.images.name,),
        LONGEST: () if subject.longest is None else (f"{subject.longest:,}",),
        MINUTES: () if subject.minutes is None else (f"{subject.minutes:g}",),
    }
    check_options([experiment.name for experiment in experiments], used_options)
    if subject.quick and subject.longest is not None:
        raise ValueError(f"expected --quick or --longest, got both. Remove --quick or --longest {subject.longest}.")


def check_options(names: Sequence[str], options: Mapping[str, Sequence[str]]) -> None:
    """Check that each experiment uses the options.

    names: names of experiments. options: option -> its values.

    Raises:
        ValueError: An experiment does not use an option, or accepts fewer values.
    """
    for option, values in options.items():
        if not values:
            continue
        none = [name for name in names if option not in EXPERIMENTS[name].takes]
        if none:
            raise ValueError(
                f"expected no {option} with {', '.join(none)}, got {', '.join(values)}. Remove it, or run only "
                f"{' or '.join(_experiments_with(option))}, which accept it."
            )
        if len(values) == 1:
            continue
        single = [name for name in names if EXPERIMENTS[name].takes[option] == 1]
        if single:
            noun = NOUNS.get(option, option)
            several = [name for name in _experiments_with(option) if EXPERIMENTS[name].takes[option] is None]
            raise ValueError(
                f"expected one {noun} with {', '.join(single)}, got {', '.join(values)}. Run once for each, with "
                f"a different --out. Several are accepted by {', '.join(several)}."
            )


def _experiments_with(option: str) -> list[str]:
    return [name for name, entry in EXPERIMENTS.items() if option in entry.takes]


def check_text_lengths(experiments: Sequence[Experiment], subject: ExperimentSubject) -> None:
    """Compare the tokens that the experiments need with the text and the positions of the model.

    Raises:
        ValueError: The text has fewer tokens than one of the experiments needs, or the model fewer positions.
    """
    from attnorm.models.describe import longest_context

    needs = {
        experiment.name: experiment.fewest_tokens(quick=subject.quick)
        for experiment in experiments
        if experiment.needs_model
    }
    if not needs:
        return
    for model_subject in subject.each():
        model_subject.described()  # loads the model once for this and for its identity
        loaded = model_subject.loaded()
        limit, _ = longest_context(loaded.model)
        most = max(needs.values())
        available = model_subject.tokens(most)
        reach = available if limit is None else min(available, limit)
        short = {name: fewest for name, fewest in needs.items() if fewest > reach}
        if not short:
            continue
        needed = ", ".join(f"{name} needs {fewest:,} tokens" for name, fewest in short.items())
        if available <= reach:
            cause = f"{model_subject.passages()[0].name!r} has {available:,} for {loaded.name}"
            remedy = "Give a longer text with --text"
        else:
            cause = f"{loaded.name} has positions for {limit:,}"
            remedy = "Use another model"
        raise ValueError(
            f"{needed}, and {cause}. {remedy}{_describe_others(needs, short)}"
            f"{_suggest_quick(experiments, reach, quick=subject.quick)}."
        )


def _describe_others(needs: Mapping[str, int], short: Mapping[str, int]) -> str:
    rest = [name for name in needs if name not in short]
    return f", or run only {' '.join(rest)}" if rest else ""


def _suggest_quick(experiments: Sequence[Experiment], reach: int, *, quick: bool) -> str:
    enough = all(experiment.fewest_tokens(quick=True) <= reach for experiment in experiments if experiment.needs_model)
    return "; --quick needs less" if enough and not quick else ""
