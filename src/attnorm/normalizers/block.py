"""`Block`, the input of every map, rule and selection: logits, the mask of visible keys, and positions.

Shapes: logits (..., Q, K); the mask broadcasts to them and is True where a query may attend. `Block.of` replaces hidden
logits by 0 through `torch.where`, so that neither their values nor their gradients, NaN included, have an effect.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Positions:
    """Token positions of the queries (..., Q) and of the keys (..., K)."""

    query: Tensor
    key: Tensor

    @property
    def distance(self) -> Tensor:
        """Position of each query minus position of each key, (..., Q, K); negative for future keys."""
        return self.query[..., :, None] - self.key[..., None, :]

    @classmethod
    def of(cls, given: "Tensor | Positions | None", logits_shape: torch.Size, device: torch.device) -> "Positions":
        """Return the given positions, or default ones in which the last query is at the last key."""
        queries, keys = logits_shape[-2:]
        if isinstance(given, Positions):
            query, key = (_spread_over_heads(p, logits_shape) for p in (given.query, given.key))
        elif given is None:
            key = torch.arange(keys, device=device)
            query = torch.arange(keys - queries, keys, device=device)
        else:
            query = _spread_over_heads(given, logits_shape)
            key = query[..., -1:] + torch.arange(1 - keys, 1, device=device) if queries != keys else query
        if query.shape[-1] != queries or key.shape[-1] != keys:
            raise ValueError(
                f"got positions for {query.shape[-1]} queries and {key.shape[-1]} keys, but logits with "
                f"{queries} queries and {keys} keys. Pass one position per query and key."
            )
        return cls(query, key)


def _spread_over_heads(positions: Tensor, logits_shape: torch.Size) -> Tensor:
    if positions.dim() == 1:
        return positions
    batch, between = logits_shape[0], len(logits_shape) - 3
    if positions.dim() == 2 and between >= 0 and positions.shape[0] in (1, batch):
        return positions.reshape(positions.shape[0], *([1] * between), positions.shape[1])
    raise ValueError(
        f"positions have shape {tuple(positions.shape)}; expected (length,) or (batch, length) "
        f"for logits of shape {tuple(logits_shape)}"
    )


@dataclass(frozen=True)
class Block:
    """Rows of logits in at least float32, 0 at hidden keys. `mask` is None if every row sees every key."""

    logits: Tensor
    mask: Tensor | None = None
    given_positions: Tensor | Positions | None = None
    hidden_states: Tensor | None = None
    sinks: int = 0  # number of leading keys that are sinks, not tokens; n does not count them

    @classmethod
    def of(
        cls,
        logits: Tensor,
        mask: Tensor | None = None,
        positions: Tensor | Positions | None = None,
        hidden_states: Tensor | None = None,
    ) -> "Block":
        check_logits(logits)
        check_positions_and_states(positions, hidden_states)
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        if mask is not None:
            check_mask(mask, logits.shape)
            logits = torch.where(mask, logits, 0.0)
        return cls(logits, mask, positions, hidden_states)

    def with_logits(self, logits: Tensor) -> "Block":
        return replace(self, logits=logits)

    def narrowed(self, keep: Tensor) -> "Block":
        """Return the block with only the keys that are visible and in `keep`."""
        mask = keep if self.mask is None else self.mask & keep
        return replace(self, mask=mask, logits=torch.where(mask, self.logits, 0.0))

    @property
    def n(self) -> Tensor:
        """Number of visible keys of each row, (..., Q, 1), in the logits' dtype."""
        if self.mask is None:
            return self.logits.new_full((1, 1), self.logits.shape[-1] - self.sinks)
        counted = self.mask.expand(*self.mask.shape[:-1], self.logits.shape[-1])
        return counted.sum(-1, keepdim=True, dtype=self.logits.dtype) - self.sinks

    @property
    def positions(self) -> Positions:
        return Positions.of(self.given_positions, self.logits.shape, self.logits.device)

    def filled(self, value: float) -> Tensor:
        """Return the logits with `value` at hidden keys."""
        return self.logits if self.mask is None else torch.where(self.mask, self.logits, value)

    def filled_low(self) -> Tensor:
        """Return the logits with the lowest finite number at hidden keys: its exp is 0, and it cannot become NaN."""
        return self.filled(torch.finfo(self.logits.dtype).min)

    def hide(self, weights: Tensor) -> Tensor:
        """Return the weights with exact zeros at hidden keys."""
        return weights if self.mask is None else torch.where(self.mask, weights, 0.0)


@dataclass(frozen=True)
class RowsBlock(Block):
    """Some rows of an attention call.

    queries: their positions without `given_positions`, or the position of the first of consecutive rows.
    """

    queries: Tensor | int = 0
    first_key: int = 0

    @property
    def positions(self) -> Positions:
        if self.given_positions is not None:
            return Positions.of(self.given_positions, self.logits.shape, self.logits.device)
        rows, keys = self.logits.shape[-2:]
        device, first = self.logits.device, self.queries
        queries = first if isinstance(first, Tensor) else torch.arange(first, first + rows, device=device)
        return Positions(queries, torch.arange(self.first_key, self.first_key + keys, device=device))

    def select_rows(self, rows: Tensor) -> "RowsBlock":
        """Return the block with some of its rows."""
        assert isinstance(self.queries, Tensor)
        mask, states, positions = self.mask, self.hidden_states, self.given_positions
        return replace(
            self,
            logits=self.logits[..., rows, :],
            mask=None if mask is None else mask[..., rows, :],
            hidden_states=None if states is None else states[..., rows, :],
            queries=self.queries[rows],
            given_positions=Positions(positions.query[rows], positions.key)
            if isinstance(positions, Positions)
            else positions,
        )


def check_logits(logits: Tensor) -> None:
    if not isinstance(logits, Tensor):
        raise TypeError(f"logits must be a torch.Tensor, got {type(logits).__name__}")
    if not logits.is_floating_point():
        raise TypeError(f"logits must be floating point, got {logits.dtype}. Convert them, e.g. logits.float().")
    if logits.dim() < 2:
        raise ValueError(
            f"logits must have shape (..., queries, keys), got {tuple(logits.shape)}. For a single row use "
            "logits[None, :]."
        )
    if logits.shape[-1] == 0:
        raise ValueError(f"logits of shape {tuple(logits.shape)} have no keys. Pass at least one key.")


def check_positions_and_states(positions: object, hidden_states: object) -> None:
    if positions is not None and not isinstance(positions, Tensor | Positions):
        raise TypeError(
            f"expected positions of shape (length,) or (batch, length), got {positions!r}. Pass a torch.Tensor, or "
            "leave them out: the last query is then at the last key."
        )
    if hidden_states is not None and not isinstance(hidden_states, Tensor):
        raise TypeError(
            f"expected hidden_states of shape (batch, queries, width), got {hidden_states!r}. Pass a torch.Tensor, or "
            "leave them out."
        )


def check_mask(mask: Tensor, logits_shape: torch.Size) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a boolean torch.Tensor, got {type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise TypeError(
            f"mask must be boolean with True = may attend, got {mask.dtype}; "
            + (
                "an additive mask becomes one by `mask > torch.finfo(mask.dtype).min / 2`"
                if mask.is_floating_point()
                else "a mask of ones and zeros becomes one by `mask.bool()`"
            )
        )
    # Compares shapes itself: torch.broadcast_shapes takes as long as a small softmax.
    sizes = zip(mask.shape[::-1], logits_shape[::-1], strict=False)
    if mask.dim() > len(logits_shape) or not all(mask_size == size or mask_size == 1 for mask_size, size in sizes):
        hint = ""
        if len(logits_shape) == 4 and mask.shape == (logits_shape[0], logits_shape[-1]):
            hint = "; padding (batch, keys) becomes mask[:, None, None, :]"
        elif len(logits_shape) == 4 and mask.shape == (logits_shape[0], *logits_shape[-2:]):
            hint = "; (batch, queries, keys) becomes mask[:, None]"
        raise ValueError(
            f"mask of shape {tuple(mask.shape)} does not broadcast to logits of {tuple(logits_shape)}{hint}"
        )


def is_exporting() -> bool:
    """Whether torch.export is tracing. torch.compiler.is_exporting() of torch 2.11 is true inside torch.compile too."""
    return torch.compiler._is_exporting_flag
