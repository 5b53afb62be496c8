"""Max retrieval of Velickovic et al. 2024 under every normalizer, and two tasks where sharpness alone does not win.

Plan -> records (found or trained) -> tables, figures, verdict. Records made elsewhere, e.g. on a GPU by the same plan,
are taken from OUT/records.jsonl or OUT/records.jsonl.xz. Markdown tables for a document go to `tables` in the folder of
parts.
"""

from collections.abc import Iterator
from pathlib import Path

from attnorm.experiments.experiment import Experiment, Outcome, Subject, Tell
from attnorm.experiments.figures import retrieval as figures
from attnorm.experiments.retrieval.collect import Found, collect
from attnorm.experiments.retrieval.lines import lines_of, scales_of
from attnorm.experiments.retrieval.markdown import fragments
from attnorm.experiments.retrieval.plan import plan
from attnorm.experiments.retrieval.tables import accuracy_table, scale_table
from attnorm.experiments.retrieval.verdict import Numbers, findings, words
from attnorm.training import atomic
from attnorm.training.retrieval.records import RECORDS

TRAINING, TABLES = "training", "tables"


def run(subject: Subject, tell: Tell, parts: Path) -> Outcome:
    chosen = plan(quick=subject.quick, only=subject.only, seed=subject.seed)
    everything = collect(chosen, parts / TRAINING, _records_elsewhere(parts), subject.device, tell)
    found = [one for one in everything if one.records]
    lines, scales = lines_of(found), scales_of(found)
    for stem, text in fragments(lines, scales).items():
        atomic.write_text(parts / TABLES / f"{stem}.md", text)
    numbers = Numbers(lines, scales)
    about = _about(len(chosen.seeds))
    return Outcome(
        words=words(numbers, _missing(everything), quick=subject.quick),
        findings=findings(numbers, quick=subject.quick),
        figures=figures.drawn(lines, scales, about),
        tables={"accuracy": accuracy_table(lines), "scale": scale_table(scales)},
        parameters={
            "seeds": list(chosen.seeds),
            "device": found[0].records[0]["device"],
            "trainings": [
                {
                    "section": one.training.section,
                    "label": one.training.label,
                    "task": one.training.task,
                    "normalizer": one.training.normalizer,
                    "recipe": one.training.recipe.as_dict(),
                    "sizes": list(one.training.trials.sizes),
                    "sets": one.training.trials.sets,
                    "complete": one.complete,
                }
                for one in found
            ],
        },
    )


def _records_elsewhere(parts: Path) -> Iterator[Path]:
    """In the folder of all experiments, where a user may have put them, and under other choices of normalizers."""
    out = parts.parent.parent
    yield from (out / RECORDS, out / f"{RECORDS}.xz")
    yield from sorted(out.glob(f"parts/retrieval-*/{TRAINING}/{RECORDS}"))


def _missing(found: list[Found]) -> list[str]:
    """By section; "all" where nothing of it is complete."""
    told = []
    for section in dict.fromkeys(one.training.section for one in found):
        mine = [one for one in found if one.training.section == section]
        missing = [one.training.label for one in mine if not one.complete]
        if missing:
            told.append(f"{section}: {'all' if len(missing) == len(mine) else ', '.join(missing)}")
    return told


def _about(seeds: int) -> str:
    return f"Means of {seeds} seeds, trained on at most 16 items. attnorm reproduce retrieval"


EXPERIMENT = Experiment(
    name="retrieval",
    title="Retrieval from sets far larger than any seen in training",
    source="Velickovic et al. 2024, Table 1",
    question="Which normalizer still finds the largest of n items, what fails in the others, and what helps?",
    run=run,
    needs_model=False,
)
