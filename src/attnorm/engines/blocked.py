"""The engine for every normalizer: attention in blocks of queries, in plain PyTorch.

Memory grows with K times the queries of a block, never with Q x K. The backward pass computes each block again and adds
its gradients in place, so it keeps no matrix of weights either.
"""

from collections.abc import Callable, Iterator
from typing import Any, Never

import torch
from torch import Tensor, nn
from torch.func import functional_call

from attnorm.engines.inputs import HALF, Inputs, under_transform, without_autocast
from attnorm.normalizers.block import Block, Positions, RowsBlock, is_exporting
from attnorm.normalizers.contract import Normalizer

# Elements of one block's logits. Backward of the widest maps holds about forty arrays of this size, 4 MB each. A GPU
# needs larger blocks to be busy, and has the memory.
BLOCK_ELEMENTS = 2**20
CUDA_BLOCK_ELEMENTS = 2**25

# A function that computes the logits (B, H, q, k) of a block of queries (B, H, q, D) and keys (B, H, k, D).
Scores = Callable[[Tensor, Tensor], Tensor]


def blocked(
    inputs: Inputs,
    normalizer: Normalizer,
    *,
    scores: Scores | None = None,
    block_elements: int | None = None,
    measure: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Return the output (B, H, Q, E).

    scores: function for the logits (default: scaled dot product).
    block_elements: logits per block (default: BLOCK_ELEMENTS on a CPU, CUDA_BLOCK_ELEMENTS on a GPU).
    measure: function that computes the output of the forward pass, if there are several blocks; the backward pass is
    the same.
    """
    run = _BlockedCall(
        inputs, normalizer, scores or _scaled_dot_product(inputs.scale), block_elements or _block_elements(inputs)
    )
    dtype = inputs.q_BHQD.dtype
    q, k, v = _in_working_precision(inputs)
    # _BlockedAttention has no rules for torch.func, and an exported graph has no loop over blocks. Both compute all
    # queries as one block, which torch differentiates itself.
    if under_transform() or is_exporting() or run.rows_per_block >= inputs.queries:
        output_of_one_block: Tensor = run(0, inputs.queries, q, k, v, inputs.hidden_states, inputs.bias)
        return output_of_one_block.to(dtype)
    if inputs.dropout > 0:
        run.seed = int(torch.randint(2**62, ()))
    learned = {name: p for name, p in run.named_parameters() if p.requires_grad}
    output: Tensor = _BlockedAttention.apply(  # type: ignore[no-untyped-call]
        run, tuple(learned), measure, q, k, v, inputs.hidden_states, inputs.bias, *learned.values()
    )
    return output.to(dtype)


def in_one_block(inputs: Inputs) -> bool:
    """Whether `blocked` computes all queries at once; torch keeps their weights for the backward pass."""
    return _rows_per_block(inputs, _block_elements(inputs)) >= inputs.queries


def _block_elements(inputs: Inputs) -> int:
    return CUDA_BLOCK_ELEMENTS if inputs.q_BHQD.is_cuda else BLOCK_ELEMENTS


def _rows_per_block(inputs: Inputs, block_elements: int) -> int:
    batch, heads = inputs.q_BHQD.shape[:2]
    return max(1, block_elements // max(1, batch * heads * inputs.keys))


def attend_with_weights(inputs: Inputs, normalizer: Normalizer) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, Q, E) and its weights (B, H, Q, K) in at least float32, computed as one block."""
    q, k, v = _in_working_precision(inputs)
    batch, heads, queries, keys = inputs.weights_shape
    all_elements = batch * heads * max(1, queries) * keys
    run = _BlockedCall(inputs, normalizer, _scaled_dot_product(inputs.scale), all_elements)
    with without_autocast(q.device):
        weights = run.block_weights(0, inputs.queries, q, k, inputs.hidden_states, inputs.bias)
        return (weights @ v).to(inputs.q_BHQD.dtype), weights


def _in_working_precision(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v in at least float32, with one key head per query head."""
    dtype = inputs.q_BHQD.dtype
    working = torch.float32 if dtype in HALF else dtype
    q, k, v = (t.to(working) for t in (inputs.q_BHQD, inputs.k_BGKD, inputs.v_BGKE))
    k, v = (t.repeat_interleave(inputs.groups, dim=1) if inputs.groups > 1 else t for t in (k, v))
    return q, k, v


def _scaled_dot_product(scale: float) -> Scores:
    return lambda q, k: (q * scale) @ k.transpose(-1, -2)


class _BlockedCall(nn.Module):
    """One attention call that computes its queries block by block.

    It is a module so that `named_parameters` and `functional_call` reach the parameters of normalizer and scores.
    """

    def __init__(self, inputs: Inputs, normalizer: Normalizer, scores: Scores, block_elements: int) -> None:
        super().__init__()
        self.inputs, self.normalizer, self.scores = inputs, normalizer, scores
        self.rows_per_block = _rows_per_block(inputs, block_elements)
        self.seed: int | None = None  # random seed of dropout, if the backward pass has to draw the same mask again

    def query_spans(self) -> Iterator[tuple[int, int]]:
        return self.inputs.steps(self.rows_per_block)

    def forward(
        self,
        start: int,
        stop: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        hidden_states: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        """Return the output of the queries start..stop.

        q, hidden_states and bias belong to these queries; k and v are the keys and values that they may see.
        """
        with without_autocast(q.device):
            return self.block_weights(start, stop, q, k, hidden_states, bias) @ v

    def block_weights(
        self, start: int, stop: int, q: Tensor, k: Tensor, hidden_states: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """Return the weights of the queries start..stop, after dropout."""
        keys = k.shape[-2]
        block = Block.of(self._logits(q, k, bias), self.inputs.visible(start, stop, keys))
        positions = self._positions_of_rows(start, stop, keys)
        rows = RowsBlock(block.logits, block.mask, positions, hidden_states, queries=self.inputs.offset + start)
        return self._apply_dropout(self.normalizer.weights(rows), start)

    def slices(self, start: int, stop: int, tensors: "_CallTensors") -> "_CallTensors":
        """Return the parts of q, k, v, hidden_states and bias that the queries start..stop need."""
        q, k, v, hidden_states, bias = tensors
        reach = self.inputs.reach(stop)
        return (
            q[..., start:stop, :],
            k[..., :reach, :],
            v[..., :reach, :],
            None if hidden_states is None else hidden_states[..., start:stop, :],
            None if bias is None else bias[..., start:stop, :reach],
        )

    def _logits(self, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
        logits = self.scores(q, k)
        if self.inputs.softcap is not None:
            logits = self.inputs.softcap * torch.tanh(logits / self.inputs.softcap)
        return logits if bias is None else logits + bias

    def _apply_dropout(self, weights: Tensor, start: int) -> Tensor:
        if self.inputs.dropout == 0:
            return weights
        if self.seed is None:
            return torch.nn.functional.dropout(weights, self.inputs.dropout)
        generator = torch.Generator(weights.device).manual_seed(self.seed + start)
        kept = torch.rand(weights.shape, generator=generator, device=weights.device) >= self.inputs.dropout
        return torch.where(kept, weights, 0.0) / (1 - self.inputs.dropout)

    def _positions_of_rows(self, start: int, stop: int, keys: int) -> Positions | None:
        if self.inputs.positions is None:
            return None
        all_rows = Positions.of(self.inputs.positions, self.inputs.weights_shape, self.inputs.q_BHQD.device)
        query, key = all_rows.query[..., start:stop], all_rows.key[..., :keys]
        return Positions(*(p if p.dim() == 1 else p[:, 0] for p in (query, key)))


_CallTensors = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]  # q, k, v, hidden_states, bias


class _BlockedAttention(torch.autograd.Function):
    """All blocks of a call as one differentiable function of q, k, v, hidden_states, bias and the parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        run: _BlockedCall,
        names: tuple[str, ...],
        measure: Callable[[], Tensor] | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        hidden_states: Tensor | None,
        bias: Tensor | None,
        *parameters: Tensor,
    ) -> Tensor:
        if measure is None:
            output = q.new_empty(*q.shape[:-1], v.shape[-1])
            for start, stop in run.query_spans():
                output[..., start:stop, :] = run(start, stop, *run.slices(start, stop, (q, k, v, hidden_states, bias)))
        else:
            output = measure()
        ctx.run, ctx.names = run, names
        ctx.save_for_backward(q, k, v, hidden_states, bias, *parameters)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        run: _BlockedCall = ctx.run
        q, k, v, hidden_states, bias, *saved = ctx.saved_tensors
        # The parameters as they were in the forward pass: torch.func may have replaced them since.
        parameters = [p.detach().requires_grad_() for p in saved]
        inputs: _CallTensors = (q, k, v, hidden_states, bias)
        totals: Any = tuple(None if t is None else torch.zeros_like(t) for t in inputs)
        parameter_totals = [torch.zeros_like(p) for p in parameters]
        for start, stop in run.query_spans():
            leaves = [
                None if part is None else part.detach().requires_grad_() for part in run.slices(start, stop, inputs)
            ]
            with torch.enable_grad():
                output = functional_call(run, dict(zip(ctx.names, parameters, strict=True)), (start, stop, *leaves))
            differentiated = [leaf for leaf in leaves if leaf is not None] + parameters
            block_grads = torch.autograd.grad(output, differentiated, grad[..., start:stop, :], allow_unused=True)
            targets = [part for part in run.slices(start, stop, totals) if part is not None]  # views of the totals
            for target, block_grad in zip([*targets, *parameter_totals], block_grads, strict=True):
                if block_grad is not None:
                    target += block_grad
        gradients: list[Tensor | None] = [*totals, *parameter_totals]
        if torch.is_grad_enabled():  # with create_graph=True
            present = [i for i, t in enumerate(gradients) if t is not None]
            sources = [t for t in (grad, *ctx.saved_tensors) if t is not None]
            marked = _DifferentiatedOnce.apply(  # type: ignore[no-untyped-call]
                len(present), *(gradients[i] for i in present), *sources
            )
            for i, t in zip(present, marked, strict=True):
                gradients[i] = t
        return None, None, None, *gradients


class _DifferentiatedOnce(torch.autograd.Function):
    """Return gradients unchanged, and raise an error if they are differentiated again.

    Without it, the gradients would count as constants and a second derivative would be silently wrong.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.clone() for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Never:
        raise RuntimeError(
            "expected one derivative of attention in blocks, got a second one. Pass return_weights=True to attention, "
            "which computes all rows at once, or pass fewer queries at a time."
        )
