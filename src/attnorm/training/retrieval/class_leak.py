"""Class leak: how far the class of an item moves its logit, which should depend on its priority or key only.

A model can only guess in sets whose two best items are closer than that. The two best of n uniform priorities are
1/(n + 1) apart on average. So the leak, not dispersion alone, bounds the size at which a model can pick the largest.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from attnorm.training.retrieval.data import CLASSES, Batch
from attnorm.training.retrieval.model import Retrievers

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
    found = class_leak(models, 1 - min(CONTENDERS, size) / (size + 1))
    return [{f"{name}_at_top": value for name, value in each.items()} for each in found]


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
