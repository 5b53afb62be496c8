"""The plan of the experiment, and the folder in which its missing items are trained and tested under a time limit.

Data, order, steps and batch are equal for every normalizer; only its learning rate differs. Every normalizer is first
trained for a few steps at each learning rate; the lowest held-out loss decides. The items are ordered so that what the
paper claims is complete first: softmax and adaptive temperature, then their further seeds, then the other normalizers.

Each finished item is one JSON line. The lines are all that the results need, so lines of several machines merge: every
file of the folder that RECORD_FILES names is read. A line belongs to a plan if it has its key, a hash of everything
that decides the result. An item that is stopped by the time limit leaves a checkpoint in the folder, from which the
next call there continues. Several processes may work in one folder: each takes the next item that no other is training.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from attnorm.files import append_jsonl, read_jsonl
from attnorm.provenance import file_hash, settings_hash
from attnorm.run_folder import lock, try_lock
from attnorm_lab.experiments.experiment import ProgressCallback, no_progress
from attnorm_lab.training.checkpoints import NotFiniteError, OutOfTimeError
from attnorm_lab.training.clrs.data import ClrsData, prepare_data, quick_examples, read_examples
from attnorm_lab.training.clrs.evaluate import REFITTED, ClrsTests
from attnorm_lab.training.clrs.train import ClrsBase, ClrsRecipe, train_clrs, with_normalizer
from attnorm_lab.training.device import chosen_device

SOFTMAX, ADAPTIVE = "softmax", "adaptive_temperature"
FIRST_SEED = 0

RECORDS = "clrs-text.jsonl"
RECORD_FILES = ("clrs-text*.jsonl", "clrs-text*.jsonl.xz", "records.jsonl", "records.jsonl.xz")
RUNS = "runs"
LOCKS = "locks"
SLACK = 1.1  # an item starts only if this many times its expected duration is left


@dataclass(frozen=True, kw_only=True)
class ClrsPlan:
    """Defaults are for SmolLM2-135M on one large GPU; a model from scratch has `layers`, `heads` and `width`."""

    normalizers: tuple[str, ...] = (SOFTMAX, ADAPTIVE, REFITTED, "ssmax", "entmax15", "asentmax")
    """REFITTED: adaptive temperature with a polynomial fitted to the trained softmax model of the first seed."""
    repeated: tuple[str, ...] = (SOFTMAX, ADAPTIVE)
    """Trained with every seed; the others with the first."""
    seeds: int = 3
    at_inference: tuple[str, ...] = (ADAPTIVE, REFITTED)
    """Replace softmax in further tests of the trained softmax models."""
    rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3)
    rate_steps: int = 100
    steps: int = 1000
    batch: int = 128
    warmup_share: float = 0.05
    weight_decay: float = 0.1
    tokens_at_once: int = 2**15
    context: int = 256
    layers: int = 8
    heads: int = 8
    width: int = 512
    held_out: int = 2000
    observed: int = 1
    algorithms: tuple[str, ...] = ()
    dense: tuple[str, ...] = ()
    """Normalizers that are computed over the whole matrix of weights, where that is faster."""
    dtype: str = "bfloat16"
    compiled: bool = True
    """Compile the blocks, on a GPU."""

    def recipe(self, label: str, *, rate: float, steps: int, seed: int, coefficients: Sequence[float]) -> ClrsRecipe:
        """coefficients: for REFITTED."""
        plain = ClrsRecipe(
            steps=steps, batch=self.batch, learning_rate=rate, warmup=max(1, round(self.warmup_share * steps)),
            weight_decay=self.weight_decay, seed=seed, dtype=self.dtype, tokens_at_once=self.tokens_at_once,
            layers=self.layers, heads=self.heads, width=self.width, context=self.context,
        )  # fmt: skip
        if label == REFITTED:
            return with_normalizer(plain, ADAPTIVE, {"coefficients": list(coefficients)})
        return with_normalizer(plain, label)

    def identity(self) -> dict[str, Any]:
        """Return the values that decide the record of an item; which items there are does not."""
        excluded = ("normalizers", "repeated", "seeds", "dense", "compiled")
        return {name: value for name, value in asdict(self).items() if name not in excluded}

    def only(self, names: Sequence[str]) -> "ClrsPlan":
        """Return the plan with softmax and these normalizers (default: all).

        Raises:
            ValueError: One is not part of the plan.
        """
        unknown = [name for name in names if name not in self.normalizers]
        if unknown:
            raise ValueError(
                f"--only: expected normalizers of the plan ({', '.join(self.normalizers)}), got {unknown[0]!r}."
            )
        normalizers = tuple(name for name in self.normalizers if name == SOFTMAX or name in names)
        return replace(self, normalizers=normalizers) if names else self


FULL = ClrsPlan()
QUICK = ClrsPlan(
    normalizers=(SOFTMAX, ADAPTIVE, REFITTED), seeds=1, rates=(3e-3, 1e-2), rate_steps=4, steps=12, batch=8,
    tokens_at_once=1024, context=64, layers=1, heads=2, width=32, held_out=8, dtype="float32",
    dense=(SOFTMAX, ADAPTIVE, REFITTED),
)  # fmt: skip


@dataclass(frozen=True)
class ClrsItem:
    """One training: a short one to choose the learning rate, or a main one with all tests."""

    stage: Literal["rate", "main"]
    label: str
    seed: int
    learning_rate: float | None = None  # of the stage "rate"

    @property
    def name(self) -> str:
        rate = "" if self.learning_rate is None else f"-{self.learning_rate:g}"
        return f"{self.stage}-{self.label.replace(':', '-')}-seed-{self.seed}{rate}"


def items(plan: ClrsPlan) -> list[ClrsItem]:
    """Return all items in order: what an item needs stands before it."""
    claimed = [name for name in plan.normalizers if name in plan.repeated]
    others = [name for name in plan.normalizers if name not in plan.repeated]
    ordered: list[ClrsItem] = []
    for label in claimed:
        ordered += _items_of(plan, label)
    for seed in range(FIRST_SEED + 1, FIRST_SEED + plan.seeds):
        ordered += [ClrsItem("main", label, seed) for label in claimed]
    for label in others:
        ordered += _items_of(plan, label)
    return ordered


def _items_of(plan: ClrsPlan, label: str) -> list[ClrsItem]:
    rates = [ClrsItem("rate", label, FIRST_SEED, rate) for rate in plan.rates]
    return [*rates, ClrsItem("main", label, FIRST_SEED)]


Line = dict[str, Any]
Log = Callable[[str], None]


def read_lines(folder: Path) -> list[Line]:
    """Return the lines of all record files of a folder, without duplicates.

    records.jsonl is read as by the other experiments; it may hold records of those too.
    """
    lines: dict[tuple[Any, ...], Line] = {}
    for path in sorted(path for pattern in RECORD_FILES for path in folder.glob(pattern)):
        for line in read_jsonl(path):
            if {"run", "stage", "label"} <= line.keys():
                lines.setdefault((line["run"], *_line_key(line)), line)
    return list(lines.values())


def _line_key(line: Line) -> tuple[Any, ...]:
    return line["stage"], line["label"], line["seed"], line["learning_rate"] if line["stage"] == "rate" else None


@dataclass(frozen=True)
class ClrsWorkspace:
    """A folder, a plan, a model to start from and encoded questions."""

    folder: Path
    plan: ClrsPlan
    base: ClrsBase
    data: ClrsData

    @classmethod
    def open(
        cls, folder: Path, plan: ClrsPlan, *, model: Path | None = None, train: Path | None = None,
        test: Path | None = None, seed: int = 0,
    ) -> "ClrsWorkspace":  # fmt: skip
        """Read and encode the questions; without files those of two generated tasks.

        Raises:
            ValueError: Only one of the files is given, or they cannot be used.
        """
        if (train is None) != (test is None):
            raise ValueError("clrs-text trains on --text and tests on --valid: expected both, got one. Give both.")
        base = ClrsBase(model)
        source: dict[str, Any]
        if train is None or test is None:
            questions, source = quick_examples(seed), {"generated": seed}
        else:
            questions = read_examples(train, plan.algorithms), read_examples(test, plan.algorithms)
            source = {"train": file_hash(train), "test": file_hash(test), "algorithms": list(plan.algorithms)}
        data = prepare_data(*questions, base.tokenizer(), held_out=plan.held_out, source=source)
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder, plan, base, data)

    def run_key(self) -> str:
        decisive = {"plan": self.plan.identity(), "base": self.base.identity(), "data": self.data.source}
        return settings_hash(decisive)[:12]

    def lines(self) -> list[Line]:
        """Return the lines of this plan."""
        run = self.run_key()
        return [line for line in read_lines(self.folder) if line["run"] == run]


def best_rate(lines: Iterable[Line], plan: ClrsPlan, label: str) -> float | None:
    """Return the learning rate with the lowest held-out loss; None if a short run is missing or all diverged."""
    tried = {line["learning_rate"]: line["held_out_loss"] for line in lines if _line_key(line)[:2] == ("rate", label)}
    if any(rate not in tried for rate in plan.rates):
        return None
    ended = {rate: tried[rate] for rate in plan.rates if tried[rate] is not None}
    return min(ended, key=lambda rate: ended[rate]) if ended else None


def coefficients_of(lines: Iterable[Line]) -> list[float] | None:
    """Return the polynomial fitted to the softmax model of the first seed."""
    for line in lines:
        if _line_key(line)[:3] == ("main", SOFTMAX, FIRST_SEED) and line.get("coefficients"):
            return list(line["coefficients"])
    return None


def run_items(
    workspace: ClrsWorkspace,
    *,
    minutes: float | None = None,
    device: str | None = None,
    log: Log = lambda words: None,
    progress: ProgressCallback = no_progress,
) -> bool:
    """Train and test the missing items in order; return whether all are finished.

    minutes: start no item that would not be finished by then, and stop training there; a test that is running ends.
    """
    deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
    plan, run = workspace.plan, workspace.run_key()
    planned = items(plan)
    finished = True
    for number, item in enumerate(planned):
        with try_lock(workspace.folder / LOCKS / f"{item.name}.lock") as acquired:
            lines = workspace.lines()
            if any(_line_key(line) == astuple(item) for line in lines):
                continue
            progress(item.name, number, len(planned))
            rate = item.learning_rate or best_rate(lines, plan, item.label)
            coefficients = coefficients_of(lines) or []
            expected = _expected_seconds(lines, item)
            reason = None
            if not acquired:
                reason = "another process trains it"
            elif rate is None or (item.label == REFITTED and not coefficients):
                reason = "waits for other items"
            elif time.monotonic() + SLACK * expected >= deadline:
                reason = f"not started, it takes about {expected:.0f} s"
            if reason is not None or rate is None:
                log(f"{item.name}: {reason}")
                finished = False
                continue
            line = _finish(workspace, item, rate, coefficients, deadline, device)
            if line is None:
                log(f"{item.name}: stopped by the time limit, resumes from its checkpoint")
                return False
            with lock(workspace.folder / LOCKS / "records.lock"):
                append_jsonl(workspace.folder / RECORDS, [{"run": run, **line}])
            log(f"{item.name}: held-out loss {line['held_out_loss']}, {line['wall_seconds']} s {line['problem'] or ''}")
    progress("", len(planned), len(planned))
    return finished


def _expected_seconds(lines: Sequence[Line], item: ClrsItem) -> float:
    """Return the duration of the same item with another rate or seed, else of the slowest of its stage; 0 if none."""
    same = [line["wall_seconds"] for line in lines if (line["stage"], line["label"]) == (item.stage, item.label)]
    return float(max(same or [line["wall_seconds"] for line in lines if line["stage"] == item.stage], default=0.0))


def _finish(
    workspace: ClrsWorkspace, item: ClrsItem, rate: float, coefficients: list[float], deadline: float,
    device: str | None,
) -> Line | None:  # fmt: skip
    """Return the line of a finished item; None if the time limit stopped it. A loss that is not finite is a result."""
    plan, main = workspace.plan, item.stage == "main"
    steps = plan.steps if main else plan.rate_steps
    recipe = plan.recipe(item.label, rate=rate, steps=steps, seed=item.seed, coefficients=coefficients)
    others = plan.at_inference if item.label == SOFTMAX else ()
    tests = ClrsTests(others=others if main else (), observed=plan.observed, test=main)
    began = time.monotonic()
    line: Line = {"stage": item.stage, "label": item.label, "seed": item.seed, "learning_rate": rate, "problem": None}
    try:
        record = train_clrs(
            workspace.folder / RUNS / item.name, workspace.base, recipe, workspace.data, tests, device=device,
            attention="dense" if item.label in plan.dense else "engine", deadline=deadline,
            compiled=plan.compiled and chosen_device(device).type == "cuda",
        )  # fmt: skip
    except OutOfTimeError:
        return None
    except NotFiniteError as error:
        line |= {"problem": str(error), "held_out_loss": None}
    else:
        line |= record["result"]
    about = {
        "base": workspace.base.name, "steps": steps, "batch": plan.batch,
        "algorithms": sorted({example.algorithm for example in workspace.data.test}),
        "training_sizes": workspace.data.training_sizes,
    }  # fmt: skip
    return {**line, **about, "wall_seconds": round(time.monotonic() - began, 1)}
