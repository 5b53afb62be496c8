"""Launch the one-pass kernels (kernels/one_pass.py, kernels/one_pass_backward.py): shapes, strides, tiles."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from attnorm.kernels import entropy, extremes, kth_largest, one_pass, one_pass_backward, top_lists
from attnorm.kernels.launch import Launch, device_of, in_rows, padded
from attnorm.kernels.maps import MAPS, RULES, Reference
from attnorm.kernels.row_dots import row_dots

_LOG2E = 1.4426950408889634


@dataclass(frozen=True, kw_only=True)
class Form:
    """Everything that a launch needs besides tensors: map and rule by name, and their constants."""

    map: str
    power: int = 1  # of relu and polynomial; the variant of self_adjusted
    floor: float = 0.0  # added to the denominator of a scaled map, in natural units
    rule: str = "none"
    softcap: float | None = None
    causal: bool = False
    window: int | None = None  # a query sees this many keys, itself the last
    scale: float = 1.0


class Saved(NamedTuple):
    """Numbers of each row that the backward pass needs; empty tensors if a map has none."""

    reference: Tensor  # log2 of the denominator of a scaled map
    inverse: Tensor  # 1 / denominator of another normalised map


class RowEntropy(NamedTuple):
    """Entropy of softmax over each row, of which the row's factor is a function. All (B, H, Q) in float32."""

    factor: Tensor | None  # of the logits of this softmax
    entropy: Tensor
    reference: Tensor  # log2 of its denominator
    slope: Tensor  # the derivative of the row's factor


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, shift: Tensor | None,
    sink: Tensor | None, cutoff: Tensor | None, parameters: Tensor | None, form: Form, *, precise: bool = False,
) -> tuple[Tensor, Saved]:  # fmt: skip
    """Return the output, in float32 if precise, and what the backward pass needs.

    factor, shift, cutoff: (B, H, Q) in float32; sink, parameters of the rule: (H,). Logits below the cutoff, which is
    in bits, are hidden.
    """
    call = OnePassLaunch.of(q, k, v, mask, factor, shift, sink, cutoff, parameters, form)
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=torch.float32 if precise else q.dtype, device=q.device)
    map_ = MAPS[form.map]
    scaled = map_.reference != Reference.NONE
    saved = Saved(*(call.rows(used) for used in (scaled, map_.normalised and not scaled)))
    rows, columns, warps, stages = _forward_tile(q, v, scaled)
    with call.device:
        one_pass.forward[(triton.cdiv(q.shape[-2], rows) * q.shape[0] * q.shape[1],)](
            *call.tensors, call.sink, out, *saved, *call.strides, *out.stride()[:3],
            *call.sizes, form.floor, **call.constants, ROWS=rows, COLUMNS=columns, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out, saved


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, shift: Tensor | None,
    sink: Tensor | None, cutoff: Tensor | None, parameters: Tensor | None, out: Tensor, saved: Saved, form: Form,
    sharpened: RowEntropy | None = None, *, grad_of_factor: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return gradients of q, k, v, factor, shift, sink and the factor of the entropy; empty if there is none.

    grad_of_factor: whether to compute the gradient of the factor.
    """
    call = OnePassLaunch.of(q, k, v, mask, factor, shift, sink, cutoff, parameters, form)
    grad = in_rows(grad)
    grad_in = grad if grad.dtype == q.dtype else grad.to(q.dtype)  # the gradient of a precise output is float32
    map_ = MAPS[form.map]
    grad_q, grad_k, grad_v = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    grad_of_factor = grad_of_factor and factor is not None
    grad_factor, grad_shift = call.rows(grad_of_factor), call.rows(shift is not None)
    delta = row_dots(grad, out) if map_.normalised else call.rows(False)
    queries, keys, heads = q.shape[-2], k.shape[-2], q.shape[1]
    rows_of = (*(t.contiguous() for t in saved), delta)
    with call.device:
        rows, columns, warps, stages = _backward_tile(q, v)
        one_pass_backward.backward_queries[(triton.cdiv(queries, rows) * q.shape[0] * heads,)](
            *call.tensors, *rows_of, grad_in, grad_q, grad_factor, grad_shift,
            *call.strides, *grad_in.stride()[:3], *grad_q.stride()[:3], *call.sizes, form.scale,
            **call.constants, GRAD_OF_FACTOR=grad_of_factor, ROWS=rows, COLUMNS=columns, num_warps=warps,
            num_stages=stages,
        )  # fmt: skip
        grad_soft, softmax = call.rows(False), (call.q,) * 4
        if sharpened is not None:
            soft = None if sharpened.factor is None else sharpened.factor.contiguous()
            entropies, references = sharpened.entropy.contiguous(), sharpened.reference.contiguous()
            grad_entropy = (grad_factor * sharpened.slope).contiguous()
            grad_soft = entropy.add_gradient_of_queries(
                grad_entropy, grad_q, q, k, mask, soft, entropies, references, form.causal, form.scale
            )
            softmax = (call.q if soft is None else soft, entropies, references, grad_entropy)
            stages = 2  # with three, registers are spilled
        one_pass_backward.backward_keys[(triton.cdiv(keys, columns) * k.shape[0] * k.shape[1],)](
            *call.tensors, *rows_of, grad_in, *softmax, grad_k, grad_v,
            *call.strides, *grad_in.stride()[:3], *grad_k.stride()[:3], *grad_v.stride()[:3], *call.sizes, form.scale,
            **call.constants, ENTROPY=sharpened is not None,
            SOFT_FACTORED=sharpened is not None and sharpened.factor is not None,
            ROWS=rows, COLUMNS=columns, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    grad_sink = call.rows(False)
    if sink is not None:
        weight = torch.exp2(sink[None, :, None] * _LOG2E - saved.reference)
        grad_sink = -(weight * delta).sum((0, 2))
    return grad_q, grad_k, grad_v, grad_factor, grad_shift, grad_sink, grad_soft


def extreme_logits(
    q: Tensor, k: Tensor, mask: Tensor | None, factor: Tensor | None, form: Form
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return smallest and largest logit of each row, (B, H, Q), 0 for rows without keys, and the first such keys."""
    low_key, high_key = (torch.empty(q.shape[:3], dtype=torch.int32, device=q.device) for _ in range(2))
    low, high = (torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) for _ in range(2))
    _search(extremes.extreme_logits, q, k, mask, factor, (low_key, high_key, low, high), form, search_tile(q))
    return low, high, low_key, high_key


def sum_by_key(rows: Tensor, index: Tensor, keys: int, groups: int) -> Tensor:
    """Return for each key the sum of the rows (B, H, Q, D) with its index, over `groups` heads: (B, G, K, D)."""
    rows = in_rows(rows)
    batch, heads, queries, width = rows.shape
    sums = torch.empty((batch, heads // groups, keys, width), dtype=rows.dtype, device=rows.device)
    exact = torch.backends.cuda.matmul.fp32_precision != "tf32"
    with device_of(rows):
        extremes.sum_by_key[(triton.cdiv(keys, 64) * batch * (heads // groups),)](
            rows, index.contiguous(), sums, *rows.stride()[:3], *sums.stride()[:3], heads, groups, queries, keys, width,
            PRECISION="tf32x3" if exact else "tf32", ROWS=64, COLUMNS=64, WIDTH=padded(rows),
            num_warps=4 if width <= 128 else 8,
        )  # fmt: skip
    return sums


def top_k_cutoff(
    q: Tensor, k: Tensor, mask: Tensor | None, factor: Tensor | None, count: Tensor, most: int, form: Form
) -> Tensor:
    """Return the number that the `count` largest logits of a row exceed, (B, H, Q), in bits; -inf: all are kept.

    most: the largest count of all rows. It chooses the kernel and may be too large.
    """
    cutoff = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    rows_of = count.contiguous(), cutoff
    tile = lists_tile(q) if most <= MOST_LISTED else None
    if tile is None:
        _search(kth_largest.kth_largest, q, k, mask, factor, rows_of, form, search_tile(q))
        return cutoff
    largest, listed = torch.empty_like(cutoff), torch.empty(q.shape[:3], dtype=torch.int32, device=q.device)
    _search(
        top_lists.kth_of_lists, q, k, mask, factor, (*rows_of, largest), form, tile,
        PARTS=max(1, tile[2] * 16 // tile[0]), FAST=q.is_cuda,
    )  # fmt: skip
    _search(
        kth_largest.kth_of_lost_rows, q, k, mask, factor, (*rows_of, largest, listed), form, lost_rows_tile(q),
        rows_per_program=_CHUNK, CHUNK=_CHUNK,
    )  # fmt: skip
    return cutoff


def _search(
    kernel: Any, q: Tensor, k: Tensor, mask: Tensor | None, factor: Tensor | None, rows_of: tuple[Tensor, ...],
    form: Form, tile: tuple[int, int, int, int], rows_per_program: int | None = None, **more_constants: int,
) -> None:  # fmt: skip
    """Launch a kernel that reads queries and keys and writes numbers of rows."""
    call = OnePassLaunch.of(q, k, k, mask, factor, None, None, None, None, form)
    rows, columns, warps, stages = tile
    q_in, k_in, _, mask_in, factor_in, *_ = call.tensors
    names = ("CAPPED", "FACTORED", "CAUSAL", "WINDOWED", "MASKED", "PRECISION", "WIDTH", "FULL")
    with call.device:
        kernel[(triton.cdiv(q.shape[-2], rows_per_program or rows) * q.shape[0] * q.shape[1],)](
            q_in, k_in, mask_in, factor_in, *rows_of, *call.strides[:6], *call.strides[9:],
            *call.lengths, form.window or 0, q.shape[-1], form.scale * _LOG2E, (form.softcap or 1.0) * _LOG2E,
            **{name: call.constants[name] for name in names}, **more_constants, ROWS=rows, COLUMNS=columns,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip


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
            form.scale * _LOG2E, (form.softcap or 1.0) * _LOG2E,
        )  # fmt: skip

    @cached_property
    def constants(self) -> dict[str, object]:
        form, map_ = self.form, MAPS[self.form.map]
        ruled, cap, shifted = form.rule != "none", form.softcap is not None, self.shift is not None
        return {
            **self.shared_constants,
            "MAP": map_.weights, "SLOPES": map_.slopes, "RULE": RULES[form.rule],
            "P": form.power, "FAST": self.q.is_cuda and self.q.dtype != torch.float32,
            "REFERENCE": int(map_.reference), "NORMALISED": map_.normalised,
            "RULED": ruled, "CAPPED": cap, "SHIFTED": shifted, "SELECTED": self.cutoff is not None,
            "SINK": self.sink_logits is not None,
            "PLAIN": form.scale > 0 and not (ruled or cap or shifted),
            "WINDOWED": form.window is not None,
            "FULL": padded(self.q) == self.q.shape[-1], "V_FULL": padded(self.v) == self.v.shape[-1],
            "LIFT": map_.lift,
        }  # fmt: skip


# Rows, columns, warps, stages: the fastest of six or more on an H200 in bfloat16. Backward holds two tiles of logits at
# once and spills registers with larger ones. float32 needs twice the memory.
def _forward_tile(q: Tensor, v: Tensor, scaled: bool) -> tuple[int, int, int, int]:
    width = max(padded(q), padded(v))
    if q.dtype == torch.float32:
        return (64, 32, 4, 2) if width <= 64 else (32, 32, 4, 2)
    if width <= 64:
        return 128, 64, 4, 3
    if width <= 128:
        return (128, 128, 8, 3) if scaled else (128, 64, 4, 2)
    return 64, 32, 4, 2


def _backward_tile(q: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    width = max(padded(q), padded(v))
    if q.dtype == torch.float32:
        return 32, 32, 4, 2
    return (64, 64, 4, 3) if width <= 64 else (64, 64, 4, 2) if width <= 128 else (32, 32, 4, 2)


def search_tile(q: Tensor) -> tuple[int, int, int, int]:
    """For kernels that keep four numbers per logit in registers. The fastest of five on an H200 in bfloat16."""
    if q.dtype == torch.float32:
        return (32, 32, 4, 2) if padded(q) <= 64 else (32, 16, 4, 2)
    return (64, 32, 4, 4) if padded(q) <= 64 else (64, 64, 4, 2) if padded(q) <= 128 else (64, 32, 4, 2)


MOST_LISTED = 64  # with more of the k largest per lane, too many lanes would lose one
_CHUNK = 512  # rows among which lost ones are gathered


def lists_tile(q: Tensor) -> tuple[int, int, int, int] | None:
    """For kernels/top_lists.py, which has eight numbers of each lane, one for four columns, in registers.

    Compiled for sm_90 it takes 254 of them and spills none, so that two programs run on a multiprocessor. None: keys of
    width 256 or in float32 leave too little shared memory.
    """
    if q.is_cuda and (q.dtype == torch.float32 or padded(q) > 128):
        return None
    return 64, 128, 4, 3


def lost_rows_tile(q: Tensor) -> tuple[int, int, int, int]:
    return 32, 64 if padded(q) <= 128 else 32, 4, 2
