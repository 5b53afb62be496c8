"""The Triton kernel's statistics against those from blocks of logits in float64, which test_rows.py checks.

Without a GPU the kernel runs under Triton's interpreter.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import attnorm
from attnorm.engines.execution import HAS_TRITON
from attnorm.metrics import fused_rows
from attnorm.metrics.call import AttentionCall, logit_blocks
from attnorm.metrics.normalized import Choice, resolve_normalizers
from attnorm.metrics.rows import RowStatistics, measure_by_kernel, measure_rows
from attnorm.metrics.sampling import evenly_spaced
from attnorm.normalizers import get
from attnorm.theory.rank_one_eigenvalues import rank_one_eigenvalue
from tests.metrics.calls import CALLS, HEADS, make_call
from tests.metrics.reference import dense_logits
from tests.metrics.root_reference import improved_root, rank_one_root_of_moments

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton, which runs on Linux alone")


TOP_N = (1, 4)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OFTEN = ("causal", "cross", "left padding", "mask per head", "softcap", "sinks", "large logits")
KERNEL_CALLS = [
    pytest.param(name, marks=() if name in OFTEN else pytest.mark.nightly)
    for name, call in CALLS.items()
    if call.bias is None
]


def on_device(call: AttentionCall) -> AttentionCall:
    tensors = {name: value.to(DEVICE) for name, value in vars(call).items() if isinstance(value, Tensor)}
    return replace(call, **tensors)


def by_kernel(call: AttentionCall, choice: Choice, rows: Tensor | None = None) -> RowStatistics:
    rows = torch.arange(call.query_BHQD.shape[2]) if rows is None else rows
    call = on_device(call)
    assert fused_rows.applies(call)
    (found,) = measure_by_kernel(call, resolve_normalizers(call, [choice]), rows, TOP_N, mass_rows=None).values()
    return found


def assert_exact(call: AttentionCall, choice: Choice, rows: Tensor | None = None, loosely: float = 1.0) -> None:
    """Within the rounding of logits of this size in float32."""
    rows = torch.arange(call.query_BHQD.shape[2]) if rows is None else rows
    got = by_kernel(call, choice, rows)
    precise = replace(call, query_BHQD=call.query_BHQD.double(), key_BGKD=call.key_BGKD.double())
    (exact,) = measure_rows(precise, [choice], rows, TOP_N).values()
    size = float(dense_logits(call).abs().max().clamp(min=1))
    tolerance = loosely * 64 * torch.finfo(torch.float32).eps * size
    assert torch.equal(got.n.cpu(), exact.n)
    assert torch.equal(got.broken.cpu(), exact.broken)
    for name, value in {**exact.values, "top_mass": exact.top_mass}.items():
        found = got.top_mass if name == "top_mass" else got.values[name]
        near = torch.isclose(found.cpu().double(), value.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
        assert near.all(), (name, found.cpu()[~near], value[~near])


@pytest.mark.parametrize("name", KERNEL_CALLS)
def test_softmax_of_every_call(name: str) -> None:
    assert_exact(CALLS[name], None)


@pytest.mark.parametrize("choice", ["ssmax", "log_scaled"])
def test_a_rescaled_softmax(choice: str) -> None:
    assert_exact(CALLS["left padding"], choice)


def test_a_negative_factor_turns_the_order_of_the_keys_around() -> None:
    assert_exact(make_call(width=192), get("ssmax", s=-1.3))


def test_a_learned_sink_of_a_normalizer() -> None:
    assert_exact(CALLS["causal"], get("sink", heads=HEADS, logit=1.5))


def test_some_rows_only() -> None:
    assert_exact(CALLS["long"], None, rows=torch.tensor([0, 3, 4, 70, 150, 151, 152, 299]))


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 7), (7, 3), (1, 4)])
def test_how_many_keys_a_query_sees(queries: int, keys: int) -> None:
    rows = torch.arange(queries)
    for causal in (True, False):
        call = on_device(make_call(queries, keys, causal=causal))
        expected = [max(0, row + 1 + keys - queries) if causal else keys for row in range(queries)]
        assert fused_rows.visible_keys(call, rows)[1, 2].tolist() == expected


@pytest.mark.parametrize("kind", ["causal", "one row of a mask", "a row per query"])
def test_masses_are_those_of_the_later_rows_unless_each_has_a_mask_of_its_own(kind: str) -> None:
    mask = {
        "causal": None,
        "one row of a mask": torch.ones(1, 1, 1, 7),
        "a row per query": torch.ones(1, 1, 7, 7).tril(),
    }
    shown = mask[kind]
    call = on_device(make_call(7, batch=1, mask=None if shown is None else shown.bool()))
    chosen = resolve_normalizers(call, [None])
    rows = torch.arange(7)
    (found,) = measure_by_kernel(call, chosen, rows, TOP_N, mass_rows=2).values()
    known = found.top_mass[0, 0, :, 0].isfinite().cpu().nonzero().flatten()
    assert torch.equal(known, evenly_spaced(rows if kind == "a row per query" else rows[3:], 2))


@pytest.mark.parametrize(("dtype", "passes"), [(torch.float16, 1), (torch.float32, 2)])
def test_how_often_the_norm_is_refined(dtype: torch.dtype, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    call, made, pole_sums = make_call(3, batch=1), list[Tensor](), fused_rows.RowsLaunch.pole_sums
    half = on_device(replace(call, query_BHQD=call.query_BHQD.to(dtype), key_BGKD=call.key_BGKD.to(dtype)))

    def recorded(*arguments: Tensor) -> Tensor:
        made.append(pole_sums(*arguments))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(fused_rows.RowsLaunch, "pole_sums", recorded)
    by_kernel(half, None)
    assert [tuple(sums.shape) for sums in made] == [(2, 1, HEADS, 3)] * passes


@pytest.mark.parametrize("layout", ["every second number", "width before length"])
def test_queries_and_keys_in_another_layout(layout: str) -> None:
    call = make_call(5, batch=1)

    def laid_out(t: Tensor) -> Tensor:
        if layout == "width before length":
            return t.mT.contiguous().mT
        return torch.stack([t, 9 * t], -1).flatten(-2)[..., ::2]

    query, key = laid_out(call.query_BHQD), laid_out(call.key_BGKD)
    assert query.stride(-1) != 1 != key.stride(-1)
    assert_exact(replace(call, query_BHQD=query, key_BGKD=key), None)


def test_equal_keys_at_the_top() -> None:
    call = make_call(40, size=4.0)
    call.key_BGKD[:, :, 7:11] = call.key_BGKD[:, :, 6:7]
    call.query_BHQD.copy_(4 * call.key_BGKD[:, :, 6:7].repeat_interleave(2, 1) + 0.1 * call.query_BHQD)
    assert_exact(call, None)


def test_one_key_far_above_the_others_keeps_the_digits_of_the_rest() -> None:
    call = make_call(50, size=1.0)
    call.key_BGKD[:, :, 3] *= 60.0
    assert_exact(call, None)


def test_half_precision_errs_by_no_more_than_its_inputs() -> None:
    call = CALLS["causal"]
    half = replace(call, query_BHQD=call.query_BHQD.half(), key_BGKD=call.key_BGKD.half())
    assert_exact(half, None, loosely=4)  # the inputs are exact in float64 too; one pass less for the Jacobian norm


def test_rows_that_are_not_finite_are_broken() -> None:
    call = make_call(20, batch=1)
    call.key_BGKD[0, 0, 9] = torch.nan
    found = by_kernel(call, None)
    assert found.broken[0, :2, 9:].all()
    assert not found.broken[0, :, :9].any()
    assert not found.broken[0, 2:].any()
    assert found.values["entropy_nats"][0, :2, 9:].isnan().all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_rows_with_an_infinite_logit_are_broken(sign: float) -> None:
    call = make_call(20, batch=1)
    call.query_BHQD[..., 0] = sign
    call.key_BGKD[0, 0, 9] = torch.tensor([torch.inf, *[0.0] * 7])
    found = by_kernel(call, None)
    assert found.broken[0, :2, 9:].all()
    assert found.broken.sum() == 2 * 11
    assert found.values["max_weight"][0, :2, 9:].isnan().all()


@settings(max_examples=40)
@given(st.data())
def test_the_root_of_moments_is_close_and_never_above(data: st.DataObject) -> None:
    size, count = data.draw(st.floats(0.01, 12)), data.draw(st.integers(3, 400))
    z = size * torch.randn(
        count, dtype=torch.float64, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    )
    u = torch.exp(z - z.max()).sort(descending=True).values
    at_zero = torch.tensor(data.draw(st.sampled_from([0.0, 0.3, 5.0])), dtype=torch.float64)
    exact = rank_one_eigenvalue(u[None], at_zero[None, None])[0]
    moments = [u[3:].pow(power).sum() for power in (1, 2, 3, 4)]
    root = rank_one_root_of_moments(u[0], u[1], u[2], moments, at_zero)
    assert root <= exact * (1 + 1e-9)
    assert root >= exact * (1 - 5e-3)
    for _ in range(2):
        q = u[1:] / (root - u[1:])
        root = improved_root(u[0], u[1], root, q.sum(), q.square().sum(), at_zero)
    torch.testing.assert_close(root, exact, rtol=1e-6, atol=0.0)


def call_of(
    queries: int, keys: int, width: int = 16, *, dtype: torch.dtype = torch.float32, **options: Any
) -> AttentionCall:
    query = torch.zeros(2, 6, queries, width, dtype=dtype)
    key = torch.zeros(2, 3, keys, width, dtype=dtype)
    return AttentionCall(0, "decoder", query, key, key, 0.25, **{"causal": True, **options})


def visible(queries: int, keys: int, rows: list[int], causal: bool = True) -> Tensor:
    return fused_rows.visible_keys(call_of(queries, keys, causal=causal), torch.tensor(rows))


def test_visible_keys_without_a_mask() -> None:
    assert visible(5, 7, [0, 2, 4])[1, 5].tolist() == [3, 5, 7]
    assert visible(7, 5, [0, 1, 2, 6])[0, 0].tolist() == [0, 0, 1, 5]
    assert visible(5, 7, [0, 4], causal=False)[0, 0].tolist() == [7, 7]
    assert visible(5, 7, [0, 1, 2, 3, 4]).shape == (2, 6, 5)


def test_a_normalizer_without_rules_has_no_factor() -> None:
    call = call_of(5, 7)
    (block, *_) = logit_blocks(call, torch.arange(5))
    for name, has in (("softmax", False), ("ssmax", True), ("sink", False)):
        (one,) = resolve_normalizers(call, [name])
        assert (one.factor(call, block) is not None) is has
    (model,) = resolve_normalizers(call, [None])
    assert model.factor(call, block) is None


def test_a_normalizer_of_the_user_is_copied_to_the_device_of_the_call_and_stays_where_it_is() -> None:
    own, there = attnorm.get("ssmax", heads=6), torch.device("meta")
    call = replace(call_of(5, 7), query_BHQD=torch.empty(2, 6, 5, 8, device=there))
    for choice, running in ((own, None), (None, own)):
        (one,) = resolve_normalizers(replace(call, normalizer=running), [choice])
        assert {tensor.device for tensor in one.normalizer.parameters()} == {there}
    assert {tensor.device.type for tensor in own.parameters()} == {"cpu"}
    (here,) = resolve_normalizers(call_of(5, 7), [own])
    assert here.normalizer is own
