"""Training data of retrieval models: settings, tasks on sets of items, and the data of each step and test.

Every value of the settings changes the weights.

Shapes: sizes (..., B) in front of everything; N slots for items, of which the first `size` are visible; F features, the
last ten of them the one-hot class.

The data of a model depend on its own seed only, never on the normalizer or on other seeds. Every block of data has its
own generator, seeded by purpose, seed and block number. So a recipe that needs more random numbers does not shift those
of another, and a longer training begins with the data of a shorter one. CPU and CUDA draw different numbers.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from attnorm.arithmetic import ceil_div
from attnorm.text import did_you_mean

DTYPES = ("float32", "bfloat16")
OF_THE_PAPER = ("steps", "batch", "smallest", "largest", "width", "learning_rate", "weight_decay")

CLASSES = 10
KEY_WIDTH = 16
QUERY_NOISE = 0.25
COMMON_SHARE = 0.3
STEPS_AT_ONCE = 64
MAX_SQUEEZED = 12  # halvings
SETS_AT_ONCE = 256
ITEMS_AT_ONCE = 2**17  # of each model, in a test


@dataclass(frozen=True, kw_only=True)
class RetrievalRecipe:
    """The defaults are those of Velickovic et al. 2024 (https://arxiv.org/abs/2410.01104), with fewer steps.

    Raises:
        ValueError: A number is out of range.
    """

    steps: int = 20_000
    batch: int = 128
    smallest: int = 5
    largest: int = 16
    width: int = 128
    learning_rate: float = 1e-3
    weight_decay: float = 1e-3
    # Ours, 0 = off. Penalty on the share of the logits' variance that comes from the class.
    leak_penalty: float = 0.0
    # Share of the steps before that penalty. A logit that still falls with the priority would have to pass through
    # one that only the class moves, where the penalty is largest; it must rise first.
    leak_from: float = 0.25
    # Ours, 0 = off. Share of the sets whose priorities are squeezed toward 1, by up to a factor 2^-12.
    squeezed: float = 0.0
    # Ours, 0 = off. In training, the logits of every set are scaled to this standard deviation, so that squeezed sets
    # require the right order, not larger logits. Tests use the logits unscaled.
    standardized: float = 0.0
    cosine: bool = False  # cosine learning rate; constant in the paper
    dtype: str = "float32"  # of the matrix products in training; tests always use float32

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 2 <= self.smallest <= self.largest:
            raise ValueError(
                f"expected training sets of at least 2 items, with smallest <= largest, got {self.smallest} to "
                f"{self.largest}."
            )
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"the learning rate must be above 0, got {self.learning_rate}")
        for name in ("weight_decay", "leak_penalty", "standardized"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name.replace('_', ' ')} must be 0 or more, got {getattr(self, name)}")
        if not 0 <= self.leak_from < 1:
            raise ValueError(f"leak_from: expected a share of the steps, at least 0 and below 1, got {self.leak_from}.")
        if not 0 <= self.squeezed <= 1:
            raise ValueError(f"squeezed: expected a share of the sets between 0 and 1, got {self.squeezed}.")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be {' or '.join(DTYPES)}, got {self.dtype!r}")
        if self.dtype == "bfloat16" and (self.squeezed or self.leak_penalty or self.standardized):
            raise ValueError(
                "expected float32 with squeezed, leak_penalty or standardized, got bfloat16, which rounds "
                "priorities near 1 to steps of 1/256. Train in float32, or set these options to 0."
            )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def identity(self) -> dict[str, Any]:
        """Return the values without options that are off, so that a new option does not rename earlier runs."""
        usual = {field.name: field.default for field in fields(self)}
        return {name: value for name, value in asdict(self).items() if name in OF_THE_PAPER or value != usual[name]}

    def penalized(self, step: int) -> bool:
        """Return whether a step, counted from 0, has the leak penalty."""
        return self.leak_penalty > 0 and step >= self.leak_from * self.steps

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return self.learning_rate * (0.5 + 0.5 * math.cos(math.pi * step / self.steps) if self.cosine else 1.0)


@dataclass(frozen=True)
class Sets:
    items: Tensor  # (..., B, N, F)
    query: Tensor  # (..., B, F)
    visible: Tensor  # (..., B, N)
    label: Tensor  # (..., B)
    target: Tensor | None  # (..., B): the item that carries the answer, where there is one


@dataclass(frozen=True)
class Task:
    """A task; `draw(generator, sizes, slots)` makes one set of each size, stored in so many slots."""

    name: str
    question: str
    item_width: int
    query_width: int
    draw: Callable[[torch.Generator, Tensor, int], Sets]
    has_priority: bool = False  # the first feature of an item ranks it


def find_task(name: str) -> Task:
    """Return the task of this name.

    Raises:
        ValueError: Unknown name.
    """
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}; {did_you_mean(name, TASKS)}")
    return TASKS[name]


def stack_sets(parts: list[Sets]) -> Sets:
    """Stack the sets of several models along a new dimension in front of B."""
    where = parts[0].label.dim() - 1
    targets = [part.target for part in parts if part.target is not None]
    return Sets(
        torch.stack([part.items for part in parts], where),
        torch.stack([part.query for part in parts], where),
        torch.stack([part.visible for part in parts], where),
        torch.stack([part.label for part in parts], where),
        torch.stack(targets, where) if targets else None,
    )


def _max_retrieval(generator: torch.Generator, sizes: Tensor, slots: int) -> Sets:
    priority = _uniform(generator, *sizes.shape, slots)
    classes = _classes(generator, *sizes.shape, slots)
    query = _uniform(generator, *sizes.shape, 1)
    visible = _visible(sizes, slots)
    target = priority.masked_fill(~visible, -1.0).argmax(-1)
    return Sets(_with_class(priority[..., None], classes), query, visible, _class_of_target(classes, target), target)


def _recall(generator: torch.Generator, sizes: Tensor, slots: int) -> Sets:
    normal = torch.randn(*sizes.shape, slots + 1, KEY_WIDTH, generator=generator, device=generator.device)
    unit = F.normalize(normal, dim=-1)
    keys, noise = unit[..., :slots, :], unit[..., slots, :]
    classes = _classes(generator, *sizes.shape, slots)
    target = (_uniform(generator, *sizes.shape) * sizes).long().clamp(max=sizes - 1)
    target_key = keys.gather(-2, target[..., None, None].expand(*target.shape, 1, KEY_WIDTH)).squeeze(-2)
    query = F.normalize(target_key + QUERY_NOISE * noise, dim=-1)
    return Sets(_with_class(keys, classes), query, _visible(sizes, slots), _class_of_target(classes, target), target)


def _majority(generator: torch.Generator, sizes: Tensor, slots: int) -> Sets:
    """Draw sets in which one class has a share of 0.3 plus its part of the rest."""
    classes = _classes(generator, *sizes.shape, slots)
    common = _classes(generator, *sizes.shape, 1)
    classes = torch.where(_uniform(generator, *sizes.shape, slots) < COMMON_SHARE, common, classes)
    visible = _visible(sizes, slots)
    items = _with_class(_uniform(generator, *sizes.shape, slots, 1), classes)
    counts = (items[..., -CLASSES:] * visible[..., None]).sum(-2)
    # Ties are broken at random, so no rule can do better than chance on them.
    label = (counts + 0.5 * _uniform(generator, *sizes.shape, CLASSES)).argmax(-1)
    return Sets(items, _uniform(generator, *sizes.shape, 1), visible, label, None)


def _visible(sizes: Tensor, slots: int) -> Tensor:
    return torch.arange(slots, device=sizes.device) < sizes[..., None]


def _uniform(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=generator, device=generator.device)


def _classes(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(CLASSES, shape, generator=generator, device=generator.device)


def _with_class(features: Tensor, classes: Tensor) -> Tensor:
    return torch.cat([features, F.one_hot(classes, CLASSES).to(features.dtype)], -1)


def _class_of_target(classes: Tensor, target: Tensor) -> Tensor:
    return classes.gather(-1, target[..., None]).squeeze(-1)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "max",
            "Which class has the item of the highest priority? (Velickovic et al. 2024; the query is noise)",
            1 + CLASSES,
            1,
            _max_retrieval,
            has_priority=True,
        ),
        Task(
            "recall",
            "Which class has the item whose key the query names? (keys are random unit vectors, the query a noisy one)",
            KEY_WIDTH + CLASSES,
            KEY_WIDTH,
            _recall,
        ),
        Task("majority", "Which class occurs most often?", 1 + CLASSES, 1, _majority),
    )
}


class Batch(NamedTuple):
    """The data of one step, for S models."""

    items_SBNF: Tensor
    query_SBF: Tensor
    visible_SBN: Tensor
    label_SB: Tensor
    other_SBN: Tensor | None  # for every item another class at random, in steps with a leak penalty


def stream(purpose: str, seed: int, block: int, device: torch.device) -> torch.Generator:
    digest = hashlib.sha256(f"{purpose} {seed} {block}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def training_batches(
    task: Task, seeds: Sequence[int], recipe: RetrievalRecipe, device: torch.device, first: int = 0
) -> Iterator[Batch]:
    """Yield one batch per step, from step `first` on: contiguous views of blocks drawn in advance, without copies."""
    for block in range(first // STEPS_AT_ONCE, ceil_div(recipe.steps, STEPS_AT_ONCE)):
        sets = stack_sets([_training_block(task, recipe, stream("training", seed, block, device)) for seed in seeds])
        if recipe.squeezed:
            sets = _squeeze_priorities(sets, recipe.squeezed, seeds, block)
        steps = range(block * STEPS_AT_ONCE, min((block + 1) * STEPS_AT_ONCE, recipe.steps))
        other = _other_classes(sets, seeds, block) if recipe.penalized(steps[-1]) else None
        for i, step in enumerate(steps):
            if step < first:
                continue
            classes = other[i] if other is not None and recipe.penalized(step) else None
            yield Batch(sets.items[i], sets.query[i], sets.visible[i], sets.label[i], classes)


def sets_for_testing(task: Task, seeds: Sequence[int], size: int, sets: int, device: torch.device) -> Iterator[Sets]:
    """Yield `sets` sets of `size` items for every seed, in blocks whose length depends only on the size."""
    length = max(1, min(SETS_AT_ONCE, ITEMS_AT_ONCE // size))
    sizes = torch.full((length,), size, device=device)
    for block in range(ceil_div(sets, length)):
        block_sets = stack_sets([task.draw(stream(f"test {size}", seed, block, device), sizes, size) for seed in seeds])
        yield _first_sets(block_sets, sets - block * length)


def _training_block(task: Task, recipe: RetrievalRecipe, generator: torch.Generator) -> Sets:
    sizes = torch.randint(
        recipe.smallest, recipe.largest + 1, (STEPS_AT_ONCE, recipe.batch), generator=generator, device=generator.device
    )
    return task.draw(generator, sizes, recipe.largest)


def _squeeze_priorities(sets: Sets, share: float, seeds: Sequence[int], block: int) -> Sets:
    """Replace priorities p by 1 - f (1 - p) in some sets: the order stays, the gaps become those of larger sets."""
    shape, device = (*sets.label[:, 0].shape, 2), sets.label.device
    drawn = [torch.rand(shape, generator=stream("squeeze", seed, block, device), device=device) for seed in seeds]
    chance, power = torch.stack(drawn, 1).unbind(-1)
    factor = torch.where(chance < share, 2.0 ** (-MAX_SQUEEZED * power), 1.0)[..., None]
    priority = 1 - factor * (1 - sets.items[..., 0])
    return replace(sets, items=torch.cat([priority[..., None], sets.items[..., 1:]], -1))


def _other_classes(sets: Sets, seeds: Sequence[int], block: int) -> Tensor:
    shape, device = sets.visible[:, 0].shape, sets.visible.device
    generators = (stream("other classes", seed, block, device) for seed in seeds)
    return torch.stack([torch.randint(CLASSES, shape, generator=g, device=device) for g in generators], 1)


def _first_sets(sets: Sets, count: int) -> Sets:
    target = None if sets.target is None else sets.target[:, :count]
    return Sets(sets.items[:, :count], sets.query[:, :count], sets.visible[:, :count], sets.label[:, :count], target)
