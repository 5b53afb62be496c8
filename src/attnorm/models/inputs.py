"""Turn texts, token ids and dicts of model inputs into the arguments of a model's forward call."""

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

# A mapping with one of these is a dict of model inputs; any other maps names to texts.
MODEL_INPUTS = {
    *("input_ids", "inputs_embeds", "decoder_input_ids", "input_features", "input_values"),
    *("pixel_values", "pixel_values_videos", "past_values"),
}
FILE_NAME = re.compile(r"\S+\.(txt|md|xz)")
CHARACTERS_PER_TOKEN = 16  # more than any tokenizer needs on average: so much of a long text is enough


@dataclass(frozen=True)
class Media:
    """A file that a model reads through its processor (models.media), e.g. Media(Path("cat.png"), "image")."""

    path: Path
    kind: Literal["image", "audio"]


@dataclass(frozen=True)
class Text:
    """One thing to run a model on, under the name that results carry."""

    name: str
    content: str | Tensor | Mapping[str, Tensor] | Media
    file: bool = False  # of the same name, which holds it


def texts_from(inputs: Any) -> list[Text]:
    """A text, a Path of one, token ids (tensor or list), several of these, a dict name -> one, or model inputs."""
    if isinstance(inputs, Mapping):
        return _from_mapping(inputs)
    if isinstance(inputs, Path):
        return [_text(text_name(inputs), inputs)]
    if isinstance(inputs, Media):
        return [Text(text_name(inputs.path), inputs)]
    if isinstance(inputs, str | Text) or _are_ids(inputs):
        return [_text("text", inputs)]
    if not isinstance(inputs, Iterable) or isinstance(inputs, bytes):
        raise _unknown(inputs)
    listed = list(inputs)
    if not listed:
        raise ValueError("there is nothing to run the model on: the inputs are empty")
    return [
        _text(text_name(one) if isinstance(one, Path) else f"text {number}", one)
        for number, one in enumerate(listed, start=1)
    ]


def prepared(text: Text, loaded: LoadedModel, length: int | None) -> dict[str, Tensor]:
    """The model's inputs for the first `length` tokens, or for all there are; on the model's device."""
    if isinstance(text.content, Mapping):
        given = {name: torch.as_tensor(value) for name, value in text.content.items()}
        chosen = given if length is None else _cut(text, given, length)
    elif isinstance(text.content, Tensor):
        ids = text.content.reshape(1, -1) if text.content.dim() < 2 else text.content
        chosen = {"input_ids": _long_enough(text, ids, length)}
    else:
        chosen = _tokenized(text, loaded, length)
    return ready(text, chosen, loaded)


def ready(text: Text, chosen: dict[str, Tensor], loaded: LoadedModel) -> dict[str, Tensor]:
    """Model inputs with valid ids, with what a decoder reads, on the model's device."""
    _check_ids(text, chosen.get("input_ids"), loaded)
    device = _device_of(loaded.model)
    return {name: value.to(device) for name, value in _completed(chosen, loaded.model).items()}


def needs_tokenizer(loaded: LoadedModel) -> Any:
    """The tokenizer, or an error that says how to give one."""
    if loaded.tokenizer is None:
        raise ValueError(
            f"{loaded.name} has no tokenizer ({loaded.tokenizer_problem or 'none was given'}); "
            "save its tokenizer in the same folder, or name one (tokenizer=..., --tokenizer on the command line); "
            "in Python token ids or a dict of model inputs do without"
        )
    return loaded.tokenizer


def _from_mapping(inputs: Mapping[Any, Any]) -> list[Text]:
    if not inputs:
        raise ValueError("there is nothing to run the model on: the inputs are empty")
    if any(name in inputs for name in MODEL_INPUTS):
        return [Text("inputs", _model_inputs(inputs, "inputs"))]
    return [_text(str(name), one) for name, one in inputs.items()]


def _model_inputs(given: Mapping[Any, Any], name: str) -> dict[str, Tensor]:
    if not any(each in given for each in MODEL_INPUTS):
        raise ValueError(
            f"expected model inputs in {name!r} (one of {', '.join(sorted(MODEL_INPUTS))}), got a dict with "
            f"{', '.join(map(repr, given)) or 'nothing'}. Give texts in one dict name -> text."
        )
    return {str(each): torch.as_tensor(value) for each, value in given.items() if value is not None}


def _text(name: str, one: Any) -> Text:
    if isinstance(one, Text):
        return replace(_text(one.name, one.content), file=one.file)
    if isinstance(one, Media):
        return Text(name, one)
    if isinstance(one, str | Path):
        content = read_text(one) if isinstance(one, Path) else one
        if not content.strip():
            raise ValueError(f"{name!r} is empty; there is nothing to run the model on")
        if isinstance(one, str):
            _reject_file_name(one)
        return Text(name, content, file=isinstance(one, Path) and text_name(one) == name)
    if isinstance(one, Mapping):
        return Text(name, _model_inputs(one, name))
    if _are_ids(one):
        ids = torch.as_tensor(one, device="cpu")
        if ids.numel() == 0:
            raise ValueError(f"{name!r} holds no token ids; there is nothing to run the model on")
        if ids.dim() > 2:
            raise ValueError(
                f"token ids have one dimension or two (batch, length); {name!r} has shape {tuple(ids.shape)}"
            )
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(f"token ids are whole numbers; {name!r} has {ids.dtype}")
        return Text(name, ids.long())
    raise _unknown(one)


def _reject_file_name(text: str) -> None:
    """Reject the name of a file as a text: measuring the tokens of the name would mislead."""
    try:
        is_file = "\n" not in text and Path(text).expanduser().is_file()
    except (OSError, ValueError, RuntimeError):  # too long for a name, a null byte, an unknown ~user
        return
    if is_file:
        raise ValueError(
            f"{text!r} is a file, and a str is measured as it stands; give pathlib.Path({text!r}) to measure what the "
            "file holds"
        )
    if FILE_NAME.fullmatch(text):
        raise ValueError(
            f"there is no file {text!r}, and a str is measured as it stands; give the text, or a pathlib.Path of a file"
        )


def _are_ids(inputs: Any) -> bool:
    if isinstance(inputs, Tensor) or type(inputs).__module__ == "numpy":
        return True
    return isinstance(inputs, list | tuple) and bool(inputs) and all(type(one) is int for one in inputs)


def _unknown(inputs: Any) -> ValueError:
    return ValueError(
        f"cannot run a model on {type(inputs).__name__}; give a text, a Path, several of them, a dict name -> text, "
        "token ids, or a dict of model inputs such as {'input_ids': ...} or {'pixel_values': ...}"
    )


def _tokenized(text: Text, loaded: LoadedModel, length: int | None) -> dict[str, Tensor]:
    tokenizer = needs_tokenizer(loaded)
    content = str(text.content)
    if not content.strip():
        raise ValueError(f"{text.name!r} is empty; there is nothing to run the model on")
    start = content if length is None else content[: length * CHARACTERS_PER_TOKEN]
    encoded = _encode(tokenizer, start, length)
    if length is not None and encoded["input_ids"].shape[1] < length and len(start) < len(content):
        encoded = _encode(tokenizer, content, length)
    _long_enough(text, encoded["input_ids"], length)
    wanted = inspect.signature(loaded.model.forward).parameters
    return {name: value for name, value in encoded.items() if name in wanted}


def _encode(tokenizer: Any, content: str, length: int | None) -> dict[str, Tensor]:
    """Special tokens as the tokenizer itself puts them, and counted."""
    encoded = tokenizer(content, return_tensors="pt", truncation=length is not None, max_length=length, verbose=False)
    return dict(encoded)


def _long_enough(text: Text, ids: Tensor, length: int | None) -> Tensor:
    if length is None:
        return ids
    if length < 1:
        raise ValueError(f"a length is a number of tokens, at least 1; got {length}")
    if ids.shape[1] < length:
        raise ValueError(
            f"{text.name!r} has {ids.shape[1]} tokens, fewer than the length {length} that was asked for; "
            "give a longer text or a smaller length"
        )
    return ids[:, :length]


def _cut(text: Text, given: dict[str, Tensor], length: int) -> dict[str, Tensor]:
    ids = given.get("input_ids")
    if ids is None or ids.dim() != 2:
        raise ValueError(f"{text.name!r} has no input_ids to cut to {length} tokens; leave the length out")
    _long_enough(text, ids, length)
    return {
        name: value[:, :length] if value.dim() == 2 and value.shape == ids.shape else value
        for name, value in given.items()
    }


def _check_ids(text: Text, ids: Tensor | None, loaded: LoadedModel) -> None:
    if ids is None:
        return
    known = _embeddings(loaded.model)
    if isinstance(known, nn.Embedding) and ids.numel():
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= known.num_embeddings:
            raise ValueError(
                f"{text.name!r} holds the token id {low if low < 0 else high}, but {loaded.name} knows 0 to "
                f"{known.num_embeddings - 1}; were the ids made by another model's tokenizer?"
            )


def _completed(given: dict[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """An encoder-decoder also needs what its decoder reads: the same tokens, one step later."""
    wanted = inspect.signature(model.forward).parameters
    if not model.config.is_encoder_decoder or "decoder_input_ids" not in wanted:
        return given
    if any(name in given for name in ("decoder_input_ids", "decoder_inputs_embeds")):
        return given
    first = next(iter(given.values()))
    start = torch.full((first.shape[0], 1), _start_token(model), dtype=torch.long, device=first.device)
    ids, mask = given.get("input_ids"), given.get("attention_mask")
    if ids is None:
        return {**given, "decoder_input_ids": start}
    later = torch.cat([start, ids[:, :-1]], dim=1)
    if mask is None or mask.shape != ids.shape or "decoder_attention_mask" not in wanted:
        return {**given, "decoder_input_ids": later}
    # Padding is no token of the decoder either, and behind padding on the left the start is where the tokens start.
    later = later.scatter(1, mask.bool().int().argmax(1, keepdim=True), start)
    return {**given, "decoder_input_ids": later, "decoder_attention_mask": mask}


def _start_token(model: PreTrainedModel) -> int:
    for config in (getattr(model, "generation_config", None), model.config):
        for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
            if isinstance(found := getattr(config, name, None), int):
                return found
    return 0


def _device_of(model: PreTrainedModel) -> torch.device:
    """Where its inputs go: a model may be spread over several devices."""
    first = _embeddings(model) or model
    device: torch.device = next(first.parameters()).device
    return device if device.type != "meta" else model.device


def _embeddings(model: PreTrainedModel) -> nn.Module | None:
    """What the model's inputs meet first; None where it has no one such thing (CLIP reads texts and images)."""
    try:
        found: nn.Module | None = model.get_input_embeddings()
    except NotImplementedError:
        return None
    return found
