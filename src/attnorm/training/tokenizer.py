"""A byte-level BPE tokenizer trained on a seeded sample of the text.

Every byte is a token, so any text has tokens and comes back unchanged. Words keep the space before them, numbers are
split in threes, a run of newlines stands alone (a paragraph break is one token), and `<|endoftext|>` ends a text; where
a file contains that marker, it separates the documents inside.
"""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from attnorm.training.texts import pieces

END_OF_TEXT = "<|endoftext|>"
SAMPLE_PIECES = 1024
SAMPLE_PIECE = 2**15  # characters; with the number of pieces: 32 MiB at most
SPLIT = r"'(?:[sdmt]|ll|ve|re)|\n+| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[^\S\n]+(?!\S)|[^\S\n]+"


def train_tokenizer(texts: Iterable[Path], vocab: int, seed: int) -> Any:
    """A `tokenizers.Tokenizer` of at most `vocab` tokens; fewer where the text has too few different words."""
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


def as_transformers(tokenizer: Any, context: int) -> Any:
    """The same as transformers wants it, ready for `save_pretrained`."""
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
    """How many bytes of text each token stands for; none for the end of a text."""
    lengths = np.zeros(tokenizer.get_vocab_size(), dtype=np.int64)
    for token, index in tokenizer.get_vocab().items():
        lengths[index] = 0 if token == END_OF_TEXT else len(token)  # one character of a token is one byte
    return lengths


def _sample(texts: Iterable[Path], seed: int) -> list[str]:
    """Pieces drawn evenly from all texts, each as likely as the other, in one pass and bounded memory."""
    chooser = random.Random(seed)
    kept: list[str] = []
    seen = 0
    for path in texts:
        for piece in pieces(path, SAMPLE_PIECE):
            seen += 1
            if len(kept) < SAMPLE_PIECES:
                kept.append(piece)
            elif (place := chooser.randrange(seen)) < SAMPLE_PIECES:
                kept[place] = piece
    return kept
