"""Tokenize a text and cut it into windows, each with the special tokens that the tokenizer adds.

`bos` decides about the token that starts a text: None leaves it to the tokenizer, True adds a missing one, False
removes it. Texts that are given as token ids do not change.
"""

import inspect
from dataclasses import dataclass

import torch
from torch import Tensor

from attnorm.models.inputs import Text, needs_tokenizer, ready
from attnorm.models.load import LoadedModel

# Tokenizing a book takes many seconds, so only pieces of a longer text are tokenized, evenly spaced over it.
WHOLE_CHARACTERS = 400_000
PIECES = 8


@dataclass(frozen=True)
class Tokens:
    """The tokens of a text without special tokens, and the special tokens before and after them."""

    ids: Tensor  # (B, T)
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    names: tuple[str, ...] = ("input_ids",)  # the inputs that the tokenizer makes
    piece_ends: tuple[int, ...] = ()  # end of each piece, if `ids` are pieces of the text; empty for the whole text
    share: float = 1.0  # share of the text that `ids` contain

    @property
    def special(self) -> int:
        return len(self.before) + len(self.after)

    @property
    def whole(self) -> bool:
        return not self.piece_ends

    @property
    def count(self) -> int:
        """Number of tokens of the whole text as one input; an estimate if only pieces were tokenized."""
        return round(int(self.ids.shape[1]) / self.share) + self.special

    def starts(self, windows: int, length: int) -> list[int] | None:
        """Return the starts of disjoint windows of that length in `ids`, evenly spaced from start to end.

        None if they do not fit.
        """
        body, available = length - self.special, int(self.ids.shape[1])
        ends = self.piece_ends or (available,)
        begins = (0, *ends[:-1])
        if len(ends) == 1:
            if windows * body > available:
                return None
            return [round(window * (available - body) / max(windows - 1, 1)) for window in range(windows)]
        if windows > len(ends) or any(end - begin < body for begin, end in zip(begins, ends, strict=True)):
            return None
        selected = [round(window * (len(ends) - 1) / max(windows - 1, 1)) for window in range(windows)]
        starts = [begins[piece] for piece in selected]
        return [*starts[:-1], ends[-1] - body] if windows > 1 else starts


def tokens_of(
    text: Text, loaded: LoadedModel, bos: bool | None = None, *, whole: bool = False, pieces: int = PIECES
) -> Tokens:
    """Tokenize a text. whole: tokenize all of a long text instead of pieces. pieces: number of pieces."""
    if isinstance(text.content, Tensor):
        if bos is not None:
            raise ValueError(f"bos={bos} applies to texts, but {text.name!r} holds token ids. Leave bos out.")
        return Tokens(text.content.reshape(1, -1) if text.content.dim() < 2 else text.content)
    if not isinstance(text.content, str):
        raise TypeError(f"expected a text or token ids, got {type(text.content).__name__} for {text.name!r}")
    tokenizer, content = needs_tokenizer(loaded), text.content
    if not content.strip():
        raise ValueError(f"{text.name!r} is empty; there is nothing to run the model on")
    tokenized = [content] if whole or len(content) <= WHOLE_CHARACTERS else _pieces(content, pieces)
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    ids: list[int] = []
    ends: list[int] = []
    for piece in tokenized:
        encoded = dict(tokenizer(piece, return_special_tokens_mask=True, verbose=False))
        piece_ids, special = list(encoded["input_ids"]), list(encoded.pop("special_tokens_mask"))
        first = next((index for index, is_special in enumerate(special) if not is_special), len(piece_ids))
        last = next(
            (len(piece_ids) - index for index, is_special in enumerate(reversed(special)) if not is_special), first
        )
        before, after, names = tuple(piece_ids[:first]), tuple(piece_ids[last:]), tuple(encoded)
        ids += piece_ids[first:last]
        ends.append(len(ids))
    return Tokens(
        torch.tensor(ids, dtype=torch.long)[None],
        _with_bos(before, loaded, bos),
        after,
        names,
        tuple(ends) if len(tokenized) > 1 else (),
        sum(map(len, tokenized)) / len(content),
    )


def _pieces(content: str, count: int) -> list[str]:
    """Return pieces of equal size, evenly spaced over the text, each starting at a word."""
    size = WHOLE_CHARACTERS // count
    pieces = []
    for number in range(count):
        start = round(number * (len(content) - size) / (count - 1))
        piece = content[start : start + size]
        space = next((index for index, character in enumerate(piece[:200]) if character.isspace()), -1) if start else -1
        pieces.append(piece[space + 1 :])
    return pieces


def window_inputs(text: Text, tokens: Tokens, loaded: LoadedModel, start: int, length: int) -> dict[str, Tensor]:
    """Return the model inputs for `length` tokens, including special ones, from token `start` of the text."""
    body = tokens.ids[:, start : start + length - tokens.special]
    batch = body.shape[0]
    around = [torch.tensor(ids, dtype=torch.long).expand(batch, -1) for ids in (tokens.before, tokens.after)]
    model_inputs = {"input_ids": torch.cat([around[0], body, around[1]], dim=1)}
    accepted = inspect.signature(loaded.model.forward).parameters
    filled = {"attention_mask": 1, "token_type_ids": 0}
    for name, value in filled.items():
        if name in tokens.names and name in accepted:
            model_inputs[name] = torch.full_like(model_inputs["input_ids"], value)
    return ready(text, model_inputs, loaded)


def bos_id(loaded: LoadedModel) -> int | None:
    """Return the BOS token of the tokenizer's or the model's configuration."""
    config = loaded.model.config
    for token in (getattr(loaded.tokenizer, "bos_token_id", None), getattr(config, "bos_token_id", None)):
        if isinstance(token, int):
            return token
    return None


def bos_problem(tokens: Tokens, loaded: LoadedModel) -> str | None:
    """Return a note if a causal model has a BOS token of its own that is not the first token of the text.

    If BOS and EOS are the same token (GPT-2, SmolLM2), it separates documents, and models read texts without it.
    """
    bos, tokenizer = bos_id(loaded), loaded.tokenizer
    eos = {getattr(tokenizer, "eos_token_id", None), getattr(loaded.model.config, "eos_token_id", None)}
    if bos is None or bos in eos or tokenizer is None or loaded.model.config.is_encoder_decoder:
        return None
    if getattr(tokenizer, "cls_token_id", None) is not None or not loaded.model.can_generate():
        return None
    start = [*tokens.before, *tokens.ids.flatten()[:1].tolist()]
    if start[:1] == [bos]:
        return None
    name = tokenizer.convert_ids_to_tokens(bos)
    return (
        f"the model has the BOS token {name!r}, but the input does not start with it; models trained with BOS read and "
        "attend differently without it. Measure with it: --bos (bos=True in Python)"
    )


def _with_bos(before: tuple[int, ...], loaded: LoadedModel, bos: bool | None) -> tuple[int, ...]:
    if bos is None:
        return before
    token = bos_id(loaded)
    if token is None:
        raise ValueError(
            f"bos={bos}: expected a tokenizer or config with a BOS token, but {loaded.name} has none. Leave bos out."
        )
    rest = tuple(other for other in before if other != token)
    return (token, *rest) if bos else rest
