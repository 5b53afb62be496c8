"""Statistics of rows of maps other than softmax from Triton kernels: every row, with memory that grows with the rows.

Maps with one number per row (sigmoid, relu, softpick: kernels/map_sums.py) take one pass over the keys, the Jacobian
norm of softpick three or four more, and threshold maps (entmax, sparsemax, kneemax: kernels/threshold_sums.py) a few.
The numbers of a row are those of `weight_rows` in metrics/row_statistics.py. In front of the map there may be scale
rules and a soft cap; a normalizer with anything else, or a learned sink, is measured in blocks of logits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnorm.arithmetic import ceil_div
from attnorm.engines import sparse
from attnorm.engines.execution import kernel_operator, sent_to
from attnorm.engines.one_pass import POWERS
from attnorm.engines.one_pass_operators import backward, softmax_gradients
from attnorm.kernels.launch import Tile, device_of, empty_numbers, empty_rows, in_rows
from attnorm.metrics import fused_rows
from attnorm.metrics.call import AttentionCall, logit_blocks
from attnorm.metrics.fused_rows import EXTRA_PASSES, RowsLaunch, levels_of
from attnorm.metrics.normalized import MeasuredNormalizer
from attnorm.metrics.row_statistics import largest_numbers, requested_numbers, sums_of_first
from attnorm.normalizers.contract import KernelForm, Normalizer, ScaleRule, ThresholdForm
from attnorm.theory.rank_two_singular_values import PICK_STEPS

ONE_PASS = ("sigmoid", "relu", "softpick")  # weights rise with the logit and are at least 0
MAX_SCRATCH = 2**26  # tiles that the threshold kernel keeps numbers of at a time, 8 bytes each
# Passes that refine softpick's Jacobian norm: relative error at most 2e-4 after one, 3e-6 after two.
PICK_PASSES = {torch.bfloat16: 1, torch.float16: 1, torch.float32: 2}
_UNDEFINED = ("logsumexp", "weight_ceiling", "entropy_floor", "horizon", "horizon_without_sink")
_BLOCK = 128  # rows of a program of the kernel behind the sums, one per thread
_LN2 = math.log(2)


@dataclass(frozen=True)
class RowMap:
    """A map as the kernels know it, with the numbers of each row: (B, H, R) in float32 or None."""

    map: str
    power: int = 1
    floor: float = 0.0
    factor: Tensor | None = None  # of the logits
    shift: Tensor | None = None  # of one-pass maps
    parameter: Tensor | None = None  # of threshold maps

    @property
    def has_threshold(self) -> bool:
        return self.map not in ONE_PASS


def kernel_form(normalizer: Normalizer | None) -> KernelForm | ThresholdForm | None:
    """The form of the map if the kernels measure this normalizer."""
    if normalizer is None or normalizer.sink is not None or normalizer.selections or not normalizer.has_known_parts():
        return None
    if not all(isinstance(rule, ScaleRule) for rule in normalizer.rules):
        return None
    threshold = normalizer.map.threshold_form()
    if threshold is not None:
        return threshold
    form = normalizer.map.kernel_form()
    return form if form is not None and form.map in ONE_PASS and form.power in POWERS else None


def row_map(form: KernelForm | ThresholdForm, n: Tensor, factor: Tensor | None) -> RowMap:
    """The map of rows with n visible keys (B, H, R, 1), whose logits are multiplied by the factor of the rules."""
    if isinstance(form, ThresholdForm):
        parameter = None if form.parameter is None else form.parameter(n)
        return RowMap(form.map, factor=_rows(factor, n), parameter=_rows(parameter, n))
    if form.row_factor is not None:
        map_factor = form.row_factor(n)
        factor = map_factor if factor is None else factor * map_factor
    shift = None if form.row_shift is None else form.row_shift(n)
    return RowMap(form.map, form.power, form.floor, _rows(factor, n), _rows(shift, n))


def _rows(numbers: Tensor | None, n: Tensor) -> Tensor | None:
    return None if numbers is None else numbers.detach().float().expand(n.shape)[..., 0].contiguous()


def row_map_of(one: MeasuredNormalizer, call: AttentionCall, rows: Tensor) -> RowMap:
    """The map of these queries of a call."""
    form = kernel_form(one.normalizer)
    assert form is not None
    n = fused_rows.visible_keys(call, rows)
    factor = fused_rows.factors(one, call, rows, n) if one.rescales else None
    return row_map(form, n.float().unsqueeze(-1), factor)


@dataclass(frozen=True)
class FusedMap:
    """Numbers of each row, (B, H, R), NaN where a row has none."""

    n: Tensor  # visible keys
    values: dict[str, Tensor]  # by name
    broken: Tensor  # boolean: logits or weights are not finite
    largest_share: Tensor  # of the row's weight
    threshold: Tensor | None  # of threshold maps, relative to the largest logit, in the map's unit


def fused_map(call: AttentionCall, rows: Tensor, names: Sequence[str], map_: RowMap) -> FusedMap:
    """The statistics of these names (of catalogue.PER_ROW) of queries (sorted indices)."""
    sums = _threshold_sums(call, rows, map_) if map_.has_threshold else _map_sums(call, rows, map_)[0]
    return _statistics_of_sums(call, rows, names, map_, sums)


def _statistics_of_sums(
    call: AttentionCall, rows: Tensor, names: Sequence[str], map_: RowMap, sums: Tensor
) -> FusedMap:
    from attnorm.kernels.statistics_from_sums import MORE_WEIGHT_NUMBERS, WEIGHT_NUMBERS, weight_statistics

    if map_.map == "softpick" and "jacobian_norm" in names:
        _add_softpick_norms(call, rows, map_, sums)
    shape, total = sums.shape[1:], sums[0].numel()
    more = not {*names} <= {*WEIGHT_NUMBERS, *_UNDEFINED}
    numbers = sums.new_empty((len(WEIGHT_NUMBERS), *shape))
    others = sums.new_empty((len(MORE_WEIGHT_NUMBERS) if more else 0, *shape))
    n = sums.new_empty(shape, dtype=torch.int64)
    broken = sums.new_empty(shape, dtype=torch.bool)
    if total:
        with device_of(sums):
            weight_statistics[(ceil_div(total, _BLOCK),)](
                sums, numbers, others, n, broken.view(torch.uint8), total, MORE=more, BLOCK=_BLOCK,
                num_warps=_BLOCK // 32,
            )  # fmt: skip
    values = dict(zip(WEIGHT_NUMBERS, numbers.unbind(), strict=True))
    if more:
        values |= zip(MORE_WEIGHT_NUMBERS, others.unbind(), strict=True)
    nothing = sums.new_full((), torch.nan).expand(shape)
    values |= {name: nothing.double() if name.startswith("horizon") else nothing for name in _UNDEFINED}
    share = values["max_weight"] / values["row_sum"]
    threshold = sums[-1] if map_.has_threshold else None
    place = "MORE_WEIGHT_NUMBERS of kernels/statistics_from_sums.py or _UNDEFINED of metrics/fused_maps.py"
    return FusedMap(n, requested_numbers(values, names, place), broken, share, threshold)


def _map_sums(
    call: AttentionCall, rows: Tensor, map_: RowMap, *, with_output: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of one-pass maps, (COLUMNS of kernels/map_sums.py, B, H, R).

    Then the output and log2 of what each row is divided by, for all rows of a call with values as wide as keys; empty
    if they are not asked for, or if a map does not divide.
    """
    from attnorm.kernels.map_sums import COLUMNS, map_sums
    from attnorm.kernels.maps import MAPS

    launch, tile_map = _launch(call, rows, map_), MAPS[map_.map]
    q, v = launch.q, in_rows(call.value_BGKE)
    sums = launch.empty(len(COLUMNS))
    output = empty_rows(q) if with_output else q.new_empty((0, 0, 0, 0))
    reference = empty_numbers(q, with_output and tile_map.normalised)
    tile = fused_rows.output_tile(q) if with_output else _one_pass_tile(q)
    launch.launch(
        map_sums, tile, *launch.tensors, q if map_.shift is None else map_.shift, launch.rows, v, output, reference,
        sums, *launch.sizes, map_.floor, *v.stride()[:3], *output.stride()[:3],
        WEIGHTS=_one_pass_weights(map_), SLOPES=tile_map.slopes, P=map_.power, FAST=_fast(q),
        REFERENCE=int(tile_map.reference), NORMALISED=tile_map.normalised, LIFT=tile_map.lift,
        SHIFTED=map_.shift is not None, OUTPUT=with_output, LEVELS=levels_of(tile),
    )  # fmt: skip
    return sums, output, reference


def _add_softpick_norms(call: AttentionCall, rows: Tensor, map_: RowMap, sums: Tensor) -> None:
    """Write the Jacobian norm of softpick into its column of the sums."""
    from attnorm.kernels.map_sums import softpick_norms

    launch = _launch(call, rows, map_)
    tile = _norm_tile(launch.q)
    launch.launch(
        softpick_norms, tile, *launch.tensors, launch.rows, sums, *launch.sizes, map_.floor, LEVELS=levels_of(tile),
        PASSES=PICK_PASSES[launch.q.dtype], STEPS=PICK_STEPS,
    )  # fmt: skip


def _threshold_sums(call: AttentionCall, rows: Tensor, map_: RowMap, known: Tensor | None = None) -> Tensor:
    """Return the sums of threshold maps, (COLUMNS of kernels/map_sums.py and threshold, B, H, R).

    known: (B, H, R), thresholds relative to the largest logit, in the map's unit, if they need no search.
    """
    from attnorm.kernels.map_sums import COLUMNS
    from attnorm.kernels.threshold import EARLY_STEPS, MAX_STEPS
    from attnorm.kernels.threshold_maps import MAPS
    from attnorm.kernels.threshold_sums import threshold_sums

    launch, threshold_map = _launch(call, rows, map_), MAPS[map_.map]
    q, tile = launch.q, _threshold_tile(launch.q)
    sums = launch.empty(len(COLUMNS) + 1)
    across, programs = ceil_div(launch.key.shape[-2], tile[1]), launch.programs(tile) if sums.numel() else 0
    at_once = max(1, MAX_SCRATCH // across)
    gaps = torch.empty(min(programs, at_once) * across, dtype=torch.float32, device=q.device)
    listed = torch.empty(len(gaps) + 1, dtype=torch.int32, device=q.device)  # a place beyond the end is read
    for start in range(0, programs, at_once):
        with device_of(q):
            threshold_sums[(min(at_once, programs - start),)](
                *launch.tensors, q if map_.parameter is None else map_.parameter, launch.rows,
                sums if known is None else known, sums, gaps, listed, *launch.sizes, start, sums[0].numel(),
                threshold_map.unit * _LN2, threshold_map.slope, *_tolerances(q.dtype), **launch.constants(tile),
                WEIGHTS=threshold_map.weights, NEWTON=threshold_map.newton, START=threshold_map.start,
                COUNTED=threshold_map.counted, DEFORMED=threshold_map.deformed, PARAMETER=threshold_map.parameter,
                EXACT=q.dtype != torch.bfloat16, FAST=_fast(q), PASSES=EXTRA_PASSES[q.dtype], MAX_STEPS=MAX_STEPS,
                EARLY=EARLY_STEPS, KNOWN=known is not None,
            )  # fmt: skip
    return sums


def _launch(call: AttentionCall, rows: Tensor, map_: RowMap) -> RowsLaunch:
    return RowsLaunch.of(call, rows, None if map_.factor is None else map_.factor.unsqueeze(-1))


def _fast(q: Tensor) -> bool:
    """Whether approximate instructions of the GPU are exact enough."""
    return q.is_cuda and q.dtype != torch.float32


def _one_pass_tile(q: Tensor) -> Tile:
    """Why wide float32 has 16 rows: `launch.tile_without_values`."""
    if q.dtype == torch.float32:
        return (64, 64, 4, 2) if q.shape[-1] <= 64 else (32, 64, 4, 2) if q.shape[-1] <= 128 else (16, 64, 8, 2)
    return (64, 64, 4, 3) if q.shape[-1] <= 128 else (64, 64, 4, 2)  # with 128 keys registers are spilled


def _norm_tile(q: Tensor) -> Tile:
    """Compiled for an H200 and not timed: with these, registers are spilled least."""
    if q.dtype == torch.float32:
        return (64, 32, 4, 2) if q.shape[-1] <= 64 else (16, 32, 4, 2) if q.shape[-1] <= 128 else (16, 32, 8, 2)
    return (64, 32, 4, 3) if q.shape[-1] <= 128 else (64, 32, 4, 2)


def _threshold_tile(q: Tensor) -> Tile:
    """Float32 wider than 64: 1.1 to 2.2 KB of registers are spilled."""
    if q.dtype == torch.float32:
        return (64, 32, 4, 2) if q.shape[-1] <= 64 else (32, 32, 4, 2) if q.shape[-1] <= 128 else (16, 64, 8, 2)
    return (64, 64, 4, 3) if q.shape[-1] <= 128 else (64, 32, 8, 2)  # with 8 warps 66 instead of 34 ms on an H200


def _tolerances(dtype: torch.dtype) -> tuple[float, float, float]:
    """Return three tolerances.

    How far the sum of a row may be from 1 before the last Newton step; how far after it; and how much weight the
    leaders may leave out before such a step is needed.
    """
    return (1e-3, 4e-6, 1e-6) if dtype == torch.float32 else (3e-2, 1e-3, 2e-4)


def heaviest_masses(
    call: AttentionCall, rows: Tensor, some: Tensor, map_: RowMap, found: FusedMap, top_n: Sequence[int]
) -> Tensor:
    """The share of the N heaviest keys, (B, H, R, N), of some of the rows (indices); NaN in the others.

    Weights rise with the logit, so the heaviest keys have the largest logits; the largest weight is known.
    """
    device = call.query_BHQD.device
    masses = torch.full((*call.query_BHQD.shape[:2], len(rows), len(top_n)), torch.nan, device=device)
    at_rows = sent_to(device, some)
    for block in logit_blocks(call, rows[some], all_heads=True):
        row_indices = at_rows[block.rows]
        factor, shift, parameter, threshold, share = (
            None if numbers is None else numbers[block.item, block.heads][:, row_indices].contiguous()
            for numbers in (map_.factor, map_.shift, map_.parameter, found.threshold, found.largest_share)
        )
        z = block.logits if factor is None else block.hide(block.logits * factor.unsqueeze(-1))
        largest = largest_numbers(z, max(top_n))
        weights = _key_weights(map_, largest, shift, parameter, threshold)
        assert share is not None
        shares = weights / weights[..., :1] * share.unsqueeze(-1)
        masses[block.item, block.heads, row_indices] = sums_of_first(shares, top_n).clamp(max=1)
    return masses


def _key_weights(
    map_: RowMap, z: Tensor, shift: Tensor | None, parameter: Tensor | None, threshold: Tensor | None
) -> Tensor:
    """Weights of logits (..., N), largest first, up to a constant of the row."""
    from attnorm.kernels import maps, threshold_maps
    from attnorm.kernels.statistics_from_sums import key_weights

    z = z.contiguous()
    weights = torch.empty_like(z)
    if map_.has_threshold:
        threshold_map = threshold_maps.MAPS[map_.map]
        function, unit, deformed, reference = threshold_map.weights, threshold_map.unit, threshold_map.deformed, 0
    else:
        function, unit, deformed = _one_pass_weights(map_), 1.0, False
        reference = int(maps.MAPS[map_.map].reference)
    if z.numel():
        with device_of(z):
            key_weights[(ceil_div(z.numel(), _BLOCK),)](
                z, *(z if t is None else t for t in (shift, parameter, threshold)), weights, z.numel(), z.shape[-1],
                unit, WEIGHTS=function, P=map_.power, FAST=False, REFERENCE=reference,
                HAS_THRESHOLD=map_.has_threshold, DEFORMED=deformed, SHIFTED=shift is not None,
                PARAMETER=parameter is not None, BLOCK=_BLOCK,
            )  # fmt: skip
    return weights


def _one_pass_weights(map_: RowMap) -> Any:
    from attnorm.kernels.maps import MAPS, softpick_digits

    return softpick_digits if map_.map == "softpick" else MAPS[map_.map].weights


@kernel_operator("attnorm::output_and_statistics")
def output_and_statistics(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, shift: Tensor | None,
    sink: Tensor | None, scale: float, causal: bool, softcap: float | None, map: str, power: int, floor: float,
    by_sdpa: bool, names: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The output (B, H, Q, D), n, the numbers of these names (names, B, H, Q), and log2 of each row's denominator.

    From one pass over the keys, for softmax and the maps of ONE_PASS; those without a denominator return it empty.
    mask: as in an AttentionCall; factor, shift: (B, H, Q); sink: (H,), of softmax. by_sdpa: gradients by SDPA
    (`fused.gradients_apply`) instead of the one-pass kernels.
    """
    call = AttentionCall(0, "decoder" if causal else "encoder", q, k, v, scale, causal, mask, softcap)
    if map == "softmax":
        launch = RowsLaunch.of(call, None, None if factor is None else factor.unsqueeze(-1))
        output, sums, reference = fused_rows.output_and_sums(launch, v, sink)
        softmax = fused_rows.rows_of_sums(launch, sums, names.split(), sink)
        return output, softmax.n, _stacked(softmax.values), reference
    map_ = RowMap(map, power, floor, factor, None if shift is None else shift.contiguous())
    rows = torch.arange(q.shape[2])
    sums, output, reference = _map_sums(call, rows, map_, with_output=True)
    found = _statistics_of_sums(call, rows, names.split(), map_, sums)
    return output, found.n, _stacked(found.values), reference


def _stacked(values: dict[str, Tensor]) -> Tensor:
    return torch.stack([*values.values()])


@output_and_statistics.register_fake
def _(q: Tensor, map: str, names: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from attnorm.kernels.maps import MAPS

    return *_empty_output_and_numbers(q, names), empty_numbers(q, MAPS[map].normalised)


def _empty_output_and_numbers(q: Tensor, names: str) -> tuple[Tensor, Tensor, Tensor]:
    numbers = q.new_empty((len(names.split()), *q.shape[:3]), dtype=torch.float32)
    return empty_rows(in_rows(q)), q.new_empty(q.shape[:3], dtype=torch.int64), numbers


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *ctx.options, _names = inputs[7:]
    result, *others, reference = output
    ctx.mark_non_differentiable(*others, reference)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:7], result, reference)


def _gradients(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    q, k, v, mask, factor, shift, sink, output, reference = ctx.saved_tensors  # gradient checkpointing: only once
    scale, causal, softcap, map_, power, floor, by_sdpa = ctx.options
    no_gradients = (None,) * 8  # of the options and the names
    if by_sdpa:
        gradients = softmax_gradients(grad, q, k, v, output, reference, causal, scale)
        return *gradients, None, None, None, None, *no_gradients
    mask = None if mask is None else mask.expand(*q.shape[:3], k.shape[2])
    of_factor = factor is not None and ctx.needs_input_grad[4]
    grad_q, grad_k, grad_v, *rows = backward(
        grad, q, k, v, mask, factor, shift, sink, None, None, output, reference, reference.new_empty(0), of_factor,
        map_, power, floor, "none", softcap, causal, None, scale,
    )  # fmt: skip
    used = (of_factor, shift is not None, sink is not None)
    return grad_q, grad_k, grad_v, None, *(g if u else None for u, g in zip(used, rows, strict=True)), *no_gradients


output_and_statistics.register_autograd(_gradients, setup_context=_save_for_backward)


@kernel_operator("attnorm::threshold_output_and_statistics")
def threshold_output_and_statistics(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, parameter: Tensor | None,
    causal: bool, scale: float, map: str, trains: bool, names: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The same for threshold maps, and what their backward pass needs if trains: the tensors of threshold.Saved.

    Attention finds the thresholds; the sums take them over. factor, parameter: (B, H, Q).
    """
    from attnorm.kernels.threshold import forward, relative_threshold

    call = AttentionCall(0, "decoder" if causal else "encoder", q, k, v, scale, causal, mask)
    mask = None if mask is None else mask.expand(*q.shape[:3], k.shape[2])
    output, (mean_u, threshold, live) = forward(
        q, k, v, mask, factor, parameter, None, causal, scale, map, trains, with_threshold=True
    )
    rows = torch.arange(q.shape[2])
    map_ = RowMap(map, factor=factor, parameter=None if parameter is None else parameter.contiguous())
    sums = _threshold_sums(call, rows, map_, relative_threshold(threshold, q.dtype))
    found = _statistics_of_sums(call, rows, names.split(), map_, sums)
    return output, found.n, _stacked(found.values), mean_u, threshold if trains else threshold.new_empty(0), live


@threshold_output_and_statistics.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, trains: bool, names: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from attnorm.kernels.threshold import saved_shapes

    threshold, live = saved_shapes(q, k, v, trains)
    mean_u = empty_rows(in_rows(q)) if trains else q.new_empty(0)
    saved = mean_u, q.new_empty(threshold, dtype=torch.float32), q.new_empty(live, dtype=torch.uint8)
    return *_empty_output_and_numbers(q, names), *saved


def _save_thresholds(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, mask, factor, parameter, *options, _names = inputs
    mask = None if mask is None else mask.expand(*q.shape[:3], k.shape[2])
    sparse.save_for_backward(ctx, (q, k, v, mask, factor, parameter, None, *options), (output[0], *output[3:]))
    ctx.mark_non_differentiable(*output[1:])


# Sparse attention has as many inputs: penalties behind the parameter, and no names.
threshold_output_and_statistics.register_autograd(sparse.gradients, setup_context=_save_thresholds)
