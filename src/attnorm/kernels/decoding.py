"""Decoding kernels: few queries, many keys, and maps that first need a number of the whole row.

Such a map is the threshold of entmax, the entropy of adaptive temperature or the k-th largest logit of top-k. With few
queries the logits of all rows are small (4 MB for 32 rows of 32,768), so that they are stored, and keys and values are
read once each:

1. `store_logits` reads the keys and writes the logits of the one-pass kernels, in bits; those of hidden keys are -inf.
2. A kernel of row_searches.py finds the state of each row from its logits, which are still in the cache.
3. `weigh_parts` turns logits into weights and reads the values. Sparse maps skip tiles of values without a weight.
4. `join_parts` of one_pass.py adds up the parts.

Steps 1 and 3 split the keys over programs as `decode` of one_pass.py does.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnorm.arithmetic import round_up
from attnorm.kernels.blocks import (
    NO_NUMBER,
    Constants,
    LogitRows,
    MapConstants,
    Matrix,
    Sight,
    load_factor,
    load_number,
    load_queries,
    load_tile,
    logits,
    rows_of_key_head,
    seen_keys,
)
from attnorm.kernels.launch import (
    DecodePlan,
    Form,
    GivenLayout,
    KernelConstants,
    LaunchPlan,
    Layout,
    LayoutFields,
    PreparedKernels,
    number_kind,
    padded_to,
    product_precision,
)
from attnorm.kernels.maps import LN2, NO_REFERENCE, RULES
from attnorm.kernels.one_pass import (
    CALL_NUMBERS,
    PLANS,
    TOGETHER,
    call_numbers,
    device_of_all,
    join_parts,
    needs_copies,
    parts_of_keys,
    run_planned,
)
from attnorm.kernels.row_searches import (
    ALIGNED,
    ENTROPY,
    RANGE,
    VARIANCE,
    find_thresholds,
    soften_rows,
    sum_costs,
    workspace,
)
from attnorm.kernels.stick_breaking import part_of, shares, sum_after
from attnorm.kernels.threshold_maps import MAPS, ThresholdConstants, weight_of

SOFT, THRESHOLD, STICK = 0, 1, 2  # families of maps
_SOFT, _THRESHOLD, _STICK = tl.constexpr(SOFT), tl.constexpr(THRESHOLD), tl.constexpr(STICK)  # for the kernels
CHUNK = 4096  # logits of a row that are read at a time: 8 per thread of 16 warps
LISTED = 1024  # the same for the listed ones, which are few
MAX_STEPS = 100  # of Newton's method; rows built against it need 24
EARLY_STEPS = 6
TOLERANCE = 4e-6  # how far the sum of a row may be from 1 before the last step
STATES = 3  # numbers of a row that a search finds
DENSE_PROGRAMS, SPARSE_PROGRAMS = 2, 4  # per processor. A sparse program waits for logits rather than for values.


class RowSearch(NamedTuple):
    """What a map needs to know of a row."""

    kind: str  # entropy, variance, range, top, stick, stick_rest, or a map of kernels/threshold_maps.py
    numbers: tuple[float, ...] = ()  # entropy: the polynomial, highest power first; variance: floor and temperature
    steps: tuple[float, ...] = ()  # entropy: pairs of an entropy and the least factor of the rows above it
    top: int | None = None  # keep this many logits, the largest ones

    @property
    def family(self) -> int:
        return family_of(self.kind)


def family_of(kind: str) -> int:
    return THRESHOLD if kind in MAPS else STICK if kind.startswith("stick") else SOFT


def decode(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, exponent: Tensor | None,
    sink: Tensor | None, parameters: Tensor | float | None, parameter: Tensor | float | None, count: Tensor | None,
    form: Form, search: RowSearch,
) -> Tensor:  # fmt: skip
    """Return the output (B, H, Q, E).

    factor, its exponent, sink, parameters of the rule, parameter of a threshold map: as `launch.number_kind` has them.
    count: how many logits to keep, (B, H, Q) in int32, where this differs between rows.
    """
    mask = None if mask is None else mask.view(torch.uint8)
    options = form, search, product_precision(q.dtype)
    return run_planned(_plan, options, q, k, v, mask, factor, exponent, parameters, parameter, count, sink)


@lru_cache(maxsize=PLANS)
def _plan(
    form: Form, search: RowSearch, precision: str, q_: LayoutFields, k_: LayoutFields, v_: LayoutFields,
    mask: GivenLayout, factor: GivenLayout, exponent: GivenLayout, parameters: GivenLayout, parameter: GivenLayout,
    count: GivenLayout, sink: GivenLayout,
) -> DecodePlan:  # fmt: skip
    numbers = factor, exponent, parameters, parameter, count, sink
    device, q, k, v = device_of_all(q_, k_, v_, mask, *numbers), Layout(*q_), Layout(*k_), Layout(*v_)
    (batch, heads, queries, width), (_, key_heads, keys, v_width) = q.shape, v.shape
    groups, rows, family = heads // key_heads, batch * heads * queries, search.family
    kernels = _kernels(
        form.rule, form.softcap is not None, form.causal, form.window is not None, mask is not None,
        number_kind(factor), number_kind(exponent), number_kind(sink), number_kind(parameters),
        number_kind(parameter), count is not None,
        search.kind, search.numbers, search.steps, search.top is not None, q.dtype, width, v_width, groups * queries,
        precision, device >= 0,
    )  # fmt: skip
    begin, logit_span, logit_splits = parts_of_keys(q, v, form.window, kernels.columns, DENSE_PROGRAMS)
    span, splits = logit_span, logit_splits
    if family != SOFT or search.top is not None:
        _, span, splits = parts_of_keys(q, v, form.window, kernels.columns, SPARSE_PROGRAMS)
    stored = kernels.lists * round_up(keys, ALIGNED.value)
    launches = LaunchPlan(
        kernels.prepared, device,
        (
            logit_splits * batch * key_heads, rows * splits if family == STICK else rows, splits * batch * key_heads,
            rows,
        ),
        (
            *call_numbers(q, k, v, mask, form), begin, logit_span, logit_splits, span, splits, search.top or 0,
            TOLERANCE, stored, 0.0,
        ),
    )  # fmt: skip
    work = rows * (splits * (v_width + 2) + stored + STATES)
    return DecodePlan((batch, heads, queries, v_width), work, launches, needs_copies(q, k, v, numbers))


ARGUMENTS = (
    "q", "k", "v", "mask", "factor", "exponent", "parameters", "parameter", "count", "sink", "work", "out",
    *CALL_NUMBERS, "begin", "logit_span", "logit_splits", "span", "splits", "top", "tolerance", "stored", "floor",
)  # fmt: skip


class _Kernels(NamedTuple):
    columns: int  # of a tile
    lists: int  # rows of K numbers per row: its logits, and those that a search lists
    prepared: PreparedKernels  # store_logits; soften_rows, find_thresholds or sum_costs; weigh_parts; join_parts


@lru_cache(maxsize=256)
def _kernels(
    rule: str, capped: bool, causal: bool, windowed: bool, masked: bool, factor: int, exponent: int, sink: int,
    parameters: int, parameter: int, counted: bool, kind: str, numbers: tuple[float, ...], steps: tuple[float, ...],
    selected: bool, dtype: torch.dtype, width: int, v_width: int, rows: int, precision: str, on_gpu: bool,
) -> _Kernels:  # fmt: skip
    """Return the kernels of a call. factor to parameter: kinds of numbers."""
    padded_width, padded_v_width = padded_to(width), padded_to(v_width)
    tile_rows, columns, warps, stages = _tile(max(padded_width, padded_v_width), dtype.itemsize, rows)
    fast, rest, family = on_gpu and dtype != torch.float32, kind == "stick_rest", family_of(kind)
    map_ = MAPS.get(kind, MAPS["sparsemax"])
    unit, lists = map_.unit * LN2.value, 2 if family == THRESHOLD or selected else 1
    places = {"LISTS": lists, "V_SIZE": v_width}
    logits = {
        "RULE": RULES[rule], "FAST": fast, "RULED": parameters, "CAPPED": capped, "FACTORED": factor,
        "EXPONENT": exponent, "CAUSAL": causal, "WINDOWED": windowed, "MASKED": masked, "PRECISION": precision,
        "ROWS": tile_rows, "COLUMNS": columns, "WIDTH": padded_width, "SIZE": width, **places,
    }  # fmt: skip
    if family == SOFT:
        statistic = {"entropy": ENTROPY, "variance": VARIANCE, "range": RANGE}.get(kind, 0)
        constants = {
            "STATISTIC": statistic, "NUMBERS": numbers, "STEPS": steps, "SELECTED": selected, "COUNTED": counted,
            "CHUNK": CHUNK, "LISTED": LISTED, **places,
        }  # fmt: skip
        search = KernelConstants(soften_rows, constants, 16)
    elif family == THRESHOLD:
        constants = {
            "UNIT": unit, "WEIGHTS": map_.weights, "NEWTON": map_.newton, "START": map_.start,
            "DEFORMED": map_.deformed, "COUNTED": map_.counted, "PARAMETER": parameter, "FAST": fast, "CHUNK": CHUNK,
            "LISTED": LISTED, "MAX_STEPS": MAX_STEPS, "EARLY": EARLY_STEPS, **places,
        }  # fmt: skip
        search = KernelConstants(find_thresholds, constants, 16)
    else:
        search = KernelConstants(sum_costs, {"REST": rest, "FAST": fast, "LISTED": LISTED, **places}, 4)
    weigh = {
        "UNIT": unit, "WEIGHTS": map_.weights, "DEFORMED": map_.deformed, "PARAMETER": parameter, "FAMILY": family,
        "RANGED": kind == "range", "SPARSE": family != SOFT or selected, "REST": rest, "PART": part_of(dtype, on_gpu),
        # float16 loses digits below 6e-5, where the weights of long rows lie
        "FAST": fast, "LIFT": 1024.0 if dtype == torch.float16 else 1.0, "PRECISION": precision, "ROWS": tile_rows,
        "COLUMNS": columns, "V_WIDTH": padded_v_width, **places,
    }  # fmt: skip
    join = {
        "REFERENCE": 1 if family == SOFT else 0, "NORMALISED": family != STICK, "SINK": sink, "LIFT": 1.0,
        "V_WIDTH": padded_v_width, "V_SIZE": v_width,
    }  # fmt: skip
    kinds = {
        "mask": masked, "factor": factor, "exponent": exponent, "parameters": parameters, "parameter": parameter,
        "count": counted, "sink": sink,
    }  # fmt: skip
    prepared = PreparedKernels(
        ARGUMENTS,
        KernelConstants(store_logits, logits, warps, stages),
        search,
        KernelConstants(weigh_parts, weigh, warps, stages),
        KernelConstants(join_parts, join, 1 if v_width <= 64 else 4),
        absent=[name for name, kind in kinds.items() if not kind],
    )
    return _Kernels(columns, lists, prepared)


def _tile(width: int, item_size: int, queries: int) -> tuple[int, int, int, int]:
    """Rows for all queries that share a key head, columns, warps, stages.

    Compiled for sm_90 in bfloat16, tiles of up to 64 rows spill nothing with 8 warps from 64 rows on. 16 rows of width
    128 take at most 126 registers, so that a processor holds four programs, and 56 KB of shared memory. Only these are
    timed (docs/results/benchmarks.md).
    """
    rows = max(16, int(triton.next_power_of_2(queries)))
    return rows, 32 if width * item_size > 256 else 64, 4 if rows <= 32 else 8, 2 if item_size > 2 or rows > 32 else 4


@triton.jit
def store_logits(
    q, k, mask, factor, exponent, parameters, work,
    q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
    heads, groups, queries, keys, window, scale, cap, log2_base, delta, begin, logit_span, logit_splits, splits,
    RULE: tl.constexpr, FAST: tl.constexpr, RULED: tl.constexpr, CAPPED: tl.constexpr, FACTORED: tl.constexpr,
    EXPONENT: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    LISTS: tl.constexpr, V_SIZE: tl.constexpr,
):  # fmt: skip
    """Write the logits of one part of the keys of a key head, for all rows that share it.

    RULED, FACTORED, EXPONENT: kinds of numbers. logit_span, logit_splits: keys and number of these parts; splits:
    number of the parts of `weigh_parts`.
    """
    C: tl.constexpr = Constants(CAUSAL, WINDOWED, MASKED, PRECISION, ROWS, COLUMNS, WIDTH, WIDTH == SIZE)
    M: tl.constexpr = MapConstants(
        None, None, RULE, 1, FAST, NO_REFERENCE, False, RULED != NO_NUMBER, CAPPED, FACTORED != NO_NUMBER, False, False,
        False, 1.0
    )  # fmt: skip
    split, own = rows_of_key_head(logit_splits, heads, groups, queries, ROWS)
    row_count = tl.num_programs(0) // logit_splits * groups * queries
    places = workspace(work, row_count, keys, splits, LISTS, V_SIZE)
    q_tile = load_queries(q, own, q_batch, q_head, q_row, SIZE, WIDTH)
    k = Matrix(k + own.batch * k_batch + own.key_head * k_head, keys, k_row, SIZE)
    mask += own.batch * mask_batch + (own.head * mask_head)[:, None]
    offset = keys - queries
    sight = Sight(mask, mask_row, mask_column, queries, keys, offset, window)
    row_factor = load_factor(factor, exponent, log2_base, delta, own, FACTORED, EXPONENT)
    row = LogitRows(row_factor, row_factor, row_factor)
    parameter = load_number(parameters, own.row_at, own.head, own.inside, RULED, 0.0)[:, None]
    i = own.query[:, None]
    start = begin + split * logit_span
    for at in range(start, tl.minimum(start + logit_span, keys), COLUMNS):
        columns = at + tl.arange(0, COLUMNS)
        j = columns[None, :]
        k_tile = load_tile(k, columns, WIDTH, True, C.FULL)
        dot = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        z, _s, _cap_slope, _rule_slope = logits(dot, i, j, offset, row, scale, cap, parameter, M, 1)
        z = tl.where(seen_keys(i, j, sight, C), z, float("-inf"))
        tl.store(places.logits + own.row_at[:, None] * places.pitch + j, z, mask=own.inside[:, None] & (j < keys))


@triton.jit
def weigh_parts(
    work, v, parameter, v_batch, v_head, v_row, heads, groups, queries, keys, begin, span, splits,
    UNIT: tl.constexpr, WEIGHTS: tl.constexpr, DEFORMED: tl.constexpr, PARAMETER: tl.constexpr, FAMILY: tl.constexpr,
    RANGED: tl.constexpr, SPARSE: tl.constexpr, REST: tl.constexpr, PART: tl.constexpr, FAST: tl.constexpr,
    LIFT: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, V_WIDTH: tl.constexpr,
    LISTS: tl.constexpr, V_SIZE: tl.constexpr,
):  # fmt: skip
    """Sum the weighted values of one part of the keys, and the denominators; of stick-breaking these are the costs.

    A map like softmax also writes the reference of its weights. PARAMETER: kind of number.
    """
    T: tl.constexpr = ThresholdConstants(WEIGHTS, DEFORMED, FAST, True)
    split, own = rows_of_key_head(splits, heads, groups, queries, ROWS)
    row_count = tl.num_programs(0) // splits * groups * queries
    places = workspace(work, row_count, keys, splits, LISTS, V_SIZE)
    v = Matrix(v + own.batch * v_batch + own.key_head * v_head, keys, v_row, V_SIZE)
    at_part = own.row_at * splits + split
    peak = tl.load(places.state + own.row_at, mask=own.inside & (FAMILY != _STICK), other=0.0)[:, None]
    second = tl.load(places.state + row_count + own.row_at, mask=own.inside & (FAMILY != _STICK), other=0.0)[:, None]
    third = tl.load(places.state + 2 * row_count + own.row_at, mask=own.inside & (FAMILY == _SOFT), other=0.0)[:, None]
    a = load_number(parameter, own.row_at, own.head, own.inside, PARAMETER, 0.5)[:, None]
    if FAMILY == _STICK:
        later, all_costs = _costs_after(places.sums, own, split, splits, ROWS)
    acc = tl.zeros([ROWS, V_WIDTH], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    start = begin + split * span
    tiles = tl.cdiv(tl.minimum(start + span, keys) - start, COLUMNS)
    logits = places.logits + own.row_at[:, None] * places.pitch
    first = start + (tiles - 1) * COLUMNS + tl.arange(0, COLUMNS)
    following = load_logit_tile(logits, first, own, start, keys)
    for index in range(tiles):  # from the last key to the first, the order of stick-breaking
        columns = first - index * COLUMNS
        j = columns[None, :]
        z = following
        following = load_logit_tile(logits, columns - COLUMNS, own, start, keys)
        if FAMILY == _SOFT:
            b = tl.exp2((z - peak) * (1.0 if RANGED else second))
            p = b * ((z - third) * second) if RANGED else b
            hidden = z == float("-inf") if RANGED else z < third
            b = tl.where(hidden, 0.0, b)
            p = tl.where(hidden, 0.0, p)
            total += tl.sum(b, 1)
        elif FAMILY == _THRESHOLD:
            p, _u, _some = weight_of((z - peak) * UNIT, second, a, T)
            total += tl.sum(p, 1)
        else:
            current = (j == own.query[:, None] + keys - queries) & (z != float("-inf"))
            if REST:
                z = tl.where(current, float("-inf"), z)
            taken, cost = shares(z, FAST)
            p = tl.exp2(taken - sum_after(cost, PART) - later)
            later += tl.sum(cost, 1)[:, None]
            if REST:
                p = tl.where(current, tl.exp2(-all_costs), p)
        if SPARSE:
            if tl.max(tl.max(tl.where(p == 0, 0, 1), 1), 0) != 0:  # a NaN is no 0
                v_tile = load_tile(v, columns, V_WIDTH, True, V_SIZE == V_WIDTH)
                acc = tl.dot((p * LIFT).to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
        else:
            v_tile = load_tile(v, columns, V_WIDTH, True, V_SIZE == V_WIDTH)
            acc = tl.dot((p * LIFT).to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
    if FAMILY == _SOFT:
        tl.store(places.references + at_part, tl.sum(peak if RANGED else peak * second, 1), mask=own.inside)
    if FAMILY != _STICK:
        tl.store(places.sums + at_part, total, mask=own.inside)
    values = tl.arange(0, V_WIDTH)
    seen = own.inside[:, None] & (values < V_SIZE)[None, :]
    tl.store(places.parts + at_part[:, None] * V_SIZE + values[None, :], acc * (1.0 / LIFT), mask=seen)


@triton.jit
def load_logit_tile(logits, columns, own, start, keys):
    """Load logits of all rows, -inf before `start` and behind the last key."""
    inside = own.inside[:, None] & ((columns >= start) & (columns < keys))[None, :]
    return tl.load(logits + columns[None, :], mask=inside, other=float("-inf"))


@triton.jit
def _costs_after(costs, own, split, splits, ROWS: tl.constexpr):
    """Return what the parts behind this one cost, (ROWS, 1), and what all parts cost."""
    after = tl.zeros([ROWS, TOGETHER], tl.float32)
    every = tl.zeros([ROWS, TOGETHER], tl.float32)
    for at in range(0, splits, TOGETHER):
        other = (at + tl.arange(0, TOGETHER))[None, :]
        cost = tl.load(
            costs + own.row_at[:, None] * splits + other, mask=own.inside[:, None] & (other < splits), other=0.0
        )
        every += cost
        after += tl.where(other > split, cost, 0.0)
    return tl.sum(after, 1)[:, None], tl.sum(every, 1)[:, None]
