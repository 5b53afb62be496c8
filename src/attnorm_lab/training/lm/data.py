"""Turn text files into windows of tokens: read in pieces, tokenized once, stored on disk, drawn at random positions.

Tokenizer: byte-level BPE, trained on a seeded sample of the text. Every byte is a token, so any text can be encoded and
decoded without loss. Words keep the space before them, numbers are split in threes, a run of newlines is one token, and
`<|endoftext|>` ends a text; inside a file this marker separates documents.

Tokens: one array of ids per text, encoded once and memory-mapped by later runs. The folder has one subfolder per text,
vocabulary and seed, so several runs can share it.

Windows: drawn by a generator that depends only on the seed and the step. A resumed run sees the same windows in the
same order as one that was never interrupted.
"""

import lzma
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64

from attnorm.analysis.settings import passage
from attnorm.evaluation.windows import Tokens
from attnorm.files import atomic_replace, open_text, write_json
from attnorm.provenance import file_hash, settings_hash

PIECE = 2**18  # characters
LARGEST_VOCABULARY = 2**16  # tokens are stored as uint16
END_OF_TEXT = "<|endoftext|>"
SAMPLE_PIECES = 1024
SAMPLE_PIECE = 2**15  # characters; with the number of pieces: 32 MiB at most
SPLIT = r"'(?:[sdmt]|ll|ve|re)|\n+| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[^\S\n]+(?!\S)|[^\S\n]+"
AT_ONCE = 64  # pieces that the tokenizer's threads share


def pieces(path: Path, size: int = PIECE) -> Iterator[str]:
    """Yield the text in pieces that end after line breaks; joined they are the whole text.

    Cutting after the last newline of a run changes no token: the tokenizer never joins a newline with what follows.
    Only a text without newlines is cut at a space, or anywhere if it has none.

    Raises:
        ValueError: No such file, not UTF-8, or not xz although its name says so.
    """
    check_file(path)
    rest = ""
    try:
        with open_text(path) as file:
            while block := file.read(size):
                rest += block
                cut = _cut(rest)
                if cut:
                    yield rest[:cut]
                    rest = rest[cut:]
        if rest:
            yield rest
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason}). Convert it first, e.g. with iconv.") from None
    except (lzma.LZMAError, EOFError):
        raise ValueError(
            f"{path} is not an xz file, or it is truncated. Compress it again, or name a plain .txt file."
        ) from None


def fingerprint(path: Path) -> str:
    """Return the SHA-256 of a text file.

    Raises:
        ValueError: No such file.
    """
    check_file(path)
    return file_hash(path)


def check_file(path: Path) -> None:
    """Raise ValueError if there is no such file."""
    if path.is_dir():
        raise ValueError(f"expected a text file, got the folder {path}. Name the text files in it.")
    if not path.is_file():
        raise ValueError(f"no such text file: {path}. Check the path.")


def _cut(text: str) -> int:
    """Return where the text may be cut; 0 if nowhere.

    A run of newlines at the end does not count: more of them may follow.
    """
    newline = text.rstrip("\n").rfind("\n") + 1
    if newline:
        return newline
    if len(text) < 4 * PIECE:
        return 0
    return max(text.rfind(" "), 0) or len(text)


def train_tokenizer(texts: Iterable[Path], vocab: int, seed: int) -> Any:
    """Train a `tokenizers.Tokenizer` of at most `vocab` tokens; fewer if the text has few different words."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = (piece.replace(END_OF_TEXT, "") for piece in _sample(texts, seed))
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def read_tokenizer(path: Path) -> Any:
    """Read a byte-level BPE: tokenizer.json, or a folder with it or with GPT-2's vocab.json and merges.txt.

    Raises:
        ValueError: No such files, damaged ones, no end-of-text token, or more tokens than can be stored.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    file = path / "tokenizer.json" if path.is_dir() else path
    vocab, merges = (path / name for name in ("vocab.json", "merges.txt"))
    if not file.is_file() and not (vocab.is_file() and merges.is_file()):
        raise ValueError(f"expected tokenizer.json, or vocab.json and merges.txt, in {path}, found neither.")
    try:
        if file.is_file():
            tokenizer = Tokenizer.from_file(str(file))
        else:
            tokenizer = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
            tokenizer.add_special_tokens([END_OF_TEXT])
    except Exception as error:  # tokenizers raises no class of its own
        raise ValueError(f"expected the files of a tokenizer, got {path} ({error}). Copy them again.") from None
    if tokenizer.token_to_id(END_OF_TEXT) is None:
        raise ValueError(f"{path} has no token {END_OF_TEXT}, which separates texts. Add it to the tokenizer.")
    size = tokenizer.get_vocab_size()
    if size > LARGEST_VOCABULARY:
        raise ValueError(f"expected a tokenizer of at most {LARGEST_VOCABULARY:,} tokens, got {size:,} in {path}.")
    return tokenizer


def as_transformers(tokenizer: Any, context: int) -> Any:
    """Wrap the tokenizer for transformers, so that it has `save_pretrained`."""
    import transformers

    build: Any = transformers.PreTrainedTokenizerFast  # its constructor has no annotations
    return build(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def token_bytes(tokenizer: Any) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Return the number of bytes of each token; 0 for the end-of-text token."""
    lengths = np.zeros(tokenizer.get_vocab_size(), dtype=np.int64)
    for token, index in tokenizer.get_vocab().items():
        lengths[index] = 0 if token == END_OF_TEXT else len(token)  # one character of a token is one byte
    return lengths


def _sample(texts: Iterable[Path], seed: int) -> list[str]:
    """Draw pieces uniformly from all texts in one pass and bounded memory (reservoir sampling)."""
    chooser = random.Random(seed)
    kept: list[str] = []
    seen = 0
    for path in texts:
        for piece in pieces(path, SAMPLE_PIECE):
            seen += 1
            if len(kept) < SAMPLE_PIECES:
                kept.append(piece)
            elif (corpus_folder := chooser.randrange(seen)) < SAMPLE_PIECES:
                kept[corpus_folder] = piece
    return kept


@dataclass(frozen=True)
class Corpus:
    """A training and a validation text as tokens, and their tokenizer."""

    tokenizer: Any
    train: Tokens
    valid: Tokens
    source: dict[str, Any]
    """File names and hashes, for the record of a run; no paths."""
    folder: Path
    """The folder of the token files."""

    @property
    def vocabulary(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    @property
    def end_of_text(self) -> int:
        return int(self.tokenizer.token_to_id(END_OF_TEXT))


def write_quick_texts(folder: Path) -> tuple[list[Path], Path]:
    """Write the bundled model's passage to two files: a training text, and the last fifth as the held-out one."""
    text = passage()
    cut = len(text) * 4 // 5
    train, valid = folder / "passage.txt", folder / "passage-held-out.txt"
    for path, part in ((train, text[:cut]), (valid, text[cut:])):
        path.write_text(part, encoding="utf-8", newline="\n")
    return [train], valid


def describe_texts(texts: Sequence[Path], valid: Path) -> dict[str, Any]:
    """Return names and hashes of the texts, which identify them.

    Raises:
        ValueError: A file is missing, or the validation text is among the training texts.
    """
    train = [{"name": path.name, "sha256": fingerprint(path)} for path in texts]
    held_out = {"name": valid.name, "sha256": fingerprint(valid)}
    if held_out["sha256"] in {text["sha256"] for text in train}:
        raise ValueError(
            f"{valid} is also one of the training texts, so that a loss on it would mean nothing. Use another text "
            "for validation."
        )
    return {"train": train, "valid": held_out}


def prepare(
    texts: Sequence[Path],
    valid: Path,
    folder: Path,
    *,
    vocab: int,
    seed: int,
    tokenizer: Path | None = None,
    progress: Callable[[str, int], None] = lambda what, tokens: None,
) -> Corpus:
    """Return the corpus in `folder`; encode it first if it is not there.

    tokenizer: one to read (default: train one of `vocab` tokens on the texts).

    Raises:
        ValueError: A file is missing or not text.
    """
    source = describe_texts(texts, valid)
    key = {"texts": source, "vocab": vocab, "seed": seed, "layout": 1}
    given_tokenizer = None if tokenizer is None else read_tokenizer(tokenizer)
    if given_tokenizer is not None:
        key["tokenizer"] = settings_hash(given_tokenizer.get_vocab())
    corpus_folder = folder / settings_hash(key)[:16]
    if not corpus_folder.is_dir():
        with atomic_replace(corpus_folder) as draft:
            draft.mkdir()
            progress("preparing the tokenizer", 0)
            used = train_tokenizer(texts, vocab, seed) if given_tokenizer is None else given_tokenizer
            used.save(str(draft / "tokenizer.json"))
            for name, kind, paths in (("train", "training", texts), ("valid", "validation", [valid])):
                encode(used, paths, draft / f"{name}.npy", partial(progress, f"encoding the {kind} text"))
            write_json(draft / "source.json", key)
    return read_corpus(corpus_folder, source)


def read_corpus(folder: Path, source: dict[str, Any]) -> Corpus:
    """Read a corpus that `prepare` wrote to this folder."""
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
    """Stream the ids of the texts into a .npy file; each text is followed by the end-of-text token."""
    written = 0
    with path.open("wb") as file:
        _write_header(file, written)
        for text in texts:
            for group in _groups(pieces(text)):
                # Runs in the tokenizer's own threads, one piece each, without computing offsets.
                encoded = tokenizer.encode_batch_fast(group, add_special_tokens=False)
                ids = np.concatenate([np.array(encoding.ids, dtype=np.uint16) for encoding in encoded])
                file.write(ids.astype("<u2").tobytes())
                written += len(ids)
                progress(written)
            file.write(np.array([tokenizer.token_to_id(END_OF_TEXT)], dtype="<u2").tobytes())
            written += 1
        file.seek(0)
        _write_header(file, written)


def _write_header(file: Any, length: int) -> None:
    """Write the header; NumPy pads it, so the header of the final length can replace the first one."""
    header = {"descr": "<u2", "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(file, header)


def _groups(text_pieces: Iterator[str]) -> Iterator[list[str]]:
    while group := list(islice(text_pieces, AT_ONCE)):
        yield group


def check_sizes(texts: Sequence[Path], valid: Path, context: int) -> None:
    """Check that plain texts can have one window, before a folder is made: a token has at least one byte.

    Raises:
        ValueError: A text is too short whatever the tokenizer.
    """
    for what, paths in (("training", texts), ("validation", [valid])):
        most = sum(path.stat().st_size for path in paths)
        if most < context and not any(path.suffix == ".xz" for path in paths):
            raise ValueError(
                f"the {what} text has at most {most} tokens, fewer than one window of {context} tokens and the "
                "token after it. Use more text or a smaller context."
            )


def check_length(tokens: Tokens, context: int, what: str) -> None:
    """Check that the text has at least one window.

    Raises:
        ValueError: It is too short.
    """
    if len(tokens) < context + 2:
        raise ValueError(
            f"the {what} text has {len(tokens)} tokens, fewer than one window of {context} tokens and the token "
            "after it. Use more text or a smaller context."
        )


def training_windows(
    tokens: Tokens, *, seed: int, step: int, batch: int, context: int
) -> "Int64[torch.Tensor, 'batch window']":
    """Return random windows of context + 1 tokens: the last is not read, the first is not predicted."""
    starts = np.random.default_rng((seed, step)).integers(0, len(tokens) - context, size=batch)
    return torch.from_numpy(np.stack([tokens[start : start + context + 1] for start in starts]).astype(np.int64))
