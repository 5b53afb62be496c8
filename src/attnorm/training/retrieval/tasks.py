"""Sets of items, a query, a label: tasks whose set size can grow far beyond what was seen in training.

A draw is a function of its generator alone. Shapes: sizes (..., B) in front of everything; N places for items, of
which the first `size` are visible, F features, the last ten of them the one-hot class.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from attnorm.analysis.hint import hint

CLASSES = 10
KEY_WIDTH = 16
QUERY_NOISE = 0.25
COMMON_SHARE = 0.3


@dataclass(frozen=True)
class Sets:
    items: Tensor  # (..., B, N, F)
    query: Tensor  # (..., B, F)
    visible: Tensor  # (..., B, N)
    label: Tensor  # (..., B)
    target: Tensor | None  # (..., B): the item that carries the answer, where there is one


@dataclass(frozen=True)
class Task:
    """`draw(generator, sizes, places)` makes one set of each size, stored in so many places."""

    name: str
    question: str
    item_width: int
    query_width: int
    draw: Callable[[torch.Generator, Tensor, int], Sets]
    has_target: bool = True
    has_priority: bool = False  # the first feature of an item ranks it


def find_task(name: str) -> Task:
    """
    Raises:
        ValueError: There is no task of that name.
    """
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}; {hint(name, TASKS)}")
    return TASKS[name]


def stacked(parts: list[Sets]) -> Sets:
    """The sets of several models: a dimension for the models in front of B."""
    where = parts[0].label.dim() - 1
    targets = [part.target for part in parts if part.target is not None]
    return Sets(
        torch.stack([part.items for part in parts], where),
        torch.stack([part.query for part in parts], where),
        torch.stack([part.visible for part in parts], where),
        torch.stack([part.label for part in parts], where),
        torch.stack(targets, where) if targets else None,
    )


def _max_retrieval(generator: torch.Generator, sizes: Tensor, places: int) -> Sets:
    priority = _uniform(generator, *sizes.shape, places)
    classes = _classes(generator, *sizes.shape, places)
    query = _uniform(generator, *sizes.shape, 1)
    visible = _visible(sizes, places)
    target = priority.masked_fill(~visible, -1.0).argmax(-1)
    return Sets(_with_class(priority[..., None], classes), query, visible, _picked(classes, target), target)


def _recall(generator: torch.Generator, sizes: Tensor, places: int) -> Sets:
    normal = torch.randn(*sizes.shape, places + 1, KEY_WIDTH, generator=generator, device=generator.device)
    unit = F.normalize(normal, dim=-1)
    keys, noise = unit[..., :places, :], unit[..., places, :]
    classes = _classes(generator, *sizes.shape, places)
    target = (_uniform(generator, *sizes.shape) * sizes).long().clamp(max=sizes - 1)
    wanted = keys.gather(-2, target[..., None, None].expand(*target.shape, 1, KEY_WIDTH)).squeeze(-2)
    query = F.normalize(wanted + QUERY_NOISE * noise, dim=-1)
    return Sets(_with_class(keys, classes), query, _visible(sizes, places), _picked(classes, target), target)


def _majority(generator: torch.Generator, sizes: Tensor, places: int) -> Sets:
    """One class has a share of 0.3 and its part of the rest, the others what is left."""
    classes = _classes(generator, *sizes.shape, places)
    common = _classes(generator, *sizes.shape, 1)
    classes = torch.where(_uniform(generator, *sizes.shape, places) < COMMON_SHARE, common, classes)
    visible = _visible(sizes, places)
    items = _with_class(_uniform(generator, *sizes.shape, places, 1), classes)
    counts = (items[..., -CLASSES:] * visible[..., None]).sum(-2)
    # Ties are broken at random: no rule can do better on them than chance.
    label = (counts + 0.5 * _uniform(generator, *sizes.shape, CLASSES)).argmax(-1)
    return Sets(items, _uniform(generator, *sizes.shape, 1), visible, label, None)


def _visible(sizes: Tensor, places: int) -> Tensor:
    return torch.arange(places, device=sizes.device) < sizes[..., None]


def _uniform(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=generator, device=generator.device)


def _classes(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(CLASSES, shape, generator=generator, device=generator.device)


def _with_class(features: Tensor, classes: Tensor) -> Tensor:
    return torch.cat([features, F.one_hot(classes, CLASSES).to(features.dtype)], -1)


def _picked(classes: Tensor, target: Tensor) -> Tensor:
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
        Task("majority", "Which class occurs most often?", 1 + CLASSES, 1, _majority, has_target=False),
    )
}
