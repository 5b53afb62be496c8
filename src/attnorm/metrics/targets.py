"""The weight of a known key in each row: how much of its attention a head gives to the key that a task asks for.

Only the chosen rows are computed, block by block, and of each row only the numbers of its target are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnorm.metrics.call import AttentionCall
from attnorm.metrics.logits import logit_blocks
from attnorm.metrics.normalized import Choice, as_normalizer, resolve_normalizers, rows_block


@dataclass(frozen=True)
class TargetWeights:
    """Numbers of the target in every row, (B, H, R), in float64. A row that does not see its target has weight 0."""

    weight: Tensor  # as the normalizer gives it: not rescaled to a row sum of 1
    gap: Tensor  # nats: log of the target's weight over the mean weight of the other visible keys; may be infinite
    heaviest: Tensor  # boolean: no visible key has more weight
    n: Tensor  # visible keys


@torch.no_grad()
def measure_targets(
    call: AttentionCall, normalizers: Sequence[Choice], rows: Tensor, targets: Tensor
) -> dict[str, TargetWeights]:
    """Measure one target key per row, by the normalizers' names.

    rows: sorted query indices, (R,). targets: key indices, (B, R).
    """
    batch, heads = call.query_BHQD.shape[:2]
    if targets.shape != (batch, len(rows)):
        raise ValueError(f"expected targets of shape {(batch, len(rows))}, got {tuple(targets.shape)}.")
    if not bool(((targets >= 0) & (targets < call.key_BGKD.shape[-2])).all()):
        raise ValueError(f"expected targets from 0 to {call.key_BGKD.shape[-2] - 1}, got {targets.tolist()}.")
    chosen = resolve_normalizers(call, normalizers)
    device = call.query_BHQD.device
    targets = targets.to(device)
    shape = (batch, heads, len(rows))
    found = {
        one.name: TargetWeights(
            weight=torch.zeros(shape, dtype=torch.float64, device=device),
            gap=torch.full(shape, -torch.inf, dtype=torch.float64, device=device),
            heaviest=torch.zeros(shape, dtype=torch.bool, device=device),
            n=torch.zeros(shape, dtype=torch.long, device=device),
        )
        for one in chosen
    }
    for block in logit_blocks(call, rows, all_heads=True):
        rows_view = rows_block(call, block)
        view = rows_view.with_logits(rows_view.logits.double())  # a weight that float32 rounds to 0 has a gap too
        visible = block.visible.expand(block.logits.shape)
        column = targets[block.item, block.rows] - block.first_key
        inside = (column >= 0) & (column < visible.shape[-1])
        at = column.clamp(0, visible.shape[-1] - 1)[None, :, None].expand(visible.shape[0], -1, 1)
        seen = visible.gather(-1, at).squeeze(-1) & inside
        n = visible.sum(-1)
        for one in chosen:
            weights = as_normalizer(one, call).weights(view)[0].double().masked_fill(~visible, 0.0)
            own = torch.where(seen, weights.gather(-1, at).squeeze(-1), 0.0)
            others = weights.scatter(-1, at, 0.0).sum(-1)
            where = (block.item, block.heads, block.rows)
            numbers = found[one.name]
            numbers.weight[where] = own
            numbers.gap[where] = own.log() - others.log() + (n - 1).clamp(min=1).double().log()
            numbers.heaviest[where] = seen & (own >= weights.amax(-1))
            numbers.n[where] = n
    return found
