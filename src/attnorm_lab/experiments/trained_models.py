"""Models that an experiment trains from scratch: their plan, their texts, and the folder that several processes share.

No work is done twice.

plan.json                     the plan of this folder; a folder belongs to one plan
data/                         the texts as tokens, encoded once and memory-mapped by every process
results.jsonl                 one line per finished piece of work
runs/NORMALIZER/NAME/         metrics and checkpoints of a run
locks/                        which work is claimed; the operating system releases the locks of a process that ends
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from attnorm.analysis.settings import passage, topics
from attnorm.evaluation.windows import Tokens
from attnorm.files import append_jsonl, atomic_replace, read_jsonl, write_json
from attnorm.normalizers.spec import parse_spec
from attnorm.run_folder import lock, read_record, require_same_run, try_lock
from attnorm_lab.experiments.experiment import ExperimentSubject
from attnorm_lab.training.lm.data import Corpus, encode, prepare, read_corpus, token_bytes
from attnorm_lab.training.lm.evaluate import baselines
from attnorm_lab.training.lm.model import LMSettings, learned_values

PLAN = "plan.json"
RESULTS = "results.jsonl"
WAIT_TO_WRITE = 60  # seconds
DATA = "data"
INDEX = "texts.json"
SEED = 0  # of the tokenizer's sample: all models have the same tokens, whatever their seed
HELD_OUT_SHARE = 0.3  # of the bundled text
MOST_LEARNED = 256  # numbers of one parameter in a record: a few per head


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """Shape and training of models that are compared under equal conditions, and the tests of their losses."""

    layers: int = 8
    heads: int = 8
    width: int = 512
    context: int = 1024
    vocab: int = 8192
    batch: int = 16
    """Windows per step. With 64, the short runs would have too few steps to choose a learning rate."""
    warmup_share: float = 0.1
    weight_decay: float = 0.1
    longer: tuple[int, ...] = (1, 2, 4)
    chunks: int = 40
    """Pieces of text, each as long as the longest window, for the losses at all lengths."""
    observed: int = 2
    """Windows for the attention statistics."""
    dtype: str = "bfloat16"
    compiled: bool = True

    def model_settings(self, normalizer: str, *, rate: float, tokens: int, seed: int, **others: Any) -> LMSettings:
        """normalizer: its specification. others: settings that differ from the plan, e.g. architecture or heads."""
        steps = max(1, math.ceil(tokens / (self.batch * self.context)))
        name, options = parse_spec(normalizer)
        return LMSettings(
            **{
                "architecture": "llama", "layers": self.layers, "heads": self.heads, "width": self.width,
                "context": self.context, "vocab": self.vocab, "steps": steps, "batch": self.batch,
                "learning_rate": rate, "warmup": max(1, round(self.warmup_share * steps)),
                "weight_decay": self.weight_decay, "seed": seed, "dtype": self.dtype, "normalizer": name,
                "normalizer_options": options, **others,
            }
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


AnyPlan = TypeVar("AnyPlan", bound=ModelPlan)
ChangedPlan = TypeVar("ChangedPlan", bound=Any)  # a dataclass


def on_this_machine(plan: AnyPlan) -> AnyPlan:
    """Return the plan for this machine: without a GPU, float32 and nothing compiled."""
    import torch

    return plan if torch.cuda.is_available() else replace(plan, dtype="float32", compiled=False)


def change_plan(plan: ChangedPlan, changes: Sequence[str]) -> ChangedPlan:
    """Apply NAME=VALUE changes, VALUE in JSON: main_tokens=50000000, rates=[0.001,0.002], needle.steps=300.

    Raises:
        ValueError: The plan has no such name, or the value is not JSON of the same type.
    """
    for change in changes:
        name, _, text = change.partition("=")
        current, types = _by_name(asdict(plan)), _by_name(_types_of(type(plan)))
        if name not in current:
            raise ValueError(f"--set {change}: expected a value of the plan ({', '.join(current)}), got {name!r}.")
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            raise ValueError(
                f"--set {change}: expected a value in JSON, as in batch=16 or rates=[0.001,0.002], got {text}."
            ) from None
        value = tuple(value) if isinstance(value, list) else value
        if not _has_type(value, types[name]):
            raise ValueError(f"--set {change}: expected a value like {json.dumps(current[name])}, got {text}")
        part, dot, inner = name.partition(".")
        if dot:
            value = replace(getattr(plan, part), **{inner: value})
        plan = replace(plan, **{part: value})
    return plan


def _by_name(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by name; those of a part have names such as needle.steps."""
    values: dict[str, Any] = {}
    for name, value in parts.items():
        values |= {f"{name}.{inner}": one for inner, one in value.items()} if isinstance(value, dict) else {name: value}
    return values


def _types_of(plan: Any) -> dict[str, Any]:
    """Return the type of each value of a plan, or of a part of it as a dict of types."""
    types = get_type_hints(plan)
    return {name: _types_of(kind) if is_dataclass(kind) else kind for name, kind in types.items()}


def _has_type(value: Any, kind: Any) -> bool:
    """Whether a value has the type; a whole number also stands for a float."""
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_has_type(item, get_args(kind)[0]) for item in value)
    return type(value) is kind or (kind is float and type(value) is int)


@dataclass(frozen=True)
class Workspace(Generic[AnyPlan]):
    folder: Path
    plan: AnyPlan

    @classmethod
    def open(cls, folder: Path, plan: AnyPlan) -> "Workspace[AnyPlan]":
        """
        Raises:
            ValueError: The folder contains another plan.
        """
        folder.mkdir(parents=True, exist_ok=True)
        workspace = cls(folder, plan)
        current = json.loads(json.dumps(plan.as_dict()))
        with workspace.locked("plan", WAIT_TO_WRITE):
            if not (folder / PLAN).exists():
                write_json(folder / PLAN, current)
        stored = read_record(folder / PLAN, (), "Choose another folder, or remove the file.") or {}
        require_same_run(current, stored, f"{folder} contains another plan", "Choose another folder")
        return workspace

    @property
    def data(self) -> Path:
        return self.folder / DATA

    def run_folder(self, normalizer: str, name: str) -> Path:
        return self.folder / "runs" / _as_file(normalizer) / name

    def model_folder(self, normalizer: str, seed: int) -> Path:
        return self.folder / "models" / f"{_as_file(normalizer)}-seed-{seed}"

    def results(self, **conditions: Any) -> list[dict[str, Any]]:
        """Return the finished pieces of work that have these values, in the order in which they were finished."""
        lines = read_jsonl(self.folder / RESULTS)
        return [line for line in lines if all(line.get(key) == value for key, value in conditions.items())]

    def add(self, result: dict[str, Any]) -> dict[str, Any]:
        """Append a finished piece of work to the results."""
        with self.locked("results", WAIT_TO_WRITE):
            append_jsonl(self.folder / RESULTS, [result])
        return result

    def claimed(self, work: str) -> AbstractContextManager[bool]:
        """Yield whether this process may do the work: False if another process is doing it."""
        return try_lock(self._lock_path(work))

    def locked(self, work: str, timeout: float = -1) -> AbstractContextManager[None]:
        """Wait until no other process does this work, at most `timeout` seconds (default: without limit)."""
        return lock(self._lock_path(work), timeout)

    def _lock_path(self, work: str) -> Path:
        return self.folder / "locks" / f"{_as_file(work)}.lock"


def _as_file(name: str) -> str:
    """Return a name that is valid on every file system: kneemax:knee=0.25 -> kneemax-knee=0.25."""
    return name.replace(":", "-")


@dataclass(frozen=True)
class Texts:
    """The texts of all models: the training text, and the held-out texts by name."""

    corpus: Corpus
    held_out: dict[str, Tokens]

    @property
    def valid(self) -> Tokens:
        return self.corpus.valid


def prepare_texts(
    workspace: Workspace[Any],
    train: Sequence[Path],
    valid: Path,
    others: Sequence[Path] = (),
    tokenizer: Path | None = None,
) -> Texts:
    """Encode all texts once; then compute the unigram and bigram baselines.

    tokenizer: one to read (default: train one on the training text).

    Raises:
        ValueError: A file is missing or not text, or two have the same name.
    """
    names = names_of_texts([valid, *others])
    with workspace.locked("prepare"):
        if not (workspace.data / INDEX).exists():
            corpus = prepare(train, valid, workspace.data, vocab=workspace.plan.vocab, seed=SEED, tokenizer=tokenizer)
            held_out = {names[0]: f"{corpus.folder.name}/valid.npy"}
            for name, path in zip(names[1:], others, strict=True):
                with atomic_replace(workspace.data / f"{name}.npy") as draft:
                    encode(corpus.tokenizer, [path], draft)
                held_out[name] = f"{name}.npy"
            index = {"folder": corpus.folder.name, "held_out": held_out, "source": corpus.source}
            write_json(workspace.data / INDEX, index)
    texts = read_texts(workspace)
    with workspace.locked("counts"):
        check_same_texts(workspace.results(stage="texts"), texts, str(workspace.folder))
        if not workspace.results(stage="texts"):
            workspace.add({"stage": "texts", **_describe_texts(texts)})
    return texts


def check_same_texts(described: Sequence[Mapping[str, Any]], texts: Texts, where: str) -> None:
    """Check that records belong to these texts: their numbers of tokens are equal, packed or not.

    Raises:
        ValueError: They do not.
    """
    held_out = {name: len(tokens) for name, tokens in texts.held_out.items()}
    for record in described:
        if record["training_tokens"] != len(texts.corpus.train) or held_out != {
            name: text["tokens"] for name, text in record["held_out"].items()
        }:
            names = ", ".join(text["name"] for text in record["source"]["train"])
            raise ValueError(
                f"{where}: expected models of the same text, got models of {names} with "
                f"{record['training_tokens']:,} tokens; this text has {len(texts.corpus.train):,}. Pass that "
                "text and its held-out texts, or another --out."
            )


def require_texts(folder: Path) -> None:
    """Raise ValueError if the texts of the folder are not encoded yet."""
    if not (folder / DATA / INDEX).exists():
        raise ValueError(f"{folder} has no encoded texts yet. Run --stage prepare first.")


def read_texts(workspace: Workspace[Any]) -> Texts:
    """
    Raises:
        ValueError: The texts are not encoded yet.
    """
    require_texts(workspace.folder)
    index = json.loads((workspace.data / INDEX).read_text(encoding="utf-8"))
    corpus = read_corpus(workspace.data / index["folder"], index["source"])
    paths = {name: workspace.data / file for name, file in index["held_out"].items()}
    return Texts(corpus, {name: np.load(path, mmap_mode="r") for name, path in paths.items()})


def names_of_texts(held_out: Sequence[Path]) -> list[str]:
    """Return the names of held-out texts in results.

    Raises:
        ValueError: Two have the same name.
    """
    names = [path.name.removesuffix(".xz").removesuffix(".txt") for path in held_out]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(
            f"expected texts with different file names, which identify results, got {twice!r} twice. Rename one."
        )
    return names


def _describe_texts(texts: Texts) -> dict[str, Any]:
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


def texts_of(subject: ExperimentSubject, folder: Path) -> tuple[list[Path], Path, list[Path]]:
    """Return the texts for training, for validation, and further held-out texts.

    Raises:
        ValueError: No training text, or no validation text.
    """
    if subject.texts and subject.valid:
        return list(subject.texts), subject.valid[0], list(subject.valid[1:])
    if subject.texts or subject.valid or not subject.quick:
        given = "--text only" if subject.texts else "--valid only" if subject.valid else "neither"
        raise ValueError(
            f"expected --text to train on and --valid to measure on (.txt or .txt.xz), got {given}. Give both, "
            "or --quick alone, which uses a built-in text."
        )
    all_topics = topics()
    cut = all_topics.rfind("\n", 0, int((1 - HELD_OUT_SHARE) * len(all_topics))) + 1
    contents = {"python-topics": all_topics[:cut], "python-topics-held-out": all_topics[cut:], "passage": passage()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    train, valid, other = (folder / f"{name}.txt" for name in contents)
    return [train], valid, [other]


def learned(model: Any) -> dict[str, list[float]]:
    """Return the parameters of the normalizers, by layer; without matrices, such as the landmarks of `soft`."""
    values_by_name = learned_values(model, MOST_LEARNED)
    return {name.removeprefix("model.layers."): values for name, values in values_by_name.items()}
