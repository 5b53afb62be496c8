"""The heaviest keys of chosen rows: which positions a head reads, and with what weight.

Only the chosen rows are computed, block by block, and only their `count` heaviest keys are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnorm.engines.threads import in_threads
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.heaviest import heaviest_keys
from attnorm.metrics.logits import logit_blocks
from attnorm.metrics.normalized import Choice, as_normalizer, resolve_normalizers, rows_block

NO_KEY = -1


@dataclass(frozen=True)
class Reads:
    """Keys and weights (B, H, R, count), the heaviest first; NO_KEY and 0 where a row reads fewer keys."""

    keys: Tensor  # positions in the sequence
    weights: Tensor  # as the normalizer gives them: not rescaled to a row sum of 1


@torch.no_grad()
def measure_reads(call: AttentionCall, normalizers: Sequence[Choice], rows: Tensor, count: int) -> dict[str, Reads]:
    """The `count` heaviest keys of these queries (sorted indices), by the normalizers' names.

    Keys are ordered by the size of their weight; among equal weights the earlier key comes first. A key of weight 0 is
    not read, and a row whose weights are not finite reads nothing.
    """
    if count < 1:
        raise ValueError(f"expected a count of keys of at least 1, got {count}.")
    chosen = resolve_normalizers(call, normalizers)
    shape = (*call.query_BHQD.shape[:2], len(rows), count)
    device = call.query_BHQD.device
    keys = {one.name: torch.full(shape, NO_KEY, device=device) for one in chosen}
    weights = {one.name: torch.zeros(shape, dtype=torch.float64, device=device) for one in chosen}

    def measure(_: range) -> None:
        for block in logit_blocks(call, rows, all_heads=True):
            view = rows_block(call, block)
            visible = block.visible.expand(block.logits.shape)
            for one in chosen:
                found = as_normalizer(one, call).weights(view)[0]
                where, values = heaviest_keys(found, visible, count)
                read = where >= 0
                at = (block.item, block.heads, block.rows, slice(where.shape[-1]))
                keys[one.name][at] = torch.where(read, where + block.first_key, NO_KEY)
                weights[one.name][at] = values.double()

    in_threads(measure, call.key_BGKD.shape[1], device, whole=True)
    return {one.name: Reads(keys[one.name], weights[one.name]) for one in chosen}
