"""The normalizer under test and its inputs, which do not depend on torch's global random seed."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnorm.normalizers.block import Block, Positions
from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.declaration import Options, Reference, Row


@dataclass(frozen=True)
class CheckedNormalizer:
    """A normalizer in one dtype. Logits are (batch, heads, queries, keys); `width` is that of the hidden states."""

    normalizer: Normalizer
    heads: int
    width: int | None = None
    reference: Reference | None = None  # its declared definition, for default options

    @classmethod
    def of(
        cls, normalizer: Normalizer, heads: int, width: int | None, reference: Reference | None = None
    ) -> "CheckedNormalizer":
        """Copy the normalizer to float64, with parameters rounded to float32."""
        return cls(copy.deepcopy(normalizer).float().double(), heads, width, reference)

    def to(self, dtype: torch.dtype) -> "CheckedNormalizer":
        return replace(self, normalizer=copy.deepcopy(self.normalizer).to(dtype))

    def logits(self, queries: int = 5, keys: int = 7, *, batch: int = 2, spread: float = 2.0, seed: int = 0) -> Tensor:
        shape = (batch, self.heads, queries, keys)
        return spread * torch.randn(shape, generator=seeded(seed), dtype=torch.float64)

    def hidden_states(self, batch: int, queries: int) -> Tensor | None:
        return None if self.width is None else torch.randn(batch, queries, self.width, generator=seeded(7))

    def __call__(
        self,
        logits: Tensor,
        mask: Tensor | None = None,
        *,
        positions: Positions | None = None,
        hidden_states: Tensor | None = None,
    ) -> Tensor:
        if hidden_states is None:
            hidden_states = self.hidden_states(logits.shape[0], logits.shape[-2])
        weights: Tensor = self.normalizer(logits, mask, positions=positions, hidden_states=hidden_states)
        return weights

    def prepared(self, logits: Tensor) -> Tensor:
        """The logits as the map sees them, behind all scale rules."""
        hidden_states = self.hidden_states(logits.shape[0], logits.shape[-2])
        return self.normalizer.prepare(Block.of(logits, hidden_states=hidden_states)).logits

    def gradients(self, logits: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Weights, and the gradients of a random combination of them: for the logits, and for each parameter."""
        logits = logits.detach().requires_grad_()
        parameters = self.parameters()
        weights = self(logits, mask)
        cotangent = torch.randn(weights.shape, generator=seeded(3), dtype=torch.float64).to(weights.dtype)
        inputs = [logits, *parameters.values()]
        loss = (weights * cotangent).sum()
        first, *others = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
        return weights.detach(), first, dict(zip(parameters, others, strict=True))

    def parameters(self) -> dict[str, Tensor]:
        """Return the learned parameters by name."""
        return {name: p for name, p in self.normalizer.named_parameters() if p.requires_grad}


# A check yields one complaint, with the numbers, for every promise it finds broken.
Complaints = Iterator[str]
CheckFunction = Callable[[CheckedNormalizer], Complaints]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_mask(logits: Tensor) -> Tensor:
    """A random half of the keys for each batch entry and query, its own key always among them."""
    batch, _, queries, keys = logits.shape
    random_keys = torch.rand(batch, 1, queries, keys, generator=seeded(0)) < 0.5
    is_own_key = torch.arange(keys) == torch.arange(keys - queries, keys)[:, None]
    return random_keys | is_own_key


def by_definition(
    reference: Reference, logits: Tensor, mask: Tensor | None = None, options: Options | None = None,
    learned: Mapping[str, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """The weights of logits (..., heads, queries, keys) by a declared reference, row by row in the logits' dtype."""
    rows, (heads, queries, keys) = logits.detach().flatten(0, -2), logits.shape[-3:]
    visible_keys = torch.ones_like(logits, dtype=torch.bool) if mask is None else mask.expand(logits.shape)
    weights = torch.zeros_like(rows)
    for i, (row, visible) in enumerate(zip(rows, visible_keys.flatten(0, -2), strict=True)):
        columns = visible.nonzero()[:, 0]
        if len(columns):
            visible_row = Row(
                row[columns], keys - queries + i % queries - columns, i // queries % heads, learned=learned or {}
            )
            weights[i, columns] = reference(visible_row, **(options or {}))
    return weights.reshape(logits.shape)


def largest(x: Tensor) -> float:
    """The largest absolute value, NaN if there is one, 0 for an empty tensor."""
    return x.abs().max().item() if x.numel() else 0.0


def exceeds(found: float, allowed: float) -> bool:
    """Return whether a number exceeds a limit; also true for NaN."""
    return not found <= allowed
