"""Tasks of lm-eval on a model in memory, patched or not: https://github.com/EleutherAI/lm-evaluation-harness.

RULER's documents are made on this machine. lm-eval takes a length and the folder of a tokenizer for that, makes 500
documents and uses the first ones, so the same seed gives both sides of a comparison the same documents.
"""

import io
import logging
import random
from collections.abc import Collection, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

import numpy as np

from attnorm.evaluation.result import Scores
from attnorm.evaluation.tasks import DOWNLOADED, OFFLINE, RULER, Item
from attnorm.models.describe import longest_context
from attnorm.models.load import LoadedModel

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
    """Documents are made once per task and length; use it as a context manager."""

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
        """lm-eval would cut documents at the length that the config states."""
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
    """The task's first metric, or for RULER the one that carries the length as its name."""
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
    """RULER draws from the global random generators; their states are restored."""
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
