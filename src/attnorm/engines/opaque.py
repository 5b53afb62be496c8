"""Blocked attention as one operator of a compiled graph.

Traced, its loops would be unrolled into the graph: every block of queries and, in each, every step of the search for a
threshold. Here the graph holds one call, and when it runs, the blocks run as they do uncompiled.
"""

from typing import Any

import torch
from torch import Tensor

from attnorm.engines.blocked import Run, attend_in_blocks, gradients_in_blocks, working_tensors
from attnorm.engines.inputs import Inputs
from attnorm.normalizers.block import Positions
from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.handle import named_by

# Of the normalizer, the tensors with a gradient, the tensors without, and the settings. `names` are those of `learned`.
CALL = (
    "Tensor handle, Tensor q, Tensor k, Tensor v, Tensor? hidden_states, Tensor? bias, Tensor[] learned, "
    "Tensor? mask, Tensor? query_positions, Tensor? key_positions, Tensor? seed, "
    "str names, bool causal, float scale, float? softcap, float dropout"
)
# The search for a threshold asks the device whether it is done, which a recorded CUDA graph cannot.
TAGS = (torch.Tag.cudagraph_unsafe,)

torch.library.define("attnorm::blocked", f"({CALL}) -> Tensor", tags=TAGS)
torch.library.define("attnorm::blocked_backward", f"(Tensor grad, {CALL}) -> Tensor[]", tags=TAGS)


def applies(normalizer: Normalizer) -> bool:
    """An exported program outlives this process, and the normalizers that it could name."""
    return torch.compiler.is_compiling() and not torch.compiler.is_exporting() and normalizer.handle is not None


def blocked(inputs: Inputs, normalizer: Normalizer) -> Tensor:
    """Output (B, H, Q, D), as `attnorm.engines.blocked.blocked` computes it."""
    learned = {name: p for name, p in normalizer.named_parameters() if p.requires_grad}
    output: Tensor = torch.ops.attnorm.blocked(
        normalizer.handle,
        *working_tensors(inputs),
        inputs.hidden_states,
        inputs.bias,
        list(learned.values()),
        inputs.mask,
        *_positions(inputs),
        torch.randint(2**62, (), device=inputs.q_BHQD.device) if inputs.dropout > 0 else None,
        " ".join(learned),
        inputs.causal,
        inputs.scale,
        inputs.softcap,
        inputs.dropout,
    )
    return output.to(inputs.q_BHQD.dtype)


def _positions(inputs: Inputs) -> tuple[Tensor | None, Tensor | None]:
    """Of the queries (Q,) or (B, Q) and of the keys, where the caller gave them."""
    if inputs.positions is None:
        return None, None
    every = Positions.of(inputs.positions, inputs.weights_shape, inputs.q_BHQD.device)
    query, key = (p if p.dim() == 1 else p[:, 0] for p in (every.query, every.key))
    return query, key


@torch.library.impl("attnorm::blocked", "default")
def _forward(*call: Any) -> Tensor:
    return attend_in_blocks(*_unpacked(call))


@torch.library.impl("attnorm::blocked_backward", "default")
def _backward(grad: Tensor, *call: Any) -> list[Tensor]:
    run, *tensors = _unpacked(call)
    return [total for total in gradients_in_blocks(run, grad, *tensors) if total is not None]


def _unpacked(call: tuple[Any, ...]) -> Any:
    """The run, q, k, v, hidden_states, bias and the learned parameters by their names in the run."""
    handle, q, k, v, hidden_states, bias, learned, mask, query, key, seed, names, causal, scale, softcap, dropout = call
    normalizer = named_by(handle)
    assert isinstance(normalizer, Normalizer)
    positions = None if query is None else Positions(query, key)
    inputs = Inputs(q, k, v, mask, causal, scale, positions, hidden_states, softcap, bias, dropout)
    run = Run(inputs, normalizer)
    run.seed = None if seed is None else int(seed)
    by_name = {f"normalizer.{name}": p for name, p in zip(names.split(), learned, strict=True)}
    return run, q, k, v, hidden_states, bias, by_name


def _output_shape(handle: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])


def _gradient_shapes(
    grad: Tensor,
    handle: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hidden_states: Tensor | None,
    bias: Tensor | None,
    learned: list[Tensor],
    *rest: Any,
) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in (q, k, v, hidden_states, bias, *learned) if t is not None]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    handle, q, k, v, hidden_states, bias, learned, mask, query, key, seed, *ctx.settings = inputs
    ctx.save_for_backward(handle, q, k, v, hidden_states, bias, mask, query, key, seed, *learned)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *first, mask, query, key, seed = ctx.saved_tensors[:10]
    learned = list(ctx.saved_tensors[10:])
    found = iter(torch.ops.attnorm.blocked_backward(grad, *first, learned, mask, query, key, seed, *ctx.settings))
    wanted = [None if t is None else next(found) for t in first[1:]]
    return None, *wanted, list(found), None, None, None, None, *(None for _ in ctx.settings)


torch.library.register_fake("attnorm::blocked", _output_shape)
torch.library.register_fake("attnorm::blocked_backward", _gradient_shapes)
torch.library.register_autograd("attnorm::blocked", _gradients, setup_context=_remember)
