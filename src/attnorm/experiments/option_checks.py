"""Reject a call before anything runs: unused options, and texts or models that are too short."""

from collections.abc import Mapping, Sequence

from attnorm.experiments.catalogue import EXPERIMENTS, LONGEST, MODEL, ONLY, TEXT, VALID
from attnorm.experiments.experiment import Experiment, ExperimentSubject

NOUNS = {MODEL: "model", TEXT: "text"}


def check_unused_options(chosen: Sequence[Experiment], subject: ExperimentSubject) -> None:
    """Raise ValueError for an option that an experiment ignores: its record would show it as used."""
    models = (subject.model, *subject.others)
    given: dict[str, Sequence[str]] = {
        MODEL: models if subject.others else (),  # one may be the default
        TEXT: [path.name for path in subject.texts],
        VALID: [path.name for path in subject.valid],
        ONLY: subject.only,
        LONGEST: () if subject.longest is None else (f"{subject.longest:,}",),
    }
    check_options([one.name for one in chosen], given)
    if subject.quick and subject.longest is not None:
        raise ValueError(f"--quick uses small sizes only: remove --quick, or --longest {subject.longest}")


def check_options(chosen: Sequence[str], given: Mapping[str, Sequence[str]]) -> None:
    """
    chosen: names of experiments. given: option -> its values.

    Raises:
        ValueError: An experiment does not use an option, or accepts fewer values.
    """
    for option, values in given.items():
        if not values:
            continue
        none = [name for name in chosen if option not in EXPERIMENTS[name].takes]
        if none:
            raise ValueError(
                f"{_subject(none)} no {option}, and {', '.join(values)} was given: leave it out; it is for "
                f"{', '.join(_taking(option))}, run without the others"
            )
        if len(values) == 1:
            continue
        single = [name for name in chosen if EXPERIMENTS[name].takes[option] == 1]
        if single:
            noun = NOUNS.get(option, option)
            several = [name for name in _taking(option) if EXPERIMENTS[name].takes[option] is None]
            raise ValueError(
                f"{_subject(single)} one {noun} at a time, and {', '.join(values)} were given; run once for each, with "
                f"an --out of its own. Several are taken by {', '.join(several)}"
            )


def _subject(names: Sequence[str]) -> str:
    return f"{', '.join(names)} {'takes' if len(names) == 1 else 'take'}"


def _taking(option: str) -> list[str]:
    return [name for name, entry in EXPERIMENTS.items() if option in entry.takes]


def check_text_lengths(chosen: Sequence[Experiment], subject: ExperimentSubject) -> None:
    """Compare the tokens that the experiments need with the text and the positions of the model.

    Raises:
        ValueError: The text has fewer tokens than one of the experiments needs, or the model fewer positions.
    """
    from attnorm.models.describe import longest_context

    needs = {one.name: one.fewest_tokens(quick=subject.quick) for one in chosen if one.needs_model}
    if not needs:
        return
    for each in subject.each():
        each.described()  # loads the model once for this and for its identity
        loaded = each.loaded()
        limit, _ = longest_context(loaded.model)
        most = max(needs.values())
        there = each.tokens(most)
        reach = there if limit is None else min(there, limit)
        short = {name: fewest for name, fewest in needs.items() if fewest > reach}
        if not short:
            continue
        needed = ", ".join(f"{name} needs {fewest:,} tokens" for name, fewest in short.items())
        if there <= reach:
            cause = f"{each.passages()[0].name!r} has {there:,} for {loaded.name}"
            remedy = "give a longer text with --text"
        else:
            cause = f"{loaded.name} has positions for {limit:,}"
            remedy = "use another model"
        raise ValueError(
            f"{needed}, and {cause}; {remedy}{_rest(needs, short)}{_quick(chosen, reach, quick=subject.quick)}"
        )


def _rest(needs: Mapping[str, int], short: Mapping[str, int]) -> str:
    rest = [name for name in needs if name not in short]
    return f", or run only {' '.join(rest)}" if rest else ""


def _quick(chosen: Sequence[Experiment], reach: int, *, quick: bool) -> str:
    enough = all(one.fewest_tokens(quick=True) <= reach for one in chosen if one.needs_model)
    return "; --quick needs less" if enough and not quick else ""
