"""Launch the decoding kernels: how the keys are split, and the tiles."""

import torch
import triton
from torch import Tensor

from attnorm.kernels import decode
from attnorm.kernels.launch import padded
from attnorm.kernels.maps import MAPS, Reference
from attnorm.kernels.one_pass_attention import Form, OnePassLaunch

FEWEST_SPLIT = 256  # keys of a program; with fewer, joining the parts would cost more than reading keys


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, shift: Tensor | None,
    sink: Tensor | None, parameters: Tensor | None, form: Form, *, precise: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and reference of one_pass_attention.forward, for few queries."""
    call = OnePassLaunch.of(q, k, v, mask, factor, shift, sink, None, parameters, form)
    batch, heads, queries, keys, width = *q.shape[:3], k.shape[2], v.shape[-1]
    rows, columns, warps, stages = tile(q, v, heads // k.shape[1] * queries)
    begin = 0 if form.window is None else max(keys - queries - form.window + 1, 0) // columns * columns
    programs = 2 * _processors(q) // (batch * k.shape[1])
    span = max(FEWEST_SPLIT, triton.cdiv(keys - begin, max(programs, 1)))
    span = triton.cdiv(span, columns) * columns
    splits = triton.cdiv(keys - begin, span)
    parts = torch.empty((batch, heads, queries, splits, width), dtype=torch.float32, device=q.device)
    total, peak = (torch.empty(parts.shape[:-1], dtype=torch.float32, device=q.device) for _ in range(2))
    out = torch.empty((*q.shape[:-1], width), dtype=torch.float32 if precise else q.dtype, device=q.device)
    reference = call.rows(MAPS[form.map].reference != Reference.NONE)
    names = ("REFERENCE", "NORMALISED", "SINK", "LIFT", "V_WIDTH")
    with call.device:
        decode.parts[(splits * batch * k.shape[1],)](
            *call.tensors, parts, total, peak, *call.strides, *call.sizes, begin, span, splits, **call.constants,
            ROWS=rows, COLUMNS=columns, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        decode.join[(batch * heads * queries,)](
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
