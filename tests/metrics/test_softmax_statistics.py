"""The kernels behind the sums: exact statistics of these sums, no worse than the plain formula, in a few operations."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from attnorm.engines.execution import HAS_TRITON
from attnorm.metrics import fused_rows
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.catalogue import PER_ROW
from attnorm.metrics.normalized import Choice, resolve_normalizers
from attnorm.metrics.row_statistics import RowSums, shared_height
from attnorm.metrics.rows import _finish_statistics, measure_by_kernel
from attnorm.normalizers import get
from tests.metrics.calls import CALLS, HEADS, KEY_HEADS, WIDTH, left_padding, make_call
from tests.metrics.reference import dense_logits, dense_visible
from tests.metrics.root_reference import improved_root, rank_one_root_of_moments

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton, which runs on Linux alone")


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PUBLIC = [
    "max_logit", "min_logit", "logsumexp", "entropy_nats", "effective_keys", "max_weight", "sink_mass", "row_sum",
    "jacobian_norm",
]  # fmt: skip
ALL = [*PER_ROW, "min_logit", "logsumexp"]
SIZES = (0.0, 1e-4, 1e-2, 1.0, 10.0, 300.0, 1e4)
KEYS = (0, 1, 2, 3, 4, 9, 64)


def logits_of_rows() -> tuple[Tensor, Tensor]:
    """Logits (rows, 64) of every size, -inf at hidden keys, with sinks below, above and between; and visible keys."""
    generator = torch.Generator().manual_seed(0)
    n = torch.tensor([n for n in KEYS for _ in SIZES for _ in range(4)])
    size = torch.tensor([size for _ in KEYS for size in SIZES for _ in range(4)], dtype=torch.float64)
    z = size[:, None] * torch.randn(len(n), KEYS[-1], generator=generator, dtype=torch.float64)
    z[1::4, 0] += 30
    z[2::4, 0] -= 30
    z[3::4, 5:9] = z[3::4, 4:5]  # equal keys
    return z.masked_fill(torch.arange(KEYS[-1]) >= n[:, None], -math.inf), n


def scaled(z: Tensor, gain: Tensor) -> Tensor:
    return (z * gain[:, None]).masked_fill(z.isinf(), -math.inf)


def sums_of(z: Tensor, n: Tensor, gain: Tensor) -> Tensor:
    """What kernels/softmax_sums.py returns for these logits, (11, rows)."""
    others = scaled(z, gain)[:, 1:].sort(descending=True).values
    level, runner_up = others[:, 0], others[:, 1]
    x = torch.where(n[:, None] > 2, others[:, 1:] - runner_up[:, None], -math.inf)
    e = x.exp()
    plain, first = z[:, 1:], z[:, 0].nan_to_num(neginf=0.0)
    columns = [
        n.double(), first, plain.amax(-1), plain.masked_fill(plain.isinf(), math.inf).amin(-1), level,
        torch.where(n > 1, first * gain - level, 0.0), torch.where(n > 2, runner_up - level, -math.inf),
        e.sum(-1), torch.where(e > 0, e * x, 0.0).sum(-1), *(e.pow(p).sum(-1) for p in (2, 3, 4)),
    ]  # fmt: skip
    return torch.stack(columns).float()


def entries_of(sums: RowSums, drop: Tensor, n: Tensor) -> tuple[Tensor, ...]:
    height = shared_height(sums.sink, sums.learned)
    sink, learned = ((z - height).clamp(max=300).exp() for z in (sums.sink, sums.learned))
    return sink, (n > 1) * (-height).exp(), (drop - height).exp(), learned


def expected_of(columns: Tensor, gain: Tensor, learned_sink: Tensor, poles: Callable[[Tensor], Tensor] | None) -> dict:
    """The statistics of the same sums by the code for blocks of logits, in float64. poles: sums at a root."""
    n, first, largest, smallest, level, sink, drop, s1, e_log_e, s2, s3, s4 = columns.double()
    level = torch.where(n > 1, level, first * gain)
    fall = torch.where(s1 != 0, drop, 0.0)
    scale = drop.exp()
    log_others, e_log_e = drop + s1.log(), scale * (e_log_e + fall * s1)
    none = torch.zeros_like(n)
    sums = RowSums(level, sink, learned_sink - level, log_others, e_log_e, scale.square() * s2, none)
    sink, one, second, learned = entries_of(sums, drop, n)
    smaller = torch.minimum(sink, one)
    ends = torch.maximum(sink, one), torch.maximum(smaller, second)
    moments = [(m - 1).clamp(min=0) * second**power for power, m in enumerate((s1, s2, s3, s4), start=1)]
    root = rank_one_root_of_moments(*ends, torch.minimum(smaller, second), moments, learned)
    if poles is not None:
        x = root.float().double()
        ratio = torch.where(sink < one, sink / (x - sink), 0.0)
        p, squares = poles(x).double()
        improved = improved_root(*ends, x, p + ratio, squares + ratio.square(), learned)
        near = shared_height(sums.sink, sums.learned) == 0
        root = torch.where(improved.isfinite() & near, improved, root)
    found = {"sums": torch.stack(sums._replace(root=root), -1), "gain": gain.abs()[:, None]}
    limits = {"n": n.long()[:, None], "logits": torch.stack([first, largest, smallest], -1)}
    return _finish_statistics(limits, found, (), ALL).values


@pytest.mark.parametrize("improve", [False, True])
@pytest.mark.parametrize("rule", ["plain", "factor", "learned sink", "both"])
def test_every_number_is_that_of_the_sums_in_float64(rule: str, improve: bool) -> None:
    from attnorm.kernels import statistics_from_sums as kernels
    from attnorm.kernels.statistics_from_sums import softmax_root

    z, n = logits_of_rows()
    gain = torch.ones(len(n), dtype=torch.float64)
    if rule in ("factor", "both"):
        gain = torch.tensor([-2.0, -0.5, 0.0, 0.5, 2.0], dtype=torch.float64).repeat(len(n))[: len(n)]
        gain[n == 0] = math.nan  # such a row is empty, not broken
    sink = torch.tensor([-math.inf]) if rule in ("plain", "factor") else torch.tensor([1.5])
    columns = sums_of(z, n, gain)
    u = (scaled(z, gain)[:, 1:] - torch.where(n > 1, columns[4].double(), 0.0)[:, None]).exp()

    def poles(x: Tensor) -> Tensor:
        q = torch.where(u < x[:, None], u / (x[:, None] - u), 0.0)
        return torch.stack([q.sum(-1), q.square().sum(-1)]).float()

    expected = expected_of(columns, gain, sink.double(), poles if improve else None)
    sums = columns[:, None, None].contiguous().to(DEVICE)
    factor = gain.float()[None, None, :, None].to(DEVICE) if rule in ("factor", "both") else None
    learned = None if sink.isinf() else sink.to(DEVICE)
    roots = pole_sums = None
    shape = sums.shape[1:]
    if improve:
        roots = torch.full(shape, math.nan, dtype=torch.float64, device=DEVICE)
        fused_rows._run_on_rows(softmax_root, sums, factor, learned, roots, None)
        pole_sums = poles(roots[0, 0].cpu().float().double())[:, None, None].contiguous().to(DEVICE)
    outputs = [
        torch.full((len(names), *shape), math.nan, dtype=dtype, device=DEVICE)
        for names, dtype in (
            (kernels.NUMBERS, torch.float32),
            (kernels.MORE_NUMBERS, torch.float32),
            (kernels.WIDE_NUMBERS, torch.float64),
        )
    ]
    count = torch.full(shape, -1, device=DEVICE)
    broken = torch.full(shape, 2, dtype=torch.uint8, device=DEVICE)
    fused_rows._run_on_rows(
        kernels.softmax_statistics, sums, factor, learned, roots, pole_sums, *outputs, count, broken, MORE=True
    )
    assert torch.equal(count[0, 0].cpu(), n)
    assert not broken.any()
    names = (*kernels.NUMBERS, *kernels.MORE_NUMBERS, *kernels.WIDE_NUMBERS)
    found = {name: t[0, 0].cpu().double() for name, t in zip(names, (t for o in outputs for t in o), strict=True)}
    assert found.keys() - {"largest_share"} == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=3e-7, atol=1e-37, equal_nan=True, msg=lambda t, c=name: f"{c}: {t}"
        )
    seen = n > 0
    exact = scaled(z, gain)[seen].softmax(-1).amax(-1)
    torch.testing.assert_close(found["largest_share"][seen], exact, rtol=3e-7, atol=0)


def nearly_equal(keys: int) -> AttentionCall:
    call = make_call(5, keys, batch=1)
    call.key_BGKD.mul_(1e-4).add_(1.0)
    return call


CASES = {
    "random, 63 keys": lambda: make_call(63, batch=1),
    "random, 100 keys": lambda: make_call(4, 100, batch=1),
    "random, 2000 keys": lambda: make_call(2, 2000, batch=1),
    "peaked": lambda: make_call(4, 100, batch=1, size=12.0),
    "nearly equal": lambda: nearly_equal(100),
    "huge": lambda: make_call(4, 63, batch=1, size=1e4),
    "padded": lambda: make_call(33, mask=left_padding(33, 6)),
    "rows that see nothing": lambda: make_call(12, 7, batch=1),
}


def plain_formulas(call: AttentionCall, dtype: torch.dtype) -> dict[str, Tensor]:
    """Softmax and its statistics as one would write them down, of the whole matrix."""
    k = call.key_BGKD.to(dtype).repeat_interleave(HEADS // KEY_HEADS, 1)
    visible = dense_visible(call)
    z = (call.query_BHQD.to(dtype) @ k.mT * WIDTH**-0.5).masked_fill(~visible, -math.inf)
    p = torch.softmax(z, -1)
    first = visible.int().argmax(-1, keepdim=True)
    lowest = z.masked_fill(~visible, math.inf).amin(-1)
    spread = z.amax(-1) - lowest
    n = visible.sum(-1).to(dtype)
    found = {
        "max_logit": z.amax(-1), "min_logit": lowest, "logsumexp": z.logsumexp(-1),
        "entropy_nats": -torch.xlogy(p, p).sum(-1), "effective_keys": 1 / p.square().sum(-1), "max_weight": p.amax(-1),
        "sink_mass": p.gather(-1, first).squeeze(-1), "row_sum": p.sum(-1), "logit_spread": spread,
        "weight_ceiling": 1 / (1 + (n - 1) * torch.exp(-spread)),
        "entropy_ratio": torch.where(n > 1, -torch.xlogy(p, p).sum(-1) / n.log(), math.nan),
    }  # fmt: skip
    return {name: value.masked_fill(n < 1, math.nan) for name, value in found.items()}


@pytest.mark.parametrize("case", CASES)
def test_no_number_errs_by_more_than_twice_the_plain_formula(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fused_rows.EXTRA_PASSES, torch.float32, 0)  # they are for the Jacobian norm alone
    call = CASES[case]()
    found = measured(on_device(call), None, ALL)
    plain, exact = (plain_formulas(call, dtype) for dtype in (torch.float32, torch.float64))
    assert dense_logits(call).abs().max() > 1e3 or case != "huge"
    for name, value in exact.items():
        got = found[name].cpu().double()
        assert torch.equal(got.isnan(), value.isnan()), name
        rounding = 2 * torch.finfo(torch.float32).eps * value.nan_to_num().abs().max()
        worst, naive = ((v - value).nan_to_num().abs().max() for v in (got, plain[name].double()))
        assert worst <= 2 * naive + rounding, (name, float(worst), float(naive))


def test_the_sums_of_thousands_of_nearly_equal_weights_lose_no_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fused_rows.EXTRA_PASSES, torch.float32, 0)
    call = make_call(10, 30000, batch=1, size=1e-3)
    exact = plain_formulas(call, torch.float64)
    found = measured(on_device(call), None, list(exact))
    for name in ("effective_keys", "max_weight", "entropy_nats"):
        torch.testing.assert_close(found[name].cpu().double(), exact[name], rtol=6e-7, atol=0, msg=name)


@pytest.mark.parametrize("size", [1.0, 100.0, 1e4])
def test_the_mass_of_the_heaviest_key_is_the_largest_weight(size: float) -> None:
    call, rows = on_device(make_call(9, 70, batch=1, size=size)), torch.arange(9)
    (found,) = measure_by_kernel(call, resolve_normalizers(call, [None]), rows, (1, 70), mass_rows=None).values()
    torch.testing.assert_close(found.top_mass[..., 0], found.values["max_weight"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("logits", [[-5.0, -200.0], [-1.0, -400.0, -401.0], [1.0, -305.0], [400.0, 0.0]])
def test_the_norm_where_both_sinks_are_far_above_the_others(logits: list[float]) -> None:
    key = torch.tensor(logits)[None, None, :, None]
    call = AttentionCall(0, "cross", torch.ones(1, 1, 1, 1), key, key, 1.0, causal=False)
    found = measured(on_device(call), get("sink", logit=logits[0] + 1), ["jacobian_norm"])["jacobian_norm"].item()
    share = 1 / (1 + math.e)
    assert found == pytest.approx(share * (1 - share), rel=1e-6)


def on_device(call: AttentionCall) -> AttentionCall:
    return replace(call, **{name: t.to(DEVICE) for name, t in vars(call).items() if isinstance(t, Tensor)})


def measured(call: AttentionCall, choice: Choice, names: list[str]) -> dict[str, Tensor]:
    rows = torch.arange(call.query_BHQD.shape[2])
    (found,) = measure_by_kernel(call, resolve_normalizers(call, [choice]), rows, (), names).values()
    return found.values


class Calls(TorchDispatchMode):
    """Counts what torch is asked to do, outside of the kernels' own launches."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that run; the interpreter's own copies of tensors are not counted as calls."""
    ran: list[str] = []

    def unseen(run: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
        def launch(*args: object, **options: object) -> Tensor | None:
            ran.append(next(a.__name__ for a in args if hasattr(a, "__getitem__") and hasattr(a, "__name__")))
            with _disable_current_modes():
                return run(*args, **options)

        return launch

    monkeypatch.setattr(fused_rows, "_run_on_rows", unseen(fused_rows._run_on_rows))
    monkeypatch.setattr(fused_rows.RowsLaunch, "_run", unseen(fused_rows.RowsLaunch._run))
    return ran


@pytest.mark.parametrize(("passes", "kernels"), [(0, 2), (1, 4), (2, 6)])
@pytest.mark.parametrize("choice", [None, get("sink", heads=HEADS, logit=1.5)], ids=["softmax", "sink"])
def test_a_few_operations_around_the_kernels(
    choice: Choice, passes: int, kernels: int, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fused_rows.EXTRA_PASSES, torch.float32, passes)
    call = on_device(make_call(5, batch=1))
    choice = None if choice is None else choice.to(DEVICE)
    for names, most in ((PUBLIC, 12), (PER_ROW, 14)):
        launches.clear()
        with Calls() as calls:
            measured(call, choice, [*names])
        assert len(launches) == kernels
        assert launches[0] == "softmax_sums"
        assert launches[-1] == "softmax_statistics"
        assert calls.count <= most + 2 * passes


MASKED = {kind: call for kind, call in CALLS.items() if call.mask is not None} | {
    "cache with padding": make_call(5, 40, mask=torch.arange(40).ge(torch.tensor([0, 7])[:, None])[:, None, None]),
    "causal": CALLS["causal"],
    "cache": CALLS["cache"],
    "bidirectional": CALLS["bidirectional"],
    "more queries than keys": CALLS["more queries than keys"],
}


@pytest.mark.parametrize("kind", MASKED)
def test_visible_keys_are_counted_without_a_pass_over_the_keys(kind: str, launches: list[str]) -> None:
    call = MASKED[kind]
    queries = call.query_BHQD.shape[2]
    for rows in (torch.arange(queries), torch.arange(0, queries, 3)):
        found = fused_rows.visible_keys(on_device(call), rows)
        assert torch.equal(found.cpu(), dense_visible(call)[:, :, rows].sum(-1).expand(found.shape))
    assert not launches
