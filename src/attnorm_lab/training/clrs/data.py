"""Questions and answers of CLRS-Text: from JSONL files, from dm-clrs, or made here for two simple tasks.

CLRS-Text (Markeeva et al. 2024, https://arxiv.org/abs/2406.04229) writes the inputs and the result of 30 classical
algorithms as text. A record has `algorithm`, `size`, `question` and `answer`; the answer ends with an empty line.

Question and answer are tokenized apart, so that the answer starts at a token. The examples of a step depend only on the
seed and the step. A step is computed in groups of similar length, padded on the right: under causal attention no token
sees the padding, so that no mask is needed and every attention engine can be used.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from attnorm.arithmetic import round_up
from attnorm.files import read_jsonl
from attnorm.text import did_you_mean

FIELDS = ("algorithm", "size", "question", "answer")
ROUNDED_TO = 32  # tokens: fewer different shapes
PASS = 4000  # tokens that a GPU computes in the time that a small pass costs beyond its tokens
HELD_OUT_SEED = 0  # the held-out part is the same for every seed of a model
CHARACTERS = 256  # tokens of `Characters`


@dataclass(frozen=True)
class ClrsExample:
    algorithm: str
    size: int
    question: str
    answer: str


def read_examples(path: Path, algorithms: Sequence[str] = ()) -> list[ClrsExample]:
    """Read a .jsonl or .jsonl.xz file; `algorithms` selects some of them.

    Raises:
        ValueError: No such file, a record without a field, or an algorithm that the file does not have.
    """
    if not path.is_file():
        raise ValueError(f"expected a file of CLRS-Text examples (.jsonl or .jsonl.xz), got {path}. Check the path.")
    examples = []
    for number, record in enumerate(read_jsonl(path), 1):
        missing = [field for field in FIELDS if field not in record]
        if missing:
            raise ValueError(f"{path}, record {number}: expected the fields {', '.join(FIELDS)}, got no {missing[0]!r}")
        examples.append(ClrsExample(*(record[field] for field in FIELDS)))
    if not examples:
        raise ValueError(f"expected one JSON record per line in {path}, got no records.")
    return select_algorithms(examples, algorithms)


def select_algorithms(examples: list[ClrsExample], algorithms: Sequence[str]) -> list[ClrsExample]:
    """Return the examples of these algorithms (default: all).

    Raises:
        ValueError: There are none of an algorithm.
    """
    available = {example.algorithm for example in examples}
    for name in algorithms:
        if name not in available:
            raise ValueError(
                f"expected an algorithm of the examples, got {name!r}; {did_you_mean(name, sorted(available))}"
            )
    return [example for example in examples if example.algorithm in algorithms] if algorithms else examples


def _format_numbers(values: Iterable[float]) -> str:
    return f"[{' '.join(str(value) for value in values)}]"


def _minimum(keys: list[float]) -> tuple[str, str]:
    return f"key: {_format_numbers(keys)}\nmin:", str(keys.index(min(keys)))


def _insertion_sort(keys: list[float]) -> tuple[str, str]:
    return f"key: {_format_numbers(keys)}\npred:", _format_numbers(sorted(keys))


SIMPLE: dict[str, Callable[[list[float]], tuple[str, str]]] = {
    "minimum": _minimum,
    "insertion_sort": _insertion_sort,
}


def simple_examples(sizes: Sequence[int], count: int, seed: int, digits: int = 3) -> list[ClrsExample]:
    """Return `count` examples per size of the algorithms in SIMPLE, in the format of CLRS-Text; numbers differ."""
    generator = random.Random(seed)
    examples = []
    for algorithm, solve in SIMPLE.items():
        for size in sizes:
            for _ in range(count):
                keys = [value / 10**digits for value in generator.sample(range(10**digits), size)]
                question, answer = solve(keys)
                examples.append(ClrsExample(algorithm, size, f"{algorithm}:\n{question}\n", f"{answer}\n\n"))
    return examples


def quick_examples(seed: int) -> tuple[list[ClrsExample], list[ClrsExample]]:
    """Return a small training set, sizes 2 to 4 with numbers of one digit, and a test of sizes 2 to 6."""
    test = simple_examples((2, 3, 4, 5, 6), 16, seed + 1, digits=1)
    known = {example.question for example in test}
    train = [example for example in simple_examples((2, 3, 4), 200, seed, digits=1) if example.question not in known]
    return train, test


def dm_clrs_examples(
    algorithms: Sequence[str], sizes: Sequence[int], count: int, seed: int, known: Iterable[str] = ()
) -> list[ClrsExample]:
    """Generate up to `count` different examples with dm-clrs (pip install dm-clrs), without hints.

    algorithms: default: all 30. known: questions to leave out, for example those of the test.

    Raises:
        ValueError: dm-clrs is not installed.
    """
    if find_spec("clrs") is None:
        raise ValueError("generating examples needs dm-clrs, which is not installed. Run: pip install dm-clrs")
    generators: Any = import_module("clrs._src.clrs_text.huggingface_generators")
    requested = {name: list(sizes) for name in algorithms or import_module("clrs").CLRS_30_ALGS_SETTINGS}
    records = generators.clrs_generator(requested, num_samples=count, seed=seed)
    seen = set(known)
    examples = []
    for record in records:
        if record["question"] not in seen:
            seen.add(record["question"])
            examples.append(ClrsExample(record["algo_name"], record["length"], record["question"], record["answer"]))
    return examples


class ClrsTokenizer(Protocol):
    """Encodes texts to token ids below `vocabulary`."""

    @property
    def vocabulary(self) -> int: ...

    def encode(self, texts: Sequence[str]) -> list[list[int]]: ...


class Characters:
    """One token per byte, for models trained from scratch."""

    vocabulary = CHARACTERS

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]


class Pretrained:
    """The tokenizer of a pretrained model."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def vocabulary(self) -> int:
        return len(self._tokenizer)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
        return ids


@dataclass(frozen=True)
class EncodedExample:
    algorithm: str
    size: int
    tokens: np.ndarray[tuple[int], np.dtype[np.int32]]  # question, then answer
    answer_from: int  # index of the answer's first token


def encode_examples(examples: Sequence[ClrsExample], tokenizer: ClrsTokenizer) -> list[EncodedExample]:
    questions = tokenizer.encode([example.question for example in examples])
    answers = tokenizer.encode([example.answer for example in examples])
    return [
        EncodedExample(example.algorithm, example.size, np.array([*question, *answer], np.int32), len(question))
        for example, question, answer in zip(examples, questions, answers, strict=True)
    ]


@dataclass(frozen=True)
class ClrsData:
    """Examples for training, a held-out part of the same sizes, and the test; `source` describes the files."""

    train: list[EncodedExample]
    held_out: list[EncodedExample]
    test: list[EncodedExample]
    source: dict[str, Any]

    @property
    def training_sizes(self) -> list[int]:
        return sorted({example.size for example in self.train})


def prepare_data(
    train: Sequence[ClrsExample], test: Sequence[ClrsExample], tokenizer: ClrsTokenizer, *, held_out: int,
    source: dict[str, Any],
) -> ClrsData:  # fmt: skip
    """Encode the examples; `held_out` random training examples are kept apart.

    Raises:
        ValueError: Fewer than two training examples remain, or a test question is also a training question.
    """
    if not 0 < held_out < len(train) - 1:
        raise ValueError(
            f"expected 1 to {len(train) - 2} held-out examples of {len(train)} training examples, got {held_out}"
        )
    common = {example.question for example in train} & {example.question for example in test}
    if common:
        raise ValueError(
            f"{len(common)} test questions are training questions too. Remove them from one of the two files."
        )
    order = np.random.default_rng(HELD_OUT_SEED).permutation(len(train))
    encoded = encode_examples(train, tokenizer)
    apart, kept = order[:held_out], np.sort(order[held_out:])
    return ClrsData(
        [encoded[index] for index in kept],
        [encoded[index] for index in apart],
        encode_examples(test, tokenizer),
        source,
    )


def step_indices(count: int, batch: int, seed: int, step: int) -> list[int]:
    """Return the examples of a step: a random order of all of them, then another one, and so on."""
    start = step * batch
    indices: list[int] = []
    while len(indices) < batch:
        epoch, first = divmod(start + len(indices), count)
        indices += _epoch_order(count, seed, epoch)[first : first + batch - len(indices)].tolist()
    return indices


@lru_cache(maxsize=2)
def _epoch_order(count: int, seed: int, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.random.default_rng((seed, epoch)).permutation(count)


@dataclass(frozen=True)
class PaddedExamples:
    """Examples of similar length, padded with 0, and the answer tokens, which are to be predicted.

    The indices are known before the model runs, so that a GPU need not be waited for.
    """

    inputs: Tensor  # (B, L)
    before: Tensor  # (A,): index of the token before each answer token, in the flattened inputs
    targets: Tensor  # (A,): the answer tokens, example after example

    def to(self, device: torch.device) -> "PaddedExamples":
        if device.type != "cuda":
            return self
        parts = (self.inputs, self.before, self.targets)
        return PaddedExamples(*(part.pin_memory().to(device, non_blocking=True) for part in parts))


def padded(examples: Sequence[EncodedExample]) -> PaddedExamples:
    length = _padded_length(max(len(example.tokens) for example in examples))
    inputs = torch.zeros(len(examples), length, dtype=torch.long)
    before, targets = [], []
    for row, example in enumerate(examples):
        tokens = torch.from_numpy(example.tokens.astype(np.int64))
        inputs[row, : len(tokens) - 1] = tokens[:-1]
        before.append(row * length + torch.arange(example.answer_from - 1, len(tokens) - 1))
        targets.append(tokens[example.answer_from :])
    return PaddedExamples(inputs, torch.cat(before), torch.cat(targets))


def _padded_length(tokens: int) -> int:
    """Return the inputs of an example, all tokens but the last, rounded up."""
    return round_up(max(1, tokens - 1), ROUNDED_TO)


def groups_by_length(examples: Sequence[EncodedExample], most_tokens: int) -> Iterator[list[int]]:
    """Yield indices of examples in groups of similar length, longest first, of at most `most_tokens` padded tokens.

    The groups have the fewest padded tokens, where another group counts as PASS tokens. A single example that is longer
    than `most_tokens` is a group of its own.
    """
    order = sorted(range(len(examples)), key=lambda index: -len(examples[index].tokens))
    lengths = np.array([_padded_length(len(examples[index].tokens)) for index in order])
    least = np.zeros(len(order) + 1)  # least[j]: cost of the j longest examples
    first = np.zeros(len(order) + 1, np.int64)  # where the last of their groups begins
    for stop in range(1, len(order) + 1):
        start = np.arange(stop)
        tokens = (stop - start) * lengths[:stop]
        cost = np.where((tokens <= most_tokens) | (start == stop - 1), least[:stop] + tokens + PASS, np.inf)
        first[stop] = cost.argmin()
        least[stop] = cost[first[stop]]
    groups: list[list[int]] = []
    stop = len(order)
    while stop:
        groups.append(order[first[stop] : stop])
        stop = int(first[stop])
    yield from reversed(groups)
