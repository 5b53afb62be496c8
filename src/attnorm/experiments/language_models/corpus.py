"""The texts as tokens: encoded once by whoever comes first, read by every process through a memory map."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attnorm.experiments.language_models.workplace import Workplace
from attnorm.training import atomic
from attnorm.training.baselines import baselines
from attnorm.training.tokenizer import token_bytes
from attnorm.training.tokens import Corpus, Tokens, encode, prepare, read_corpus

INDEX = "texts.json"
SEED = 0  # of the tokenizer's sample: all models have the same tokens, whatever their seed


@dataclass(frozen=True)
class Texts:
    """What all models read: a training text, and texts that nothing is trained on by name."""

    corpus: Corpus
    held_out: dict[str, Tokens]

    @property
    def valid(self) -> Tokens:
        return self.corpus.valid


def prepare_texts(place: Workplace, train: Sequence[Path], valid: Path, others: Sequence[Path] = ()) -> Texts:
    """Learns the vocabulary and encodes all texts, unless that is done; then counts, for what a model must beat.

    Raises:
        ValueError: A file is missing, no text, or two have one name.
    """
    names = [text_name(path) for path in (valid, *others)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two texts are named {twice!r}; results are told apart by file names: rename one")
    with place.alone("prepare"):
        if not (place.data / INDEX).exists():
            corpus = prepare(train, valid, place.data, vocab=place.plan.vocab, seed=SEED)
            held_out = {names[0]: f"{corpus.folder.name}/valid.npy"}
            for name, path in zip(names[1:], others, strict=True):
                with atomic.replacing(place.data / f"{name}.npy") as draft:
                    encode(corpus.tokenizer, [path], draft)
                held_out[name] = f"{name}.npy"
            index = {"folder": corpus.folder.name, "held_out": held_out, "source": corpus.source}
            atomic.write_json(place.data / INDEX, index)
    texts = read_texts(place)
    with place.alone("counts"):
        if not place.results(stage="texts"):
            place.add({"stage": "texts", **_described(texts)})
    return texts


def read_texts(place: Workplace) -> Texts:
    """
    Raises:
        ValueError: They are not prepared yet.
    """
    if not (place.data / INDEX).exists():
        raise ValueError(f"{place.folder} holds no encoded texts yet; run the stage 'prepare' first")
    index = json.loads((place.data / INDEX).read_text(encoding="utf-8"))
    corpus = read_corpus(place.data / index["folder"], index["source"])
    paths = {name: place.data / file for name, file in index["held_out"].items()}
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
