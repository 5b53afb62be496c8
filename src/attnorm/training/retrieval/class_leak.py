"""How far the class of an item moves its logit, where only its priority or key should.

Sets whose two best items are closer than that are a guess, and the two best of n uniform priorities are 1/(n + 1) apart
on average: this, not dispersion alone, bounds the size up to which a model can pick the largest.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from attnorm.training.retrieval.data import CLASSES, Batch
from attnorm.training.retrieval.model import Retrievers

PRIORITIES_FROM = 0.9
PRIORITIES, QUERIES = 101, 32
CONTENDERS = 10  # the best of each class are among about so many of the best


def leaked_share(models: Retrievers, batch: Batch, logits_SBN: Tensor) -> Tensor:
    """Per copy: mean squared change of the logits when the classes change, over their variance. Differentiable.

    Places that hold no item count as well: they are drawn like the others.
    """
    assert batch.other_SBN is not None
    other = F.one_hot(batch.other_SBN, CLASSES).to(logits_SBN.dtype)
    swapped = torch.cat([batch.items_SBNF[..., :-CLASSES], other], -1)
    change = models.logits(models.read(swapped), batch.query_SBF) - logits_SBN
    variance = logits_SBN.var(-1).mean(-1).clamp(min=1e-6)
    return change.square().mean((-1, -2)) / variance


def leak_at_top(models: Retrievers, size: int) -> list[dict[str, float | None]]:
    """As `class_leak`, where the contenders of a set of this size lie: a model may be at its most exact there."""
    found = class_leak(models, 1 - min(CONTENDERS, size) / (size + 1))
    return [{f"{name}_at_top": value for name, value in each.items()} for each in found]


@torch.no_grad()
def class_leak(models: Retrievers, lowest: float = PRIORITIES_FROM) -> list[dict[str, float | None]]:
    """Per copy of a model that ranks by priority: the slope of its logits on [lowest, 1], and the leak in priorities.

    leak = standard deviation of the logit over the classes / slope, both averaged over priorities and queries; None
    where the logit does not rise with the priority.
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
