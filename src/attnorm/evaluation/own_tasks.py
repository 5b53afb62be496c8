"""Perplexity of a text and pass keys in it: one score per document, by the code that tests trained models."""

import hashlib
import math
from typing import Any

import numpy as np
import torch

from attnorm.evaluation.documents import Scores
from attnorm.evaluation.tasks import PASS_KEY, PERPLEXITY
from attnorm.models.forward_pass import predicts_next_token, reading, run
from attnorm.models.load import LoadedModel
from attnorm.training.lm.data import check_length, validation_windows
from attnorm.training.needle.data import Wording, puzzles_at, shortest_window
from attnorm.training.needle.train import NeedleTask, answer_logits

TokenIds = np.ndarray[Any, np.dtype[np.int64]]


def check_model(loaded: LoadedModel) -> None:
    """Raise ValueError if the model predicts no next token or has no tokenizer."""
    if loaded.tokenizer is None:
        raise ValueError(f"expected a tokenizer for {loaded.name}, got none ({loaded.tokenizer_problem})")
    if not predicts_next_token(loaded):
        raise ValueError(
            f"expected a model that predicts the next token, got {type(loaded.model).__name__}. Choose a causal one."
        )


def token_ids(loaded: LoadedModel, text: str) -> TokenIds:
    """The tokens of the text without special ones."""
    tokenizer: Any = loaded.tokenizer
    return np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int64)


def score_perplexity(loaded: LoadedModel, tokens: TokenIds, length: int, limit: int) -> Scores:
    """Nats per token of up to `limit` windows, spread over the text."""
    check_length(tokens, length, PERPLEXITY)  # type: ignore[arg-type]
    windows = [w for w in validation_windows(tokens, length, limit) if len(w) == length + 1]  # type: ignore[arg-type]
    scores, names = [], []
    for window in windows:
        inputs = {"input_ids": window[None].to(loaded.model.device)}
        loss = reading(loaded, inputs, run(loaded, inputs)).loss
        if loss is None:
            raise ValueError(f"expected a finite loss at length {length}, got none. Use dtype float32 or bfloat16.")
        scores.append(loss)
        names.append(hashlib.sha256(window.numpy().tobytes()).hexdigest()[:16])
    return Scores("nats per token", "lower", scores, names)


@torch.inference_mode()
def score_pass_keys(loaded: LoadedModel, tokens: TokenIds, length: int, limit: int, seed: int) -> Scores:
    """1 for each key whose every character is the likeliest token, over depths from 0.1 to 0.9."""
    task = NeedleTask()
    backend = getattr(loaded.tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"expected a fast tokenizer for {PASS_KEY}, got {type(loaded.tokenizer).__name__}")
    wording = Wording.of(backend)
    least = shortest_window(wording, task.characters)
    if length < least or len(tokens) < length + 1:
        raise ValueError(
            f"expected a length from {least} to {len(tokens) - 1} for {PASS_KEY} (the text has {len(tokens)} tokens), "
            f"got {length}. Choose another length, or give more text."
        )
    scores, names = [], []
    for number, depth in enumerate(task.depths):
        count = len(range(number, limit, len(task.depths)))
        if not count:
            continue
        puzzles = puzzles_at(
            tokens, wording, characters=task.characters, seed=seed, count=math.ceil(count), length=length + 1,  # type: ignore[arg-type]
            depth=depth,
        )  # fmt: skip
        for start in range(count):
            one = puzzles.some(start, 1)
            right = answer_logits(loaded.model, one.to(loaded.model.device)).argmax(-1).cpu() == one.targets
            scores.append(float(right.all()))
            names.append(hashlib.sha256(one.windows.numpy().tobytes()).hexdigest()[:16])
    return Scores("keys found", "higher", scores, names)
