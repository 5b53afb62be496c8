"""Load a model from the Hugging Face hub, a folder, a .gguf file or this package, with clear errors.

Weights are read from safetensors, GGUF, and pickles that hold tensors only. Code of a repository runs only if the
caller allows it.
"""

import os
import pickle
import re
import shlex
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

from attnorm.models.output_head import restore_output
from attnorm.models.private_names import commit_hash, find_file, loaded_from, uncompiled
from attnorm.models.saving import restore_normalizers, with_known_loss
from attnorm.models.source import (
    BUNDLED,
    GGUF,
    CannotLoad,
    commit_of,
    did_you_mean,
    find,
    in_its_folder,
    is_gguf,
    unreachable,
)
from attnorm.models.threads import exclusive
from attnorm.models.untrusted import check_config, check_gguf, ignore_foreign_kernels

__all__ = ["BUNDLED", "CannotLoad", "LoadedModel", "load"]

SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"
# Files that a Trainer or accelerate writes beside the weights.
NOT_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|scaler|sampler|rng_state|random_states)")
DTYPES = ("float32", "bfloat16", "float16", "float64")
AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModel")


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, its tokenizer, and the source of both."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str  # hub name, folder name or class name
    revision: str | None = None  # commit hash, if known
    tokenizer_problem: str = ""  # why there is no tokenizer
    tokenizer_given: str | None = None  # source of the tokenizer, if it is not that of the model
    source: str | Path | None = None  # hub name or folder; None for a model that was passed in memory
    trusted: bool = False  # whether code of its repository may run
    requested_name: str | None = None  # the name by which the caller loaded it


def load(
    model: "str | Path | nn.Module | LoadedModel",
    *,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a model with its tokenizer.

    model: hub name, folder, .gguf file, "bundled" (the small model of this package), or a model in memory, which does
    not change. dtype: "auto" for that of the checkpoint (default: float32 on a CPU, else that of the checkpoint).
    device: "auto" spreads the model over all GPUs (default: the GPU if there is one).
    """
    if isinstance(model, LoadedModel):
        return model
    if isinstance(model, nn.Module):
        return _wrap_model(model, tokenizer, {"dtype": dtype, "device": device, "revision": revision})
    if not isinstance(model, str | Path):
        raise ValueError(f"expected a transformers model, a hub name or a folder, got {model!r}")
    _check_device(device)
    precision = _parse_dtype(dtype)
    return _load(model, tokenizer, precision, device, revision, trust_remote_code)


@exclusive(alone=True)
def _load(
    model: str | Path, tokenizer: Any, precision: Any, device: str | None, revision: str | None, trust_remote_code: bool
) -> LoadedModel:
    source, name, local_only = find(model)
    options = {"revision": revision, "trust_remote_code": trust_remote_code, "local_files_only": local_only}
    with _explain_errors(name, source, local_only), silence_transformers():
        location, as_gguf = in_its_folder(Path(source)) if is_gguf(source) else (source, {})
        options |= as_gguf
        if as_gguf:
            check_gguf(Path(source))
        elif isinstance(source, Path):
            check_config(source)
        config = AutoConfig.from_pretrained(location, **options)
        ignore_foreign_kernels(config, name)
        files: dict[str, Any] = {"revision": revision, "local_files_only": local_only}
        pickled = not as_gguf and _are_pickled(source, name, files)
        pretrained = _load_weights(location, config, precision, device, options, pickled)
        if not as_gguf:
            restore_normalizers(pretrained, source, pickles=pickled, **files)
            restore_output(pretrained, source, pickles=pickled, **files)
        read, problem = _load_tokenizer(tokenizer, location, options)
    pretrained.train(False)
    commit = None if isinstance(source, Path) else commit_of(source, revision)
    return LoadedModel(
        pretrained, read, name, commit, problem, _name_of_tokenizer(tokenizer), location, trust_remote_code, str(model)
    )


def _wrap_model(model: nn.Module, tokenizer: Any, options: dict[str, Any]) -> LoadedModel:
    requested = [name for name, value in options.items() if value is not None]
    if requested:
        raise ValueError(
            f"{' and '.join(requested)} cannot be changed for a model that is already in memory. Change the "
            "model itself, e.g. model.to('cuda', torch.float32), and leave the option out."
        )
    plain: Any = uncompiled(model)
    if hasattr(plain, "get_base_model"):
        plain = plain.get_base_model()  # adapters of PEFT sit inside it and stay active
    if not isinstance(plain, PreTrainedModel):
        raise ValueError(
            f"expected a transformers model, a hub name or a folder, got {type(model).__name__}. Measure other "
            "PyTorch models with attnorm.observe()."
        )
    read, problem = _load_tokenizer(tokenizer, None, {}) if tokenizer is not None else (None, "none was given")
    known_as = loaded_from(plain.config).rstrip("/")
    name = Path(known_as).name if Path(known_as).is_dir() else known_as
    commit = commit_hash(plain.config)
    return LoadedModel(plain, read, name or type(plain).__name__, commit, problem, _name_of_tokenizer(tokenizer))


def _check_device(device: str | None) -> None:
    """Try an empty tensor: torch raises a different error for each reason why a device cannot be used."""
    try:
        torch.empty(0, device=None if device == "auto" else device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = _first_line(error)
        if reason.startswith("Expected one of"):  # and then every kind of device that torch has a name for
            reason = "torch knows no device of that name"
        raise CannotLoad(
            f"cannot use the device {device!r} here ({reason}); use {', '.join(map(repr, usable_devices()))} or 'auto'"
        ) from error


def usable_devices() -> list[str]:
    """Kinds of devices that torch can use on this machine."""
    gpu = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu"] if gpu is None else ["cpu", gpu.type]


def _parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | str | None:
    """The dtype, if a model can run in it."""
    parsed = getattr(torch, dtype, None) if isinstance(dtype, str) and dtype != "auto" else dtype
    if dtype in (None, "auto") or (isinstance(parsed, torch.dtype) and str(parsed).removeprefix("torch.") in DTYPES):
        return parsed
    raise CannotLoad(f"a model cannot run in dtype {str(dtype)!r}; use {', '.join(map(repr, DTYPES))} or 'auto'")


def _are_pickled(source: str | Path, name: str, files: dict[str, Any]) -> bool:
    """Whether the weights are pickles, which is followed by a warning; safetensors beside them have priority."""

    def has(file: str) -> bool:
        return any(find_file(source, file + index, **files) for index in ("", ".index.json"))

    if has(SAFETENSORS):
        return False
    if has(PICKLED):
        target = str(source) if isinstance(source, Path) else source.rpartition("/")[2]
        revision = f", revision={files['revision']!r}" if files["revision"] else ""
        code = (
            f"from attnorm.models.load import load; load({str(source)!r}, dtype='auto', device='cpu'{revision})"
            f".model.save_pretrained({target!r})"
        )
        warnings.warn(
            f"{name}: the weights are read from {PICKLED}, a pickle: only tensors, no code (weights_only=True). "
            f"Convert it to safetensors once: python -c {shlex.quote(code)}",
            stacklevel=3,
        )
        return True
    if isinstance(source, Path) and not any(source.glob("*.safetensors")):
        _raise_without_weights(source, name)
    return False


def _raise_without_weights(folder: Path, name: str) -> None:
    others = sorted(
        path.name
        for path in folder.iterdir()
        if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".gguf") and not NOT_WEIGHTS.match(path.name)
    )
    if not others:
        raise CannotLoad(
            f"{name}: expected weights ({SAFETENSORS} or {PICKLED}) beside config.json, got none. Copy them to the "
            "folder."
        )
    raise CannotLoad(
        f"{name}: expected {SAFETENSORS} or {PICKLED}, got {', '.join(others[:3])}. Load it with the code that wrote "
        "it, and save it with save_pretrained()."
    )


def _load_weights(
    source: str | Path, config: Any, precision: Any, device: str | None, options: dict[str, Any], pickled: bool
) -> PreTrainedModel:
    target_device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if precision is None:
        precision = torch.float32 if target_device == "cpu" else "auto"
    as_gguf = "gguf_file" in options
    if pickled:  # otherwise transformers asks a service of the hub to convert the repository
        os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")
    model, about = _model_class(config, options["trust_remote_code"], as_gguf).from_pretrained(
        source,
        config=config,
        dtype=precision,
        weights_only=True,
        **(_dequantized() if as_gguf else {"use_safetensors": not pickled}),
        output_loading_info=True,
        device_map="auto" if target_device == "auto" else None,
        **options,
    )
    prefix = model.base_model_prefix + "." if model.base_model is not model else ""
    lost = sorted(key for key in about["missing_keys"] if key.startswith(prefix) and "pooler" not in key)
    if lost:
        raise CannotLoad(
            f"{source}: the checkpoint has no value for {len(lost)} weights of {type(model).__name__} (the first "
            f"is {lost[0]!r}), which would be random. The folder is incomplete, or its config.json belongs to "
            "another model."
        )
    loaded: PreTrainedModel = model if target_device == "auto" else model.to(target_device)
    return with_known_loss(loaded)


def _dequantized() -> dict[str, Any]:
    """Without this option transformers 5.23 may fetch kernels from the hub, which compute with packed weights."""
    options = getattr(transformers, "GgufConfig", None)  # transformers before 5.23 always dequantizes
    return {} if options is None else {"quantization_config": options(dequantize=True)}


def _model_class(config: Any, trust_remote_code: bool, as_gguf: bool) -> Any:
    """Return the class that the checkpoint was saved from, so that all weights can be loaded."""
    mapped = getattr(config, "auto_map", None) or {}
    if trust_remote_code and any(name in mapped for name in AUTO_CLASSES):
        return getattr(transformers, next(name for name in AUTO_CLASSES if name in mapped))
    for name in getattr(config, "architectures", None) or ():
        model_class = getattr(transformers, name, None)
        if isinstance(model_class, type) and issubclass(model_class, PreTrainedModel):
            return model_class
    if as_gguf and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:  # a .gguf file names no class
        return AutoModelForCausalLM
    return AutoModel


def _load_tokenizer(tokenizer: Any, source: str | Path | None, options: dict[str, Any]) -> tuple[Any, str]:
    if tokenizer is not None and not isinstance(tokenizer, str | Path):
        return tokenizer, ""
    if tokenizer is not None:
        trusted = options.get("trust_remote_code", False)
        try:
            location, _, local_only = find(tokenizer)
            location, as_gguf = in_its_folder(Path(location)) if is_gguf(location) else (location, {})
            tokenizer_options = {"trust_remote_code": trusted, "local_files_only": local_only, **as_gguf}
            return AutoTokenizer.from_pretrained(location, **tokenizer_options), ""
        except (OSError, ValueError, ImportError) as error:
            raise CannotLoad(f"cannot read a tokenizer from {str(tokenizer)!r}: {_first_line(error)}") from error
    try:
        loaded_tokenizer = AutoTokenizer.from_pretrained(source, **options)
        # Without tokenizer files, transformers returns an empty tokenizer that knows no word.
        ordinary = loaded_tokenizer.get_vocab().keys() - {
            token.content for token in loaded_tokenizer.added_tokens_decoder.values()
        }
        return (loaded_tokenizer, "") if len(ordinary) > 1 else (None, "its files are missing")
    except Exception as error:  # a model without text has none; transformers raises various errors for it
        return None, _first_line(error)


def _name_of_tokenizer(tokenizer: Any) -> str | None:
    return str(tokenizer) if isinstance(tokenizer, str | Path) else None


@contextmanager
def _explain_errors(name: str, source: str | Path, local_only: bool) -> Iterator[None]:
    """Raise CannotLoad with an explanation for errors of transformers and the hub."""
    try:
        yield
    except CannotLoad:
        raise
    except SafetensorError as error:
        raise CannotLoad(
            f"{name}: the weights are damaged or truncated ({error}). Download or save them again."
        ) from error
    except pickle.UnpicklingError as error:
        raise CannotLoad(
            f"{name}: expected tensors only in the weights, got a damaged file or other Python objects, which can run "
            f"code when they are read. Get the model as {SAFETENSORS} from its author."
        ) from error
    except Exception as error:  # files from elsewhere: any value of a config may be missing, of a wrong kind or 0
        named = "" if isinstance(source, Path) else f"{name}: "  # the explanation contains the path
        raise CannotLoad(f"{named}{_explain_error(error, source, local_only)}") from error


def _explain_error(error: Exception, source: str | Path, local_only: bool) -> str:
    text = str(error)
    if "trust_remote_code" in text and "execute" in text:
        named = f"{source}: " if isinstance(source, Path) else ""
        return (
            f"{named}the model comes with code of its own, which attnorm does not run by itself; "
            "read that code, then allow it with trust_remote_code=True (--trust-remote-code)"
        )
    if isinstance(source, Path):
        return _explain_local_error(error, source)
    if "safetensors" in text and "does not appear to have" in text:
        return (
            f"the repository has neither {SAFETENSORS} nor {PICKLED}. Look for another revision, or load it with the "
            "code that wrote it, and save it with save_pretrained() to a folder"
        )
    if local_only:
        return unreachable(source)
    if any(sign in text for sign in ("is not a local folder", "Repository Not Found", "not a valid model identifier")):
        hint = did_you_mean(source) or "check the name, or log in if it is private"
        return f"neither a folder here nor a model on the Hugging Face hub; {hint.strip()}"
    return _first_line(error)


def _explain_local_error(error: Exception, source: Path) -> str:
    if is_gguf(source):
        return f"transformers cannot read the file {source}: {_first_line(error)}"
    if not (source / "config.json").is_file():
        files = sorted(path.name for path in source.glob(f"*{GGUF}"))
        return f"expected the folder of a Hugging Face model, got {source} without config.json. " + (
            f"Give the file itself: {source / files[0]}"
            if files
            else f"Give a folder that save_pretrained wrote, a hub name such as 'gpt2', or '{BUNDLED}'."
        )
    if "ignore_mismatched_sizes" in str(error):
        return f"{source}: the weights have other shapes than config.json describes. One of them is of another model."
    impossible = isinstance(error, TypeError | AttributeError | KeyError | ArithmeticError)
    reason = ". A value of config.json is missing or impossible" if impossible else ""
    return f"transformers cannot read the folder {source}: {_first_line(error)}{reason}"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):  # as the errors of a config's fields
        return f"{lines[0]} {lines[1]}"
    return lines[0] if lines else type(error).__name__


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Turn off progress bars and warnings of transformers."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
