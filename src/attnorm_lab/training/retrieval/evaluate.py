"""Test trained models on sets of every size: records of accuracy and kinds of errors, and their means over seeds.

Errors are split into wrong logits and dispersed weights. Memory is bounded at every size: sets come in blocks, and the
items of a block are read a slice at a time, once for their logits and once for their values. Records that exist already
are not computed again.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from attnorm.arithmetic import student_half_width
from attnorm.files import append_jsonl, read_jsonl
from attnorm.normalizers.contract import Normalizer
from attnorm_lab.training.retrieval.data import CLASSES, Batch, Sets, Task, find_task, sets_for_testing
from attnorm_lab.training.retrieval.model import Retrievers, TrainedSeeds, load_trained_seeds, mixture, normalizer_for

SLICE_BYTES = {"cuda": 2**32, "cpu": 2**27}
ITEMS_IN_ALL = 2**24  # per model and size: 1024 sets of 16,384 items, 128 of 131,072
SIZES = (16, 64, 256, 1024, 4096, 16_384)
OWN = "own"  # the normalizer it was trained with
RECORDS = "records.jsonl"  # one per normalizer, seed, size and test normalizer
Record = dict[str, Any]


def sets_at(size: int, wanted: int) -> int:
    """Return the number of sets of this size in a test: fewer if they are very large."""
    return max(1, min(wanted, ITEMS_IN_ALL // size))


@torch.no_grad()
def evaluate(
    models: Retrievers,
    task: Task,
    seeds: Sequence[int],
    size: int,
    sets: int,
    normalizers: Mapping[str, Normalizer | None],
) -> list[dict[str, Any]]:
    """Return one record per seed and test normalizer (None: the one it was trained with).

    accuracy + logits_wrong + dispersed = 1 if the task has a target: an error is "logits wrong" if the largest logit is
    not the right item's, and "dispersed" if it is.
    """
    device = models.to_key.weight_SIO.device
    totals: dict[str, dict[str, Tensor]] = {name: {} for name in normalizers}
    for drawn in sets_for_testing(task, seeds, size, sets, device):
        logits = torch.cat([models.logits(models.read(part), drawn.query) for part in _slices(models, drawn)], -1)
        weights = {name: models.weights(logits, drawn.visible, normalizer) for name, normalizer in normalizers.items()}
        for name, mixed in _mixtures(models, drawn, weights).items():
            right = models.classes(mixed).argmax(-1) == drawn.label
            for key, value in _outcomes(drawn, logits, weights[name], right).items():
                totals[name][key] = totals[name].get(key, torch.zeros((), device=device)) + value.double().sum(-1)
    return [
        {
            "seed": seed,
            "size": size,
            "sets": sets,
            "tested_with": name,
            **{key: _finite_or_none(float(total[copy]) / sets) for key, total in sums.items()},
        }
        for name, sums in totals.items()
        for copy, seed in enumerate(seeds)
    ]


def _slices(models: Retrievers, drawn: Sets) -> Iterator[Tensor]:
    """Return slices of the items, so small that the model's intermediate values fit into SLICE_BYTES."""
    copies, sets, items, _ = drawn.items.shape
    per_item = copies * sets * models.width * drawn.items.element_size() * 4
    length = max(1, SLICE_BYTES.get(drawn.items.device.type, SLICE_BYTES["cpu"]) // per_item)
    return (drawn.items[:, :, start : start + length] for start in range(0, items, length))


def _mixtures(models: Retrievers, drawn: Sets, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    mixed: dict[str, Tensor] = {}
    start = 0
    for part in _slices(models, drawn):
        values = models.values(models.read(part), part.shape[1])
        for name, own in weights.items():
            part_mixture = mixture(own[..., start : start + part.shape[2]], values)
            mixed[name] = mixed[name] + part_mixture if name in mixed else part_mixture
        start += part.shape[2]
    return mixed


def _outcomes(drawn: Sets, logits: Tensor, weights: Tensor, right: Tensor) -> dict[str, Tensor]:
    outcome = {"accuracy": right}
    if drawn.target is None:
        return outcome
    target = drawn.target[..., None]
    others = logits.scatter(-1, target, -torch.inf).amax(-1)
    margin = logits.gather(-1, target).squeeze(-1) - others
    finds_target = logits.argmax(-1) == drawn.target
    return outcome | {
        "logits_wrong": ~finds_target & ~right,
        "dispersed": finds_target & ~right,
        "logits_right": finds_target,
        "winner_weight": weights.gather(-1, target).squeeze(-1),
        "margin": margin,
        "spread": logits.amax(-1) - logits.amin(-1),
    }


def _finite_or_none(value: float) -> float | None:
    """Return None for values that are not finite, which JSON does not have."""
    return value if math.isfinite(value) else None


@dataclass(frozen=True, kw_only=True)
class Trials:
    """Sizes and numbers of the test sets; `others` are normalizers that replace the trained one in further tests.

    Raises:
        ValueError: Sizes or numbers are out of range, or a normalizer is unknown.
    """

    sizes: tuple[int, ...] = SIZES
    sets: int = 1024
    others: tuple[str, ...] = ("hard",)

    def __post_init__(self) -> None:
        if not self.sizes:
            raise ValueError("expected at least one set size to test, got none.")
        if min(self.sizes) < 2:
            raise ValueError(f"expected set sizes of at least 2 items, got {min(self.sizes)}.")
        if self.sets < 1:
            raise ValueError(f"expected at least 1 test set per size, got {self.sets}.")
        for name in self.others:
            normalizer_for(name, 1)

    @property
    def names(self) -> tuple[str, ...]:
        return (OWN, *self.others)

    def includes(self, record: Record) -> bool:
        """Return whether a record belongs to these tests."""
        return (
            record["size"] in self.sizes
            and record["sets"] == sets_at(record["size"], self.sets)
            and record["tested_with"] in self.names
        )


def records_of(
    out: Path, stack: TrainedSeeds, task: Task, trials: Trials, device: torch.device, report: Callable[[int], None]
) -> list[Record]:
    """Return all records of these tests; compute and append the missing ones.

    report: called with the number of finished sizes, before each size and at the end.
    """
    path = out / RECORDS
    lines = read_jsonl(path)
    known = [r for r in lines if r.get("run") == stack.run and r["seed"] in stack.seeds and trials.includes(r)]
    models: Retrievers | None = None
    for done, size in enumerate(trials.sizes):
        recorded = {(r["tested_with"], r["seed"]) for r in known if r["size"] == size}
        missing = [name for name in trials.names if any((name, seed) not in recorded for seed in stack.seeds)]
        if not missing:
            continue
        report(done)
        models = models or load_trained_seeds(stack, task, device)
        normalizers: dict[str, Normalizer | None] = {
            name: None if name == OWN else normalizer_for(name, len(stack.seeds)).to(device) for name in missing
        }
        results = evaluate(models, task, stack.seeds, size, sets_at(size, trials.sets), normalizers)
        about = _training_facts(stack, models, task, size)
        new = [about[r["seed"]] | r for r in results if (r["tested_with"], r["seed"]) not in recorded]
        append_jsonl(path, new)
        known += new
    report(len(trials.sizes))
    return known


def _training_facts(stack: TrainedSeeds, models: Retrievers, task: Task, size: int) -> dict[int, dict[str, Any]]:
    """Return for every seed how it was trained, and its class leak, overall and among the best items of this size."""
    about = stack.about
    shared = {name: about[name] for name in ("run", "task", "normalizer", "device")}
    leaks: list[dict[str, float | None]] = [{} for _ in stack.seeds]
    if task.has_priority:
        leaks = [
            over_all | at_top for over_all, at_top in zip(class_leak(models), leak_at_top(models, size), strict=True)
        ]
    return {
        seed: {
            **shared,
            **about["recipe"],
            "train_seconds": about["train_seconds"],
            "train_loss": about["train_losses"][copy],
            "learned": {name: value[copy].item() for name, value in models.normalizer.named_parameters()},
            **leaks[copy],
        }
        for copy, seed in enumerate(stack.seeds)
    }


PRIORITIES_FROM = 0.9
PRIORITIES, QUERIES = 101, 32
CONTENDERS = 10  # the best items of all classes are among about this many


def leaked_share(models: Retrievers, batch: Batch, logits_SBN: Tensor) -> Tensor:
    """Return per copy the mean squared change of the logits when the classes change, over their variance.

    Differentiable. Hidden items count too: they are drawn like the others.
    """
    assert batch.other_SBN is not None
    other = F.one_hot(batch.other_SBN, CLASSES).to(logits_SBN.dtype)
    swapped = torch.cat([batch.items_SBNF[..., :-CLASSES], other], -1)
    change = models.logits(models.read(swapped), batch.query_SBF) - logits_SBN
    variance = logits_SBN.var(-1).mean(-1).clamp(min=1e-6)
    return change.square().mean((-1, -2)) / variance


def leak_at_top(models: Retrievers, size: int) -> list[dict[str, float | None]]:
    """Return `class_leak` among the best items of sets of this size, where a model may be most exact."""
    leaks = class_leak(models, 1 - min(CONTENDERS, size) / (size + 1))
    return [{f"{name}_at_top": value for name, value in leak.items()} for leak in leaks]


@torch.no_grad()
def class_leak(models: Retrievers, lowest: float = PRIORITIES_FROM) -> list[dict[str, float | None]]:
    """Return per copy the slope of the logits for priorities in [lowest, 1], and the leak in units of priority.

    leak = standard deviation of the logit over the classes / slope, both averaged over priorities and queries; None if
    the logit does not rise with the priority.
    """
    device = models.to_key.weight_SIO.device
    priority = torch.linspace(lowest, 1, PRIORITIES, device=device)
    hot = torch.eye(CLASSES, device=device).expand(PRIORITIES, -1, -1)
    items = torch.cat([priority[:, None, None].expand(-1, CLASSES, 1), hot], -1).flatten(0, 1)
    query = torch.linspace(0, 1, QUERIES, device=device)[:, None]
    shape = (models.copies, QUERIES)
    read = models.read(items.expand(*shape, *items.shape))
    logits = models.logits(read, query.expand(*shape, 1)).unflatten(-1, (PRIORITIES, CLASSES)).double()
    mean = logits.mean(-1)
    slopes = ((mean[..., -1] - mean[..., 0]) / (1 - lowest)).mean(-1).tolist()
    spreads = logits.std(-1, unbiased=False).mean((-1, -2)).tolist()
    return [{"slope": s, "leak": d / s if s > 0 else None} for s, d in zip(slopes, spreads, strict=True)]


@dataclass(frozen=True)
class Mean:
    """Mean over independent seeds with its 95 % confidence interval, `value` +- `half_width` (Student's t)."""

    value: float
    half_width: float | None  # None for a single seed

    @classmethod
    def of(cls, values: Sequence[float]) -> "Mean":
        numbers = np.asarray(values, dtype=np.float64)
        count = len(numbers)
        if count < 2:
            return cls(float(numbers[0]), None)
        return cls(float(numbers.mean()), student_half_width(float(numbers.std(ddof=1)) / count**0.5, count))


@dataclass(frozen=True)
class RetrievalRow:
    """One normalizer, test and size; errors and leak are None if the task does not define them."""

    normalizer: str
    tested_with: str
    size: int
    seeds: int
    sets: int
    accuracy: Mean
    logits_wrong: Mean | None
    dispersed: Mean | None
    winner_weight: Mean | None
    leak: Mean | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize(records: Sequence[Record]) -> list[RetrievalRow]:
    """Return one row per normalizer, test and size, in the order of their first records."""
    groups: dict[tuple[str, str, int], list[Record]] = {}
    for record in records:
        groups.setdefault((record["normalizer"], record["tested_with"], record["size"]), []).append(record)
    rows = []
    for (normalizer, tested_with, size), group in groups.items():
        accuracy = mean_of(group, "accuracy")
        assert accuracy is not None
        others = (mean_of(group, name) for name in ("logits_wrong", "dispersed", "winner_weight", "leak"))
        rows.append(RetrievalRow(normalizer, tested_with, size, len(group), group[0]["sets"], accuracy, *others))
    return rows


def mean_of(records: Sequence[Record], name: str) -> Mean | None:
    """Return the mean; None if a record lacks the number, since a mean over some seeds would be biased."""
    values = [record.get(name) for record in records]
    if not values or any(value is None for value in values):
        return None
    return Mean.of([record[name] for record in records])


def tables(task: str, rows: Sequence[RetrievalRow]) -> RenderableType:
    """Return the tables for rows of one task and recipe."""
    seeds = max(row.seeds for row in rows)
    among = f"mean over {seeds} seeds ± 95 % confidence" if seeds > 1 else "one seed"
    leak = find_task(task).has_priority
    parts: list[RenderableType] = [
        _size_table(f"{task}: right answers in %, {among}", rows, lambda row: percent(row.accuracy), leak=leak)
    ]
    if any(row.logits_wrong is not None for row in rows):
        title = "Errors in %: logits wrong (the largest is not the right item's) + dispersed (it is)"
        parts.append(_size_table(title, rows, _format_errors, leak=False))
    return Group(*parts)


def _size_table(title: str, rows: Sequence[RetrievalRow], cell: Callable[[RetrievalRow], str], *, leak: bool) -> Table:
    sizes = sorted({row.size for row in rows})
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("normalizer", no_wrap=True)
    table.add_column("tested with", no_wrap=True)
    for size in sizes:
        table.add_column(f"{size:,}", justify="right", no_wrap=True)
    if leak:
        table.add_column("class leak", justify="right", no_wrap=True)
        table.caption = "class leak: sets whose two best priorities are closer than this are a guess"
        table.caption_justify = "left"
    groups: dict[tuple[str, str], dict[int, RetrievalRow]] = {}
    for row in rows:
        groups.setdefault((row.normalizer, row.tested_with), {})[row.size] = row
    for (normalizer, tested_with), by_size in groups.items():
        cells = [cell(by_size[size]) if size in by_size else "-" for size in sizes]
        first = next(iter(by_size.values()))
        leaks = ["-" if first.leak is None else f"{first.leak.value:.2g}"] if leak else []
        table.add_row(normalizer, tested_with, *cells, *leaks)
    return table


def percent(mean: Mean) -> str:
    spread = "" if mean.half_width is None else f" ±{100 * mean.half_width:.1f}"
    return f"{100 * mean.value:.1f}{spread}"


def _format_errors(row: RetrievalRow) -> str:
    if row.logits_wrong is None or row.dispersed is None:
        return "-"
    return f"{100 * row.logits_wrong.value:.1f} + {100 * row.dispersed.value:.1f}"
