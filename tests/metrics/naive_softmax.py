"""Output and statistics of softmax attention by the plain formulas in a given dtype, from the whole matrix."""

import math

import torch
from torch import Tensor

import attnorm

LENGTHS = (63, 100)
KINDS = ("random", "peaked", "nearly equal", "huge", "padded", "rows that see nothing")


def drawn(
    kind: str, length: int, dtype: torch.dtype, *, heads: int = 8, width: int = 16, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values with half as many key heads, and a causal mask (1, 1, Q, K)."""
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(1, h, length, width, generator=generator) for h in (heads, heads // 2, heads // 2))
    visible = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    if kind == "random":
        q = 2 * q
    elif kind == "peaked":  # one key far above the others
        k[:, :, length // 3] *= 40
    elif kind == "nearly equal":
        q = 1e-3 * q
    elif kind == "huge":
        q = q * (1e4 / (q @ k.repeat_interleave(2, 1).mT).abs().max() * math.sqrt(width))
    elif kind == "padded":
        visible = visible & (torch.arange(length) >= 7)
        visible[..., :7, 0] = True
    else:
        visible = visible & (torch.arange(length) >= 7)
    return q.to(device, dtype), k.to(device, dtype), v.to(device, dtype), visible.to(device)


def naive(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> dict[str, Tensor]:
    """All numbers in the dtype of q; NaN in rows without keys.

    The Jacobian norm of at most 200 keys is that of the weights in this dtype, in float64.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    z = (q @ k.mT) * q.shape[-1] ** -0.5
    visible = visible.expand(z.shape)
    seen = visible.any(-1)
    hidden = z.masked_fill(~visible, -math.inf)
    w = torch.where(visible, torch.softmax(hidden, -1), 0.0).nan_to_num()
    sink = visible.int().argmax(-1, keepdim=True)
    numbers = {
        "max_logit": z.masked_fill(~visible, -math.inf).amax(-1),
        "min_logit": z.masked_fill(~visible, math.inf).amin(-1),
        "logsumexp": torch.logsumexp(hidden, -1),
        "entropy": -torch.where(w > 0, w * torch.log(torch.where(w > 0, w, 1.0)), 0.0).sum(-1),
        "effective_keys": 1 / w.square().sum(-1),
        "max_weight": w.amax(-1),
        "sink_mass": w.gather(-1, sink).squeeze(-1),
        "row_sum": w.sum(-1),
    }
    if w.shape[-1] <= 200:
        p = torch.where(w > 1e-30, w, 0.0).double()  # LAPACK need not converge with products that underflow
        jacobian = torch.diag_embed(p) - p[..., :, None] * p[..., None, :]
        numbers["jacobian_norm"] = torch.linalg.eigvalsh(jacobian).amax(-1)
    numbers = {name: value.masked_fill(~seen, math.nan) for name, value in numbers.items()}
    return numbers | {"output": w @ v, "n": visible.sum(-1)}


def assert_at_most_twice_the_naive_error(
    found: tuple[Tensor, attnorm.AttentionStatistics],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    logit_roundings: float = 0.0,
    sum_roundings: float = 1.0,
) -> None:
    """FlashAttention's rule: both against float64, with some slack where the plain formula is exact.

    sum_roundings: that slack, in roundings of the largest number. logit_roundings: further slack, in roundings of the
    largest logit.
    """
    output, statistics = found
    assert output.dtype == q.dtype
    exact = naive(q.double(), k.double(), v.double(), visible)
    plain = naive(q, k, v, visible)
    numbers = statistics._asdict() | {"output": output}
    assert torch.equal(statistics.n, exact["n"])
    largest = float(torch.maximum(exact["max_logit"], -exact["min_logit"]).nan_to_num().max())
    for name, value in exact.items():
        got = numbers[name].double()
        assert torch.equal(got.isnan(), value.isnan().expand_as(got)), name
        size = float(value.nan_to_num().abs().max().clamp(min=1))
        slack = torch.finfo(q.dtype).eps * size * (sum_roundings + logit_roundings * largest)
        error, allowed = (float((one.double() - value).nan_to_num().abs().max()) for one in (got, plain[name]))
        assert error <= 2 * allowed + slack, (name, error, allowed)
