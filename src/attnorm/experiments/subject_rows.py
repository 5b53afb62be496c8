"""The last query row of every head of a model: its weights and the vectors that they mix, as theory takes them.

Vectors are the values after the head's projection, or what they were projected from (`vectors="inputs"`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnorm.experiments.experiment import Subject, Tell
from attnorm.experiments.observed import look_at
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.logits import logit_blocks
from attnorm.metrics.normalized import as_normalizer, measured, rows_block
from attnorm.metrics.vectors import Vectors
from attnorm.theory.geometry import on_sphere
from attnorm.theory.selection import SelectedRows, at_least_float32, top_n_indices


@dataclass(frozen=True)
class LastRows:
    """The last row of the heads of one layer, by the vectors that they share (grouped-query attention)."""

    layer: int
    weights: Tensor  # (g, h / g, L)
    vectors: Tensor  # (g, L, d)
    visible: Tensor  # (g, h / g, L)

    @property
    def heads(self) -> int:
        return self.weights.shape[0] * self.weights.shape[1]

    @property
    def keys(self) -> int:
        """Visible to the row that sees most."""
        return int(self.visible.sum(-1).max())

    def selected(self, most: int) -> SelectedRows:
        """With the `most` heaviest keys; `with_indices(.indices[..., :N])` gives the top N of them."""
        indices = top_n_indices(self.weights, most, self.visible)
        return SelectedRows(self.weights, self.vectors, self.visible, indices, one_row_per_set=False)

    def on_sphere(self) -> "LastRows":
        return replace(self, vectors=on_sphere(self.vectors))

    def permuted(self, generator: torch.Generator) -> "LastRows":
        """Every head's weights dealt out to its visible keys at random: the weights know nothing of the vectors."""
        scores = torch.rand(self.weights.shape, generator=generator, dtype=torch.float64)
        return replace(self, weights=dealt(self.weights, self.visible, scores))


def dealt(weights: Tensor, visible: Tensor, scores: Tensor) -> Tensor:
    """The weights of each row on its visible keys in the order of their scores, which are below 1."""
    by_score = torch.where(visible, scores, 2.0).argsort(dim=-1)  # hidden keys last
    in_order = visible.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(weights).scatter(-1, by_score, weights.gather(-1, in_order))


def last_rows(
    subject: Subject,
    length: int,
    *,
    start: int = 0,
    vectors: Vectors = "values",
    tell: Tell = lambda what, done, total: None,
) -> list[LastRows]:
    """One forward pass over `length` tokens of the first text, from token `start` on; attention to an encoder is left
    out."""
    found: list[LastRows] = []
    look_at(
        subject, length, lambda call: found.append(_last_row(call, vectors)), tell,
        f"running the model on {length} tokens", start=start, inputs=vectors == "inputs", encoders=True,
    )  # fmt: skip
    return found


def joined(layers: Sequence[LastRows]) -> list[LastRows]:
    """Layers of one shape as one, head after head: the same numbers from fewer and larger operations."""
    by_shape: dict[tuple[torch.Size, torch.Size], list[LastRows]] = {}
    for layer in layers:
        by_shape.setdefault((layer.weights.shape, layer.vectors.shape), []).append(layer)
    return [
        LastRows(same[0].layer, *(torch.cat([getattr(one, name) for one in same]) for name in _TENSORS))
        for same in by_shape.values()
    ]


_TENSORS = ("weights", "vectors", "visible")


def _last_row(call: AttentionCall, vectors: Vectors) -> LastRows:
    values = call.value_BGKE if vectors == "values" else call.inputs_BKC
    if values is None:
        raise ValueError("the layer inputs of this model cannot be seen; take the values as vectors")
    if vectors == "inputs":
        values = values[:, None]
    row = torch.tensor([call.query_BHQD.shape[-2] - 1], device=call.query_BHQD.device)
    (own,) = measured(call, [None])
    with torch.no_grad():
        (block,) = logit_blocks(call, row, all_heads=True)
        # In float64: weights that float32 rounds to 0, sums over a thousand keys, differences of nearly equal lengths.
        view = rows_block(call, block)
        weights = as_normalizer(own, call).weights(view.with_logits(view.logits.double()))[0].double()
        keys = slice(block.first_key, block.first_key + weights.shape[-1])
        x = at_least_float32(values[0, :, keys])
        x = pad(x, (0, 0, 0, weights.shape[-1] - x.shape[-2]))
        visible = block.visible.expand(weights.shape)
        groups = x.shape[0]
        shape = (groups, -1, weights.shape[-1])
        weights, visible = weights.reshape(shape).cpu(), visible.reshape(shape).cpu()
        x = torch.where(visible.any(-2).unsqueeze(-1), x.double().cpu(), 0.0)
    seen = visible.flatten(0, 1).any(0)  # without the padding
    return LastRows(call.layer, weights[..., seen], x[:, seen], visible[..., seen])
