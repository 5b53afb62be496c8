"""The rank of the output layer's logits: the softmax bottleneck of Yang et al. 2018, https://arxiv.org/abs/1711.03953.

The logits of N contexts are a matrix A = H W^T, N x vocabulary, of rank at most the width d of the hidden states.
Softmax ignores a shift of each row, so A is centered over the vocabulary first. If the text needs log-probabilities of
a higher rank, no hidden states can express them. This is about the last layer. The softmax of attention, which mixes
keys and disperses with their number, is another one (docs/theory/two-softmaxes.md).

This file answers three questions. What is the numerical rank of A, compared with d? How many nats does its best
approximation of rank r lose (truncated SVD, best in squared error)? If a larger model with the same vocabulary is
given, as an estimate of what the data needs: how many nats would it lose at rank d?
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnorm.analysis.settings import default_text
from attnorm.models.describe import longest_context
from attnorm.models.forward_pass import head_logits, predicts_next_token, run
from attnorm.models.inputs import texts_from, tokens_of, window_inputs
from attnorm.models.load import BUNDLED, LoadedModel, load
from attnorm.models.threads import exclusive

NEGLIGIBLE = 0.01  # nats per token: a loss of this size is below the difference of two random seeds
WINDOW = 257  # tokens of a pass, fewer where the positions of a model end; the last one is only predicted
MAX_CONTEXTS = 2048
DENSE = 2**27  # logits of a model whose head is not linear: capped, or a mixture of softmaxes
AT_ONCE = 2**24  # logits of a block
BINDS, ROOM = 0.9, 0.5  # needed rank over width: from here the width binds; below there is room


@dataclass(frozen=True)
class RankCurve:
    """Loss of the approximations of rank r of a model's logits, in nats per token."""

    model: str
    singular_values: tuple[float, ...]  # of the centered logits, largest first
    rank: int  # numerical rank
    ranks: tuple[int, ...]
    kl: tuple[float, ...]  # from the model's predictions to those of rank r
    loss: tuple[float, ...]  # on the text's next tokens
    full_loss: float

    def kl_at(self, rank: int) -> float:
        """Return the KL at a rank of the grid, or at the next larger one."""
        return next((kl for grid_rank, kl in zip(self.ranks, self.kl, strict=True) if grid_rank >= rank), 0.0)

    @property
    def needed(self) -> int:
        """Smallest rank of the grid that loses no more than NEGLIGIBLE."""
        return next(
            (grid_rank for grid_rank, kl in zip(self.ranks, self.kl, strict=True) if kl <= NEGLIGIBLE), self.ranks[-1]
        )


@dataclass(frozen=True)
class OutputBottleneck:
    """Rank of the output logits of a model over the contexts of a text.

    >>> found = attnorm.output_bottleneck("gpt2", text)
    >>> print(found)
    """

    width: int  # of the hidden states: the largest rank that a linear head can have
    vocabulary: int
    contexts: int
    own: RankCurve
    larger: RankCurve | None = None

    @property
    def verdict(self) -> str:
        """ "binds", "partly" or "room", by the needed rank relative to the width.

        "lifted" if the predictions need a rank above the width, which only a nonlinear output layer has. "not tested"
        with fewer contexts than twice the width.
        """
        if self.own.needed > self.width + 1:  # one more than the width: a bias
            return "lifted"
        if self.larger is not None:
            return "binds" if self.larger.kl_at(self.width) > NEGLIGIBLE else "room"
        if self.contexts < 2 * self.width:
            return "not tested"
        share = self.own.needed / self.width
        return "binds" if share >= BINDS else "room" if share < ROOM else "partly"

    @property
    def sentences(self) -> list[str]:
        own, width = self.own, self.width
        words = {
            "binds": "the width limits the predictions",
            "partly": "the width limits the predictions in part",
            "room": "the width is larger than needed",
            "lifted": "the width is no limit, because the output layer is not linear",
            "not tested": f"not judged, because {self.contexts:,} contexts are fewer than twice the width",
        }
        first = (
            f"Output layer (not attention): {words[self.verdict]}. The centered logits of {self.contexts:,} contexts "
            f"have the numerical rank {own.rank:,}. The hidden states have {width:,} dimensions, the vocabulary has "
            f"{self.vocabulary:,} tokens. Reduced to rank {own.needed:,}, they lose at most {NEGLIGIBLE:g} nats per "
            f"token; reduced to half the width, {own.kl_at(width // 2):.3f}."
        )
        sentences = [first]
        if self.larger is not None:
            sentences.append(
                f"{self.larger.model} needs rank {self.larger.needed:,}. Reduced to rank {width:,}, it loses "
                f"{self.larger.kl_at(width):.3f} nats per token."
            )
        return sentences

    def __str__(self) -> str:
        return "\n".join(self.sentences)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON and the manifest; the singular values are rounded to 6 digits."""
        plain = asdict(self)
        for name, curve in (("own", self.own), ("larger", self.larger)):
            if curve is not None:
                plain[name]["singular_values"] = [float(f"{value:.6g}") for value in curve.singular_values]
                plain[name]["needed"] = curve.needed
        return {**plain, "verdict": self.verdict, "sentences": self.sentences}


def output_bottleneck(
    model: Any = None,
    texts: Any = None,
    *,
    larger: Any = None,
    contexts: int | None = None,
    tokenizer: Any = None,
    device: str | None = None,
) -> OutputBottleneck:
    """Measure the rank of a language model's output logits, and what lower ranks lose.

    Args:
        model: Hub name, folder or loaded transformers model (default: the small bundled model).
        texts: A text, a pathlib.Path, several of them, or token ids (default: a built-in text).
        larger: A larger model with the same vocabulary, as an estimate of the rank that the text needs.
        contexts: Number of contexts, that is rows of the matrix (default: four times the width, at most 2,048).
        tokenizer: Object, hub name or folder (default: the tokenizer of the model).
        device: "cpu", "cuda" or "auto" (default: the GPU if there is one).

    Raises:
        ValueError: The model predicts no next token, or the larger model has another vocabulary or tokenizer.

    >>> attnorm.output_bottleneck("gpt2", text, larger="gpt2-xl")
    """
    source = BUNDLED if model is None else model
    loaded = load(source, tokenizer=tokenizer, device=device)
    texts_or_default = default_text(bundled=loaded.requested_name == BUNDLED) if texts is None else texts
    return measure_output(loaded, texts_or_default, larger=larger, contexts=contexts, device=device)


def measure_output(
    loaded: LoadedModel, texts: Any, *, larger: Any = None, contexts: int | None = None, device: str | None = None
) -> OutputBottleneck:
    """Measure the same as output_bottleneck() for a loaded model."""
    weight = _head(loaded).weight
    vocabulary, width = int(weight.shape[0]), int(weight.shape[1])
    if contexts is not None and contexts < 2:
        raise ValueError(f"contexts: expected an integer of at least 2, got {contexts}.")
    context_count = contexts or min(4 * width, MAX_CONTEXTS)
    big = None if larger is None else load_larger(larger, loaded, device=device)
    limits = [longest_context(model.model) for model in (loaded, big) if model is not None]
    length = min([WINDOW, *(limit for limit, hard in limits if hard and limit is not None)])
    windows = _windows(loaded, texts, context_count, length)
    with exclusive(*(model.model for model in (loaded, big) if model is not None)):
        own, count = _curve(loaded, windows, context_count, width)
        other = None if big is None else _curve(big, windows, context_count, width)[0]
    return OutputBottleneck(width=width, vocabulary=vocabulary, contexts=count, own=own, larger=other)


def load_larger(larger: Any, loaded: LoadedModel, **options: Any) -> LoadedModel:
    """Load the larger model. Options of load() are ignored for a model in memory.

    Raises:
        ValueError: Its vocabulary or its tokenizer is not that of `loaded`.
    """
    big = load(larger, **(options if isinstance(larger, str | Path) else {}))
    vocabulary, size = (int(_head(model).weight.shape[0]) for model in (loaded, big))
    if size != vocabulary:
        raise ValueError(
            f"larger: expected the vocabulary of {loaded.name}, {vocabulary:,} tokens, got {size:,} of {big.name}. "
            "Use a model of the same family."
        )
    if loaded.tokenizer and big.tokenizer and loaded.tokenizer.get_vocab() != big.tokenizer.get_vocab():
        raise ValueError(
            f"larger: expected the tokenizer of {loaded.name}, got another one with {big.name}, in which the "
            "same ids stand for other tokens. Use a model of the same family."
        )
    return big


def _head(loaded: LoadedModel) -> Any:
    if not predicts_next_token(loaded):
        raise ValueError(
            f"expected a model with an output layer over a vocabulary, got {loaded.name}. Load a causal language model."
        )
    return loaded.model.get_output_embeddings()  # type: ignore[no-untyped-call]


def _windows(loaded: LoadedModel, texts: Any, context_count: int, length: int) -> list[Tensor]:
    """Return token ids of disjoint windows of at most this length, (1, L) each, until there are enough contexts."""
    windows: list[Tensor] = []
    collected = 0
    for text in texts_from(texts):
        if not isinstance(text.content, str | Tensor):
            continue
        tokens = tokens_of(text, loaded, None)
        body = length - tokens.special
        for start in range(0, max(1, int(tokens.ids.shape[1]) - body + 1), body):
            if collected >= context_count:
                return windows
            ids = window_inputs(text, tokens, loaded, start, length)["input_ids"][:1]
            if ids.shape[1] > 1:
                windows.append(ids)
                collected += ids.shape[1] - 1
    if collected < 2:
        raise ValueError("texts: expected a text of at least 3 tokens, got none. Use a longer text.")
    return windows


@torch.no_grad()
def _curve(loaded: LoadedModel, windows: Sequence[Tensor], context_count: int, width: int) -> tuple[RankCurve, int]:
    states, targets, kind = [], [], None
    for ids in windows:
        output = run(loaded, {"input_ids": ids.to(loaded.model.device)})
        kind = type(output)
        states.append(output.last_hidden_state[0, :-1].cpu())
        targets.append(ids[0, 1:].cpu())
    hidden, nexts = torch.cat(states)[:context_count], torch.cat(targets)[:context_count]
    left, values, right = _decompose_logits(loaded, hidden, kind)
    tolerance = float(values[0]) * max(len(hidden), len(right)) * torch.finfo(torch.float32).eps
    rank = int((values > tolerance).sum())
    grid = _grid(rank, width)
    kl, loss = _losses(left * values, right, grid, nexts)
    curve = RankCurve(
        model=loaded.name, singular_values=tuple(values.tolist()), rank=rank, ranks=tuple(grid), kl=tuple(kl[:-1]),
        loss=tuple(loss[:-1]), full_loss=loss[-1],
    )  # fmt: skip
    return curve, len(hidden)


def _decompose_logits(loaded: LoadedModel, hidden: Tensor, kind: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return U (N, r), singular values (r,) and V (vocabulary, r) of the logits, centered over the vocabulary.

    A linear head is decomposed by its factors, H (N, d) and W (vocabulary, d); the product is never made.
    """
    head = _head(loaded)
    W = head.weight.double().cpu()
    bias = getattr(head, "bias", None)
    sample = hidden[:4].to(loaded.model.device)
    exact = head_logits(
        loaded.model, torch.zeros(1, len(sample), dtype=torch.long, device=sample.device), sample[None], kind
    )
    exact = _center_logits(exact[0].double().cpu())
    H = hidden.double()
    if bias is not None:
        H, W = torch.cat([H, torch.ones(len(H), 1, dtype=H.dtype)], 1), torch.cat([W, bias.double().cpu()[:, None]], 1)
    W = W - W.mean(0)
    linear = H[:4] @ W.T
    scale = float((exact * linear).sum() / linear.square().sum())  # some models multiply the logits by a constant
    if torch.allclose(exact, scale * linear, rtol=1e-2, atol=1e-2 * float(exact.abs().max())):
        Q, R = torch.linalg.qr(W * scale)
        U, values, V = torch.linalg.svd(H @ R.T, full_matrices=False)
        return U, values, Q @ V.T
    if len(hidden) * len(W) > DENSE:
        raise ValueError(
            f"the output layer of {loaded.name} is not linear (capped logits, or a mixture), so that all "
            f"{len(hidden) * len(W):,} logits must be in memory at once, more than the limit of {DENSE:,}. Use "
            f"at most {DENSE // len(W):,} contexts."
        )
    ids = torch.zeros(1, len(hidden), dtype=torch.long, device=sample.device)
    logits = head_logits(loaded.model, ids, hidden[None].to(sample.device), kind)[0].double().cpu()
    U, values, V = torch.linalg.svd(_center_logits(logits), full_matrices=False)
    return U, values, V.T


def _center_logits(logits: Tensor) -> Tensor:
    return logits - logits.mean(-1, keepdim=True)


def _grid(rank: int, width: int) -> list[int]:
    """Return about 24 ranks up to the numerical rank, with the width and its half among them."""
    steps = {round(rank * share) for share in np.linspace(0.05, 1, 20)} | {1, rank}
    return sorted(step for step in steps | {width, width // 2} if 1 <= step <= max(rank, 1))


def _losses(scores: Tensor, right: Tensor, ranks: Sequence[int], targets: Tensor) -> tuple[list[float], list[float]]:
    """Return the KL from the full predictions and the loss on the targets, for each rank and for the full matrix."""
    kl, loss = np.zeros(len(ranks) + 1), np.zeros(len(ranks) + 1)
    step = max(1, AT_ONCE // len(right))
    for start in range(0, len(scores), step):
        rows = slice(start, start + step)
        logits = torch.zeros(len(scores[rows]), len(right), dtype=torch.float64)
        full = torch.log_softmax(scores[rows] @ right.T, -1)
        done = 0
        for index, rank in enumerate((*ranks, scores.shape[1])):
            logits += scores[rows, done:rank] @ right[:, done:rank].T
            done = rank
            log_p = torch.log_softmax(logits, -1)
            kl[index] += float((full.exp() * (full - log_p)).sum())
            loss[index] -= float(log_p.gather(-1, targets[rows, None]).sum())
    return (kl / len(scores)).clip(min=0).tolist(), (loss / len(scores)).tolist()
