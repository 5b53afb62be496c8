"""Sets of items, a query, a label: tasks whose set size can grow far beyond what was seen in training.

Every draw is a function of its generator alone, so that all normalizers see the same data. Shape suffixes: S models
trained side by side, B sets, N items, C classes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

CLASSES = 10


@dataclass(frozen=True)
class Sets:
    items_SBNF: Tensor
    query_SBF: Tensor
    visible_BN: Tensor  # True at real items; the sets of one batch differ in size
    label_SB: Tensor
    target_SB: Tensor | None  # the item that carries the answer, where there is one


@dataclass(frozen=True)
class Task:
    name: str
    item_width: int
    query_width: int
    draw: Callable[[torch.Generator, int, Tensor, int], Sets]

    def sample(self, generator: torch.Generator, models: int, sizes_B: Tensor, items: int) -> Sets:
        """Sets of sizes_B items each, stored in `items` places."""
        return self.draw(generator, models, sizes_B, items)


def _visible(sizes_B: Tensor, items: int) -> Tensor:
    return torch.arange(items, device=sizes_B.device) < sizes_B[:, None]


def _uniform(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=generator, device=generator.device)


def _classes(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(CLASSES, shape, generator=generator, device=generator.device)


def _max_retrieval(generator: torch.Generator, models: int, sizes_B: Tensor, items: int) -> Sets:
    """Which class has the item of the highest priority? Velickovic et al. 2024; the query is noise."""
    batch = len(sizes_B)
    priority = _uniform(generator, models, batch, items)
    classes = _classes(generator, models, batch, items)
    query = _uniform(generator, models, batch, 1)
    visible = _visible(sizes_B, items)
    target = priority.masked_fill(~visible, -1.0).argmax(-1)
    label = classes.gather(-1, target[..., None])[..., 0]
    features = torch.cat([priority[..., None], F.one_hot(classes, CLASSES).to(priority.dtype)], -1)
    return Sets(features, query, visible, label, target)


KEY_WIDTH = 16


def _recall(generator: torch.Generator, models: int, sizes_B: Tensor, items: int) -> Sets:
    """Which class has the item whose key the query names? Keys are random unit vectors, the query a noisy copy."""
    batch = len(sizes_B)
    normal = torch.randn(models, batch, items + 1, KEY_WIDTH, generator=generator, device=generator.device)
    keys = F.normalize(normal[:, :, :items], dim=-1)
    classes = _classes(generator, models, batch, items)
    visible = _visible(sizes_B, items)
    target = (_uniform(generator, models, batch) * sizes_B).long()
    wanted = keys.gather(2, target[..., None, None].expand(-1, -1, 1, KEY_WIDTH))[:, :, 0]
    query = F.normalize(wanted + 0.25 * F.normalize(normal[:, :, items], dim=-1), dim=-1)
    label = classes.gather(-1, target[..., None])[..., 0]
    features = torch.cat([keys, F.one_hot(classes, CLASSES).to(keys.dtype)], -1)
    return Sets(features, query, visible, label, target)


COMMON_SHARE = 0.3


def _majority(generator: torch.Generator, models: int, sizes_B: Tensor, items: int) -> Sets:
    """Which class occurs most often? One class has a share of 0.3 on average, the others what is left."""
    batch = len(sizes_B)
    classes = _classes(generator, models, batch, items)
    common = _classes(generator, models, batch, 1)
    classes = torch.where(_uniform(generator, models, batch, items) < COMMON_SHARE, common, classes)
    visible = _visible(sizes_B, items)
    hot = F.one_hot(classes, CLASSES).to(torch.get_default_dtype())
    counts = (hot * visible[..., None]).sum(2)
    # Ties are broken at random: no rule can do better on them than chance.
    label = (counts + 0.5 * _uniform(generator, models, batch, CLASSES)).argmax(-1)
    features = torch.cat([_uniform(generator, models, batch, items, 1), hot], -1)
    return Sets(features, _uniform(generator, models, batch, 1), visible, label, None)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("max", 1 + CLASSES, 1, _max_retrieval),
        Task("recall", KEY_WIDTH + CLASSES, KEY_WIDTH, _recall),
        Task("majority", 1 + CLASSES, 1, _majority),
    )
}
