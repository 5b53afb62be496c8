"""Train the small retrieval models and see where they fail: all seeds at once, the same data for every normalizer."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.registry import get
from attnorm.training.retrieval_tasks import CLASSES, TASKS, Sets, Task
from attnorm.training.retriever import WIDTH, Retrievers

DRAWN_AT_ONCE = 64  # steps of data
CHUNK_BYTES = {"cuda": 2**32, "cpu": 2**27}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train. The defaults are those of Velickovic et al. 2024, with fewer steps."""

    steps: int = 20_000
    batch: int = 128
    smallest: int = 5
    largest: int = 16
    learning_rate: float = 1e-3
    weight_decay: float = 1e-3
    # Ours, 0 = off. Penalty on the share of the logits' variance that comes from the class, which must not matter.
    leak_penalty: float = 0.0
    # Ours, 0 = off. Share of the sets whose priorities are squeezed toward their largest, by up to a factor 2^-12.
    squeezed: float = 0.0
    cosine: bool = False  # learning rate falls to 0 along a cosine; the paper keeps it


def train(
    task: Task,
    normalizer: Normalizer,
    seeds: list[int],
    recipe: Recipe,
    *,
    device: str = "cpu",
    compiled: bool = False,
    progress: Callable[[int, float], None] | None = None,
) -> Retrievers:
    """Models trained from `seeds` (their starting weights) on data drawn from the first of them."""
    models = Retrievers(task, normalizer, seeds).to(device)
    optimizer = torch.optim.AdamW(
        models.parameters(),
        lr=torch.tensor(recipe.learning_rate, device=device),
        weight_decay=recipe.weight_decay,
        fused=device == "cuda",
        capturable=device == "cuda",
    )
    generator = torch.Generator(device=device).manual_seed(1_000_003 + seeds[0])

    def loss_of(items: Tensor, query: Tensor, visible: Tensor, label: Tensor, other: Tensor) -> Tensor:
        logits, values = models.logits(items, query)
        scores = models.classes(models.weights(logits, visible), values)
        # The sum over the copies: each gets the gradient of its own mean.
        loss = F.cross_entropy(scores.flatten(0, 1), label.flatten(), reduction="sum") / label.shape[1]
        if recipe.leak_penalty:
            loss = loss + recipe.leak_penalty * _leaked_variance(models, items, query, other, logits).sum()
        return loss

    step_loss = torch.compile(loss_of, mode="reduce-overhead") if compiled else loss_of
    for step, (sets, other) in enumerate(_batches(task, generator, len(seeds), recipe)):
        if recipe.cosine:
            share = torch.tensor(step / recipe.steps * torch.pi)
            optimizer.param_groups[0]["lr"].fill_(recipe.learning_rate * float(0.5 + 0.5 * share.cos()))
        optimizer.zero_grad(set_to_none=True)
        loss = step_loss(sets.items_SBNF, sets.query_SBF, sets.visible_BN, sets.label_SB, other)
        loss.backward()
        optimizer.step()
        if progress is not None and (step % 500 == 0 or step == recipe.steps - 1):
            progress(step + 1, float(loss) / len(seeds))
    return models.eval()


def _batches(task: Task, generator: torch.Generator, models: int, recipe: Recipe) -> Iterator[tuple[Sets, Tensor]]:
    """Sets of smallest..largest items, and for every item another class at random."""
    device, batch = generator.device, recipe.batch
    for start in range(0, recipe.steps, DRAWN_AT_ONCE):
        steps = min(DRAWN_AT_ONCE, recipe.steps - start)
        sizes = torch.randint(
            recipe.smallest, recipe.largest + 1, (DRAWN_AT_ONCE * batch,), generator=generator, device=device
        )
        drawn = task.sample(generator, models, sizes, recipe.largest)
        other = torch.randint(CLASSES, drawn.items_SBNF.shape[:3], generator=generator, device=device)
        if recipe.squeezed:
            drawn = _squeezed(drawn, generator, recipe.squeezed)
        for i in range(steps):
            part = slice(i * batch, (i + 1) * batch)
            target = drawn.target_SB
            yield (
                Sets(
                    drawn.items_SBNF[:, part].contiguous(),
                    drawn.query_SBF[:, part].contiguous(),
                    drawn.visible_BN[part].contiguous(),
                    drawn.label_SB[:, part].contiguous(),
                    None if target is None else target[:, part],
                ),
                other[:, part].contiguous(),
            )


def _squeezed(sets: Sets, generator: torch.Generator, share: float) -> Sets:
    """Some sets with priorities 1 - f (1 - p) for p: their order stays, the gaps become those of larger sets."""
    S, B = sets.label_SB.shape
    device = generator.device
    factor = 2.0 ** (-12 * torch.rand(S, B, 1, generator=generator, device=device))
    chosen = torch.rand(S, B, 1, generator=generator, device=device) < share
    priority = sets.items_SBNF[..., 0]
    priority = torch.where(chosen, 1 - factor * (1 - priority), priority)
    items = torch.cat([priority[..., None], sets.items_SBNF[..., 1:]], -1)
    return Sets(items, sets.query_SBF, sets.visible_BN, sets.label_SB, sets.target_SB)


def _leaked_variance(models: Retrievers, items: Tensor, query: Tensor, other: Tensor, logits: Tensor) -> Tensor:
    """Per copy: mean squared change of the logits when classes change, over their variance."""
    swapped = torch.cat([items[..., :-CLASSES], F.one_hot(other, CLASSES).to(items.dtype)], -1)
    change = models.logits(swapped, query)[0] - logits
    variance = logits.var(-1).mean(-1).clamp(min=1e-6)
    return change.square().mean((-1, -2)) / variance


@torch.no_grad()
def evaluate(
    models: Retrievers,
    task: Task,
    sizes: tuple[int, ...],
    *,
    sets: int = 1024,
    seed: int = 0,
    test_normalizers: dict[str, Normalizer | None] | None = None,
) -> list[dict[str, Any]]:
    """One record per size, seed and normalizer used at test time (None: the one trained with).

    accuracy = logits_right * accuracy_if_right + rest; an error is "logits wrong" where the largest logit is not the
    right item's, and "dispersed" where it is and the answer is wrong all the same.
    """
    device = next(models.parameters()).device
    test_normalizers = test_normalizers or {"own": None}
    copies = models.read_item.first.weight_SIO.shape[0]
    records = []
    for size in sizes:
        generator = torch.Generator(device=device).manual_seed(7_000_000 + seed)
        chunk = max(1, CHUNK_BYTES[device.type] // (copies * size * WIDTH * 4 * 4))
        totals: dict[str, dict[str, Tensor]] = {name: {} for name in test_normalizers}
        done = 0
        while done < sets:
            batch = min(chunk, sets - done)
            drawn = task.sample(generator, copies, torch.full((batch,), size, device=device), size)
            logits, values = models.logits(drawn.items_SBNF, drawn.query_SBF)
            for name, normalizer in test_normalizers.items():
                for key, value in _outcomes(models, drawn, logits, values, normalizer).items():
                    totals[name][key] = totals[name].get(key, 0) + value.double().sum(-1)
            done += batch
        for name, sums in totals.items():
            means = {key: (value / sets).tolist() for key, value in sums.items()}
            for copy in range(copies):
                own = {key: value[copy] for key, value in means.items()}
                records.append({"size": size, "copy": copy, "tested_with": name, "sets": sets, **own})
    return records


def _outcomes(
    models: Retrievers, drawn: Sets, logits: Tensor, values: Tensor, normalizer: Normalizer | None
) -> dict[str, Tensor]:
    weights = models.weights(logits, drawn.visible_BN, normalizer)
    right = models.classes(weights, values).argmax(-1) == drawn.label_SB
    outcome = {"accuracy": right}
    if drawn.target_SB is not None:
        seen = logits.masked_fill(~drawn.visible_BN, -torch.inf)
        found = seen.argmax(-1) == drawn.target_SB
        outcome |= {
            "logits_right": found,
            "dispersed": found & ~right,
            "logits_wrong": ~found & ~right,
            "winner_weight": weights.gather(-1, drawn.target_SB[..., None])[..., 0],
            "spread": seen.amax(-1) - logits.masked_fill(~drawn.visible_BN, torch.inf).amin(-1),
        }
    return outcome


@torch.no_grad()
def class_leak(models: Retrievers, *, low: float = 0.9, points: int = 101, queries: int = 32) -> list[dict[str, float]]:
    """Per copy of a max-retrieval model: the logit's slope in the priority on [low, 1], and how far the class moves it.

    leak = standard deviation over the classes / slope, in units of priority: sets whose two best priorities are closer
    than that are a guess. The two best of n uniform priorities are 1/(n + 1) apart on average.
    """
    device = next(models.parameters()).device
    copies = models.read_item.first.weight_SIO.shape[0]
    priority = torch.linspace(low, 1, points, device=device)
    hot = torch.eye(CLASSES, device=device)
    items = torch.cat([priority[:, None, None].expand(-1, CLASSES, 1), hot.expand(points, -1, -1)], -1).flatten(0, 1)
    query = torch.linspace(0, 1, queries, device=device)[:, None]
    shape = (copies, queries)
    logits = models.logits(items.expand(*shape, -1, -1), query.expand(*shape, -1))[0].unflatten(-1, (points, CLASSES))
    mean = logits.mean(-1)
    slope = (mean[..., -1] - mean[..., 0]) / (1 - low)
    leak = logits.std(-1, unbiased=False).mean(-1) / slope
    return [{"slope": float(s), "leak": float(k)} for s, k in zip(slope.mean(-1), leak.mean(-1), strict=True)]


def run(
    task: str,
    normalizer: str,
    seeds: list[int],
    recipe: Recipe,
    sizes: tuple[int, ...],
    *,
    device: str,
    compiled: bool,
    sets: int,
    test_with: tuple[str, ...] = (),
    progress: Callable[[int, float], None] | None = None,
) -> list[dict[str, Any]]:
    """Train and evaluate; records ready for JSONL."""
    chosen = resolve_for(normalizer, len(seeds))
    began = time.monotonic()
    models = train(TASKS[task], chosen, seeds, recipe, device=device, compiled=compiled, progress=progress)
    seconds = time.monotonic() - began
    others: dict[str, Normalizer | None] = {"own": None}
    others |= {name: resolve_for(name, len(seeds)).to(device) for name in test_with}
    leaks = class_leak(models) if task == "max" else [{} for _ in seeds]
    about = {"task": task, "normalizer": normalizer, **asdict(recipe), "train_seconds": round(seconds, 1)}
    return [
        {**about, "seed": seeds[record["copy"]], **record, **leaks[record["copy"]]}
        for record in evaluate(models, TASKS[task], sizes, sets=sets, test_normalizers=others)
    ]


def resolve_for(name: str, copies: int) -> Normalizer:
    """The named normalizer, with parameters for each copy where it learns any."""
    chosen = get(name)
    if not isinstance(chosen, Normalizer):
        raise ValueError(f"{name!r} needs q, k and v of a sequence; sets of items take a normalizer of rows")
    if any(True for _ in chosen.parameters()):
        chosen = get(name, heads=copies)
    assert isinstance(chosen, Normalizer)
    return chosen
