"""Attention by any map of kernels/maps.py in one pass over the keys, no matrix of weights in memory: the forward pass.

The kernels add tiles of keys to the output and the denominator of each row. The logits of a row are

    z = rule(factor * cap(scale <q, k>) + shift),   cap(s) = c tanh(s / c)

where all but the scale are optional. Keys whose logit lies below the `cutoff` of their row are hidden. LIFT multiplies
weights before their product with values, since float16 loses digits below 6e-5, where the weights of long rows lie.

`forward` runs one program per block of queries. `decode` is for few queries and many keys, and splits the keys over
programs: a program takes one part of the keys of a key head, for all queries of all heads that share it, which are the
rows of its tile; a second kernel joins the parts of each row. one_pass_backward.py has the gradients.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnorm.arithmetic import ceil_div, round_up
from attnorm.kernels.blocks import (
    HEAD_NUMBERS,
    NO_NUMBER,
    Constants,
    LogitRows,
    MapConstants,
    Matrix,
    Sight,
    key_range,
    load_factor,
    load_number,
    load_queries,
    load_tile,
    logit_rows,
    logits,
    matrix_of_head,
    queries_keys_values,
    rows_of_key_head,
    seen_keys,
    selected,
    store_tile,
)
from attnorm.kernels.launch import (
    DecodePlan,
    Form,
    GivenLayout,
    KernelConstants,
    Launch,
    LaunchPlan,
    Layout,
    LayoutFields,
    PlannedRun,
    PreparedKernels,
    are_rows,
    empty_numbers,
    empty_rows,
    fitting,
    in_rows,
    layout_of,
    number_kind,
    padded,
    padded_to,
    product_precision,
    record_run,
)
from attnorm.kernels.maps import AT_LEAST_ZERO, AT_MOST_ZERO, LOG2E, MAPS, NO_REFERENCE, RULES, Reference

TOGETHER = tl.constexpr(16)  # parts that are read at a time
PLANS = 1024  # kept; a model needs one per kind of layer for every length of its cache
MIN_SPLIT = 256  # keys of a program; with fewer, joining the parts would cost more than reading keys


class Saved(NamedTuple):
    """Numbers of each row that the backward pass needs; empty tensors if a map has none."""

    reference: Tensor  # log2 of the denominator of a scaled map
    inverse: Tensor  # 1 / denominator of another normalised map


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, shift: Tensor | None,
    sink: Tensor | None, cutoff: Tensor | None, parameters: Tensor | None, form: Form, *, precise: bool = False,
) -> tuple[Tensor, Saved]:  # fmt: skip
    """Return the output, in float32 if precise, and what the backward pass needs.

    factor, shift, cutoff: (B, H, Q) in float32; sink, parameters of the rule: (H,). Logits below the cutoff, which is
    in bits, are hidden.
    """
    call = OnePassLaunch.of(q, k, v, mask, factor, shift, sink, cutoff, parameters, form)
    out = empty_rows(q, v.shape[-1], torch.float32 if precise else q.dtype)
    map_ = MAPS[form.map]
    scaled = map_.reference != Reference.NONE
    saved = Saved(*(empty_numbers(q, used) for used in (scaled, map_.normalised and not scaled)))
    call.launch(
        forward_kernel, _forward_tile(q, v, scaled, mask is not None), *call.tensors, call.sink, out, *saved,
        *call.strides, *out.stride()[:3], *call.sizes, form.floor, **call.constants,
    )  # fmt: skip
    return out, saved


def _forward_tile(q: Tensor, v: Tensor, scaled: bool, masked: bool) -> tuple[int, int, int, int]:
    """Rows, columns, warps, stages: the fastest of six or more on an H200 in bfloat16. float32 needs more memory.

    Three stages of keys and values of width 128 fill the shared memory, so that a mask leaves two. Why float32 above
    width 128 has 16 rows: `launch.tile_without_values`. It spills 0.2 to 0.3 KB per thread.
    """
    width = max(padded(q), padded(v))
    if q.dtype == torch.float32:
        return (64, 32, 4, 2) if width <= 64 else (32, 32, 4, 2) if width <= 128 else (16, 64, 8, 2)
    if width <= 64:
        return 128, 64, 4, 3
    if width <= 128:
        if not scaled:
            return 128, 64, 4, 2
        return fitting(q, (128, 128, 8, 2 if masked else 3), 114_688 if masked else 163_840, (128, 64, 8, 2))
    return 64, 32, 4, 2


def decode(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, exponent: Tensor | None,
    shift: Tensor | float | None, sink: Tensor | None, parameters: Tensor | float | None, form: Form,
) -> Tensor:  # fmt: skip
    """Return the output like `forward`, for few queries.

    factor, exponent, shift, sink and parameters: as `launch.number_kind` has them; the sink and the parameters of the
    rule not by row.
    """
    mask = None if mask is None else mask.view(torch.uint8)
    options = form, product_precision(q.dtype)
    return run_planned(_decode_plan, options, q, k, v, mask, factor, exponent, shift, parameters, sink)


def run_planned(
    find_plan: Callable[..., DecodePlan], options: tuple[Hashable, ...], q: Tensor, k: Tensor, v: Tensor,
    mask: Tensor | None, *numbers: Tensor | float | None,
) -> Tensor:  # fmt: skip
    """Return the output of a call. mask: in uint8. numbers: of rows, heads or the call.

    find_plan: a cached function of the options and the layouts of all tensors, so that nothing else enters a plan.
    """
    sources = q, k, v, mask, *numbers
    plan = find_plan(*options, *[None if source is None else layout_of(source) for source in sources])
    if plan.copies:
        numbers = tuple(t.contiguous() if isinstance(t, Tensor) else t for t in numbers)
        sources = in_rows(q), in_rows(k), in_rows(v), mask, *numbers
        plan = find_plan(*options, *map(layout_of, sources))
    given = [source for source in sources if source is not None]
    output = plan.run(given)
    record_run(PlannedRun(plan, given, output))
    return output


def needs_copies(q: Layout, k: Layout, v: Layout, numbers: Iterable[GivenLayout]) -> bool:
    """Whether kernels need copies: rows of q, k and v that are not contiguous, or such numbers."""
    if not all(are_rows(layout.strides) for layout in (q, k, v)):
        return True
    return any(isinstance(layout, tuple) and not _is_contiguous(*layout[:2]) for layout in numbers)


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def device_of_all(*layouts: GivenLayout) -> int:
    """Return the device of all tensors: kernels get addresses, which another device cannot read."""
    devices = {layout[3] for layout in layouts if isinstance(layout, tuple)}
    if len(devices) > 1:
        raise ValueError(f"expected all tensors on one device, got the devices {sorted(devices)} (-1 is the CPU)")
    return devices.pop()


@lru_cache(maxsize=PLANS)
def _decode_plan(
    form: Form, precision: str, q_: LayoutFields, k_: LayoutFields, v_: LayoutFields, mask: GivenLayout,
    factor: GivenLayout, exponent: GivenLayout, shift: GivenLayout, parameters: GivenLayout, sink: GivenLayout,
) -> DecodePlan:  # fmt: skip
    numbers = factor, exponent, shift, parameters, sink
    device, q, k, v = device_of_all(q_, k_, v_, mask, *numbers), Layout(*q_), Layout(*k_), Layout(*v_)
    (batch, heads, queries, width), (_, key_heads, _, v_width) = q.shape, v.shape
    groups, rows = heads // key_heads, batch * heads * queries
    columns, kernels = _decode_kernels(
        form.map, form.power, form.rule, form.softcap is not None, form.causal, form.window is not None,
        mask is not None, *map(number_kind, numbers), q.dtype, width, v_width, groups * queries, precision, device >= 0,
    )  # fmt: skip
    begin, span, splits = parts_of_keys(q, v, form.window, columns, 2)
    numbers_of_call = (*call_numbers(q, k, v, mask, form), begin, span, splits, 0, form.floor)
    launches = LaunchPlan(kernels, device, (splits * batch * key_heads, rows), numbers_of_call)
    copies = needs_copies(q, k, v, numbers)
    return DecodePlan((batch, heads, queries, v_width), rows * splits * (v_width + 2), launches, copies)


# What call_numbers returns: arguments of the kernels here and in decoding.py.
CALL_NUMBERS = (
    "q_batch", "q_head", "q_row", "k_batch", "k_head", "k_row", "v_batch", "v_head", "v_row",
    "mask_batch", "mask_head", "mask_row", "mask_column", "heads", "groups", "queries", "keys",
    "window", "scale", "cap", "log2_base", "delta",
)  # fmt: skip


def call_numbers(q: Layout, k: Layout, v: Layout, mask: GivenLayout, form: Form) -> tuple[float, ...]:
    """Return the strides and sizes of the tensors and the constants of the form, with logits in bits."""
    mask_strides = mask[1] if isinstance(mask, tuple) else (0, 0, 0, 0)
    heads, groups = q.shape[1], q.shape[1] // v.shape[1]
    return (
        *q.strides[:3], *k.strides[:3], *v.strides[:3], *mask_strides, heads, groups, q.shape[2], v.shape[2],
        form.window or 0, form.scale * LOG2E.value, (form.softcap or 1.0) * LOG2E.value, form.log2_base, form.delta,
    )  # fmt: skip


DECODE_ARGUMENTS = (
    "q", "k", "v", "mask", "factor", "exponent", "shift", "parameters", "sink", "work", "out",
    *CALL_NUMBERS, "begin", "span", "splits", "stored", "floor",
)  # fmt: skip


@lru_cache(maxsize=256)
def _decode_kernels(
    map_name: str, power: int, rule: str, capped: bool, causal: bool, windowed: bool, masked: bool, factor: int,
    exponent: int, shift: int, parameters: int, sink: int, dtype: torch.dtype, width: int, v_width: int, rows: int,
    precision: str, on_gpu: bool,
) -> tuple[int, PreparedKernels]:  # fmt: skip
    """Return the columns of a tile, `decode_parts` and `join_parts`. factor to sink: kinds of numbers."""
    map_, padded_width, padded_v_width = MAPS[map_name], padded_to(width), padded_to(v_width)
    tile_rows, columns, warps, stages = _decode_tile(padded_width, padded_v_width, dtype.itemsize, rows)
    shared = {
        "REFERENCE": int(map_.reference), "NORMALISED": map_.normalised, "LIFT": map_.lift,
        "V_WIDTH": padded_v_width, "V_SIZE": v_width,
    }  # fmt: skip
    constants = {
        **shared, "MAP": map_.weights, "SLOPES": map_.slopes, "RULE": RULES[rule], "P": power,
        "FAST": on_gpu and dtype != torch.float32, "RULED": parameters, "CAPPED": capped, "FACTORED": factor,
        "EXPONENT": exponent, "SHIFTED": shift, "CAUSAL": causal, "WINDOWED": windowed, "MASKED": masked,
        "PRECISION": precision, "ROWS": tile_rows, "COLUMNS": columns, "WIDTH": padded_width, "SIZE": width,
    }  # fmt: skip
    kinds = {
        "mask": masked, "factor": factor, "exponent": exponent, "shift": shift, "parameters": parameters, "sink": sink,
    }  # fmt: skip
    return columns, PreparedKernels(
        DECODE_ARGUMENTS,
        KernelConstants(decode_parts, constants, warps, stages),
        KernelConstants(join_parts, shared | {"SINK": sink}, 1 if v_width <= 64 else 4),
        absent=[name for name, kind in kinds.items() if not kind],
    )


def _decode_tile(width: int, v_width: int, item_size: int, queries: int) -> tuple[int, int, int, int]:
    """Rows for all queries that share a key head, columns, warps, stages. Timed with 16 rows only."""
    wide = max(width, v_width) * item_size > 256
    return max(16, int(triton.next_power_of_2(queries))), 32 if wide else 64, 4, 2 if item_size > 2 else 3


def parts_of_keys(q: Layout, v: Layout, window: int | None, columns: int, programs: int) -> tuple[int, int, int]:
    """Return the first key that a query sees, the keys of a part and the number of parts.

    programs: per processor, for the parts of all key heads together.
    """
    batch, key_heads, keys, _ = v.shape
    begin = 0 if window is None else max(keys - q.shape[2] - window + 1, 0) // columns * columns
    splits = programs * _processors(q.device) // (batch * key_heads)
    span = round_up(max(MIN_SPLIT, ceil_div(keys - begin, max(splits, 1))), columns)
    return begin, span, ceil_div(keys - begin, span)


@lru_cache
def _processors(device: int) -> int:
    return 4 if device < 0 else int(torch.cuda.get_device_properties(device).multi_processor_count)


@dataclass(frozen=True)
class OnePassLaunch(Launch):
    shift: Tensor | None
    sink_logits: Tensor | None
    cutoff: Tensor | None
    parameters: Tensor | None  # of the rule, (H,) in float32
    form: Form

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, shift: Tensor | None,
        sink: Tensor | None, cutoff: Tensor | None, parameters: Tensor | None, form: Form,
    ) -> "OnePassLaunch":  # fmt: skip
        factor, shift, cutoff = (None if t is None else t.contiguous() for t in (factor, shift, cutoff))
        return cls(in_rows(q), in_rows(k), in_rows(v), mask, factor, form.causal, shift, sink, cutoff, parameters, form)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*super().tensors, *(self.q if t is None else t for t in (self.shift, self.cutoff, self.parameters)))

    @property
    def sink(self) -> Tensor:
        return self.q if self.sink_logits is None else self.sink_logits

    @property
    def sizes(self) -> tuple[int | float, ...]:
        form = self.form
        return (
            *self.lengths, form.window or 0, self.q.shape[-1], self.v.shape[-1],
            form.scale * LOG2E.value, (form.softcap or 1.0) * LOG2E.value,
        )  # fmt: skip

    @cached_property
    def constants(self) -> dict[str, Any]:
        form, map_ = self.form, MAPS[self.form.map]
        ruled, cap, shifted = form.rule != "none", form.softcap is not None, self.shift is not None
        return {
            **super().constants,
            "MAP": map_.weights, "SLOPES": map_.slopes, "RULE": RULES[form.rule],
            "P": form.power, "REFERENCE": int(map_.reference), "NORMALISED": map_.normalised,
            "RULED": ruled, "CAPPED": cap, "SHIFTED": shifted, "SELECTED": self.cutoff is not None,
            "SINK": self.sink_logits is not None,
            "PLAIN": form.scale > 0 and not (ruled or cap or shifted),
            "WINDOWED": form.window is not None, "LIFT": map_.lift,
        }  # fmt: skip


@triton.jit
def forward_kernel(
    q, k, v, mask, factor, shift, cutoff, parameters, sink, out, reference_out, inverse_out,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row, mask_column, o_batch, o_head, o_row,
    heads, groups, queries, keys, offset, window, width, v_width, scale, cap, floor,
    MAP: tl.constexpr, SLOPES: tl.constexpr, RULE: tl.constexpr, P: tl.constexpr, FAST: tl.constexpr,
    REFERENCE: tl.constexpr, NORMALISED: tl.constexpr, RULED: tl.constexpr,
    CAPPED: tl.constexpr, FACTORED: tl.constexpr, SHIFTED: tl.constexpr, SELECTED: tl.constexpr,
    SINK: tl.constexpr, PLAIN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    FULL: tl.constexpr, V_FULL: tl.constexpr, LIFT: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = Constants(CAUSAL, WINDOWED, MASKED, PRECISION, ROWS, COLUMNS, WIDTH, FULL, V_WIDTH, V_FULL)
    M: tl.constexpr = MapConstants(
        MAP, SLOPES, RULE, P, FAST, REFERENCE, NORMALISED, RULED, CAPPED, FACTORED, SHIFTED, SELECTED, PLAIN, LIFT
    )  # fmt: skip
    own, rows, inside, q_tile, k, v, sight = queries_keys_values(
        q, k, v, mask, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, mask_batch, mask_head,
        mask_row, mask_column, heads, groups, queries, keys, offset, window, width, v_width, C,
    )  # fmt: skip
    row_at = own.batch_head * queries + rows
    row = logit_rows(LogitRows(factor, shift, cutoff), row_at, inside, M)
    if PLAIN and FACTORED:  # the same logits with a factor that is not negative, so that the largest product stays it
        q_tile = tl.where(row.factor[:, None] < 0, -q_tile, q_tile)
        row = LogitRows(tl.abs(row.factor), row.shift, row.cutoff)
    parameter = tl.load(parameters + own.head) if RULED else 0.0

    acc = tl.zeros([ROWS, V_WIDTH], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    if SINK:
        peak = tl.zeros([ROWS], tl.float32) + tl.load(sink + own.head) * LOG2E
        total = total + 1.0
    borders = key_range(own.index, sight, C)
    for part in tl.static_range(0 if WINDOWED or MASKED else 1, 3):
        acc, total, peak = fold(
            acc, total, peak, borders[part], borders[part + 1], q_tile, k, v, rows, row, sight, scale, cap, parameter,
            C, M, part != 1,
        )  # fmt: skip

    reference = reference_of(peak, REFERENCE, True)
    if REFERENCE == AT_LEAST_ZERO:  # no other map has a floor, and 2^-reference may overflow there
        total = total + floor * tl.exp2(-reference)
    if NORMALISED:
        inverse = inverse_of(total)
        acc = acc * inverse[:, None]
        if REFERENCE != NO_REFERENCE:
            tl.store(reference_out + row_at, reference + tl.log2(tl.where(total > 0, total, 1.0)), mask=inside)
        else:
            tl.store(inverse_out + row_at, inverse, mask=inside)
    if REFERENCE == NO_REFERENCE:
        acc = acc * (1.0 / LIFT)
    out = matrix_of_head(out, own.batch, own.head, o_batch, o_head, o_row, queries, v_width)
    store_tile(out, acc, rows, V_WIDTH)


@triton.jit
def decode_parts(
    q, k, v, mask, factor, exponent, shift, parameters, work,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row, mask_column,
    heads, groups, queries, keys, window, scale, cap, log2_base, delta, begin, span, splits,
    MAP: tl.constexpr, SLOPES: tl.constexpr, RULE: tl.constexpr, P: tl.constexpr, FAST: tl.constexpr,
    REFERENCE: tl.constexpr, NORMALISED: tl.constexpr, RULED: tl.constexpr,
    CAPPED: tl.constexpr, FACTORED: tl.constexpr, EXPONENT: tl.constexpr, SHIFTED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    SIZE: tl.constexpr, V_SIZE: tl.constexpr, LIFT: tl.constexpr,
):  # fmt: skip
    """Compute the state of each row over one part of the keys: `parts_in` says where it is written.

    RULED, FACTORED, EXPONENT, SHIFTED: kinds of numbers.
    """
    FULL: tl.constexpr = WIDTH == SIZE
    V_FULL: tl.constexpr = V_WIDTH == V_SIZE
    C: tl.constexpr = Constants(CAUSAL, WINDOWED, MASKED, PRECISION, ROWS, COLUMNS, WIDTH, FULL, V_WIDTH, V_FULL)
    M: tl.constexpr = MapConstants(
        MAP, SLOPES, RULE, P, FAST, REFERENCE, NORMALISED, RULED != NO_NUMBER, CAPPED, FACTORED != NO_NUMBER,
        SHIFTED != NO_NUMBER, False, False, LIFT,
    )  # fmt: skip
    split, own = rows_of_key_head(splits, heads, groups, queries, ROWS)
    part_out, total_out, peak_out = parts_in(work, tl.num_programs(0) // splits * groups * queries, splits, 0, V_SIZE)
    k += own.batch * k_batch + own.key_head * k_head
    v += own.batch * v_batch + own.key_head * v_head
    mask += own.batch * mask_batch + (own.head * mask_head)[:, None]
    q_tile = load_queries(q, own, q_batch, q_head, q_row, SIZE, WIDTH)
    row_shift = load_number(shift, own.row_at, own.head, own.inside, SHIFTED, 0.0) * LOG2E
    row = LogitRows(load_factor(factor, exponent, log2_base, delta, own, FACTORED, EXPONENT), row_shift, row_shift)
    parameter = load_number(parameters, own.row_at, own.head, own.inside, RULED, 0.0)[:, None]

    acc = tl.zeros([ROWS, V_WIDTH], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    start = begin + split * span
    acc, total, peak = fold(
        acc, total, peak, start, tl.minimum(start + span, keys), q_tile, Matrix(k, keys, k_row, SIZE),
        Matrix(v, keys, v_row, V_SIZE), own.query, row,
        Sight(mask, mask_row, mask_column, queries, keys, keys - queries, window), scale, cap, parameter, C, M, True,
    )  # fmt: skip
    at = own.row_at * splits + split
    tl.store(total_out + at, total, mask=own.inside)
    tl.store(peak_out + at, peak, mask=own.inside)
    values = tl.arange(0, V_WIDTH)
    seen = own.inside[:, None] & (values < V_SIZE)[None, :]
    tl.store(part_out + at[:, None] * V_SIZE + values[None, :], acc, mask=seen)


@triton.jit
def parts_in(work, row_count, splits, stored, V_SIZE: tl.constexpr):
    """Return pointers to the sums of weighted values (rows, splits, E), denominators and peaks (rows, splits).

    stored: logits of a row, which are stored between the sums and the denominators (kernels/decoding.py).
    """
    rows = row_count.to(tl.int64)
    totals = work + rows * (splits * V_SIZE + stored)
    return work, totals, totals + rows * splits


@triton.jit
def join_parts(
    work, sink, out, heads, queries, splits, stored, floor,
    REFERENCE: tl.constexpr, NORMALISED: tl.constexpr, SINK: tl.constexpr, LIFT: tl.constexpr, V_WIDTH: tl.constexpr,
    V_SIZE: tl.constexpr,
):  # fmt: skip
    """Join the parts of one row. SINK: kind of number."""
    row = tl.program_id(0).to(tl.int64)
    values = tl.arange(0, V_WIDTH)
    part, total, peak = parts_in(work, tl.num_programs(0), splits, stored, V_SIZE)
    part += row * splits * V_SIZE
    total += row * splits
    peak += row * splits
    some = tl.arange(0, TOGETHER)
    largest = tl.full([TOGETHER], float("-inf"), tl.float32)
    for at in range(0, splits, TOGETHER):
        largest = tl.maximum(largest, tl.load(peak + at + some, mask=at + some < splits, other=float("-inf")))
    highest = tl.max(largest, 0)
    if SINK:
        sunk = tl.load(sink + (row // queries % heads if SINK == HEAD_NUMBERS else 0)).to(tl.float32) * LOG2E
        highest = tl.maximum(highest, sunk)
    reference = reference_of(highest, REFERENCE, True)

    acc = tl.zeros([V_WIDTH], tl.float32)
    denominator = tl.zeros([TOGETHER], tl.float32)
    for at in range(0, splits, TOGETHER):
        inside = at + some < splits
        weight = tl.where(inside, 1.0, 0.0)
        if REFERENCE != NO_REFERENCE:  # a part that saw no key has the reference 0, and sums of 0
            own = tl.load(peak + at + some, mask=inside, other=float("-inf"))
            weight = tl.where(own == float("-inf"), 0.0, tl.exp2(reference_of(own, REFERENCE, True) - reference))
        denominator += tl.load(total + at + some, mask=inside, other=0.0) * weight
        shown = inside[:, None] & (values < V_SIZE)[None, :]
        piece = tl.load(part + (at + some)[:, None] * V_SIZE + values[None, :], mask=shown, other=0.0)
        acc += tl.sum(piece * weight[:, None], 0)
    whole = tl.sum(denominator, 0)
    if SINK:
        whole += tl.exp2(sunk - reference)
    if REFERENCE == AT_LEAST_ZERO:
        whole += floor * tl.exp2(-reference)
    if NORMALISED:
        inverse = inverse_of(whole)
        acc = acc * inverse
    if REFERENCE == NO_REFERENCE:
        acc = acc * (1.0 / LIFT)
    tl.store(out + row * V_SIZE + values, acc.to(out.dtype.element_ty), mask=values < V_SIZE)


@triton.jit
def fold(
    acc, total, peak, start, stop, q_tile, k, v, rows, row, sight, scale, cap, parameter,
    C: tl.constexpr, M: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Add the keys from start to stop to output, denominator and peak of a block of queries."""
    for at in range(start, stop, C.COLUMNS):
        columns = at + tl.arange(0, C.COLUMNS)
        k_tile = load_tile(k, columns, C.WIDTH, EDGE, C.FULL)
        dot = tl.dot(q_tile, tl.trans(k_tile), input_precision=C.PRECISION)
        i, j = rows[:, None], columns[None, :]
        z, _s, _cap_slope, _rule_slope = logits(dot, i, j, sight.offset, row, scale, cap, parameter, M, 1)
        if EDGE:
            seen = seen_keys(i, j, sight, C)
        if M.REFERENCE != NO_REFERENCE:
            if EDGE:
                largest = tl.max(tl.where(seen, z, float("-inf")), 1)
            elif M.PLAIN:  # one product per row instead of one per key
                largest = tl.max(dot, 1) * (row.factor * scale)
            else:
                largest = tl.max(z, 1)
            largest = tl.maximum(peak, largest)
            shrink = tl.exp2(reference_of(peak, M.REFERENCE, False) - reference_of(largest, M.REFERENCE, EDGE))
            acc = acc * shrink[:, None]
            total = total * shrink
            peak = largest
        reference = reference_of(peak, M.REFERENCE, EDGE)
        if M.SELECTED:  # behind the peak, which is kept: a tile without any other kept key has one all the same
            z = selected(z, row.cutoff[:, None])
        a, b = M.MAP(z, reference[:, None], M.P, M.FAST)
        if EDGE:
            a = tl.where(seen, a, 0.0)
            b = tl.where(seen, b, 0.0)
        if M.NORMALISED:
            total = total + tl.sum(b, 1)
        if M.REFERENCE == NO_REFERENCE:
            a = a * M.LIFT
        v_tile = load_tile(v, columns, C.V_WIDTH, EDGE, C.V_FULL)
        acc = tl.dot(a.to(v_tile.dtype), v_tile, acc, input_precision=C.PRECISION)
    return acc, total, peak


@triton.jit
def reference_of(peak, REFERENCE: tl.constexpr, MAY_BE_EMPTY: tl.constexpr):
    """Return r of maps.Reference from the largest logits so far; 0 for rows without a key so far."""
    if MAY_BE_EMPTY:
        peak = tl.where(peak == float("-inf"), 0.0, peak)
    if REFERENCE == AT_LEAST_ZERO:
        peak = tl.maximum(peak, 0.0)
    if REFERENCE == AT_MOST_ZERO:
        peak = tl.minimum(peak, 0.0)
    return peak


@triton.jit
def inverse_of(total):
    """1 / total, and 0 for rows without a weight."""
    return tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), tl.where(total == 0, 0.0, float("nan")))
