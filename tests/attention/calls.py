"""Calls to try attention on: q, k, v of every shape, with every kind of mask."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import attnorm
from tests.attention.reference import HEADS, WIDTH, Case

Tensors = list[Tensor]


@dataclass(frozen=True)
class Call:
    """Sizes of one call, with the options that go with it."""

    batch: int = 2
    key_heads: int = HEADS
    queries: int = 5
    keys: int = 5
    width: int = 4
    value_width: int = 4
    options: dict[str, Any] = field(default_factory=dict)

    def tensors(self, dtype: torch.dtype = torch.float64) -> Tensors:
        """q, k, v with logits of about unit size, and hidden states."""
        shapes = [
            (self.batch, HEADS, self.queries, self.width),
            (self.batch, self.key_heads, self.keys, self.width),
            (self.batch, self.key_heads, self.keys, self.value_width),
            (self.batch, self.queries, WIDTH),
        ]
        return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def padding_mask() -> Tensor:
    """The first sequence is padded on the left, the second on the right; (2, 1, 1, 7)."""
    mask = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    mask[0, ..., :2] = False
    mask[1, ..., -3:] = False
    return mask


def mask_with_an_empty_row() -> Tensor:
    mask = torch.rand(5, 7, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[2] = False
    return mask


def mask_per_head() -> Tensor:
    return torch.rand(2, HEADS, 5, 7, generator=torch.Generator().manual_seed(2)) < 0.6


CALLS = {
    "every key": Call(),
    "causal": Call(queries=7, keys=7, options={"causal": True}),
    "one query": Call(queries=1, keys=7, options={"causal": True}),
    "queries at the end": Call(key_heads=2, queries=3, keys=7, options={"causal": True}),
    "more queries than keys": Call(queries=5, keys=3, options={"causal": True}),
    "wide values, one key head": Call(key_heads=1, value_width=7, options={"causal": True}),
    "narrow values": Call(width=5, value_width=1, keys=3),
    "padding": Call(keys=7, options={"mask": padding_mask()}),
    "padding, causal": Call(key_heads=2, queries=7, keys=7, options={"mask": padding_mask(), "causal": True}),
    "a mask of one dimension": Call(options={"mask": torch.tensor([True, False, True, True, False])}),
    "a mask with an empty row": Call(keys=7, options={"mask": mask_with_an_empty_row()}),
    "a mask per head": Call(key_heads=2, keys=7, options={"mask": mask_per_head(), "causal": True}),
    "a mask of queries": Call(options={"mask": torch.tensor([True, True, False, True, True])[:, None]}),
    "negative scale": Call(options={"scale": -0.8, "causal": True}),
    "scale 0": Call(options={"scale": 0.0, "causal": True}),
}


def outputs_and_gradients(
    function: Callable[..., Tensor], tensors: Iterable[Tensor], parameters: Iterable[Tensor] = ()
) -> Tensors:
    """function(*tensors), then d/d of a fixed random combination of its outputs, by each tensor and parameter."""
    leaves = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in tensors]
    parameters = list(parameters)
    output = function(*leaves)
    if not output.requires_grad:  # no query saw a key
        return [output, *(torch.zeros_like(t) for t in (*leaves, *parameters))]
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    loss = (output * direction.to(output.dtype)).sum()
    grads = torch.autograd.grad(loss, [*leaves, *parameters], allow_unused=True, materialize_grads=True)
    return [output.detach(), *grads]


def learned(normalizer: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in normalizer.parameters() if p.requires_grad]


def calling(case: Case, normalizer: attnorm.Normalizer, options: dict[str, Any], **more: Any) -> Callable[..., Tensor]:
    """attnorm.attention as a function of q, k, v and hidden states, which only some normalizers read."""

    def call(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        states = hidden if case.hidden_width else None
        return attnorm.attention(q, k, v, normalizer, **options, **more, hidden_states=states)

    return call


def assert_all_close(actual: Tensors, expected: Tensors, *, atol: float = 1e-10) -> None:
    """Outputs and gradients agree, each to a part of its own size."""
    assert len(actual) == len(expected)
    for got, wanted in zip(actual, expected, strict=True):
        size = max(1.0, wanted.abs().max().item()) if wanted.numel() else 1.0
        torch.testing.assert_close(got, wanted, atol=atol * size, rtol=0.0)
