"""How many keys each row sees through a boolean mask: one read of the mask, whatever the number of query heads.

A rescaled softmax needs the count before its logits: its factor depends on it.
"""

import triton
import triton.language as tl


@triton.jit
def visible_keys(
    mask, row_queries, out, mask_batch, mask_head, mask_row, mask_column, heads, rows_total, keys, offset,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """mask: (B, H, Q, K), with its own batch and heads; row_queries: (R,); out: (B, H, R)."""
    blocks = tl.cdiv(rows_total, ROWS)
    program = tl.program_id(0)
    batch_head = (program // blocks).to(tl.int64)
    at = program % blocks * ROWS + tl.arange(0, ROWS)
    inside = at < rows_total
    rows = tl.load(row_queries + at, mask=inside, other=0)
    reach = tl.where(inside, keys, 0)
    if CAUSAL:
        reach = tl.where(inside, tl.maximum(tl.minimum(rows + offset + 1, keys), 0), 0)
    mask += batch_head // heads * mask_batch + batch_head % heads * mask_head
    row = mask + rows.to(tl.int64)[:, None] * mask_row
    n = tl.zeros([ROWS], tl.int32)
    for start in range(0, tl.max(reach, 0), KEYS):
        columns = (start + tl.arange(0, KEYS))[None, :]
        seen = tl.load(row + columns.to(tl.int64) * mask_column, mask=columns < reach[:, None], other=0)
        n += tl.sum((seen != 0).to(tl.int32), 1)
    tl.store(out + batch_head * rows_total + at, n.to(tl.int64), mask=inside)
