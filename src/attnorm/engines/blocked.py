"""Attention of any normalizer in blocks of queries: memory O(L x block), forward and backward, never L x L.

Backward computes each block again and adds its gradients into place, so nothing of size Q x L is kept either.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from attnorm.engines.inputs import Inputs
from attnorm.normalizers.block import Block, Positions
from attnorm.normalizers.contract import Normalizer

# Elements of one block's logits. A step holds about ten arrays of this size: 2^21 floats keep it near 100 MB.
BLOCK_ELEMENTS = 2**21

# Logits from a block of queries (B, H, q, D) and the keys (B, H, l, D).
Scores = Callable[[Tensor, Tensor], Tensor]


def blocked(
    inputs: Inputs, normalizer: Normalizer, *, scores: Scores | None = None, block_elements: int = BLOCK_ELEMENTS
) -> Tensor:
    """Output (B, H, Q, D). `scores` replaces the scaled dot product."""
    run = _Run(inputs, normalizer, scores or _dot_product(inputs.scale), block_elements)
    dtype = inputs.q_BHQD.dtype
    working = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    q, k, v = (t.to(working) for t in (inputs.q_BHQD, inputs.k_BKLD, inputs.v_BKLD))
    k, v = (t.repeat_interleave(inputs.groups, dim=1) if inputs.groups > 1 else t for t in (k, v))
    if run.rows >= inputs.queries:
        return run.block(0, inputs.queries, q, k, v, inputs.hidden_states).to(dtype)
    parameters = [p for p in normalizer.parameters() if p.requires_grad]
    output: Tensor = _BlockedAttention.apply(run, q, k, v, inputs.hidden_states, *parameters)  # type: ignore[no-untyped-call]
    return output.to(dtype)


def _dot_product(scale: float) -> Scores:
    return lambda q, k: (q * scale) @ k.transpose(-1, -2)


class _Run:
    """One call: cuts the queries into blocks and computes each."""

    def __init__(self, inputs: Inputs, normalizer: Normalizer, scores: Scores, block_elements: int) -> None:
        self.inputs, self.normalizer, self.scores = inputs, normalizer, scores
        batch, heads = inputs.q_BHQD.shape[:2]
        self.rows = max(1, block_elements // max(1, batch * heads * inputs.keys))
        self.positions: Positions | None = None
        if inputs.positions is not None:
            self.positions = Positions.of(inputs.positions, inputs.weights_shape, inputs.q_BHQD.device)

    def spans(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self.inputs.queries, self.rows):
            yield start, min(start + self.rows, self.inputs.queries)

    def block(self, start: int, stop: int, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor | None) -> Tensor:
        """Output of the queries start..stop; q and hidden_states are those queries', k and v their reachable keys."""
        keys = k.shape[-2]
        block = Block.of(
            self.scores(q, k), self.inputs.visible(start, stop, keys), self._positions(start, stop, keys), hidden_states
        )
        return self.normalizer.weights(block) @ v

    def _positions(self, start: int, stop: int, keys: int) -> Positions:
        if self.positions is not None:
            return Positions(self.positions.query[..., start:stop], self.positions.key[..., :keys])
        device = self.inputs.q_BHQD.device
        offset = self.inputs.offset
        return Positions(
            torch.arange(offset + start, offset + stop, device=device), torch.arange(keys, device=device)
        )


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: _Run, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor | None, *parameters: Tensor
    ) -> Tensor:
        output = q.new_empty(*q.shape[:-1], v.shape[-1])
        for start, stop in run.spans():
            reach = run.inputs.reach(stop)
            output[..., start:stop, :] = run.block(
                start, stop, q[..., start:stop, :], k[..., :reach, :], v[..., :reach, :], _rows(hidden_states, start, stop)
            )
        ctx.run = run
        ctx.save_for_backward(q, k, v, hidden_states, *parameters)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        run: _Run = ctx.run
        q, k, v, hidden_states, *parameters = ctx.saved_tensors
        totals = [torch.zeros_like(t) for t in (q, k, v)]
        hidden_total = None if hidden_states is None else torch.zeros_like(hidden_states)
        parameter_totals = [torch.zeros_like(p) for p in parameters]
        for start, stop in run.spans():
            reach = run.inputs.reach(stop)
            pieces = [q[..., start:stop, :], k[..., :reach, :], v[..., :reach, :], _rows(hidden_states, start, stop)]
            leaves = [None if piece is None else piece.detach().requires_grad_() for piece in pieces]
            with torch.enable_grad():
                output = run.block(start, stop, *leaves)  # type: ignore[arg-type]
            wanted = [leaf for leaf in leaves if leaf is not None] + parameters
            grads = list(torch.autograd.grad(output, wanted, grad[..., start:stop, :], allow_unused=True))
            places = [totals[0][..., start:stop, :], totals[1][..., :reach, :], totals[2][..., :reach, :]]
            if hidden_total is not None:
                places.append(hidden_total[..., start:stop, :])
            for place, piece in zip([*places, *parameter_totals], grads, strict=True):
                if piece is not None:
                    place += piece
        return None, *totals, hidden_total, *parameter_totals


def _rows(hidden_states: Tensor | None, start: int, stop: int) -> Tensor | None:
    return None if hidden_states is None else hidden_states[..., start:stop, :]

