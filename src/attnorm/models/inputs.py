"""Turn texts, token ids and dicts of model inputs into the arguments of a model's forward call; cut texts into windows.

Each window has the special tokens that the tokenizer adds. `bos` decides about the token that starts a text: None
leaves it to the tokenizer, True adds a missing one, False removes it. Texts that are given as token ids do not change.
"""

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnorm.files import read_text, text_name
from attnorm.models.load import LoadedModel

# A mapping with one of these keys is a dict of model inputs; any other mapping is name -> text.
MODEL_INPUTS = {
    *("input_ids", "inputs_embeds", "decoder_input_ids", "input_features", "input_values"),
    *("pixel_values", "pixel_values_videos", "past_values"),
}
# Main input of a model that reads no text -> what it reads, and which kind of Media that is.
MEDIA_INPUTS = {
    "pixel_values": ("images", "image"),
    "input_features": ("sound", "audio"),
    "input_values": ("sound", "audio"),
}
FILE_NAME = re.compile(r"\S+\.(txt|md|xz)")
CHARACTERS_PER_TOKEN = 16  # more than any tokenizer has on average; limits how much of a long text is tokenized

# Tokenizing a book takes many seconds, so only pieces of a longer text are tokenized, evenly spaced over it.
WHOLE_CHARACTERS = 400_000
PIECES = 8


@dataclass(frozen=True)
class Media:
    """A file that a model reads through its processor (models.media), e.g. Media(Path("cat.png"), "image")."""

    path: Path
    kind: Literal["image", "audio"]


@dataclass(frozen=True)
class Text:
    """One input of a model, and its name in results."""

    name: str
    content: str | Tensor | Mapping[str, Tensor] | Media
    file: bool = False  # whether the content comes from a text file of this name
    media: Literal["image", "audio"] | None = None  # the content comes from an image or sound file of this name


def texts_from(inputs: Any) -> list[Text]:
    """Return a list of texts from any supported input.

    inputs: a text, the Path of a text, token ids (tensor or list), a list of these, a dict name -> one of these, or a
    dict of model inputs.
    """
    if isinstance(inputs, Mapping):
        return _from_mapping(inputs)
    if isinstance(inputs, Path):
        return [_make_text(text_name(inputs), inputs)]
    if isinstance(inputs, Media):
        return [Text(text_name(inputs.path), inputs)]
    if isinstance(inputs, str | Text) or _is_token_ids(inputs):
        return [_make_text("text", inputs)]
    if not isinstance(inputs, Iterable) or isinstance(inputs, bytes):
        raise _unknown_input_error(inputs)
    listed = list(inputs)
    if not listed:
        raise ValueError("expected at least one input to run the model on, got none.")
    return [
        _make_text(text_name(content) if isinstance(content, Path) else f"text {number}", content)
        for number, content in enumerate(listed, start=1)
    ]


def prepared(text: Text, loaded: LoadedModel, length: int | None) -> dict[str, Tensor]:
    """Return the model inputs for the first `length` tokens (None: all), on the model's device."""
    if isinstance(text.content, Mapping):
        model_inputs = {name: torch.as_tensor(value) for name, value in text.content.items()}
        selected_inputs = model_inputs if length is None else _cut_inputs(text, model_inputs, length)
    elif isinstance(text.content, Tensor):
        selected_inputs = {"input_ids": _cut_ids(text, torch.atleast_2d(text.content), length)}
    else:
        selected_inputs = _tokenize(text, loaded, length)
    return ready(text, selected_inputs, loaded)


def ready(text: Text, chosen: dict[str, Tensor], loaded: LoadedModel) -> dict[str, Tensor]:
    """Check token ids, add inputs of the decoder if there is one, and move all to the model's device."""
    _check_ids(text, chosen.get("input_ids"), loaded)
    device = _input_device(loaded.model)
    return {name: value.to(device) for name, value in _add_decoder_inputs(chosen, loaded.model).items()}


def needs_tokenizer(loaded: LoadedModel) -> Any:
    """Return the tokenizer; raise ValueError if there is none."""
    if loaded.tokenizer is None:
        main_input = getattr(loaded.model, "main_input_name", None)
        if main_input in MEDIA_INPUTS:
            reads, kind = MEDIA_INPUTS[main_input]
            raise ValueError(
                f"{loaded.name} reads {reads} and has no tokenizer for text. Give --{kind} FILE on the command line, "
                f'or attnorm.models.inputs.Media(Path(FILE), "{kind}") in Python.'
            )
        raise ValueError(
            f"{loaded.name}: expected a tokenizer, got none ({loaded.tokenizer_problem or 'none was given'}). "
            "Save it in the folder of the model, or name one (tokenizer=..., --tokenizer on the command line). "
            "In Python, token ids or a dict of model inputs need no tokenizer."
        )
    return loaded.tokenizer


def _from_mapping(inputs: Mapping[Any, Any]) -> list[Text]:
    if not inputs:
        raise ValueError("expected at least one input to run the model on, got none.")
    if any(name in inputs for name in MODEL_INPUTS):
        return [Text("inputs", _model_inputs(inputs, "inputs"))]
    return [_make_text(str(name), content) for name, content in inputs.items()]


def _model_inputs(inputs: Mapping[Any, Any], name: str) -> dict[str, Tensor]:
    if not any(key in inputs for key in MODEL_INPUTS):
        raise ValueError(
            f"expected model inputs in {name!r} (one of {', '.join(sorted(MODEL_INPUTS))}), got a dict with "
            f"{', '.join(map(repr, inputs)) or 'nothing'}. Give texts in one dict name -> text."
        )
    return {str(key): torch.as_tensor(value) for key, value in inputs.items() if value is not None}


def _make_text(name: str, source: Any) -> Text:
    if isinstance(source, Text):
        return replace(_make_text(source.name, source.content), file=source.file, media=source.media)
    if isinstance(source, Media):
        return Text(name, source, media=source.kind if text_name(source.path) == name else None)
    if isinstance(source, str | Path):
        content = read_text(source) if isinstance(source, Path) else source
        _check_not_blank(name, content)
        if isinstance(source, str):
            _reject_file_name(source)
        return Text(name, content, file=isinstance(source, Path) and text_name(source) == name)
    if isinstance(source, Mapping):
        return Text(name, _model_inputs(source, name))
    if _is_token_ids(source):
        ids = torch.as_tensor(source, device="cpu")
        if ids.numel() == 0:
            raise ValueError(f"{name!r}: expected token ids, got none.")
        if ids.dim() > 2:
            raise ValueError(
                f"{name!r}: expected token ids of shape (length,) or (batch, length), got {tuple(ids.shape)}."
            )
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(f"{name!r}: expected token ids of an integer dtype, got {ids.dtype}.")
        return Text(name, ids.long())
    raise _unknown_input_error(source)


def _check_not_blank(name: str, content: str) -> None:
    if not content.strip():
        raise ValueError(f"{name!r} is empty: expected at least one token to run the model on.")


def _reject_file_name(text: str) -> None:
    """Reject the name of a file as a text: measuring the tokens of the name would mislead."""
    try:
        is_file = "\n" not in text and Path(text).expanduser().is_file()
    except (OSError, ValueError, RuntimeError):  # too long for a name, a null byte, an unknown ~user
        return
    if is_file:
        raise ValueError(
            f"{text!r} is a file, but a str stands for the text itself. Pass pathlib.Path({text!r}) to measure "
            "its content."
        )
    if FILE_NAME.fullmatch(text):
        raise ValueError(
            f"expected a text, got {text!r}, which looks like a file name, but there is no such file. Pass the "
            "text, or a pathlib.Path of a file."
        )


def _is_token_ids(inputs: Any) -> bool:
    if isinstance(inputs, Tensor) or type(inputs).__module__ == "numpy":
        return True
    return isinstance(inputs, list | tuple) and bool(inputs) and all(type(token) is int for token in inputs)


def _unknown_input_error(inputs: Any) -> ValueError:
    return ValueError(
        f"cannot run a model on {type(inputs).__name__}; give a text, a Path, several of them, a dict name -> text, "
        "token ids, or a dict of model inputs such as {'input_ids': ...} or {'pixel_values': ...}"
    )


def _tokenize(text: Text, loaded: LoadedModel, length: int | None) -> dict[str, Tensor]:
    tokenizer = needs_tokenizer(loaded)
    content = str(text.content)
    _check_not_blank(text.name, content)
    start = content if length is None else content[: length * CHARACTERS_PER_TOKEN]
    encoded = _encode(tokenizer, start, length)
    if length is not None and encoded["input_ids"].shape[1] < length and len(start) < len(content):
        encoded = _encode(tokenizer, content, length)
    _cut_ids(text, encoded["input_ids"], length)
    accepted = inspect.signature(loaded.model.forward).parameters
    return {name: value for name, value in encoded.items() if name in accepted}


def _encode(tokenizer: Any, content: str, length: int | None) -> dict[str, Tensor]:
    """Tokenize with the tokenizer's own special tokens, which count towards the length."""
    encoded = tokenizer(content, return_tensors="pt", truncation=length is not None, max_length=length, verbose=False)
    return dict(encoded)


def _cut_ids(text: Text, ids: Tensor, length: int | None) -> Tensor:
    if length is None:
        return ids
    if length < 1:
        raise ValueError(f"expected a length of at least 1 token, got {length}.")
    if ids.shape[1] < length:
        raise ValueError(
            f"{text.name!r} has {ids.shape[1]} tokens, fewer than the length {length}. Use a longer text or a "
            "smaller length."
        )
    return ids[:, :length]


def _cut_inputs(text: Text, inputs: dict[str, Tensor], length: int) -> dict[str, Tensor]:
    ids = inputs.get("input_ids")
    if ids is None or ids.dim() != 2:
        raise ValueError(
            f"{text.name!r}: expected input_ids to cut to {length} tokens, got none. Leave the length out."
        )
    _cut_ids(text, ids, length)
    return {
        name: value[:, :length] if value.dim() == 2 and value.shape == ids.shape else value
        for name, value in inputs.items()
    }


def _check_ids(text: Text, ids: Tensor | None, loaded: LoadedModel) -> None:
    if ids is None:
        return
    embeddings = _input_embeddings(loaded.model)
    if isinstance(embeddings, nn.Embedding) and ids.numel():
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= embeddings.num_embeddings:
            raise ValueError(
                f"{text.name!r}: expected token ids from 0 to {embeddings.num_embeddings - 1} for {loaded.name}, "
                f"got {low if low < 0 else high}. Make the ids with the tokenizer of this model."
            )


def _add_decoder_inputs(inputs: dict[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """Add the inputs of the decoder for an encoder-decoder model: the same tokens, shifted by one."""
    accepted = inspect.signature(model.forward).parameters
    if not model.config.is_encoder_decoder or "decoder_input_ids" not in accepted:
        return inputs
    if any(name in inputs for name in ("decoder_input_ids", "decoder_inputs_embeds")):
        return inputs
    first = next(iter(inputs.values()))
    start = torch.full((first.shape[0], 1), _start_token(model), dtype=torch.long, device=first.device)
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if ids is None:
        return {**inputs, "decoder_input_ids": start}
    later = torch.cat([start, ids[:, :-1]], dim=1)
    if mask is None or mask.shape != ids.shape or "decoder_attention_mask" not in accepted:
        return {**inputs, "decoder_input_ids": later}
    # The decoder gets the same padding. With padding on the left, its start token comes right after the padding.
    later = later.scatter(1, mask.bool().int().argmax(1, keepdim=True), start)
    return {**inputs, "decoder_input_ids": later, "decoder_attention_mask": mask}


def _start_token(model: PreTrainedModel) -> int:
    for config in (getattr(model, "generation_config", None), model.config):
        for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
            if isinstance(token := getattr(config, name, None), int):
                return token
    return 0


def _input_device(model: PreTrainedModel) -> torch.device:
    """Return the device for inputs; a model may be spread over several devices."""
    first = _input_embeddings(model) or model
    device: torch.device = next(first.parameters()).device
    return device if device.type != "meta" else model.device


def _input_embeddings(model: PreTrainedModel) -> nn.Module | None:
    """Return the input embeddings; None if there is more than one kind (CLIP reads texts and images)."""
    try:
        embeddings: nn.Module | None = model.get_input_embeddings()
    except NotImplementedError:
        return None
    return embeddings


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
            raise ValueError(f"bos={bos} applies to texts, but {text.name!r} contains token ids. Leave bos out.")
        return Tokens(torch.atleast_2d(text.content))
    if not isinstance(text.content, str):
        raise TypeError(f"expected a text or token ids, got {type(text.content).__name__} for {text.name!r}")
    tokenizer, content = needs_tokenizer(loaded), text.content
    _check_not_blank(text.name, content)
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
