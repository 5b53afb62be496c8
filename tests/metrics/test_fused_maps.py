"""The Triton kernels' statistics of maps other than softmax against those from blocks of logits in float64.

test_rows.py checks the blocks. Without a GPU the kernels run under Triton's interpreter.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import attnorm
from attnorm.engines.execution import HAS_TRITON
from attnorm.metrics import fused_maps, fused_rows
from attnorm.metrics.attention_statistics import map_statistics_operator
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.catalogue import PER_ROW
from attnorm.metrics.normalized import resolve_normalizers
from attnorm.metrics.rows import RowStatistics, measure_map_by_kernel, measure_rows
from attnorm.normalizers import Normalizer, get
from tests.attention.kernel_calls import assert_compiles, each_depth
from tests.metrics.calls import CALLS, HEADS, make_call
from tests.metrics.reference import dense_logits
from tests.metrics.test_fused_rows import DEVICE, on_device

# In rows that see nothing and in hidden keys -inf is subtracted from -inf; the kernels do not use the result.
pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="needs Triton, which runs on Linux alone"),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]


TOP_N = (1, 4)
NAMES = (*PER_ROW, "min_logit")
EPS = torch.finfo(torch.float32).eps
MAPS: dict[str, tuple[str, dict[str, object]]] = {
    "sparsemax": ("sparsemax", {}),
    "entmax15": ("entmax15", {}),
    "entmax": ("entmax", {"alpha": 1.3}),
    "learned alpha": ("entmax", {"alpha": 1.6, "learned": True, "heads": HEADS}),
    "asentmax": ("asentmax", {"heads": HEADS, "gamma": 0.5}),
    "kneemax": ("kneemax", {}),
    "knee at 1/n": ("kneemax", {"share": 1.0}),
    "sigmoid": ("sigmoid", {}),
    "relu": ("relu", {}),
    "squared relu": ("relu", {"power": 2.0}),
    "threshold relu": ("threshold_relu", {"beta": 0.3}),
    "softpick": ("softpick", {}),
}
SOME_MAPS = ("entmax15", "kneemax", "sigmoid", "softpick")
OF_LOGITS = ("max_logit", "min_logit", "logit_spread", "logit_spread_without_sink")
# What is left of a weight when nearly all of it is in one place: its logarithm has the error of the logits over it.
OF_SMALL_WEIGHTS = ("effective_gap", "effective_gap_without_sink")


def often(names: Sequence[str]) -> list[Any]:
    """A map with a threshold and one without on every commit, the others at night: they differ in their formulas."""
    every_commit = ("entmax15", "sigmoid")
    return [name if name in every_commit else pytest.param(name, marks=pytest.mark.nightly) for name in names]


def make(name: str) -> Normalizer:
    found = get(MAPS[name][0], **MAPS[name][1])
    assert isinstance(found, Normalizer)
    return found


def by_kernel(call: AttentionCall, normalizer: Normalizer, rows: Tensor | None = None) -> RowStatistics:
    rows = torch.arange(call.query_BHQD.shape[2]) if rows is None else rows
    call = on_device(call)
    assert fused_maps.kernel_form(normalizer) is not None
    assert fused_rows.applies(call)
    (one,) = resolve_normalizers(call, [normalizer])
    return measure_map_by_kernel(call, fused_maps.row_map_of(one, call, rows), rows, TOP_N, NAMES, None)


def assert_close_to_float64(
    call: AttentionCall, normalizer: Normalizer, rows: Tensor | None = None, *, exact_logits: bool = False
) -> None:
    """Errors at most twice those of the same formulas in float32, but for the rounding of the logits.

    exact_logits: float32 holds the products of queries and keys, and the scale is a power of two: nothing is rounded.
    """
    rows = torch.arange(call.query_BHQD.shape[2]) if rows is None else rows
    got = by_kernel(call, normalizer, rows)
    precise = replace(call, query_BHQD=call.query_BHQD.double(), key_BGKD=call.key_BGKD.double())
    normalizer = normalizer.cpu()
    (exact,) = measure_rows(precise, [normalizer], rows, TOP_N, names=NAMES).values()
    (naive,) = measure_rows(call, [normalizer], rows, TOP_N, names=NAMES).values()
    size = 1.0 if exact_logits else float(dense_logits(call).abs().max().clamp(min=1))
    assert torch.equal(got.n.cpu(), exact.n)
    assert torch.equal(got.broken.cpu(), exact.broken)
    for name in (*exact.values, "top_mass"):
        ours, true, theirs = (
            (one.top_mass if name == "top_mass" else one.values[name]).cpu().double() for one in (got, exact, naive)
        )
        if name in OF_LOGITS:
            near = ((ours - true).abs() <= 16 * EPS * longest_products(call, rows)) | (ours.isnan() & true.isnan())
            assert near.all(), (name, ours[~near], true[~near])
            continue
        if name in OF_SMALL_WEIGHTS:  # both are infinite where float32 has no smaller weight
            known = true.abs() < 10
            ours, true, theirs = (t.where(known, 0.0) for t in (ours, true, theirs))
        lost = theirs.isnan() & ~true.isnan()  # float32 rounds weights to 0 that float64 does not
        ours, true, theirs = (t.masked_fill(lost, 0.0) for t in (ours, true, theirs))
        allowed = 2 * (theirs - true).nan_to_num().abs().max() + 16 * EPS * size * (1 + true.abs())
        near = ((ours - true).abs() <= allowed) | (ours == true) | (ours.isnan() & true.isnan())
        assert near.all(), (name, allowed[~near], ours[~near], true[~near])


def longest_products(call: AttentionCall, rows: Tensor) -> Tensor:
    """The largest logit that vectors as long as these can have, (B, H, R): its rounding is that of all of a row."""
    key = call.key_BGKD.double().norm(dim=-1).amax(-1).repeat_interleave(HEADS // call.key_BGKD.shape[1], 1)
    return call.scale * call.query_BHQD[:, :, rows].double().norm(dim=-1) * key[..., None]


def call_of(kind: str, length: int) -> AttentionCall:
    """One item, but for padding; test_every_call has several."""
    if kind == "huge":
        return huge_call(length)
    size = {"random": 2.0, "peaked": 12.0, "nearly equal": 1e-3, "padded": 2.0}[kind]
    if kind != "padded":
        return make_call(length, batch=1, size=size, seed=3)
    padded = torch.arange(length) >= torch.tensor([0, 20])[:, None]
    return make_call(length, size=size, seed=3, mask=padded[:, None, None])


def huge_call(length: int) -> AttentionCall:
    """Logits up to 2^14 or so, whole multiples of 2^8, which float32 holds exactly; many are equal."""
    call = make_call(length, batch=1, size=2.0, seed=3, scale=0.25)
    return replace(call, query_BHQD=2.0**10 * call.query_BHQD.round(), key_BGKD=(2 * call.key_BGKD).round())


@pytest.mark.parametrize("length", [63, 100])
@pytest.mark.parametrize("kind", ["random", "peaked", "nearly equal", "huge", "padded"])
@pytest.mark.parametrize("name", MAPS)
def test_every_number_of_every_row(name: str, kind: str, length: int) -> None:
    assert_close_to_float64(call_of(kind, length), make(name), exact_logits=kind == "huge")


@pytest.mark.parametrize("name", often(MAPS))
def test_some_rows_of_1100_keys(name: str) -> None:
    """tests/cuda has all rows of 2000 keys, and every kind of logits."""
    assert_close_to_float64(call_of("random", 1100), make(name), torch.tensor([0, 550, 1099]))


@pytest.mark.parametrize("name", [name for name in MAPS if name != "softpick"])
@pytest.mark.every_second("name")
def test_logits_far_from_zero_keep_their_differences(name: str) -> None:
    """Of softpick the kernel rounds logits, in bits, before it subtracts the largest one."""
    call = make_call(63, batch=1, size=2.0, seed=3, scale=0.25)
    call.query_BHQD.round_()[..., 0] = 32.0
    call.key_BGKD.mul_(2).round_().div_(2)[..., 0] = 1024.0
    assert dense_logits(call).median() > 8000
    assert_close_to_float64(call, make(name), exact_logits=True)


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.bias is None])
@pytest.mark.parametrize("map_", SOME_MAPS)
@pytest.mark.every_second("name")
def test_every_call(map_: str, name: str) -> None:
    call = CALLS[name]
    if name == "large logits" and map_ in ("sigmoid", "softpick"):
        call = replace(call, scale=0.2 * call.scale)  # or float32 rounds most weights to 0, and float64 does not
    assert_close_to_float64(call, make(map_))


@pytest.mark.parametrize("name", often(SOME_MAPS))
def test_some_rows_only(name: str) -> None:
    assert_close_to_float64(CALLS["long"], make(name), rows=torch.tensor([0, 3, 4, 70, 150, 151, 152, 299]))


@pytest.mark.parametrize("map_", often(SOME_MAPS))
def test_a_negative_factor_turns_the_order_of_the_keys_around(map_: str) -> None:
    call = make_call(batch=1, width=192)
    assert_close_to_float64(call, attnorm.compose(make(map_).map, scale=get("ssmax", s=-1.3)))


@pytest.mark.parametrize("name", often(["entmax15", "kneemax", "entmax", "sigmoid", "softpick"]))
def test_equal_keys_at_the_top(name: str) -> None:
    call = make_call(80, batch=1, size=4.0)
    call.key_BGKD[:, :, 7:11] = call.key_BGKD[:, :, 6:7]
    call.query_BHQD.copy_(call.key_BGKD[:, :, 6:7].repeat_interleave(2, 1) + 0.1 * call.query_BHQD)
    assert_close_to_float64(call, make(name))


@pytest.mark.parametrize(
    "name",
    ["entmax15", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("sigmoid", "squared relu", "softpick"))],
)
def test_every_tile_has_a_key_above_all_before_it(name: str) -> None:
    call = make_call(260, batch=1, causal=False)
    call.query_BHQD.fill_(0.3)
    call.key_BGKD.copy_(0.02 * torch.arange(260.0)[:, None] - 2.5 + 0.1 * call.key_BGKD)
    call = replace(call, query_BHQD=call.query_BHQD[:, :, :40])
    assert_close_to_float64(call, make(name))


@pytest.mark.parametrize(("name", "key", "gap"), [("softpick", 150, 90.0), ("entmax near 1", 0, 18.0)])
def test_weights_so_small_that_their_inverse_is_infinite(name: str, key: int, gap: float) -> None:
    """One key is above all others by `gap` to 1.15 of it, where these have weights around 1e-40."""
    call = make_call(160, batch=1, causal=False, scale=1.0)
    call = replace(call, query_BHQD=torch.ones_like(call.query_BHQD[:, :2, :30]), key_BGKD=call.key_BGKD[:, :1])
    call.query_BHQD[..., 0] = gap * torch.linspace(1, 1.15, 30)
    call.key_BGKD.mul_(1e-3)[..., 0] = 0.0
    call.key_BGKD[:, :, key, 0] = 1.0
    call = replace(call, query_BHQD=call.query_BHQD.half(), key_BGKD=call.key_BGKD.half())
    found = by_kernel(call, make(name) if name in MAPS else get("entmax", alpha=1.05))
    assert not found.broken.any()
    for column in ("max_weight", "effective_keys"):
        torch.testing.assert_close(found.values[column], torch.ones_like(found.values[column]))
    assert (found.values["entropy_nats"] < 1e-5).all()
    assert (found.values["jacobian_norm"] < 1e-5).all()


def test_many_weights_of_one_row_need_newton_passes_over_the_keys() -> None:
    call = make_call(400, batch=1, size=0.02, causal=False)  # more weights than leaders
    call = replace(call, query_BHQD=call.query_BHQD[:, :, :40])
    found = by_kernel(call, make("entmax15"))
    assert found.values["effective_keys"].min() > 200
    assert_close_to_float64(call, make("entmax15"))


def test_programs_that_share_their_memory_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    call, normalizer = make_call(100, batch=1), make("entmax15")
    at_once = by_kernel(call, normalizer)
    monkeypatch.setattr(fused_maps, "MAX_SCRATCH", 12)  # of 8 programs 3 at a time, with 4 tiles each
    in_turn = by_kernel(call, normalizer)
    torch.testing.assert_close(in_turn.values, at_once.values, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("name", often(SOME_MAPS))
def test_half_precision_errs_by_no_more_than_its_inputs(name: str) -> None:
    call = CALLS["causal"]
    half = on_device(replace(call, query_BHQD=call.query_BHQD.half(), key_BGKD=call.key_BGKD.half()))
    got = by_kernel(half, make(name)).values
    precise = replace(half, query_BHQD=half.query_BHQD.double(), key_BGKD=half.key_BGKD.double())
    (exact,) = measure_rows(precise, [make(name)], torch.arange(33), TOP_N).values()
    for column in ("entropy_nats", "effective_keys", "max_weight", "sink_mass", "row_sum", "jacobian_norm"):
        torch.testing.assert_close(got[column].double(), exact.values[column], rtol=1e-3, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", SOME_MAPS)
def test_rows_that_are_not_finite_are_broken(name: str, value: float) -> None:
    call = make_call(20, batch=1)
    call.query_BHQD[..., 0] = 1.0
    call.key_BGKD[0, 0, 9] = torch.tensor([value, *[0.0] * 7])
    found = by_kernel(call, make(name))
    assert found.broken[0, :2, 9:].all()
    assert found.broken.sum() == 2 * 11
    assert found.values["entropy_nats"][0, :2, 9:].isnan().all()
    assert found.values["row_sum"][0, :2, :9].isfinite().all()


def test_rows_without_a_weight_have_no_entropy() -> None:
    call = make_call(batch=1)
    call.query_BHQD.fill_(-1.0)
    call.key_BGKD.abs_()
    for name in ("relu", "softpick"):
        found = by_kernel(call, make(name))
        assert (found.values["row_sum"] == 0).all()
        assert found.values["entropy_nats"].isnan().all()
        assert (found.values["jacobian_norm"] == 0).all()
        assert not found.broken.any()
    assert_close_to_float64(call, make("relu"))


def test_which_normalizers_have_kernels() -> None:
    assert all(fused_maps.kernel_form(make(name)) is not None for name in MAPS)
    for name in ("softmax", "kernel", "topk", "stick_breaking", "sa_softmax", "nearmax"):
        found = get(name)
        assert isinstance(found, Normalizer)
        assert fused_maps.kernel_form(found) is None
    assert fused_maps.kernel_form(attnorm.compose("entmax15", sink=attnorm.Sink())) is None
    assert fused_maps.kernel_form(get("relu", power=2.5)) is None
    assert fused_maps.kernel_form(None) is None


def test_a_threshold_relu_has_a_norm_in_every_row() -> None:
    (found,) = measure_rows(CALLS["causal"], [make("threshold relu")], torch.arange(33), TOP_N).values()
    assert found.values["jacobian_norm"].isfinite().all()


NIGHTLY = ("asentmax", "kneemax", "sigmoid", "softpick", "relu")  # one operator for all of them


@pytest.mark.parametrize("name", ["entmax15", *(pytest.param(name, marks=pytest.mark.nightly) for name in NIGHTLY)])
def test_a_compiled_function_keeps_one_graph(name: str) -> None:
    call = on_device(make_call(70, 90, batch=1))
    normalizer = make(name).to(DEVICE)
    mask = (torch.arange(90) >= 9).to(DEVICE)

    def measure(q: Tensor, k: Tensor) -> tuple[Tensor, attnorm.AttentionStatistics]:
        found = attnorm.attention_statistics(q, k, normalizer, causal=True, mask=mask, softcap=20.0, top_n=(1, 5))
        return 2 * found.entropy, found

    q, k = call.query_BHQD, call.key_BGKD
    doubled, found = torch.compile(measure, fullgraph=True, backend="aot_eager")(q, k)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fused_rows, "applies", lambda call: False)
        expected = measure(q.double(), k.double())[1]
    torch.testing.assert_close(
        found, type(found)(*(t.to(f.dtype) for t, f in zip(expected, found, strict=True))),
        rtol=1e-4, atol=1e-4, equal_nan=True,
    )  # fmt: skip
    torch.testing.assert_close(doubled, 2 * found.entropy)


def test_the_operator_is_sound() -> None:
    call = on_device(make_call(70, batch=1))
    numbers = torch.rand(1, HEADS, 70, device=DEVICE)
    given = (call.query_BHQD, call.key_BGKD, None, numbers, None, numbers, 0.3, True, None)
    inputs = (*given, "kneemax", 1, 0.0, "entropy_nats max_logit", [1, 5])
    torch.library.opcheck(map_statistics_operator, inputs, test_utils=("test_schema", "test_faketensor"))


@each_depth
def test_the_kernels_compile_for_gpus_that_are_not_here(lowered: bool) -> None:
    script = """
from attnorm.kernels import map_sums, maps, statistics_from_sums, threshold_maps, threshold_sums
types = dict(q="*bf16", k="*bf16", mask="*u8", row_queries="*i32", listed="*i32", broken="*u8")
types |= dict.fromkeys(("scale", "cap", "floor", "natural", "slope", "enough", "tolerance", "doubt", "unit"), "fp32")
rows = ("factor", "row_shift", "parameter", "out", "gaps", "sums", "more", "count", "logits", "shift", "threshold")
types |= dict.fromkeys((*rows, "reference_out", "known"), "*fp32") | dict.fromkeys(("v", "output"), "*bf16")
shared = dict(
    FAST=True, CAUSAL=True, MASKED=True, CAPPED=True, FACTORED=True, PRECISION="tf32", ROWS=32, KEYS=16, WIDTH=16,
    FULL=False, P=1, SHIFTED=True, LEVELS=1, PASSES=1, MAX_STEPS=9, EARLY=3, BLOCK=128, MORE=True, OUTPUT=True,
    LIFT=2.0, EXACT=False,
)
compiles(statistics_from_sums.weight_statistics, shared, types)
compiles(map_sums.softpick_norms, {**shared, "STEPS": 2}, types)
for kernel, name in (
    ("threshold_sums", "kneemax"), ("threshold_sums", "entmax"), ("threshold_sums", "entmax15"),
    ("map_sums", "softpick"), ("map_sums", "sigmoid"), ("map_sums", "relu"),
):
    if kernel == "map_sums":
        one = maps.MAPS[name]
        weights = maps.softpick_digits if name == "softpick" else one.weights
        given = dict(SLOPES=one.slopes, REFERENCE=int(one.reference), NORMALISED=one.normalised, DEFORMED=False)
        compiles(map_sums.map_sums, {**shared, **given, "WEIGHTS": weights}, types)
    else:
        one = threshold_maps.MAPS[name]
        weights = one.weights
        given = dict(
            NEWTON=one.newton, START=one.start, COUNTED=one.counted, DEFORMED=one.deformed, PARAMETER=one.parameter,
            KNOWN=name != "entmax15",
        )
        compiles(threshold_sums.threshold_sums, {**shared, **given, "WEIGHTS": weights}, types)
    state = dict(HAS_THRESHOLD=kernel != "map_sums", REFERENCE=0, PARAMETER=True)
    compiles(statistics_from_sums.key_weights, {**shared, **given, **state, "WEIGHTS": weights}, types)
"""
    assert_compiles(script, lowered)
