"""Output gates: a model multiplies the attention output of head h by sigmoid(W x); here that factor is measured.

Qiu et al. 2025, https://arxiv.org/abs/2505.06708. Qwen3-Next, AFMoE and other model families have such gates, each in
its own code, so we measure them. In modules whose code mentions a gate, we compare the result of the attention function
with the input of the output projection. It is gated if every entry became smaller without changing its sign; a softplus
gate may also enlarge it. If a module changes the output before the gate (a norm in MuseSpark), we compare the result of
that module. A head may put all of its weight on the first key while its gate is closed; then this sink has no effect.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from attnorm.metrics.call import AttentionCall
from attnorm.metrics.normalized import MODEL
from attnorm.metrics.rows import measure_rows
from attnorm.metrics.sampling import evenly_spaced
from attnorm.models.dispatch import attention_sites
from attnorm.models.observe import observe
from attnorm.models.threads import only_in_this_thread
from attnorm.normalizers.contract import Mechanism

PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense", "wo")
ROWS = 64  # of the first sequence's later half
SAME = 1e-4  # relative difference up to which the projection receives the output itself
ROUNDING = 1e-2  # of half precision: a gate keeps signs and makes nothing larger, where a norm may


@dataclass(frozen=True)
class HeadGates:
    """One number per head, means over the sampled rows."""

    gate: Tensor  # |gated output| / |output|
    gated_sink_mass: Tensor  # sink mass times that


@dataclass
class OutputGates:
    """The gates of all layers that have some, by kind and layer."""

    layers: dict[tuple[str, int], HeadGates] = field(default_factory=dict)


@contextmanager
def output_gates(model: nn.Module) -> Iterator[OutputGates]:
    """Within the with statement, measure the gates of every attention module that runs and has gates."""
    measured = OutputGates()
    waiting: dict[nn.Module, list[tuple[AttentionCall, Tensor]]] = {}
    running: list[nn.Module] = []

    def enters(module: nn.Module, args: tuple[Any, ...]) -> None:
        running[:] = [module]

    def on_output(call: AttentionCall, output: Tensor) -> None:
        if running and not isinstance(call.normalizer, Mechanism):
            waiting.setdefault(running[0], []).append((call, output))

    def changes(module: nn.Module, part: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        outputs = waiting.get(module, [])
        if len(outputs) == 1 and _is_output(outputs[0][1], args) and isinstance(result, Tensor):
            call, output = outputs[0]
            if result.numel() == output.numel():
                waiting[module] = [(call, result.reshape(output.shape))]

    def projects(module: nn.Module, projection: nn.Module, args: tuple[Any, ...]) -> None:
        outputs = waiting.pop(module, [])
        if len(outputs) == 1 and args and isinstance(args[0], Tensor):  # differential attention combines several
            call, output = outputs[0]
            gates = _gates(call, output, args[0], may_grow=_mentions("softplus", type(module).forward, unknown=False))
            if gates is not None:
                measured.layers[call.kind, call.layer] = gates

    sites = attention_sites(model)
    gated = [module for module in sites if any(_mentions("gate", type(part).forward) for part in _code_of(module))]
    with ExitStack() as until_exit:
        for module in gated:
            projection = _projection_of(module)
            if projection is not None:
                until_exit.callback(module.register_forward_pre_hook(only_in_this_thread(enters)).remove)
                for part in module.children():
                    change = only_in_this_thread(partial(changes, module))
                    until_exit.callback(part.register_forward_hook(change).remove)
                project = only_in_this_thread(partial(projects, module))
                until_exit.callback(projection.register_forward_pre_hook(project).remove)
        if gated:
            until_exit.enter_context(observe(model, lambda call: None, check=False, on_output=on_output))
        yield measured


def _projection_of(module: nn.Module) -> nn.Module | None:
    """Return the output projection of an attention module, or of a part of it (NeoMME)."""
    for holder in (module, *module.children()):
        for name in PROJECTIONS:
            if isinstance(projection := getattr(holder, name, None), nn.Module):
                return projection
    return None


def _code_of(module: nn.Module) -> list[nn.Module]:
    """Return the modules whose code may apply a gate: the attention module and the owner of the projection."""
    projection = _projection_of(module)
    return [module, *(part for part in module.children() if any(child is projection for child in part.children()))]


@lru_cache(maxsize=1000)
def _mentions(word: str, forward: Callable[..., Any], unknown: bool = True) -> bool:
    """Whether the source code of a forward mentions a word. unknown: result if there is no source code."""
    try:
        return word in inspect.getsource(forward)
    except (OSError, TypeError):
        return unknown


def _is_output(output: Tensor, args: tuple[Any, ...]) -> bool:
    """Whether a module receives the output of the attention function."""
    received = args[0] if args else None
    if not isinstance(received, Tensor) or received.numel() != output.numel():
        return False
    return received.data_ptr() == output.data_ptr() or torch.equal(received.reshape(output.shape), output)


@torch.no_grad()
def _gates(call: AttentionCall, output: Tensor, projected: Tensor, *, may_grow: bool = False) -> HeadGates | None:
    """Compute the gates of a call; None if its output is not gated.

    output: result of the attention function, (B, Q, H, E). projected: input of the output projection. may_grow: whether
    the gate may exceed 1.
    """
    if projected.numel() != output.numel() or projected.data_ptr() == output.data_ptr():
        return None
    rows = evenly_spaced(torch.arange(output.shape[1] // 2, output.shape[1]), ROWS)
    before = output[0, rows].float()  # (R, H, E)
    after = projected.reshape(output.shape)[0, rows].float()
    size = before.abs().max()
    if bool((before - after).abs().max() <= SAME * size):
        return None
    grown = after.abs() > (1 + ROUNDING) * before.abs() + SAME * size
    turned = (after * before < 0) & (after.abs() > SAME * size)
    if bool((turned if may_grow else grown | turned).any()):
        return None
    gate = (torch.linalg.vector_norm(after, dim=-1) / torch.linalg.vector_norm(before, dim=-1)).T  # (H, R)
    first_item = replace(
        call,
        **{name: getattr(call, name)[:1] for name in ("query_BHQD", "key_BGKD", "value_BGKE")},
        mask=None if call.mask is None else call.mask[:1],
        bias=None if call.bias is None else call.bias[:1],
    )
    sink = measure_rows(first_item, [None], rows, (), names=("sink_mass",))[MODEL].values["sink_mass"][0]
    return HeadGates(gate.nanmean(-1).cpu(), (gate * sink.to(gate.device, gate.dtype)).nanmean(-1).cpu())
