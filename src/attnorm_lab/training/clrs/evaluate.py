"""The tests of a trained model: exact match of the greedy answer, the loss, and the entropy of the answers' rows.

Greedy decoding gives the right answer exactly if every answer token is the most likely one after the *true* tokens
before it: as long as it is right, its own tokens are the true ones. So one forward pass over question and answer
decides, without generating.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from attnorm.arithmetic import ceil_div
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.normalized import as_normalizer, resolve_normalizers
from attnorm.metrics.sampling import evenly_spaced
from attnorm.models.dispatch import attention_sites
from attnorm.models.observe import observe
from attnorm.normalizers.adaptive_temperature import adaptive_temperature, fit
from attnorm.normalizers.block import Block, Positions
from attnorm.normalizers.spec import parse_spec
from attnorm.theory.dispersion import entropy_nats
from attnorm_lab.training.clrs.data import EncodedExample, PaddedExamples, groups_by_length, padded

OWN = "own"  # the normalizer it was trained with
REFITTED = "re-fitted"  # adaptive temperature whose polynomial is fitted to the trained softmax model
Matches = np.ndarray[tuple[int], np.dtype[np.bool_]]
ROWS = 8  # answer rows per example that are measured
OBSERVED_TOKENS = 2**13  # of the examples that are observed in one forward pass
FIT_EXAMPLES, FIT_ROWS = 64, 4096
KEEP = 0.5  # target weight of a row's winner in the re-fit, as in `attnorm lab reproduce adaptive`


@dataclass(frozen=True, kw_only=True)
class ClrsTests:
    """What is measured after training.

    others: normalizers that replace the trained one in further tests; REFITTED is fitted first.
    observed: test examples per algorithm and size whose attention rows are measured; 0 for none.
    """

    others: tuple[str, ...] = ()
    observed: int = 1
    test: bool = True  # False: the held-out loss only, to choose a learning rate

    def as_dict(self) -> dict[str, Any]:
        return {"others": list(self.others), "observed": self.observed, "test": self.test}


def swap_for_test(model: Any, name: str, coefficients: Sequence[float]) -> AbstractContextManager[Any]:
    """Replace the trained normalizer by that of a test within the with statement."""
    from attnorm.models.patch import swap

    if name == OWN:
        return nullcontext()
    if name == REFITTED:
        return swap(model, adaptive_temperature(coefficients), warm_start=False)
    named, options = parse_spec(name)
    return swap(model, named, warm_start=False, **options)


def answer_logits(model: Any, examples: PaddedExamples, *, exact: bool = False) -> Tensor:
    """Return the logits (A, V) of all answer tokens, example after example.

    exact: the last product in float32 under autocast too; rounded logits are often equal, and then none is the largest.
    """
    hidden = model.base_model(input_ids=examples.inputs, use_cache=False).last_hidden_state
    states = hidden.flatten(0, 1).index_select(0, examples.before)
    weight = model.get_output_embeddings().weight
    if not exact:
        return F.linear(states, weight)
    with torch.autocast(states.device.type, enabled=False):
        return F.linear(states.float(), weight.float())


@torch.inference_mode()
def check_answers(
    model: Any, examples: Sequence[EncodedExample], device: torch.device, dtype: str, most_tokens: int
) -> tuple[Matches, float]:
    """Return whether each greedy answer is right, and the loss in nats per answer token."""
    model.eval()
    matches = np.zeros(len(examples), dtype=np.bool_)
    total, count = 0.0, 0
    for group, logits, targets in _logits(model, examples, device, dtype, most_tokens):
        lengths = [len(examples[index].tokens) - examples[index].answer_from for index in group]
        right = (logits.argmax(-1) == targets).cpu().split(lengths)
        matches[group] = [bool(part.all()) for part in right]
        total += float(F.cross_entropy(logits.float(), targets, reduction="sum"))
        count += len(targets)
    return matches, total / max(1, count)


def _logits(
    model: Any, examples: Sequence[EncodedExample], device: torch.device, dtype: str, most_tokens: int
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    for group in groups_by_length(examples, most_tokens):
        batch = padded([examples[index] for index in group]).to(device)
        with torch.autocast(device.type, getattr(torch, dtype), enabled=dtype != "float32"):
            yield group, answer_logits(model, batch, exact=True), batch.targets


def bits_by_cell(examples: Sequence[EncodedExample], matches: Matches) -> dict[str, dict[str, str]]:
    """Return algorithm -> size -> one character per test example in the order of the file: 1 if it is right."""
    cells: dict[str, dict[str, str]] = {}
    for example, right in zip(examples, matches, strict=True):
        sizes = cells.setdefault(example.algorithm, {})
        sizes[str(example.size)] = sizes.get(str(example.size), "") + str(int(right))
    return cells


def accuracy_by_size(cells: Mapping[str, Mapping[str, str]]) -> dict[str, dict[int, tuple[int, int]]]:
    """Return algorithm -> size -> right answers and questions, from the bits of a record."""
    return {
        algorithm: {int(size): (bits.count("1"), len(bits)) for size, bits in sizes.items()}
        for algorithm, sizes in cells.items()
    }


@torch.no_grad()
def answer_entropy(
    model: Any, examples: Sequence[EncodedExample], per_cell: int, device: torch.device
) -> list[dict[str, Any]]:
    """Measure the attention rows that predict answers: one record per algorithm and size.

    `entropy_nats` and `entropy_ratio` (1: uniform over the visible keys) are means over examples, up to ROWS answer
    tokens of each, layers and heads.
    """
    cells: dict[tuple[str, int], list[EncodedExample]] = {}
    for example in examples:
        cell = cells.setdefault((example.algorithm, example.size), [])
        if len(cell) < per_cell:
            cell.append(example)
    measured_examples = [example for cell in cells.values() for example in cell]
    means = iter(_row_means(model, measured_examples, device))
    records = []
    for (algorithm, size), cell in cells.items():
        cell_means = [next(means) for _ in cell]
        mean = {name: round(float(np.mean([values[name] for values in cell_means])), 5) for name in cell_means[0]}
        records.append({"algorithm": algorithm, "size": size, "examples": len(cell), **mean})
    return records


@dataclass(frozen=True)
class AnswerRows:
    """Up to ROWS queries of each example that predict tokens of its answer, (B, ROWS); the last one fills the rest."""

    queries: Tensor
    real: Tensor  # False where the last one is repeated

    @classmethod
    def of(cls, examples: Sequence[EncodedExample], device: torch.device) -> "AnswerRows":
        rows = [
            evenly_spaced(torch.arange(example.answer_from - 1, len(example.tokens) - 1), ROWS) for example in examples
        ]
        queries = torch.stack([torch.cat([indices, indices[-1:].expand(ROWS - len(indices))]) for indices in rows])
        real = torch.arange(ROWS) < torch.tensor([len(indices) for indices in rows])[:, None]
        return cls(queries.to(device), real.to(device))

    def block(self, call: AttentionCall) -> Block:
        """Return the logits of these rows in a layer, (B, H, ROWS, K), and the keys that they see."""
        query_index = self.queries[:, None, :, None]
        query, key = call.query_BHQD.take_along_dim(query_index, 2).float(), call.key_BGKD.float()
        logits = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT * call.scale
        if call.softcap is not None:
            logits = call.softcap * (logits / call.softcap).tanh()
        keys = torch.arange(key.shape[2], device=key.device)
        seen = keys <= query_index
        if call.mask is not None:
            queries = call.query_BHQD.shape[2]
            seen = seen & call.mask.expand(len(seen), -1, queries, -1).take_along_dim(query_index, 2)
        return Block.of(logits, seen, Positions(self.queries, keys))


def _row_means(model: Any, examples: Sequence[EncodedExample], device: torch.device) -> list[dict[str, float]]:
    """Return the means over rows, layers and heads of each example."""
    means: list[dict[str, float]] = [{}] * len(examples)
    by_layer: list[Tensor] = []

    def on_call(call: AttentionCall, rows: AnswerRows) -> None:
        (normalizer,) = resolve_normalizers(call, [None])
        block = rows.block(call)
        entropy = entropy_nats(as_normalizer(normalizer, call).weights(block).abs())
        ratio = entropy / block.n[..., 0].clamp(min=2).log()
        by_layer.append(torch.stack([entropy, ratio], -1).mean(1).double())

    for group, rows, run in _observe_groups(model, examples, device, on_call):
        by_layer.clear()
        run()
        kept = rows.real.double()[..., None]
        mean = (torch.stack(by_layer).mean(0) * kept).sum(1) / kept.sum(1)
        keys = ((rows.queries + 1) * rows.real).sum(1) / rows.real.sum(1)
        for index, (entropy, ratio), n in zip(group, mean.tolist(), keys.tolist(), strict=True):
            means[index] = {"entropy_nats": entropy, "entropy_ratio": ratio, "keys": n}
    return means


def _observe_groups(
    model: Any,
    examples: Sequence[EncodedExample],
    device: torch.device,
    on_call: Callable[[AttentionCall, AnswerRows], None],
) -> Iterator[tuple[list[int], AnswerRows, Callable[[], object]]]:
    """Yield groups of examples, their answer rows, which `on_call` gets too, and a function that runs the model."""
    model.eval()
    rows = AnswerRows.of(examples[:1], device)
    with observe(model, lambda call: on_call(call, rows), check=False):  # once: it looks at every module
        for group in groups_by_length(examples, OBSERVED_TOKENS):
            group_examples = [examples[index] for index in group]
            rows = AnswerRows.of(group_examples, device)
            inputs = padded(group_examples).to(device).inputs
            yield group, rows, partial(model.base_model, input_ids=inputs, use_cache=False)


@torch.no_grad()
def fitted_coefficients(model: Any, examples: Sequence[EncodedExample], device: torch.device) -> tuple[float, ...]:
    """Fit adaptive temperature's polynomial to the answer rows of a softmax model, all heads.

    For each row the target is its own largest logit, which shall keep half of the weight.
    """
    generator = np.random.default_rng(0)
    fit_examples = [examples[i] for i in generator.permutation(len(examples))[:FIT_EXAMPLES]]
    width = padded(fit_examples).inputs.shape[1]
    per_example = ceil_div(FIT_ROWS, len(fit_examples) * len(attention_sites(model)))
    logits: list[Tensor] = []
    visible: list[Tensor] = []

    def on_call(call: AttentionCall, rows: AnswerRows) -> None:
        block = rows.block(call)
        assert block.mask is not None
        real = rows.real[:, None].expand(block.logits.shape[:3])
        kept, seen = block.logits[real], block.mask.expand(block.logits.shape)[real]
        sample = torch.from_numpy(generator.permutation(len(kept))[: per_example * len(rows.real)]).to(device)
        room = (0, width - kept.shape[-1])
        logits.append(F.pad(kept[sample].cpu(), room))
        visible.append(F.pad(seen[sample].cpu(), room))

    for _, _, run in _observe_groups(model, fit_examples, device, on_call):
        run()
    return fit(torch.cat(logits), mask=torch.cat(visible), keep=KEEP)
