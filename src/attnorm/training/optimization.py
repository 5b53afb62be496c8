"""AdamW with decay on matrices only, and a learning rate that climbs for a while and then follows a cosine to 0."""

import math
from typing import Any

import torch

from attnorm.training.settings import Settings

BETAS = (0.9, 0.95)
LARGEST_GRADIENT = 1.0  # norm over all parameters; longer gradients are shortened to it


def make_optimizer(model: torch.nn.Module, settings: Settings) -> torch.optim.AdamW:
    from attnorm.models.support import NORMALIZER

    decaying: list[torch.nn.Parameter] = []
    free: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        # What a normalizer learns is a scale or a threshold: 0 is no better a guess for it than any other number.
        decays = parameter.dim() > 1 and NORMALIZER not in name.split(".")
        (decaying if decays else free).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decaying, "weight_decay": settings.weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=BETAS, fused=decaying[0].is_cuda)


def learning_rate(step: int, settings: Settings) -> float:
    """Of the step-th update, counted from 0; the first and the last are above 0."""
    warmup = min(settings.warmup, settings.steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / (warmup + 1)
    progress = (step - warmup + 1) / (settings.steps - warmup + 1)
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
