"""The tasks: what a name means, its lengths and downloads; our own (perplexity, pass keys) and those of lm-eval.

Tasks of lm-eval (https://github.com/EleutherAI/lm-evaluation-harness) run on a model in memory, patched or not. RULER's
documents are made on this machine. lm-eval takes a length and the folder of a tokenizer for that, makes 500 documents
and uses the first ones, so the same seed gives both sides of a comparison the same documents.
"""

import hashlib
import io
import logging
import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from attnorm.evaluation.pass_keys import CHARACTERS, DEPTHS, Wording, answer_logits, puzzles_at, shortest_window
from attnorm.evaluation.result import Scores
from attnorm.evaluation.windows import validation_windows
from attnorm.models.describe import longest_context
from attnorm.models.forward_pass import predicts_next_token, reading, run
from attnorm.models.load import LoadedModel
from attnorm.text import did_you_mean

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
                    f"expected a length of at least {RULER[name]} for {name}, got {length}. Its question and "
                    "example take that many tokens. Remove the task or the length."
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
        needed, least = item.length + 1, shortest_window(_wording(loaded), CHARACTERS)
        if item.length < least:
            raise ValueError(
                f"expected lengths of at least {least} for {PASS_KEY}, got {item.length}. Remove that length."
            )
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
    windows = [w for w in validation_windows(tokens, length, limit) if len(w) == length + 1]
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
    wording = _wording(loaded)
    scores, names = [], []
    for number, depth in enumerate(DEPTHS):
        count = len(range(number, limit, len(DEPTHS)))
        if not count:
            continue
        puzzles = puzzles_at(
            tokens, wording, characters=CHARACTERS, seed=seed, count=math.ceil(count), length=length + 1,
            depth=depth,
        )  # fmt: skip
        for start in range(count):
            puzzle = puzzles.some(start, 1)
            right = answer_logits(loaded.model, puzzle.to(loaded.model.device)).argmax(-1).cpu() == puzzle.targets
            scores.append(float(right.all()))
            names.append(hashlib.sha256(puzzle.windows.numpy().tobytes()).hexdigest()[:16])
    return Scores("keys found", "higher", scores, names)


LONGEST_ANSWER = 256  # tokens; RULER asks for up to 128


def require_lm_eval(task: str) -> None:
    """Raise ImportError that names the extra if lm-eval is missing."""
    try:
        import lm_eval  # noqa: F401
        import nltk  # noqa: F401
        import wonderwords  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"expected lm-eval with RULER's packages for the task {task!r}, got {error}. "
            "Run pip install 'attnorm[eval]'."
        ) from None


def all_tasks() -> Collection[str]:
    """The names of all tasks of lm-eval; none if it is not installed."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        return ()
    with _quietly():
        names: Collection[str] = TaskManager().all_tasks
    return names


class Harness:
    """Run tasks of lm-eval; documents are made once per task and length. Use it as a context manager."""

    def __init__(self, loaded: LoadedModel, seed: int) -> None:
        self._loaded, self._seed = loaded, seed
        self._made: dict[Item, Any] = {}
        self._folder = TemporaryDirectory()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._folder.cleanup()

    def score(self, item: Item, limit: int) -> Scores:
        """The score of each of the first `limit` documents.

        Raises:
            ValueError: Data that cannot be downloaded, or a task without one number per document.
        """
        from lm_eval.evaluator import evaluate

        with _quietly():
            task = self._documents(item)
            results = evaluate(lm=self._language_model(item), task_dict=task, limit=limit, bootstrap_iters=0)
        samples = next(iter(results["samples"].values()))
        metric, values = _metric_and_values(item, samples)
        task_object = next(iter(task["tasks"].values()))
        higher = bool(task_object.higher_is_better().get(metric, True))
        documents = [str(sample["doc_hash"])[:16] for sample in samples]
        shown = "share of answers" if item.task in RULER else metric
        return Scores(shown, "higher" if higher else "lower", values, documents)

    def _language_model(self, item: Item) -> Any:
        """Wrap the model for lm-eval, which would cut documents at the length that the config states."""
        from lm_eval.models.huggingface import HFLM

        class Quiet(HFLM):  # type: ignore[misc,unused-ignore]
            def generate_until(self, requests: Any, disable_tqdm: bool = True) -> Any:
                return super().generate_until(requests, disable_tqdm=True)

            def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> Any:
                return super().loglikelihood(requests, disable_tqdm=True)

        model: Any = self._loaded.model
        longest = None if item.length is None else item.length + LONGEST_ANSWER
        positions, no_more = longest_context(model)
        if longest and positions and no_more:  # RULER's documents exceed their length by a few tokens
            longest = min(longest, positions)
        return Quiet(pretrained=model, tokenizer=self._loaded.tokenizer, batch_size=1, max_length=longest)

    def _documents(self, item: Item) -> Any:
        if item not in self._made:
            from lm_eval.tasks import TaskManager

            tokenizer: Any = self._loaded.tokenizer
            tokenizer.save_pretrained(self._folder.name)
            if item.task in RULER:
                import lm_eval.tasks

                # Only this folder: reading the index of all tasks takes ten seconds and more.
                manager = TaskManager(
                    include_path=str(Path(lm_eval.tasks.__file__).parent / "ruler"), include_defaults=False,
                    metadata={"max_seq_lengths": [item.length], "tokenizer": self._folder.name},
                )  # fmt: skip
            else:
                manager = TaskManager()
            with _seeded(self._seed), _explain_errors(item), redirect_stderr(io.StringIO()):  # 500 documents, one bar
                self._made[item] = manager.load([item.task])
            if len(self._made[item]["tasks"]) != 1:
                names = ", ".join(list(self._made[item]["tasks"])[:5])
                raise ValueError(f"expected a task, got the group {item.task!r}. Name its tasks: {names}, ...")
        return self._made[item]


def _metric_and_values(item: Item, samples: list[dict[str, Any]]) -> tuple[str, list[float]]:
    """Return the task's first metric; for RULER that whose name is the length."""
    metric = str(item.length) if item.task in RULER else str(samples[0]["metrics"][0])
    values = [sample.get(metric) for sample in samples]
    if not all(isinstance(value, int | float) for value in values):
        raise ValueError(
            f"expected one number per document from {item.task!r}, got {values[0]!r} for {metric!r}. Choose another "
            "task; for the loss of a text use perplexity with --text."
        )
    return metric, [float(value) for value in values]  # type: ignore[arg-type]


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence lm-eval, which prints to stdout and warns about models in memory."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the global random generators, from which RULER draws, and restore their states afterwards."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


@contextmanager
def _explain_errors(item: Item) -> Iterator[None]:
    try:
        yield
    except (OSError, ConnectionError, LookupError, ImportError, AssertionError) as error:
        what = "texts from the internet" if item.task in DOWNLOADED else "its data"
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{item.task} needs {what}, which could not be read: {first[:200]}. Connect to the internet once, or "
            f"choose tasks that need no download: perplexity, pass-key, {', '.join(OFFLINE)}."
        ) from None
