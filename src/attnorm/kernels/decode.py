"""Forward pass of the one-pass maps for few queries and many keys, as in decoding: the keys are split over programs.

A program takes one part of the keys of a key head, for all queries of all heads that share it: they are the rows of its
tile. A second kernel joins the parts of each row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnorm.kernels.blocks import Constants, LogitRows, MapConstants, Matrix, Sight, logit_rows
from attnorm.kernels.launch import padded
from attnorm.kernels.maps import LOG2E, MAPS, Reference
from attnorm.kernels.one_pass import Form, OnePassLaunch, fold, inverse_of, reference_of

TOGETHER = tl.constexpr(16)  # parts that are read at a time
MIN_SPLIT = 256  # keys of a program; with fewer, joining the parts would cost more than reading keys


@triton.jit
def decode_parts(
    q, k, v, mask, factor, shift, cutoff, parameters, part_out, total_out, peak_out,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row, mask_column,
    heads, groups, queries, keys, offset, window, width, v_width, scale, cap, begin, span, splits,
    MAP: tl.constexpr, SLOPES: tl.constexpr, RULE: tl.constexpr, P: tl.constexpr, FAST: tl.constexpr,
    REFERENCE: tl.constexpr, NORMALISED: tl.constexpr, RULED: tl.constexpr,
    CAPPED: tl.constexpr, FACTORED: tl.constexpr, SHIFTED: tl.constexpr, SELECTED: tl.constexpr,
    SINK: tl.constexpr, PLAIN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    FULL: tl.constexpr, V_FULL: tl.constexpr, LIFT: tl.constexpr,
):  # fmt: skip
    """Compute the state of each row over one part of the keys.

    Writes part_out (B, H, Q, splits, E), total_out and peak_out (B, H, Q, splits).
    """
    C: tl.constexpr = Constants(CAUSAL, WINDOWED, MASKED, PRECISION, ROWS, COLUMNS, WIDTH, FULL, V_WIDTH, V_FULL)
    M: tl.constexpr = MapConstants(
        MAP, SLOPES, RULE, P, FAST, REFERENCE, NORMALISED, RULED, CAPPED, FACTORED, SHIFTED, SELECTED, PLAIN, LIFT
    )  # fmt: skip
    program = tl.program_id(0)
    split = program % splits
    batch_head = (program // splits).to(tl.int64)
    key_heads = heads // groups
    batch, key_head = batch_head // key_heads, batch_head % key_heads
    place = tl.arange(0, ROWS)
    inside = place < groups * queries
    head = key_head * groups + place // queries
    rows = tl.where(inside, place % queries, queries)
    k += batch * k_batch + key_head * k_head
    v += batch * v_batch + key_head * v_head
    mask += batch * mask_batch + (head * mask_head)[:, None]
    columns = tl.arange(0, WIDTH)
    q_at = q + batch * q_batch + head * q_head + rows * q_row
    q_tile = tl.load(q_at[:, None] + columns[None, :], mask=inside[:, None] & (columns < width)[None, :], other=0.0)
    row_at = (batch * heads + head) * queries + rows
    row = logit_rows(LogitRows(factor, shift, cutoff), row_at, inside, M)
    parameter = tl.load(parameters + head, mask=inside, other=0.0)[:, None] if RULED else 0.0

    acc = tl.zeros([ROWS, V_WIDTH], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    start = begin + split * span
    acc, total, peak = fold(
        acc, total, peak, start, tl.minimum(start + span, keys), q_tile, Matrix(k, keys, k_row, width),
        Matrix(v, keys, v_row, v_width), rows, row, Sight(mask, mask_row, mask_column, queries, keys, offset, window),
        scale, cap, parameter, C, M, True,
    )  # fmt: skip
    at = row_at * splits + split
    tl.store(total_out + at, total, mask=inside)
    tl.store(peak_out + at, peak, mask=inside)
    values = tl.arange(0, V_WIDTH)
    seen = inside[:, None] & (values < v_width)[None, :]
    tl.store(part_out + at[:, None] * v_width + values[None, :], acc, mask=seen)


@triton.jit
def join_parts(
    part, total, peak, sink, out, reference_out, heads, queries, v_width, splits, floor,
    REFERENCE: tl.constexpr, NORMALISED: tl.constexpr, SINK: tl.constexpr, LIFT: tl.constexpr, V_WIDTH: tl.constexpr,
):  # fmt: skip
    """Join the parts of one row: its output, and log2 of its denominator if the map is scaled."""
    row = tl.program_id(0).to(tl.int64)
    values = tl.arange(0, V_WIDTH)
    part += row * splits * v_width
    total += row * splits
    peak += row * splits
    some = tl.arange(0, TOGETHER)
    largest = tl.full([TOGETHER], float("-inf"), tl.float32)
    for at in range(0, splits, TOGETHER):
        largest = tl.maximum(largest, tl.load(peak + at + some, mask=at + some < splits, other=float("-inf")))
    highest = tl.max(largest, 0)
    if SINK:
        sunk = tl.load(sink + row // queries % heads) * LOG2E
        highest = tl.maximum(highest, sunk)
    reference = reference_of(highest, REFERENCE, True)

    acc = tl.zeros([V_WIDTH], tl.float32)
    denominator = tl.zeros([TOGETHER], tl.float32)
    for at in range(0, splits, TOGETHER):
        inside = at + some < splits
        weight = tl.where(inside, 1.0, 0.0)
        if REFERENCE != 0:  # a part that saw no key has the reference 0, and sums of 0
            own = tl.load(peak + at + some, mask=inside, other=float("-inf"))
            weight = tl.where(own == float("-inf"), 0.0, tl.exp2(reference_of(own, REFERENCE, True) - reference))
        denominator += tl.load(total + at + some, mask=inside, other=0.0) * weight
        shown = inside[:, None] & (values < v_width)[None, :]
        piece = tl.load(part + (at + some)[:, None] * v_width + values[None, :], mask=shown, other=0.0)
        acc += tl.sum(piece * weight[:, None], 0)
    whole = tl.sum(denominator, 0)
    if SINK:
        whole += tl.exp2(sunk - reference)
    if REFERENCE == 2:
        whole += floor * tl.exp2(-reference)
    if NORMALISED:
        inverse = inverse_of(whole)
        acc = acc * inverse
        if REFERENCE != 0:
            tl.store(reference_out + row, reference + tl.log2(tl.where(whole > 0, whole, 1.0)))
    if REFERENCE == 0:
        acc = acc * (1.0 / LIFT)
    tl.store(out + row * v_width + values, acc.to(out.dtype.element_ty), mask=values < v_width)


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, shift: Tensor | None,
    sink: Tensor | None, parameters: Tensor | None, form: Form, *, precise: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return output and reference like one_pass.forward, for few queries."""
    call = OnePassLaunch.of(q, k, v, mask, factor, shift, sink, None, parameters, form)
    batch, heads, queries, keys, width = *q.shape[:3], k.shape[2], v.shape[-1]
    rows, columns, warps, stages = tile(q, v, heads // k.shape[1] * queries)
    begin = 0 if form.window is None else max(keys - queries - form.window + 1, 0) // columns * columns
    programs = 2 * _processors(q) // (batch * k.shape[1])
    span = max(MIN_SPLIT, triton.cdiv(keys - begin, max(programs, 1)))
    span = triton.cdiv(span, columns) * columns
    splits = triton.cdiv(keys - begin, span)
    parts = torch.empty((batch, heads, queries, splits, width), dtype=torch.float32, device=q.device)
    total, peak = (torch.empty(parts.shape[:-1], dtype=torch.float32, device=q.device) for _ in range(2))
    out = torch.empty((*q.shape[:-1], width), dtype=torch.float32 if precise else q.dtype, device=q.device)
    reference = call.rows(MAPS[form.map].reference != Reference.NONE)
    names = ("REFERENCE", "NORMALISED", "SINK", "LIFT", "V_WIDTH")
    with call.device:
        decode_parts[(splits * batch * k.shape[1],)](
            *call.tensors, parts, total, peak, *call.strides, *call.sizes, begin, span, splits, **call.constants,
            ROWS=rows, COLUMNS=columns, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        join_parts[(batch * heads * queries,)](
            parts, total, peak, call.sink, out, reference, heads, queries, width, splits, form.floor,
            **{name: call.constants[name] for name in names}, num_warps=1 if width <= 64 else 4,
        )  # fmt: skip
    return out, reference


def _processors(q: Tensor) -> int:
    return torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 4


def tile(q: Tensor, v: Tensor, queries: int) -> tuple[int, int, int, int]:
    """Rows for all queries that share a key head, columns, warps, stages. Not yet timed on a GPU."""
    wide = max(padded(q), padded(v)) * q.element_size() > 256
    return max(16, int(triton.next_power_of_2(queries))), 32 if wide else 64, 4, 2 if q.element_size() > 2 else 3
