"""Ask a language model for the largest of n numbers: how its accuracy and the entropy of its heads change with n.

The opening example of Velickovic et al. 2024: a language model finds the largest of a few numbers and fails as the list
grows. The prompt has one solved example of the same length and then the list. The answer counts as right if every one
of its tokens has the largest probability, which is greedy decoding. A random number of the list is right in 1/n.

The heads that read the list are those that put at least half of their weight, in the row that predicts the answer, on
tokens of the list at the smallest n. Their entropy is over the tokens of the list, with weights rescaled to sum to 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnorm.figures import BARE, CORRECTED, INK, MEASURED, NULL, PRINTED, note, panel
from attnorm.metrics.call import AttentionCall, logit_blocks
from attnorm.metrics.normalized import as_normalizer, resolve_normalizers, rows_block
from attnorm.models.describe import longest_context
from attnorm.models.inputs import needs_tokenizer
from attnorm.models.observe import observe
from attnorm_lab.experiments.experiment import (
    Experiment,
    ExperimentFinding,
    ExperimentSubject,
    Floats,
    Outcome,
    ProgressCallback,
    Verdict,
    judge,
)

SIZES, QUICK_SIZES = (2, 4, 8, 16, 32, 64, 128), (2, 4, 8)
LISTS, QUICK_LISTS = 16, 2
READS = 0.5  # share of the weight on the list from which a head reads it
SMALLEST_NUMBER, LARGEST_NUMBER = 100, 999  # three digits: as many tokens for every number in most vocabularies


@dataclass(frozen=True)
class Question:
    """Tokens of a prompt with its answer, and where the list and the answer are."""

    ids: list[int]
    prompt: int  # tokens before the answer
    listed: tuple[int, int]  # tokens of the list
    largest: tuple[int, int]  # tokens of its largest number


@dataclass(frozen=True)
class TextMax:
    """One value per size; heads in the order of layers."""

    sizes: list[int]
    tokens: Floats  # of the prompt
    right: Floats  # share of right answers
    first_right: Floats  # share of right first tokens of the answer
    head_names: list[str]
    mass: Floats  # (sizes, heads): weight on the list
    entropy: Floats  # (sizes, heads): nats, over the tokens of the list
    keys: Floats  # tokens of the list
    on_largest: Floats  # (sizes, heads): weight on the tokens of the largest number, of the weight on the list

    @property
    def reading(self) -> np.ndarray:
        """Heads that read the list at the smallest size."""
        return np.asarray(self.mass[0] >= READS)


def question(tokenizer: Any, size: int, generator: np.random.Generator) -> Question:
    """Return an example of the same size, the list, and its answer."""
    lists = [
        generator.choice(np.arange(SMALLEST_NUMBER, LARGEST_NUMBER + 1), size=size, replace=False) for _ in range(2)
    ]
    shown, asked = (", ".join(map(str, numbers)) for numbers in lists)
    largest = int(lists[1].max())
    before = f"Numbers: {shown}. The largest number is {lists[0].max()}.\nNumbers:"
    # The parts are tokenized one by one, so that their positions are known; no token spans two of them.
    largest_index = asked.split(", ").index(str(largest))
    pieces = [f" {number}{'.' if index == size - 1 else ','}" for index, number in enumerate(asked.split(", "))]
    ids = list(tokenizer(before, verbose=False)["input_ids"])
    first = len(ids)
    where = (first, first)
    for index, piece in enumerate(pieces):
        start = len(ids)
        ids += tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        if index == largest_index:
            where = (start, len(ids))
    listed = (first, len(ids))
    ids += tokenizer(" The largest number is", add_special_tokens=False, verbose=False)["input_ids"]
    answer = tokenizer(f" {largest}", add_special_tokens=False, verbose=False)["input_ids"]
    while not tokenizer.decode(answer[:1]).strip():  # some vocabularies write the space before a number as a token
        ids.append(answer.pop(0))
    return Question([*ids, *answer], len(ids), listed, where)


def row_reads(call: AttentionCall, example: Question) -> tuple[Floats, Floats, Floats]:
    """Return for every head the weight on the list, its entropy there, and the largest number's share of it."""
    (normalizer,) = resolve_normalizers(call, [None])
    row = torch.tensor([example.prompt - 1], device=call.query_BHQD.device)
    (block,) = logit_blocks(call, row, all_heads=True)
    view = rows_block(call, block)
    weights = as_normalizer(normalizer, call).weights(view.with_logits(view.logits.double()))[0][:, 0]
    start, stop = (position - block.first_key for position in example.listed)
    if start < 0:
        raise ValueError(
            "expected heads that see all keys, got a sliding window that hides the start of the list. Use another "
            "model."
        )
    inside = weights[:, start:stop]
    mass = inside.sum(-1)
    shares = inside / mass.clamp(min=1e-300)[:, None]
    entropy = -torch.special.xlogy(shares, shares).sum(-1)
    first, last = (position - example.listed[0] for position in example.largest)
    return tuple(part.cpu().numpy() for part in (mass, entropy, shares[:, first:last].sum(-1)))  # type: ignore[return-value]


def measure(subject: ExperimentSubject, progress: ProgressCallback, sizes: Sequence[int], lists: int) -> TextMax:
    loaded = subject.loaded()
    tokenizer = needs_tokenizer(loaded)
    limit, _ = longest_context(loaded.model)
    generator = np.random.default_rng(subject.seed)
    columns: dict[str, list[Any]] = {name: [] for name in ("tokens", "right", "first", "mass", "entropy", "on", "keys")}
    done: list[int] = []
    names: list[str] = []
    for number, size in enumerate(sizes):
        progress(f"{size} numbers", number, len(sizes))
        results: list[tuple[Any, ...]] = []
        for index in range(lists):
            example = question(tokenizer, size, generator)
            if limit is not None and len(example.ids) > limit:
                break
            reads: list[tuple[Floats, Floats, Floats]] = []
            layers: list[str] = []

            def on_call(
                call: AttentionCall, example: Question = example, reads: Any = reads, layers: Any = layers
            ) -> None:
                if call.kind == "decoder":
                    reads.append(row_reads(call, example))
                    layers += [f"L{call.layer}H{head}" for head in range(call.query_BHQD.shape[1])]

            ids = torch.tensor([example.ids], device=loaded.model.device)
            with torch.no_grad(), observe(loaded.model, on_call, check=number == index == 0):
                logits = loaded.model(input_ids=ids, use_cache=False).logits[0, example.prompt - 1 : -1]
            hits = (logits.argmax(-1) == ids[0, example.prompt :]).tolist()
            names = layers
            results.append((example, all(hits), hits[0], *(np.concatenate(part) for part in zip(*reads, strict=True))))
        if len(results) < lists:  # longer than the model's limit
            break
        done.append(size)
        examples = [entry[0] for entry in results]
        columns["tokens"].append(np.mean([example.prompt for example in examples]))
        columns["keys"].append(np.mean([example.listed[1] - example.listed[0] for example in examples]))
        for name, position in (("right", 1), ("first", 2), ("mass", 3), ("entropy", 4), ("on", 5)):
            columns[name].append(np.mean([entry[position] for entry in results], axis=0))
    if not names:
        raise ValueError(
            f"{loaded.name} has no causal attention, or too few positions for {sizes[0]} numbers. Use another model."
        )
    arrays = {name: np.array(values, dtype=np.float64) for name, values in columns.items()}
    return TextMax(
        sizes=done, tokens=arrays["tokens"], right=arrays["right"], first_right=arrays["first"], head_names=names,
        mass=arrays["mass"], entropy=arrays["entropy"], keys=arrays["keys"], on_largest=arrays["on"],
    )  # fmt: skip


def run(subject: ExperimentSubject, progress: ProgressCallback, parts: Path) -> Outcome:
    sizes, lists = (QUICK_SIZES, QUICK_LISTS) if subject.quick else (SIZES, LISTS)
    measured = measure(subject, progress, sizes, lists)
    about = f"{subject.loaded().name}, {lists} lists per size, seed {subject.seed}"
    return Outcome(
        summary=summary(measured),
        findings=judge_claims(measured, lists),
        figures={"text-max": figure(measured, about)},
        tables={"sizes": sizes_table(measured), "heads": heads_table(measured)},
        parameters={
            "sizes": measured.sizes, "lists": lists, "numbers": [SMALLEST_NUMBER, LARGEST_NUMBER],
            "reads_from": READS, "seed": subject.seed,
        },
    )  # fmt: skip


def judge_claims(measured: TextMax, lists: int) -> tuple[ExperimentFinding, ...]:
    reading = measured.reading
    accuracy = ", ".join(f"{right:.0%} of {size}" for size, right in zip(measured.sizes, measured.right, strict=True))
    able = measured.right[0] > 1 / measured.sizes[0]
    falls = measured.right[-1] < measured.right[0] - 1 / math.sqrt(lists)
    ratio = measured.entropy / np.log(measured.keys)[:, None]
    count = int(reading.sum())
    first, last = (float(np.median(ratio[index][reading])) if count else math.nan for index in (0, -1))
    grows = (
        np.polyfit(np.log(measured.keys), np.median(measured.entropy[:, reading], axis=1), 1)[0] if count else math.nan
    )
    return (
        ExperimentFinding(
            claim="A language model finds the largest of a few numbers, and fails as the list grows [V]",
            ours=f"right: {accuracy} numbers",
            verdict="not decided" if not able else judge(falls),
            why=""
            if able
            else f"the model cannot do the task: it answers {round(lists * measured.right[0])} of {lists} lists of "
            f"{measured.sizes[0]} numbers right, and a random number of the list is right in 1 of {measured.sizes[0]}",
        ),
        ExperimentFinding(
            claim="The heads that read the list disperse: their entropy grows with n [V]",
            ours=f"{count} head{'s' * (count != 1)} read{'s' * (count == 1)} the list: median entropy {first:.2f} of "
            f"log n at {measured.sizes[0]} numbers, {last:.2f} at {measured.sizes[-1]}, up {grows:.2f} nats per e-fold"
            if count
            else "no head puts half of its weight on the list",
            verdict=_judge_growth(float(grows)),
            why="growth 1 is uniform attention over the list, 0 a selection that does not change" if count else "",
        ),
    )  # fmt: skip


def _judge_growth(growth: float) -> Verdict:
    if math.isnan(growth):
        return "not decided"
    return judge(growth > 0.5, partly=growth > 0)


def summary(measured: TextMax) -> str:
    reading = measured.reading
    best = measured.on_largest[-1][reading].max() if reading.any() else math.nan
    return (
        f"Asked for the largest of {measured.sizes[0]} numbers the model is right in {measured.right[0]:.0%} of the "
        f"lists, of {measured.sizes[-1]} in {measured.right[-1]:.0%} (a random number of the list: "
        f"{1 / measured.sizes[-1]:.0%}). {int(reading.sum())} of {len(reading)} heads read the list"
        + (
            f"; at {measured.sizes[-1]} numbers the one that looks most at the largest gives it {best:.0%} of its "
            "weight on the list."
            if reading.any()
            else "."
        )
    )


def sizes_table(measured: TextMax) -> pa.Table:
    return pa.table(
        {
            "numbers": measured.sizes, "prompt_tokens": measured.tokens, "list_tokens": measured.keys,
            "right": measured.right,
            "first_token_right": measured.first_right,
        }
    )  # fmt: skip


def heads_table(measured: TextMax) -> pa.Table:
    sizes, heads = measured.mass.shape
    return pa.table(
        {
            "numbers": np.repeat(measured.sizes, heads), "head": measured.head_names * sizes,
            "mass": measured.mass.ravel(),
            "entropy_nats": measured.entropy.ravel(), "list_tokens": np.repeat(measured.keys, heads),
            "share_of_largest": measured.on_largest.ravel(), "reads": np.tile(measured.reading, sizes),
        }
    )  # fmt: skip


EXPERIMENT = Experiment(
    name="text-max",
    title="The largest of n numbers, asked in words",
    source="Velickovic et al. 2024, introduction",
    question="Does a language model still find the largest number as the list grows, and do its heads disperse?",
    run=run,
)


def figure(measured: TextMax, about: str) -> Figure:
    drawing = Figure(figsize=(8.8, 3.6))
    left, right = drawing.subplots(1, 2, gridspec_kw={"left": 0.075, "right": 0.98, "top": 0.89, "bottom": 0.2})
    left.plot(measured.sizes, measured.right, **MEASURED, label="right answers")
    left.plot(measured.sizes, measured.first_right, **CORRECTED, label="right first tokens")
    left.plot(measured.sizes, 1 / np.array(measured.sizes), **{**NULL, **BARE}, label="a random number of the list")
    left.set(ylim=(0, 1.4), yticks=np.linspace(0, 1, 6), ylabel="share of lists")
    panel(left, "a", "Accuracy")
    left.legend(loc="upper right", fontsize=7)
    _draw_entropies(right, measured)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("numbers in the list")
    note(drawing, about)
    return drawing


def _draw_entropies(axes: Axes, measured: TextMax) -> None:
    reading = measured.reading
    for curve in measured.entropy[:, reading].T:
        axes.plot(measured.sizes, curve, color=INK, linewidth=0.6, alpha=0.25)
    if reading.any():
        middle = np.median(measured.entropy[:, reading], axis=1)
        axes.plot(measured.sizes, middle, **MEASURED, label=f"median, reading heads: {int(reading.sum())}")
    axes.plot(measured.sizes, np.log(measured.keys), **{**PRINTED, **BARE}, label="uniform over the list")
    axes.set(ylabel="entropy over the list, nats", ylim=(0, None))
    panel(axes, "b", "Heads that read the list")
    axes.legend(loc="upper left", fontsize=7)
