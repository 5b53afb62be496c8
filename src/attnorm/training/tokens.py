"""Texts as one array of token ids on disk, encoded once and read through a memory map by every later run.

The folder holds one subfolder per text, vocabulary and seed, so several runs may share it.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from attnorm.training import atomic
from attnorm.training.texts import fingerprint, pieces
from attnorm.training.tokenizer import END_OF_TEXT, train_tokenizer

Tokens = np.ndarray[Any, np.dtype[np.uint16]]
AT_ONCE = 64  # pieces that the tokenizer's threads share


@dataclass(frozen=True)
class Corpus:
    """A training and a validation text as tokens, and the tokenizer that made them."""

    tokenizer: Any
    train: Tokens
    valid: Tokens
    source: dict[str, Any]
    """File names and hashes, for the record of a run; no paths."""
    folder: Path
    """Where the tokens lie."""

    @property
    def vocabulary(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    @property
    def end_of_text(self) -> int:
        return int(self.tokenizer.token_to_id(END_OF_TEXT))


def describe_texts(texts: Sequence[Path], valid: Path) -> dict[str, Any]:
    """What tells these texts from others: names and hashes.

    Raises:
        ValueError: A file is missing, or the validation text is among the training texts.
    """
    train = [{"name": path.name, "sha256": fingerprint(path)} for path in texts]
    held_out = {"name": valid.name, "sha256": fingerprint(valid)}
    if held_out["sha256"] in {text["sha256"] for text in train}:
        raise ValueError(f"{valid} is also among the training texts; a loss on it would say nothing")
    return {"train": train, "valid": held_out}


def prepare(
    texts: Sequence[Path],
    valid: Path,
    folder: Path,
    *,
    vocab: int,
    seed: int,
    progress: Callable[[str, int], None] = lambda what, tokens: None,
) -> Corpus:
    """The corpus from `folder`, made there first if it is not there yet.

    Raises:
        ValueError: A file is missing or no text.
    """
    source = describe_texts(texts, valid)
    key = {"texts": source, "vocab": vocab, "seed": seed, "layout": 1}
    place = folder / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    if not place.is_dir():
        with atomic.replacing(place) as draft:
            draft.mkdir()
            progress("tokenizer", 0)
            tokenizer = train_tokenizer(texts, vocab, seed)
            tokenizer.save(str(draft / "tokenizer.json"))
            for name, paths in (("train", texts), ("valid", [valid])):
                encode(tokenizer, paths, draft / f"{name}.npy", partial(progress, name))
            atomic.write_json(draft / "source.json", key)
    return read_corpus(place, source)


def read_corpus(folder: Path, source: dict[str, Any]) -> Corpus:
    """A corpus that `prepare` made in this very folder."""
    from tokenizers import Tokenizer

    return Corpus(
        tokenizer=Tokenizer.from_file(str(folder / "tokenizer.json")),
        train=np.load(folder / "train.npy", mmap_mode="r"),
        valid=np.load(folder / "valid.npy", mmap_mode="r"),
        source=source,
        folder=folder,
    )


def encode(
    tokenizer: Any, texts: Sequence[Path], path: Path, progress: Callable[[int], None] = lambda tokens: None
) -> None:
    """Streams the ids of the texts, each followed by the end of a text, into a .npy file of unknown length."""
    written = 0
    with path.open("wb") as file:
        _write_header(file, written)
        for text in texts:
            for some in _groups(pieces(text)):
                # Runs in the tokenizer's own threads, one piece each; without offsets, which nobody reads.
                encoded = tokenizer.encode_batch_fast(some, add_special_tokens=False)
                ids = np.concatenate([np.array(each.ids, dtype=np.uint16) for each in encoded])
                file.write(ids.astype("<u2").tobytes())
                written += len(ids)
                progress(written)
            file.write(np.array([tokenizer.token_to_id(END_OF_TEXT)], dtype="<u2").tobytes())
            written += 1
        file.seek(0)
        _write_header(file, written)


def _write_header(file: Any, length: int) -> None:
    """NumPy leaves room for a longer first axis, so the header of the final length fits in the first one's place."""
    header = {"descr": "<u2", "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(file, header)


def _groups(some: Iterator[str]) -> Iterator[list[str]]:
    while group := list(islice(some, AT_ONCE)):
        yield group
