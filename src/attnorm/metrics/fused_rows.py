"""Row sums of softmax attention from the Triton kernel: every row, in one pass, with memory that grows with the rows.

The kernel replaces the logit blocks of rows.py for softmax and its rescalings on a GPU. The masses of the heaviest keys
are not among its sums: they are measured on some rows only.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnorm.engines.device_sync import sent_to
from attnorm.engines.triton_support import runs_kernels
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.logits import LogitBlock, Visibility
from attnorm.metrics.normalized import MeasuredNormalizer
from attnorm.metrics.softmax_rows import LARGEST_EXPONENT, RowSums
from attnorm.theory.rank_one_eigenvalues import improved_root, rank_one_root_of_moments

# Passes that refine the Jacobian norm. The first estimate has a relative error of at most 4e-3; a pass turns an error r
# into less than 10 r^2. Enough are made to come below the rounding of the inputs: 4e-3 in bfloat16, 5e-4 in float16.
EXTRA_PASSES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
MASS_ROWS = 256  # rows whose heaviest keys are summed: of the default 512 sampled rows, so many are long
_LOG2E = 1.4426950408889634


def applies(call: AttentionCall) -> bool:
    """Whether the kernel runs on this call: its device, dtype and width, and no bias on the logits."""
    return call.bias is None and runs_kernels(call.query_BHQD)


def visible_keys(call: AttentionCall, rows: Tensor) -> Tensor:
    """How many keys each of these queries sees, (B, H, R)."""
    visibility = Visibility.of(call)
    shape = (*call.query_BHQD.shape[:2], len(rows))
    if visibility.mask is not None:
        return _Launch.of(call, rows, None).softmax_sums()["n"].long()
    rows = sent_to(call.query_BHQD.device, rows)
    reach = rows + (visibility.keys - visibility.queries + 1) if visibility.causal else rows * 0 + visibility.keys
    return reach.clamp(0, visibility.keys).expand(shape)


def factors(one: MeasuredNormalizer, call: AttentionCall, rows: Tensor, n: Tensor) -> Tensor:
    """What a rescaled softmax multiplies the logits of these queries by, (B, H, R, 1)."""
    batch, heads = call.query_BHQD.shape[:2]
    mask = Visibility.of(call).mask
    counted = n if mask is not None and mask.shape[1] > 1 else n[:, :1]  # as in a block of logits
    none = torch.empty((heads, len(rows), 0), device=n.device)
    queries = sent_to(n.device, rows)
    found = []
    for item in range(batch):
        block = LogitBlock(
            none, 0, none > 0, counted[item], item, slice(0, heads), slice(0, len(rows)), queries, first_key=0
        )
        factor = one.factor(call, block)
        assert factor is not None
        found.append(factor.expand(heads, len(rows), 1))
    return torch.stack(found)


def fused_sums(
    call: AttentionCall, rows: Tensor, factor: Tensor | None = None, learned_sink: Tensor | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """The kernel's columns (B, H, R) by name, and the fields of RowSums (B, H, R, c), of queries (sorted indices).

    factor: what the logits are multiplied by, broadcastable to (B, H, R, 1). learned_sink (H,): one more logit of each
    head that takes weight.
    """
    launch = _Launch.of(call, rows, factor)
    columns = launch.softmax_sums()
    rest = columns["n"] > 1
    sink_logit = columns["sink"] if launch.factor is None else columns["sink"] * launch.factor.squeeze(-1)
    level = torch.where(rest, columns["level"], sink_logit)
    sink = sink_logit - level
    learned = torch.full_like(sink, -torch.inf)
    if learned_sink is not None:
        learned = learned_sink.to(sink)[:, None].expand_as(sink) - level
    some = columns["first_power"] != 0  # NaN stays
    drop = torch.where(some, columns["runner_up"] - level, 0.0)
    scale = torch.where(some, torch.exp(drop), 0.0)
    sums = RowSums(
        level=level,
        sink=sink,
        learned=learned,
        log_others=torch.where(some, drop + torch.log(columns["first_power"]), -torch.inf),
        tilt=scale * (columns["tilt"] + drop * columns["first_power"]),
        squares=scale.square() * columns["second_power"],
        root=_jacobian_root(launch, columns, level, sink, learned, torch.where(some, drop, -torch.inf)),
    )
    return columns, torch.stack(sums, -1)


@dataclass(frozen=True)
class _Launch:
    """The arguments that both kernels share."""

    q: Tensor
    key: Tensor
    mask: Tensor | None
    factor: Tensor | None  # (B, H, R, 1)
    rows: Tensor
    causal: bool
    queries: int
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, call: AttentionCall, rows: Tensor, factor: Tensor | None) -> "_Launch":
        visibility = Visibility.of(call)
        query, key = call.query_BHQD, call.key_BGKD
        batch, heads, queries, _ = query.shape
        rows = sent_to(query.device, rows)
        q = query if len(rows) == queries else query[:, :, rows]
        q, key = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, key))
        if factor is not None:
            factor = factor.float().expand(batch, heads, len(rows), 1).contiguous()
        mask = visibility.mask
        if mask is not None:
            mask = mask.expand(batch, heads, queries, visibility.keys)
        rows = rows.to(torch.int32)
        return cls(q, key, mask, factor, rows, visibility.causal, queries, call.scale, call.softcap)

    def softmax_sums(self) -> dict[str, Tensor]:
        from attnorm.kernels.softmax_sums import COLUMNS, softmax_sums

        out = self._run(softmax_sums, len(COLUMNS), in_levels=True)
        return dict(zip(COLUMNS, out, strict=True))

    def pole_sums(self, level: Tensor, root: Tensor) -> Tensor:
        """(2, B, H, R)."""
        from attnorm.kernels.softmax_sums import pole_sums

        return self._run(pole_sums, 2, level.contiguous(), root.contiguous())

    def _run(self, kernel: Any, columns: int, *numbers: Tensor, in_levels: bool = False) -> Tensor:
        import triton

        q, key, mask, factor = self.q, self.key, self.mask, self.factor
        batch, heads, rows, width = q.shape
        keys = key.shape[-2]
        out = torch.empty((columns, batch, heads, rows), dtype=torch.float32, device=q.device)
        if out.numel() == 0:
            return out
        padded = max(16, int(triton.next_power_of_2(width)))
        row_tile, key_tile, warps, stages = _tile(q.dtype, padded)
        exact = torch.backends.cuda.matmul.fp32_precision != "tf32"
        with torch.cuda.device(q.device) if q.is_cuda else nullcontext():  # Triton launches on the current device
            kernel[(triton.cdiv(rows, row_tile) * batch * heads,)](
                q, key, q if mask is None else mask.view(torch.uint8), q if factor is None else factor, self.rows,
                *numbers, out, *q.stride()[:3], *key.stride()[:3], *((0, 0, 0, 0) if mask is None else mask.stride()),
                heads, heads // key.shape[1], rows, self.queries, keys, keys - self.queries, width,
                self.scale * _LOG2E, (self.softcap or 1.0) * _LOG2E,
                CAUSAL=self.causal, MASKED=mask is not None, CAPPED=self.softcap is not None,
                FACTORED=factor is not None, PRECISION="tf32x3" if exact else "tf32",
                ROWS=row_tile, KEYS=key_tile, WIDTH=padded, FULL=padded == width, num_warps=warps, num_stages=stages,
                **({"LEVELS": (key_tile // 8).bit_length() - 1} if in_levels else {}),
            )  # fmt: skip
        return out


def _tile(dtype: torch.dtype, width: int) -> tuple[int, int, int, int]:
    """Rows, keys, warps, stages."""
    if dtype == torch.float32:
        return (64, 64, 4, 2) if width <= 64 else (32, 64, 4, 2)
    return (64, 128, 4, 3) if width <= 128 else (64, 64, 4, 2)


def _jacobian_root(
    launch: _Launch, columns: dict[str, Tensor], level: Tensor, sink: Tensor, learned: Tensor, drop: Tensor
) -> Tensor:
    """The norm of diag(e) - e e^T / (sum of all) over the keys, in float64.

    It starts from three keys and the moments of the others. Each pass over the keys squares its error.
    """
    sink_e, runner_up, learned_e = (_exponential(z) for z in (sink, drop, learned))
    largest = (columns["n"] > 1).double()
    first, smaller = torch.maximum(sink_e, largest), torch.minimum(sink_e, largest)
    second, third = torch.maximum(smaller, runner_up), torch.minimum(smaller, runner_up)
    moments = [
        (columns[f"{name}_power"].double() - 1).clamp(min=0) * runner_up**power
        for power, name in enumerate(("first", "second", "third", "fourth"), start=1)
    ]
    root = rank_one_root_of_moments(first, second, third, moments, learned_e)
    for _ in range(EXTRA_PASSES[launch.q.dtype]):
        x = root.float()
        poles, squares = launch.pole_sums(level, x).double()
        x = x.double()
        ratio = torch.where(sink_e < largest, sink_e / (x - sink_e), 0.0)  # the sink, where it is not the first
        improved = improved_root(first, second, x, poles + ratio, squares + ratio.square(), learned_e)
        root = torch.where(improved.isfinite(), improved, root)  # a sink far above the rest leaves float32
    return root.to(sink.dtype)


def _exponential(z: Tensor) -> Tensor:
    return torch.exp(z.double().clamp(max=LARGEST_EXPONENT[torch.float64]))
