"""The plan of the retrieval experiment: the models to train, the tests of each, and the records of these tests.

This needs only torch, not the libraries for figures. Every permutation-equivariant normalizer takes part, with the same
seeds, data and steps. The paper's adaptive temperature is used in tests only, where it replaces the trained softmax, as
hard attention does for all. PRINTED_* are the numbers of Velickovic et al. 2024 (https://arxiv.org/abs/2410.01104),
Table 1; GOALS were set by us before training.

records.jsonl of a GPU run has everything that tables and figures need. On a machine without a GPU its missing records
are not trained again; they are left out and named in the summary.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from attnorm.engines.execution import one_thread
from attnorm.files import read_jsonl
from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.registry import available, get
from attnorm.normalizers.spec import parse_spec
from attnorm_lab.experiments.experiment import ProgressCallback
from attnorm_lab.training.device import chosen_device
from attnorm_lab.training.retrieval.data import RetrievalRecipe
from attnorm_lab.training.retrieval.evaluate import RECORDS, SIZES, Record, Trials
from attnorm_lab.training.retrieval.model import run_key
from attnorm_lab.training.retrieval.train import RetrievalProgress, train_retrieval

Section = Literal["paper", "ours", "parts", "steps", "recall", "majority"]
BASELINE = "softmax"
PAPERS_RECIPE, OUR_RECIPE = "paper's recipe", "our recipe"
FOR_TESTS = "adaptive_temperature"
# Added since docs/results/retrieval.md was measured: trained where they are named.
ADDED_SINCE = ("softcap", "ssa", "norm_softmax", "threshold_relu", "odd_polynomial", "tempered", "composed")
# The defaults are meant for sequences; these are for sets of 16, where `kneemax` has its knee at 1/n.
FOR_SETS = {
    "log_scaled": "log_scaled:train_length=16", "topk": "topk:k=4", "entmax": "entmax:alpha=1.25",
    "kneemax": "kneemax:share=1",
}  # fmt: skip
OTHERS = ("hard", FOR_TESTS, "entmax15")  # replace a trained softmax in tests
OTHER_TASKS = ("softmax", "ssmax", "entmax15", "asentmax", "kneemax", "sigmoid", "softpick", "sa_softmax")
LONG = 100_000  # steps, as in the paper
BEYOND = 131_072  # items

# What our recipe changes in the paper's: a label for tables, and the fields.
PARTS: dict[str, dict[str, Any]] = {
    "squeezed sets": {"squeezed": 0.9},
    "cosine": {"cosine": True},
    "learning rate 3e-3": {"learning_rate": 3e-3},
}
# Further options if the logits need no meaningful scale: for hard attention in the tests.
STANDARDIZED: dict[str, Any] = {"standardized": 6.0}
BEST = STANDARDIZED | {"leak_penalty": 10.0}
PRINTED_SIZES = (16, 64, 256, 1024, 4096, 16_384)
PRINTED_SOFTMAX = dict(zip(PRINTED_SIZES, (98.6, 94.3, 81.3, 53.8, 22.6, 12.4), strict=True))  # % right
PRINTED_ADAPTIVE = dict(zip(PRINTED_SIZES, (98.6, 94.5, 82.1, 57.7, 24.9, 14.0), strict=True))
GOALS = {1024: 79.0, 4096: 50.0, 16_384: 28.0}  # half of the published error at 1024, and more beyond


@dataclass(frozen=True)
class Training:
    """All seeds of one normalizer, task and recipe, trained together."""

    section: Section
    label: str
    task: str
    normalizer: str
    recipe: RetrievalRecipe
    trials: Trials


@dataclass(frozen=True)
class RetrievalPlan:
    seeds: tuple[int, ...]
    trainings: tuple[Training, ...]

    def of(self, *sections: Section) -> list[Training]:
        return [training for training in self.trainings if training.section in sections]


def plan(*, quick: bool = False, only: Sequence[str] = (), seed: int = 0) -> RetrievalPlan:
    """Return the full plan, or a quick one that takes a minute on a CPU.

    only: train only these normalizers and softmax.

    Raises:
        ValueError: A normalizer does not take part.
    """
    names = _select_normalizers(only)
    if quick:
        return _quick_plan([name for name in names if only or name in ("softmax", "ssmax", "entmax15")], seed)
    paper, sizes = RetrievalRecipe(), (*SIZES, BEYOND)
    full_trials = Trials(sizes=sizes, others=OTHERS)
    other_tasks = [name for name in names if _name(name) in OTHER_TASKS]
    # With a constant rate the result would be dominated by its noise in the weights.
    falling = replace(paper, steps=6000, cosine=True)
    long = {PAPERS_RECIPE: paper, "best": replace(our_recipe(paper), **BEST)}
    trainings = [
        *_plan_trainings("paper", names, "max", paper, sizes),
        *(
            Training("parts", label, "max", BASELINE, recipe, full_trials)
            for label, recipe in _recipes_by_part(paper).items()
        ),
        *_plan_trainings("ours", [name for name in names if name != "hard"], "max", our_recipe(paper), sizes),
        *_plan_trainings("recall", other_tasks, "recall", falling, SIZES),
        *_plan_trainings("majority", other_tasks, "majority", falling, SIZES),
        *(
            Training("steps", label, "max", BASELINE, replace(recipe, steps=LONG), full_trials)
            for label, recipe in long.items()
        ),
    ]
    return RetrievalPlan(tuple(range(seed, seed + 10)), tuple(trainings))


def our_recipe(paper: RetrievalRecipe) -> RetrievalRecipe:
    return replace(paper, **{name: value for part in PARTS.values() for name, value in part.items()})


def _quick_plan(names: Sequence[str], seed: int) -> RetrievalPlan:
    """Return the quick plan; its learning rates are higher because there are few steps."""
    paper = RetrievalRecipe(steps=400, batch=64, width=32, learning_rate=1e-2)
    better = replace(paper, squeezed=0.5, cosine=True)
    sizes, sets = (16, 64, 256, 1024), 256
    small = Trials(sizes=sizes, sets=sets, others=OTHERS)
    parts = {PAPERS_RECIPE: paper, "+ cosine": replace(paper, cosine=True), OUR_RECIPE: better}
    trainings = [
        *_plan_trainings("paper", names, "max", paper, sizes, sets),
        *(Training("parts", label, "max", BASELINE, recipe, small) for label, recipe in parts.items()),
        *_plan_trainings("ours", names, "max", better, sizes, sets),
        *_plan_trainings("recall", names, "recall", paper, sizes, sets),
        *_plan_trainings("majority", names, "majority", paper, sizes, sets),
    ]
    return RetrievalPlan(tuple(range(seed, seed + 3)), tuple(trainings))


def _plan_trainings(
    section: Section,
    names: Sequence[str],
    task: str,
    recipe: RetrievalRecipe,
    sizes: tuple[int, ...],
    sets: int = 1024,
) -> Iterator[Training]:
    for name in names:
        others = OTHERS if name == BASELINE and task == "max" else ("hard",)
        trials = Trials(sizes=sizes, sets=sets, others=others)
        spelling = FOR_SETS.get(name, name)
        yield Training(section, spelling, task, spelling, recipe, trials)


def _recipes_by_part(paper: RetrievalRecipe) -> dict[str, RetrievalRecipe]:
    """Return the paper's recipe, each part of ours alone, ours without each part, ours, and its extensions."""
    full_recipe = our_recipe(paper)
    recipes = {PAPERS_RECIPE: paper}
    recipes |= {f"+ {part}": replace(paper, **fields) for part, fields in PARTS.items()}
    for part in PARTS:
        left = {name: value for other, fields in PARTS.items() if other != part for name, value in fields.items()}
        recipes[f"ours without {part}"] = replace(paper, **left)
    recipes[OUR_RECIPE] = full_recipe
    recipes["ours + standardized logits"] = replace(full_recipe, **STANDARDIZED)
    recipes["best: ours + standardized, leak penalty"] = replace(full_recipe, **BEST)
    return recipes


def _select_normalizers(only: Sequence[str]) -> list[str]:
    fitting = [name for name in available() if name != FOR_TESTS and _works_on_sets(name)]
    unknown = [name for name in only if _name(name) not in fitting]
    if unknown:
        raise ValueError(f"--only: expected normalizers of this experiment ({', '.join(fitting)}), got {unknown[0]!r}.")
    if not only:
        return [name for name in fitting if name not in ADDED_SINCE]
    return sorted({BASELINE, *only}, key=lambda name: (fitting.index(_name(name)), name))


def _name(spelling: str) -> str:
    """Return the name of a specification: kneemax:knee=0.25 -> kneemax."""
    return parse_spec(spelling)[0]


def _works_on_sets(name: str) -> bool:
    """Return whether it maps a row of logits to weights independently of the order of the keys."""
    normalizer = get(name)
    return isinstance(normalizer, Normalizer) and normalizer.properties.permutation_equivariant


DEVICES = ("cuda", "cpu")
WORTH_COMPILING = 2000  # steps


@dataclass(frozen=True)
class TrainingRecords:
    """The records of a training; some may be missing if it could not be trained here."""

    training: Training
    records: list[Record]
    complete: bool

    def tested_with(self, name: str) -> list[Record]:
        return [record for record in self.records if record["tested_with"] == name]


def collect(
    plan: RetrievalPlan, folder: Path, known: Iterable[Path], device: str | None, progress: ProgressCallback
) -> list[TrainingRecords]:
    """Return the records of all trainings, in the order of the plan; write new ones to `folder`.

    Args:
        known: Files of records, .jsonl or .jsonl.xz, which may not exist.
        device: Where to train and whose records to use (default: that of the records, else a GPU if there is one).
    """
    known_records = [record for path in (folder / RECORDS, *known) for record in read_jsonl(path)]
    local_type = chosen_device(device).type
    device_type = local_type if device is not None else _common_device(plan, known_records) or local_type
    device_name = device if device_type == local_type else device_type
    entries = []
    for number, training in enumerate(plan.trainings):
        progress(f"{training.section}: {training.label}", number, len(plan.trainings))
        records = _records_of(training, plan.seeds, known_records, device_type)
        if len(records) < _expected_records(training, plan.seeds) and device_type in (local_type, "cpu"):
            with one_thread():
                records = train_retrieval(
                    [training.normalizer], folder, task=training.task, seeds=plan.seeds, recipe=training.recipe,
                    trials=training.trials, device=device_name, compiled=_should_compile(training),
                    report=_training_progress(progress, training, number, len(plan.trainings)),
                ).records  # fmt: skip
            known_records += records
        entries.append(TrainingRecords(training, records, len(records) == _expected_records(training, plan.seeds)))
    progress("", len(plan.trainings), len(plan.trainings))
    return entries


def _records_of(training: Training, seeds: Sequence[int], records: Iterable[Record], device: str) -> list[Record]:
    """Return the records of these tests without duplicates, sorted by test, size and seed."""
    run = run_key(training.task, training.normalizer, training.recipe, device)
    by_test = {
        (training.trials.names.index(record["tested_with"]), record["size"], record["seed"]): record
        for record in records
        if record.get("run") == run and record["seed"] in seeds and training.trials.includes(record)
    }
    return [by_test[key] for key in sorted(by_test)]


def _expected_records(training: Training, seeds: Sequence[int]) -> int:
    return len(seeds) * len(training.trials.sizes) * len(training.trials.names)


def _common_device(plan: RetrievalPlan, records: Sequence[Record]) -> str | None:
    """Return the device of most of the plan's records; data differ between CPU and GPU, so all must come from one."""
    counts = {
        device: sum(len(_records_of(t, plan.seeds, records, device)) for t in plan.trainings) for device in DEVICES
    }
    most = max(counts, key=lambda device: counts[device])
    return most if counts[most] else None


def _should_compile(training: Training) -> bool | None:
    """Return the trainer's default, or False if compiling would take longer than the steps."""
    return None if training.recipe.steps >= WORTH_COMPILING else False


def _training_progress(
    progress: ProgressCallback, training: Training, number: int, of: int
) -> Callable[[RetrievalProgress], None]:
    def report(state: RetrievalProgress) -> None:
        progress(f"{training.section}: {training.label}, {state.stage} {state.done:,} of {state.total:,}", number, of)

    return report
