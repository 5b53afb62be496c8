"""The tasks: what a name means, its lengths and downloads; and our own, perplexity and pass keys, scored."""

import hashlib
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from attnorm.evaluation.result import Scores
from attnorm.models.forward_pass import predicts_next_token, reading, run
from attnorm.models.load import LoadedModel
from attnorm.suggest import did_you_mean
from attnorm.training.lm.data import validation_windows
from attnorm.training.needle.data import Wording, puzzles_at, shortest_window
from attnorm.training.needle.train import NeedleTask, answer_logits

PERPLEXITY, PASS_KEY = "perplexity", "pass-key"
OWN = (PERPLEXITY, PASS_KEY)

# RULER's tasks in lm-eval with the shortest length at which their documents can be made. Shorter ones: lm-eval's
# generator of ruler_vt never returns, and that of ruler_cwe makes a document without a text.
OFFLINE = {
    "niah_single_1": 256, "niah_multikey_2": 256, "niah_multikey_3": 512, "ruler_vt": 1024, "ruler_cwe": 1024,
    "ruler_fwe": 512,
}  # fmt: skip
DOWNLOADED = dict.fromkeys(
    (
        "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery", "ruler_qa_squad",
        "ruler_qa_hotpot",
    ),
    1024,
)  # fmt: skip
RULER = OFFLINE | DOWNLOADED
ALIASES = {
    "ruler": tuple(OFFLINE), "vt": ("ruler_vt",), "cwe": ("ruler_cwe",), "fwe": ("ruler_fwe",), "passkey": (PASS_KEY,),
    "pass_key": (PASS_KEY,), "niah": ("niah_single_1",),
}  # fmt: skip
TokenIds = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Item:
    """One task at one length; None for tasks of lm-eval whose documents have lengths of their own."""

    task: str
    length: int | None

    def __str__(self) -> str:
        return self.task if self.length is None else f"{self.task} at {self.length}"


def needs_lm_eval(task: str) -> bool:
    return task not in OWN


def items_of(tasks: Sequence[str], lengths: Sequence[int], all_of_lm_eval: Callable[[], Collection[str]]) -> list[Item]:
    """Every task at every length, each once.

    all_of_lm_eval: the names of all its tasks; called for names that are not known here.

    Raises:
        ValueError: No or unknown tasks, or a length at which a task does not exist.
    """
    names = list(dict.fromkeys(name for task in tasks for name in ALIASES.get(task, (task,))))
    if not names:
        raise ValueError(f"expected at least one task, got none. Choose from {', '.join((*OWN, *OFFLINE))}.")
    unknown = [name for name in names if name not in OWN and name not in RULER]
    if unknown:
        known = all_of_lm_eval()
        for name in unknown:
            if name not in known:
                hint = did_you_mean(name, _close_names(name, known))
                more = "" if known else "Other tasks of lm-eval need pip install 'attnorm[eval]'."
                raise ValueError(f"unknown task {name!r}; {hint}{'' if hint.endswith('?') else '.'} {more}".rstrip())
    if not lengths or min(lengths) < 2:
        raise ValueError(f"expected lengths of at least 2 tokens, got {', '.join(map(str, lengths)) or 'none'}")
    items = []
    for name in names:
        if name in unknown:
            items.append(Item(name, None))
            continue
        for length in dict.fromkeys(lengths):
            if length < RULER.get(name, 0):
                raise ValueError(
                    f"expected a length of at least {RULER[name]} for {name}, got {length}. Its question and example "
                    "take that many tokens: leave the task or the length out."
                )
            items.append(Item(name, length))
    return items


def _close_names(name: str, known: Collection[str]) -> list[str]:
    """Names to suggest: all where one is close, else those that need no download (lm-eval has thousands)."""
    import difflib

    own_names = [*OWN, *RULER, *ALIASES]
    return difflib.get_close_matches(name, [*own_names, *known], n=1) or [*OWN, *OFFLINE]


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


def check_text(loaded: LoadedModel, tokens: TokenIds, item: Item) -> None:
    """Raise ValueError if one of our own tasks cannot be made from the text at that length."""
    if needs_lm_eval(item.task) or item.length is None:
        return
    needed = item.length + 2  # a window, the token after it, and one more
    if item.task == PASS_KEY:
        needed, least = item.length + 1, shortest_window(_wording(loaded), NeedleTask().characters)
        if item.length < least:
            raise ValueError(f"expected lengths of at least {least} for {PASS_KEY}, got {item.length}. Leave it out.")
    if len(tokens) < needed:
        raise ValueError(
            f"expected a text of at least {needed} tokens for {item}, got {len(tokens)}. Use a longer text, or a "
            "smaller length."
        )


def _wording(loaded: LoadedModel) -> Wording:
    backend = getattr(loaded.tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"expected a fast tokenizer for {PASS_KEY}, got {type(loaded.tokenizer).__name__}")
    return Wording.of(backend)


def score_perplexity(loaded: LoadedModel, tokens: TokenIds, length: int, limit: int) -> Scores:
    """Nats per token of up to `limit` windows, spread over the text."""
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
    task, wording = NeedleTask(), _wording(loaded)
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
            puzzle = puzzles.some(start, 1)
            right = answer_logits(loaded.model, puzzle.to(loaded.model.device)).argmax(-1).cpu() == puzzle.targets
            scores.append(float(right.all()))
            names.append(hashlib.sha256(puzzle.windows.numpy().tobytes()).hexdigest()[:16])
    return Scores("keys found", "higher", scores, names)
