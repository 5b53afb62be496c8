"""Attention of any normalizer in blocks of queries: memory O(L x block), forward and backward, never L x L.

Backward computes each block again and adds its gradients in place, so nothing of size Q x L is kept either.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Never

import torch
from torch import Tensor, nn
from torch.func import functional_call

from attnorm.engines.inputs import HALF, Inputs, transformed, without_autocast
from attnorm.normalizers.block import Block, Positions, is_exporting
from attnorm.normalizers.contract import Normalizer

# Elements of one block's logits. Backward of the widest maps holds about forty arrays of this size, 4 MB each. A GPU
# needs larger blocks to be busy, and has the memory.
BLOCK_ELEMENTS = 2**20
CUDA_BLOCK_ELEMENTS = 2**25

# Logits from a block of queries (B, H, q, D) and the keys (B, H, l, D).
Scores = Callable[[Tensor, Tensor], Tensor]


def blocked(
    inputs: Inputs, normalizer: Normalizer, *, scores: Scores | None = None, block_elements: int | None = None
) -> Tensor:
    """Output (B, H, Q, E). `scores` replaces the scaled dot product; block_elements: by device unless given."""
    elements = block_elements or (CUDA_BLOCK_ELEMENTS if inputs.q_BHQD.is_cuda else BLOCK_ELEMENTS)
    run = _Run(inputs, normalizer, scores or _dot_product(inputs.scale), elements)
    dtype = inputs.q_BHQD.dtype
    q, k, v = _working(inputs)
    # No rule for transforms: in one block torch derives everything. An exported graph has no loop over blocks.
    if transformed() or is_exporting() or run.rows >= inputs.queries:
        whole: Tensor = run(0, inputs.queries, q, k, v, inputs.hidden_states, inputs.bias)
        return whole.to(dtype)
    if inputs.dropout > 0:
        run.seed = int(torch.randint(2**62, ()))
    learned = {name: p for name, p in run.named_parameters() if p.requires_grad}
    output: Tensor = _BlockedAttention.apply(  # type: ignore[no-untyped-call]
        run, tuple(learned), q, k, v, inputs.hidden_states, inputs.bias, *learned.values()
    )
    return output.to(dtype)


def with_weights(inputs: Inputs, normalizer: Normalizer) -> tuple[Tensor, Tensor]:
    """Output (B, H, Q, E) and the weights (B, H, Q, K) it was made with, in float32 at least, all rows in one block."""
    q, k, v = _working(inputs)
    run = _Run(
        inputs, normalizer, _dot_product(inputs.scale), q.shape[0] * q.shape[1] * max(1, q.shape[2]) * k.shape[2]
    )
    with without_autocast(q.device):
        weights = run.weigh(0, inputs.queries, q, k, inputs.hidden_states, inputs.bias)
        return (weights @ v).to(inputs.q_BHQD.dtype), weights


def _working(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in float32 at least, with a key head for every query head."""
    dtype = inputs.q_BHQD.dtype
    working = torch.float32 if dtype in HALF else dtype
    q, k, v = (t.to(working) for t in (inputs.q_BHQD, inputs.k_BGKD, inputs.v_BGKE))
    k, v = (t.repeat_interleave(inputs.groups, dim=1) if inputs.groups > 1 else t for t in (k, v))
    return q, k, v


def _dot_product(scale: float) -> Scores:
    return lambda q, k: (q * scale) @ k.transpose(-1, -2)


class _Run(nn.Module):
    """One call: cuts the queries into blocks and computes each. A module, so that all that learns is found in it."""

    def __init__(self, inputs: Inputs, normalizer: Normalizer, scores: Scores, block_elements: int) -> None:
        super().__init__()
        self.inputs, self.normalizer, self.scores = inputs, normalizer, scores
        batch, heads = inputs.q_BHQD.shape[:2]
        self.rows = max(1, block_elements // max(1, batch * heads * inputs.keys))
        self.seed: int | None = None  # of the dropout, where backward has to draw it again

    def spans(self) -> Iterator[tuple[int, int]]:
        return self.inputs.steps(self.rows)

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
        """Output of the queries start..stop; q, hidden_states and bias are those queries', k and v what they reach."""
        with without_autocast(q.device):
            return self.weigh(start, stop, q, k, hidden_states, bias) @ v

    def weigh(
        self, start: int, stop: int, q: Tensor, k: Tensor, hidden_states: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """The weights of the queries start..stop, after dropout."""
        keys = k.shape[-2]
        block = Block.of(self._logits(q, k, bias), self.inputs.visible(start, stop, keys))
        given = self._given(start, stop, keys)
        rows = _Rows(block.logits, block.mask, given, hidden_states, first=self.inputs.offset + start)
        return self._dropped(self.normalizer.weights(rows), start)

    def _logits(self, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
        logits = self.scores(q, k)
        if self.inputs.softcap is not None:
            logits = self.inputs.softcap * torch.tanh(logits / self.inputs.softcap)
        return logits if bias is None else logits + bias

    def _dropped(self, weights: Tensor, start: int) -> Tensor:
        if self.inputs.dropout == 0:
            return weights
        if self.seed is None:
            return torch.nn.functional.dropout(weights, self.inputs.dropout)
        generator = torch.Generator(weights.device).manual_seed(self.seed + start)
        kept = torch.rand(weights.shape, generator=generator, device=weights.device) >= self.inputs.dropout
        return torch.where(kept, weights, 0.0) / (1 - self.inputs.dropout)

    def _given(self, start: int, stop: int, keys: int) -> Positions | None:
        if self.inputs.positions is None:
            return None
        every = Positions.of(self.inputs.positions, self.inputs.weights_shape, self.inputs.q_BHQD.device)
        query, key = every.query[..., start:stop], every.key[..., :keys]
        return Positions(*(p if p.dim() == 1 else p[:, 0] for p in (query, key)))


@dataclass(frozen=True)
class _Rows(Block):
    """Some rows of an attention call. Where the caller gave no positions they are counted from the first row's."""

    first: int = 0

    @property
    def positions(self) -> Positions:
        if self.given_positions is not None:
            return Positions.of(self.given_positions, self.logits.shape, self.logits.device)
        rows, keys = self.logits.shape[-2:]
        device = self.logits.device
        return Positions(torch.arange(self.first, self.first + rows, device=device), torch.arange(keys, device=device))


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        run: _Run,
        names: tuple[str, ...],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        hidden_states: Tensor | None,
        bias: Tensor | None,
        *parameters: Tensor,
    ) -> Tensor:
        output = q.new_empty(*q.shape[:-1], v.shape[-1])
        for start, stop in run.spans():
            reach = run.inputs.reach(stop)
            output[..., start:stop, :] = run(
                start,
                stop,
                q[..., start:stop, :],
                k[..., :reach, :],
                v[..., :reach, :],
                _rows(hidden_states, start, stop),
                _of_block(bias, start, stop, reach),
            )
        ctx.run, ctx.names = run, names
        ctx.save_for_backward(q, k, v, hidden_states, bias, *parameters)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        run: _Run = ctx.run
        q, k, v, hidden_states, bias, *saved = ctx.saved_tensors
        # The parameters as they were forward: torch.func may have replaced them meanwhile.
        parameters = [p.detach().requires_grad_() for p in saved]
        totals = [torch.zeros_like(t) for t in (q, k, v)]
        hidden_total, bias_total = (None if t is None else torch.zeros_like(t) for t in (hidden_states, bias))
        parameter_totals = [torch.zeros_like(p) for p in parameters]
        for start, stop in run.spans():
            reach = run.inputs.reach(stop)
            pieces = [
                q[..., start:stop, :],
                k[..., :reach, :],
                v[..., :reach, :],
                _rows(hidden_states, start, stop),
                _of_block(bias, start, stop, reach),
            ]
            leaves = [None if piece is None else piece.detach().requires_grad_() for piece in pieces]
            with torch.enable_grad():
                output = functional_call(run, dict(zip(ctx.names, parameters, strict=True)), (start, stop, *leaves))
            wanted = [leaf for leaf in leaves if leaf is not None] + parameters
            grads = list(torch.autograd.grad(output, wanted, grad[..., start:stop, :], allow_unused=True))
            targets = [totals[0][..., start:stop, :], totals[1][..., :reach, :], totals[2][..., :reach, :]]
            if hidden_total is not None:
                targets.append(hidden_total[..., start:stop, :])
            if bias_total is not None:
                targets.append(bias_total[..., start:stop, :reach])
            for target, piece in zip([*targets, *parameter_totals], grads, strict=True):
                if piece is not None:
                    target += piece
        found = [*totals, hidden_total, bias_total, *parameter_totals]
        if torch.is_grad_enabled():  # with create_graph=True
            present = [i for i, t in enumerate(found) if t is not None]
            sources = [t for t in (grad, *ctx.saved_tensors) if t is not None]
            marked = _DifferentiatedOnce.apply(  # type: ignore[no-untyped-call]
                len(present), *(found[i] for i in present), *sources
            )
            for i, t in zip(present, marked, strict=True):
                found[i] = t
        return None, None, *found


class _DifferentiatedOnce(torch.autograd.Function):
    """Gradients as they are, joined to what they depend on: a second derivative raises instead of being dropped."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.clone() for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Never:
        raise RuntimeError(
            "expected one derivative of attention in blocks, got a second one. Pass return_weights=True to attention, "
            "which computes all rows at once, or pass fewer queries at a time."
        )


def _rows(hidden_states: Tensor | None, start: int, stop: int) -> Tensor | None:
    return None if hidden_states is None else hidden_states[..., start:stop, :]


def _of_block(bias: Tensor | None, start: int, stop: int, reach: int) -> Tensor | None:
    return None if bias is None else bias[..., start:stop, :reach]
