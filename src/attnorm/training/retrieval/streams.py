"""Which sets a model sees: functions of its own seed alone, never of the normalizer or of its neighbours in a stack.

Every block of data has a generator of its own, seeded by purpose, seed and number of the block. So a recipe that needs
more random numbers does not shift those of another, and a longer training begins with the data of a shorter one. The
numbers differ between CPU and CUDA, whose generators are not the same.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnorm.training.retrieval.recipe import Recipe
from attnorm.training.retrieval.tasks import CLASSES, Sets, Task, stacked

STEPS_AT_ONCE = 64
MOST_SQUEEZED = 12  # halvings
SETS_AT_ONCE = 256
ITEMS_AT_ONCE = 2**17  # of each model, in a test


class Batch(NamedTuple):
    """What one step reads; S models side by side."""

    items_SBNF: Tensor
    query_SBF: Tensor
    visible_SBN: Tensor
    label_SB: Tensor
    other_SBN: Tensor | None  # for every item another class at random, in steps with a leak penalty


def stream(purpose: str, seed: int, block: int, device: torch.device) -> torch.Generator:
    digest = hashlib.sha256(f"{purpose} {seed} {block}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def training_batches(
    task: Task, seeds: Sequence[int], recipe: Recipe, device: torch.device, first: int = 0
) -> Iterator[Batch]:
    """One batch per step, from the step `first` on. They are views of blocks drawn ahead, each contiguous: a step
    copies nothing."""
    for block in range(first // STEPS_AT_ONCE, -(-recipe.steps // STEPS_AT_ONCE)):
        sets = stacked([_training_block(task, recipe, stream("training", seed, block, device)) for seed in seeds])
        if recipe.squeezed:
            sets = _squeezed(sets, recipe.squeezed, seeds, block)
        steps = range(block * STEPS_AT_ONCE, min((block + 1) * STEPS_AT_ONCE, recipe.steps))
        other = _other_classes(sets, seeds, block) if recipe.penalised(steps[-1]) else None
        for i, step in enumerate(steps):
            if step < first:
                continue
            classes = other[i] if other is not None and recipe.penalised(step) else None
            yield Batch(sets.items[i], sets.query[i], sets.visible[i], sets.label[i], classes)


def sets_for_testing(task: Task, seeds: Sequence[int], size: int, sets: int, device: torch.device) -> Iterator[Sets]:
    """`sets` sets of `size` items for every seed, in blocks whose length depends on the size alone."""
    length = max(1, min(SETS_AT_ONCE, ITEMS_AT_ONCE // size))
    sizes = torch.full((length,), size, device=device)
    for block in range(-(-sets // length)):
        whole = stacked([task.draw(stream(f"test {size}", seed, block, device), sizes, size) for seed in seeds])
        yield _first(whole, sets - block * length)


def _training_block(task: Task, recipe: Recipe, generator: torch.Generator) -> Sets:
    sizes = torch.randint(
        recipe.smallest, recipe.largest + 1, (STEPS_AT_ONCE, recipe.batch), generator=generator, device=generator.device
    )
    return task.draw(generator, sizes, recipe.largest)


def _squeezed(sets: Sets, share: float, seeds: Sequence[int], block: int) -> Sets:
    """Some sets with priorities 1 - f (1 - p) for p: their order stays, the gaps become those of larger sets."""
    shape, device = (*sets.label[:, 0].shape, 2), sets.label.device
    drawn = [torch.rand(shape, generator=stream("squeeze", seed, block, device), device=device) for seed in seeds]
    chance, power = torch.stack(drawn, 1).unbind(-1)
    factor = torch.where(chance < share, 2.0 ** (-MOST_SQUEEZED * power), 1.0)[..., None]
    priority = 1 - factor * (1 - sets.items[..., 0])
    return replace(sets, items=torch.cat([priority[..., None], sets.items[..., 1:]], -1))


def _other_classes(sets: Sets, seeds: Sequence[int], block: int) -> Tensor:
    shape, device = sets.visible[:, 0].shape, sets.visible.device
    generators = (stream("other classes", seed, block, device) for seed in seeds)
    return torch.stack([torch.randint(CLASSES, shape, generator=g, device=device) for g in generators], 1)


def _first(sets: Sets, count: int) -> Sets:
    target = None if sets.target is None else sets.target[:, :count]
    return Sets(sets.items[:, :count], sets.query[:, :count], sets.visible[:, :count], sets.label[:, :count], target)
