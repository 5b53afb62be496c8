"""Observe every attention call of a model without changing what it computes.

At each call, an attention module of transformers gets its kernel from `AttentionInterface.get_interface(name,
eager_function)`. While a model is observed, this method returns the same kernel, wrapped so that it records its
arguments first. The model keeps its kernel name, because masks, the eager function of its file and branches inside the
model depend on it. (A new kernel name without a mask function of that name would make a decoder bidirectional.)

A model may change its logits in a way that no argument of the call shows. All measured numbers would then be wrong.
Therefore `check_output` computes the output of the last query from the recorded call and compares it with the kernel's.
"""

import inspect
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from attnorm.engines.execution import arrival, runs_asynchronously, sent_to_cpu
from attnorm.metrics.call import AttentionCall, Kind
from attnorm.models.dispatch import (
    LayerNumbers,
    UnsupportedModel,
    attention_sites,
    check_observable,
    describe_support,
)
from attnorm.models.hf_call import POSITIONAL, MaskReader, read_call
from attnorm.models.private_names import in_backward_pass, is_compiled, replace_get_interface
from attnorm.models.threads import only_in_this_thread, uncompiled_meanwhile

MAX_PARTS = 256
TOLERANCE = 0.02  # share of the largest value; rounding errors are far below, another formula far above
# Parameters of an attention module's forward that hold the states of another sequence.
OTHER_SEQUENCE = ("key_value_states", "encoder_hidden_states", "cross_attention_states")
_lock = threading.RLock()
_observed: dict[nn.Module, tuple["_Observation", ...]] = {}  # attention module -> its observations, the first one first
_original: list[Any] = []  # AttentionInterface.get_interface, while it is replaced


@contextmanager
def observe(
    model: nn.Module,
    on_call: Callable[[AttentionCall], None],
    *,
    inputs: bool = False,
    check: bool = True,
    on_output: Callable[[AttentionCall, Tensor], None] | None = None,
) -> Iterator[None]:
    """Within the with statement, pass each attention call of the model to `on_call`, then run the model's own kernel.

    The output equals the unobserved one bit for bit, with or without gradients. Calls of other threads are ignored.

    inputs: also record the states that the keys are projected from. check: check one row of every module
    (`check_output`); once per model is enough. on_output: function that gets each call with its output (B, Q, H, E).

    Raises:
        UnsupportedModel: No attention call can be observed.
    """
    check_observable(model)
    observation = _Observation(model, on_call, inputs, check, on_output)
    with ExitStack() as restore:
        _register(observation)
        restore.callback(_unregister, observation)
        modules = [*model.modules()]
        for handle in observation.hooks(modules):
            restore.callback(handle.remove)
        if any(map(is_compiled, modules)):
            restore.enter_context(uncompiled_meanwhile())  # compiled code does not call get_interface
        yield
    for decide in observation.undecided:
        decide()
    if observation.ran and not observation.calls:
        raise UnsupportedModel(
            f"{type(model).__name__} made no call to transformers' attention interface, so that nothing could be "
            "measured. Check whether its configuration bypasses it (GPT-2: reorder_and_upcast_attn). "
            f"{describe_support()}"
        )


class _Observation:
    """One `observe` block: the state of the observed model while it runs."""

    def __init__(
        self,
        model: nn.Module,
        on_call: Callable[[AttentionCall], None],
        inputs: bool,
        check: bool,
        on_output: Callable[[AttentionCall, Tensor], None] | None,
    ) -> None:
        self.on_call = on_call
        self.on_output = on_output
        self.keep_inputs = inputs
        self.thread = threading.get_ident()
        self.sites = attention_sites(model)
        self.read_mask = MaskReader()
        self._forward_parameters = {
            module_class: _forward_parameters(module_class) for module_class in {type(module) for module in self.sites}
        }
        self.ran = False
        self.calls = 0
        self._checked: set[nn.Module] = set() if check else {*self.sites}
        self.undecided: list[Callable[[], None]] = []  # output checks whose numbers are still copied from the GPU
        self._running: dict[nn.Module, _RunningModule] = {}
        self._layers = LayerNumbers(self.sites)

    def hooks(self, modules: Sequence[nn.Module]) -> Iterator[torch.utils.hooks.RemovableHandle]:
        """Register the hooks of the model and its attention modules. modules: all modules, the model first."""

        def begins(inside: list[nn.Module]) -> Callable[..., None]:
            return only_in_this_thread(partial(self._on_forward_start, inside))

        for module in modules:
            if module is modules[0]:
                yield module.register_forward_pre_hook(begins([*self.sites]))
            elif isinstance(module, PreTrainedModel):
                inside = [part for part in module.modules() if part in self.sites]
                yield module.register_forward_pre_hook(begins(inside))
        for module in self.sites:
            yield module.register_forward_pre_hook(only_in_this_thread(self._on_module_enter), with_kwargs=True)
            yield module.register_forward_hook(only_in_this_thread(self._on_module_exit), always_call=True)

    def _on_forward_start(self, inside: list[nn.Module], *_: Any) -> None:
        self.ran = True
        self._layers.restart(inside)

    def _on_module_enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = self._forward_parameters[type(module)]
        arguments = {**dict(zip(names, args, strict=False)), **{k: v for k, v in kwargs.items() if k in names}}
        other = next((arguments[name] for name in OTHER_SEQUENCE if arguments.get(name) is not None), None)
        source = arguments.get(names[0]) if other is None else other
        self._running[module] = _RunningModule(
            layer=self._layers.enter(module), crosses=other is not None, source=source if self.keep_inputs else None
        )

    def _on_module_exit(self, module: nn.Module, *_: Any) -> None:
        self._running.pop(module, None)  # frees the module's input

    def run(self, kernel: str, function: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Pass the arguments to `on_call`, run the kernel, check its output once, and return it."""
        # Gradient checkpointing runs a layer again in the backward pass; this is not a new call of the model.
        if in_backward_pass():
            return function(module, *args, **kwargs)
        call = self._call(kernel, module, dict(zip(POSITIONAL, args, strict=False)) | kwargs)
        self.calls += 1
        self.on_call(call)
        result = function(module, *args, **kwargs)
        if self.on_output is not None:
            self.on_output(call, result[0])
        if module not in self._checked and call.normalizer is None and not call.dropout:
            with torch.no_grad():
                self.undecided.append(check_output(call, result[0], self.sites[module].path, kernel))
            self._checked.add(module)
        return result

    def _call(self, kernel: str, module: nn.Module, arguments: dict[str, Any]) -> AttentionCall:
        running = self._running.get(module) or _RunningModule(0, False, None)
        call = read_call(kernel, module, **arguments, read_mask=self.read_mask)
        kind: Kind = "cross" if running.crosses else call.kind
        return replace(
            call,
            layer=self._layers.within_kind(module, kind, running.layer),
            kind=kind,
            inputs_BKC=_states_of_keys(call.key_BGKD, running.source),
        )


@dataclass(frozen=True)
class _RunningModule:
    """An attention module whose forward is running."""

    layer: int  # index within its stack
    crosses: bool  # whether its keys come from another sequence
    source: Any  # states that the keys are projected from, if they are recorded


def _register(observation: _Observation) -> None:
    with _lock:
        if not _observed:
            _original.append(replace_get_interface(_observing(AttentionInterface.get_interface)))
        for module in observation.sites:
            _observed[module] = (*_observed.get(module, ()), observation)


def _unregister(observation: _Observation) -> None:
    with _lock:
        for module in observation.sites:
            others = tuple(other for other in _observed[module] if other is not observation)
            if others:
                _observed[module] = others
            else:
                del _observed[module]
        if not _observed:
            replace_get_interface(_original.pop())


def _observing(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_interface(self: AttentionInterface, attn_implementation: str | None, default: Callable[..., Any]) -> Any:
        return partial(_run, attn_implementation or "eager", original(self, attn_implementation, default))

    return get_interface


def _run(kernel: str, function: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    for observation in _observed.get(module, ()):  # empty for a module of a model that is not observed
        if observation.thread == threading.get_ident():
            function = partial(observation.run, kernel, function)
    return function(module, *args, **kwargs)


def _forward_parameters(module_class: type[nn.Module]) -> tuple[str, ...]:
    """Return the parameter names of a module's forward, without self and **kwargs."""
    parameters = inspect.signature(module_class.forward).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind != parameter.VAR_KEYWORD)[1:]


def _states_of_keys(key: Tensor, source: Any) -> Tensor | None:
    """Return the states that the keys are projected from; None if a cache contains keys of earlier calls."""
    if not isinstance(source, Tensor) or source.dim() != 3 or source.shape[:2] != (key.shape[0], key.shape[2]):
        return None
    return source.to(key.device)


def check_output(call: AttentionCall, output_BQHE: Tensor, path: str, kernel: str) -> Callable[[], None]:
    """Raise UnsupportedModel if the last query's output is not softmax over the recorded logits times values.

    On a GPU the error is raised by the returned function, which waits for the numbers: call it later.
    """
    numbers = sent_to_cpu(_compare_outputs(call, output_BQHE))
    wait = arrival(output_BQHE.device)
    step = _step(call.query_BHQD)

    def decide() -> None:
        wait()
        visible, error, size, largest = numbers.tolist()
        # A kernel that keeps its logits in half precision rounds a large one by more than 1.
        rounding = math.expm1(min(2 * largest * step, 50.0))
        if visible and error > (TOLERANCE + rounding) * size:
            raise UnsupportedModel(
                f"the attention of {path or 'the model'} (kernel {kernel!r}) is not softmax of the logits that "
                f"its arguments give: the last query's output differs by {error:.3g} where values are up to "
                f"{size:.3g}. It changes logits or weights in a way that its arguments do not show, so that "
                "attnorm would report wrong numbers."
            )

    if runs_asynchronously(output_BQHE):
        return decide
    decide()
    return lambda: None


def _compare_outputs(call: AttentionCall, output_BQHE: Tensor) -> Tensor:
    """Return four numbers: whether any row can be compared, largest difference, largest value, largest logit."""
    logits_BHK, visible_BHK = _last_row(call)
    sink = logits_BHK.new_full((*logits_BHK.shape[:2], 1), -torch.inf)
    if call.sinks_H is not None:
        sink = sink.copy_(call.sinks_H.to(sink)[None, :, None])
    weights_BHK = torch.cat([logits_BHK.masked_fill(~visible_BHK, -torch.inf), sink], -1).softmax(-1)[..., :-1]
    groups = call.value_BGKE.shape[1]
    value_BGKE = call.value_BGKE.to(logits_BHK)
    rebuilt_BHE = _multiply_in_parts(weights_BHK.unflatten(1, (groups, -1)), value_BGKE).flatten(1, 2)
    got_BHE = output_BQHE[:, -1].to(rebuilt_BHE)
    seen_BH = visible_BHK.any(-1) & rebuilt_BHE.isfinite().all(-1) & got_BHE.isfinite().all(-1)
    seen_BGK = visible_BHK.unflatten(1, (groups, -1)).any(2)
    error = (rebuilt_BHE - got_BHE).abs().amax(-1).masked_fill(~seen_BH, 0.0).max()
    size = value_BGKE.abs().amax(-1).masked_fill(~seen_BGK, 0.0).nan_to_num().max()
    largest = logits_BHK.masked_fill(~visible_BHK, 0.0).abs().amax(-1).masked_fill(~seen_BH, 0.0).max()
    return torch.stack([seen_BH.any().to(error), error, size, largest])


def _multiply_in_parts(weights_BGrK: Tensor, value_BGKE: Tensor) -> Tensor:
    """Return weights @ value. On a GPU in parts of the keys: a product with few rows would use few processors."""
    parts = math.gcd(weights_BGrK.shape[-1], MAX_PARTS) if runs_asynchronously(value_BGKE) else 1
    weights = weights_BGrK.unflatten(-1, (parts, -1)).movedim(-2, 2)
    mixed: Tensor = (weights @ value_BGKE.unflatten(2, (parts, -1))).sum(2)
    return mixed


def _last_row(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Return logits and visible keys of the last query, both (B, H, K)."""
    dtype = torch.float64 if call.query_BHQD.dtype == torch.float64 else torch.float32
    query_BH1D = call.query_BHQD[:, :, -1:].to(dtype)
    key_BGKD = call.key_BGKD.to(dtype)
    query_BGrD = query_BH1D[:, :, 0].unflatten(1, (key_BGKD.shape[1], -1))
    logits = (query_BGrD @ key_BGKD.mT).flatten(1, 2) * call.scale
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    if call.bias is not None:
        logits = logits + call.bias[..., -1, :].to(logits)
    visible = torch.ones_like(logits, dtype=torch.bool)
    if call.mask is not None:
        visible = visible & call.mask[..., -1, :]
    return logits, visible


def _step(tensor: Tensor) -> float:
    if tensor.dtype == torch.float32 and tensor.is_cuda:
        return 2.0**-10  # TF32
    return torch.finfo(tensor.dtype).eps
