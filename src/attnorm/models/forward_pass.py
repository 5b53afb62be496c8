"""Run a model on prepared inputs, and compute its loss on the text from the same pass.

The measured pass stops before the language-model head. For the loss, the head runs on the hidden states in chunks: we
call the model's own forward with its base model replaced by a module that returns these states. So the model itself
scales and caps the logits.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from attnorm.models.load import LoadedModel
from attnorm.models.threads import exclusive, only_in_this_thread

LOGITS_AT_ONCE = 2**24  # 64 MiB in float32


def run(loaded: LoadedModel, model_inputs: Mapping[str, Tensor]) -> Any:
    """Run one forward pass in evaluation mode, without gradients, cache and language-model head.

    The head is left out because its logits (length x vocabulary) take most of the memory and are not used.
    """
    model = loaded.model
    target = _base_model(model, model_inputs)
    head: Any = model.get_output_embeddings() if target is model else None  # type: ignore[no-untyped-call]
    options = {"use_cache": False} if "use_cache" in inspect.signature(target.forward).parameters else {}
    with exclusive(model), torch.no_grad(), _eval_mode(model), _stopping_before(head):
        try:
            return target(**model_inputs, **options)
        except _HeadReached as reached:
            return reached.hidden_states


def _base_model(model: PreTrainedModel, model_inputs: Mapping[str, Tensor]) -> nn.Module:
    """Return the base model, or the whole model if the base model does not take these inputs (DINOv3)."""
    base: nn.Module = model.base_model
    return base if model_inputs.keys() <= inspect.signature(base.forward).parameters.keys() else model


class _HeadReached(Exception):  # noqa: N818 - not an error
    def __init__(self, hidden_states: Tensor) -> None:
        super().__init__()
        self.hidden_states = hidden_states


@contextmanager
def _stopping_before(head: nn.Module | None) -> Iterator[None]:
    """Stop the forward pass before the head, by an exception; for models without a base model inside (T5)."""

    def stop(module: nn.Module, args: tuple[Any, ...]) -> None:
        raise _HeadReached(args[0])

    handle = head.register_forward_pre_hook(only_in_this_thread(stop)) if isinstance(head, nn.Module) else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode, and restore training mode afterwards for the modules that had it."""
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True


@dataclass(frozen=True)
class Reading:
    """First token of an input, and the mean next-token loss in nats over `loss_tokens` tokens; None if unknown."""

    first_token: str | None
    loss: float | None
    loss_tokens: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def reading(loaded: LoadedModel, model_inputs: Mapping[str, Tensor], output: Any) -> Reading:
    """Return first token and loss of an input. output: what `run` returned for it."""
    ids = model_inputs.get("input_ids")
    hidden = getattr(output, "last_hidden_state", None)
    loss, count = None, 0
    if predicts_next_token(loaded) and ids is not None and ids.dim() == 2 and isinstance(hidden, Tensor):
        loss, count = _mean_loss(loaded.model, ids, model_inputs.get("attention_mask"), output)
    return Reading(_first_token(loaded, ids), loss, count)


def predicts_next_token(loaded: LoadedModel) -> bool:
    model: Any = loaded.model
    if model.config.is_encoder_decoder or not model.can_generate() or model.base_model is model:
        return False
    has_base = any(name == model.base_model_prefix for name, _ in model.named_children())
    return has_base and isinstance(model.get_output_embeddings(), nn.Module)


def _first_token(loaded: LoadedModel, ids: Tensor | None) -> str | None:
    if ids is None or not ids.numel() or loaded.tokenizer is None:
        return None
    first = ids.flatten()[0]
    return str(loaded.tokenizer.decode([int(first)]))  # type: ignore[no-untyped-call,unused-ignore]


@torch.no_grad()
def _mean_loss(model: Any, ids: Tensor, mask: Tensor | None, output: Any) -> tuple[float | None, int]:
    hidden: Tensor = output.last_hidden_state
    if hidden.shape[:2] != ids.shape:
        return None, 0
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None or mask.shape != ids.shape else mask.bool()
    counts = (real[:, 1:] & real[:, :-1]).to(hidden.device)
    targets = ids[:, 1:].to(hidden.device)
    vocabulary = model.get_output_embeddings().weight.shape[0]
    step = max(1, LOGITS_AT_ONCE // max(1, vocabulary * len(ids)))
    total, tokens = 0.0, 0
    for start in range(0, targets.shape[1], step):
        chunk = slice(start, min(start + step, targets.shape[1]))
        logits = head_logits(model, ids[:, chunk], hidden[:, chunk], type(output))
        losses = cross_entropy(logits.float().flatten(0, 1), targets[:, chunk].flatten(), reduction="none")
        counted = counts[:, chunk].flatten()
        total += float(losses[counted].double().sum())
        tokens += int(counted.sum())
    return (total / tokens, tokens) if tokens and total == total and abs(total) != float("inf") else (None, 0)


@torch.no_grad()
def head_logits(model: Any, ids: Tensor, hidden: Tensor, output: Any) -> Tensor:
    """Return the logits (B, L, V) that the model's own forward computes from these final hidden states.

    output: class of the base model's output.
    """
    with exclusive(model), _base_model_returns(model, output(last_hidden_state=hidden)):
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


class _FixedOutput(nn.Module):
    """Replaces the base model and returns the same output to this thread; hooks of the base model do not run."""

    def __init__(self, base: nn.Module, output: Any) -> None:
        super().__init__()
        self.__dict__["given"] = (base, output, get_ident())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        base, output, thread = self.__dict__["given"]
        return output if get_ident() == thread else base(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["given"][0], name)


@contextmanager
def _base_model_returns(model: Any, output: Any) -> Iterator[None]:
    prefix, base = model.base_model_prefix, model.base_model
    setattr(model, prefix, _FixedOutput(base, output))
    try:
        yield
    finally:
        setattr(model, prefix, base)
