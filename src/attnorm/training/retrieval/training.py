"""Train a stack: all seeds at once, the same data for every normalizer.

On CUDA a step is small and the launches of its kernels would cost more than the work, so the loss and its gradient are
compiled into one CUDA graph (torch.compile, reduce-overhead) and AdamW runs as one fused kernel. `compiled=False` is
the plain way, on any device.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from attnorm.normalizers.contract import Normalizer
from attnorm.training.retrieval.leak import leaked_share
from attnorm.training.retrieval.model import Retrievers, mixture
from attnorm.training.retrieval.recipe import Recipe
from attnorm.training.retrieval.streams import Batch, training_batches
from attnorm.training.retrieval.tasks import Task

REPORT_EVERY = 100  # steps; reading the loss makes the GPU wait


@dataclass(frozen=True)
class Trained:
    models: Retrievers
    losses: list[float]  # of each copy in the last step, without penalties
    seconds: float


def train(
    task: Task,
    normalizer: Normalizer,
    seeds: Sequence[int],
    recipe: Recipe,
    *,
    device: torch.device,
    compiled: bool = False,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> Trained:
    """One model per seed. `report(steps done, mean loss)` is called now and then.

    Raises:
        ValueError: The recipe squeezes priorities, and the task has none.
    """
    check_recipe(recipe, task)
    began = time.monotonic()
    on_cuda = device.type == "cuda"
    models = Retrievers(task, normalizer, seeds, recipe.width).to(device)
    # On CUDA the rate is a tensor, which a change of the learning rate fills: a number would be part of the kernel.
    rate = torch.tensor(recipe.learning_rate, device=device) if on_cuda else recipe.learning_rate
    optimizer = torch.optim.AdamW(
        models.parameters(), lr=rate, weight_decay=recipe.weight_decay, fused=on_cuda, capturable=on_cuda
    )

    def loss_of(batch: Batch) -> tuple[Tensor, Tensor]:
        return _loss(models, batch, recipe.leak_penalty)

    if compiled:
        torch.compiler.reset()  # after eight stacks of one process it would no longer compile, and say so only in a log
    step_loss = torch.compile(loss_of, mode="reduce-overhead") if compiled else loss_of
    losses = torch.full((len(seeds),), torch.nan)
    for step, batch in enumerate(training_batches(task, seeds, recipe, device)):
        if recipe.cosine:
            _set_rate(optimizer, recipe.rate_at(step))
        optimizer.zero_grad(set_to_none=True)
        total, losses = step_loss(batch)
        total.backward()
        optimizer.step()
        if (step + 1) % REPORT_EVERY == 0 or step + 1 == recipe.steps:
            report(step + 1, float(losses.mean()))
    return Trained(models.eval(), losses.tolist(), time.monotonic() - began)


def check_recipe(recipe: Recipe, task: Task) -> None:
    """
    Raises:
        ValueError: The recipe squeezes priorities, and the task has none.
    """
    if recipe.squeezed and not task.has_priority:
        raise ValueError(f"squeezed is for tasks with priorities, and {task.name!r} has none; leave it at 0")


def _loss(models: Retrievers, batch: Batch, leak_penalty: float) -> tuple[Tensor, Tensor]:
    """The sum over the copies - each gets the gradient of its own mean - and the cross-entropy of each."""
    read = models.read(batch.items_SBNF)
    logits = models.logits(read, batch.query_SBF)
    values = models.values(read, batch.label_SB.shape[1])
    scores = models.classes(mixture(models.weights(logits, batch.visible_SBN), values))
    entropies = F.cross_entropy(scores.flatten(0, 1), batch.label_SB.flatten(), reduction="none")
    losses = entropies.unflatten(0, batch.label_SB.shape).mean(-1)
    total = losses.sum()
    if batch.other_SBN is not None:
        total = total + leak_penalty * leaked_share(models, batch, logits).sum()
    return total, losses.detach()


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
