"""One folder that several processes share: nobody does what another is doing or has done.

plan.json                     what is run here; a folder belongs to one plan
results.jsonl                 one line per finished piece of work, written the moment it is finished
runs/NORMALIZER/NAME/         metrics and checkpoints of a run
locks/                        who works on what; the operating system frees the locks of a process that ends
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attnorm.experiments.language_models.plan import LanguageModelPlan
from attnorm.files import atomic_replace, write_json
from attnorm.training.lm.data import Corpus, Tokens, encode, prepare, read_corpus, token_bytes
from attnorm.training.lm.evaluate import baselines

PLAN = "plan.json"
RESULTS = "results.jsonl"
WAIT_TO_WRITE = 60  # seconds
INDEX = "texts.json"
SEED = 0  # of the tokenizer's sample: all models have the same tokens, whatever their seed


@dataclass(frozen=True)
class Workspace:
    folder: Path
    plan: LanguageModelPlan

    @classmethod
    def open(cls, folder: Path, plan: LanguageModelPlan) -> "Workspace":
        """
        Raises:
            ValueError: The folder holds another plan.
        """
        folder.mkdir(parents=True, exist_ok=True)
        workspace = cls(folder, plan)
        ours = json.loads(json.dumps(plan.as_dict()))
        with workspace.locked("plan", WAIT_TO_WRITE):
            if not (folder / PLAN).exists():
                write_json(folder / PLAN, ours)
        theirs = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        different = sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))
        if different:
            raise ValueError(
                f"{folder} holds another plan: {different[0]} is {theirs.get(different[0])} there and "
                f"{ours.get(different[0])} here; choose another folder"
            )
        return workspace

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def run_folder(self, normalizer: str, name: str) -> Path:
        return self.folder / "runs" / _as_file(normalizer) / name

    def model_folder(self, normalizer: str, seed: int) -> Path:
        return self.folder / "models" / f"{_as_file(normalizer)}-seed-{seed}"

    def results(self, **wanted: Any) -> list[dict[str, Any]]:
        """The finished pieces of work that have these values, in the order in which they were finished."""
        path = self.folder / RESULTS
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines]
        return [each for each in found if all(each.get(key) == value for key, value in wanted.items())]

    def add(self, result: dict[str, Any]) -> dict[str, Any]:
        line = json.dumps(result, ensure_ascii=False, allow_nan=False)
        with self.locked("results", WAIT_TO_WRITE), (self.folder / RESULTS).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
        return result

    @contextmanager
    def claimed(self, work: str) -> Iterator[bool]:
        """Whether this process may do it now: False where another one is at it."""
        from filelock import Timeout

        try:
            with self.locked(work, 0):
                yield True
        except Timeout:
            yield False

    @contextmanager
    def alone(self, work: str) -> Iterator[None]:
        """Waits until no other process is at it."""
        with self.locked(work, -1):
            yield

    @contextmanager
    def locked(self, name: str, timeout: float) -> Iterator[None]:
        from filelock import FileLock

        path = self.folder / "locks" / f"{_as_file(name)}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path, timeout=timeout):
            yield


def _as_file(name: str) -> str:
    """kneemax:knee=0.25 as a name that every system takes."""
    return name.replace(":", "-")


@dataclass(frozen=True)
class Texts:
    """What all models read: a training text, and texts that nothing is trained on by name."""

    corpus: Corpus
    held_out: dict[str, Tokens]

    @property
    def valid(self) -> Tokens:
        return self.corpus.valid


def prepare_texts(workspace: Workspace, train: Sequence[Path], valid: Path, others: Sequence[Path] = ()) -> Texts:
    """Learns the vocabulary and encodes all texts, unless that is done; then counts, for what a model must beat.

    Raises:
        ValueError: A file is missing, no text, or two have one name.
    """
    names = [text_name(path) for path in (valid, *others)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two texts are named {twice!r}; results are told apart by file names: rename one")
    with workspace.alone("prepare"):
        if not (workspace.data / INDEX).exists():
            corpus = prepare(train, valid, workspace.data, vocab=workspace.plan.vocab, seed=SEED)
            held_out = {names[0]: f"{corpus.folder.name}/valid.npy"}
            for name, path in zip(names[1:], others, strict=True):
                with atomic_replace(workspace.data / f"{name}.npy") as draft:
                    encode(corpus.tokenizer, [path], draft)
                held_out[name] = f"{name}.npy"
            index = {"folder": corpus.folder.name, "held_out": held_out, "source": corpus.source}
            write_json(workspace.data / INDEX, index)
    texts = read_texts(workspace)
    with workspace.alone("counts"):
        if not workspace.results(stage="texts"):
            workspace.add({"stage": "texts", **_described(texts)})
    return texts


def read_texts(workspace: Workspace) -> Texts:
    """
    Raises:
        ValueError: They are not prepared yet.
    """
    if not (workspace.data / INDEX).exists():
        raise ValueError(f"{workspace.folder} holds no encoded texts yet; run the stage 'prepare' first")
    index = json.loads((workspace.data / INDEX).read_text(encoding="utf-8"))
    corpus = read_corpus(workspace.data / index["folder"], index["source"])
    paths = {name: workspace.data / file for name, file in index["held_out"].items()}
    return Texts(corpus, {name: np.load(path, mmap_mode="r") for name, path in paths.items()})


def text_name(path: Path) -> str:
    return path.name.removesuffix(".xz").removesuffix(".txt")


def _described(texts: Texts) -> dict[str, Any]:
    corpus = texts.corpus
    bytes_of = token_bytes(corpus.tokenizer)
    return {
        "source": corpus.source,
        "vocabulary": corpus.vocabulary,
        "training_tokens": len(corpus.train),
        "held_out": {
            name: {
                "tokens": len(tokens),
                "bytes_per_token": round(float(bytes_of[np.asarray(tokens)].mean()), 4),
                "counting": asdict(baselines(corpus.train, np.asarray(tokens), corpus.vocabulary)),
            }
            for name, tokens in texts.held_out.items()
        },
    }
