"""The stick-breaking kernels against the blocks in float64, on a GPU or in Triton's interpreter."""

from typing import Any

import pytest
import torch
from torch import Tensor

import attnorm
from attnorm.engines import stick_breaking
from attnorm.engines.inputs import validate_inputs
from attnorm.normalizers import Normalizer
from tests.attention.kernel_calls import (
    DEVICE,
    GROUPS,
    HALF,
    MORE_QUERIES,
    PAST_THE_EDGES,
    SMALL,
    SQUARE,
    WIDE,
    assert_compiles,
    assert_follows,
    draw,
    each_depth,
    exactly,
    mask_of,
    run,
)  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

CASES = [
    (SQUARE, "rows", True), (WIDE, "none", True), (GROUPS, "padding", False), (MORE_QUERIES, "none", True),
    (PAST_THE_EDGES, "heads", True),
]  # fmt: skip
FLOAT32 = 2e-6


def make(current: bool, **parts: Any) -> Normalizer:
    map_ = attnorm.get("stick_breaking", attend_current=current).map
    return Normalizer(map_, **parts).to(DEVICE)


# Each call with one of the two forms, in turn; with the other at night.
IN_TURN = [
    pytest.param(current, *call, marks=() if number % 2 == current else pytest.mark.nightly)
    for number, call in enumerate(CASES)
    for current in (True, False)
]


@pytest.mark.parametrize(("current", "shape", "mask", "causal"), IN_TURN)
def test_values_and_gradients(current: bool, shape: tuple[int, ...], mask: str, causal: bool) -> None:
    tensors, normalizer, options = draw(shape), make(current), {"mask": mask_of(mask, shape), "causal": causal}
    found = run(tensors, normalizer, "triton", **options)
    assert_follows(found, run(exactly(tensors), normalizer, "blocked", **options), FLOAT32)


@pytest.mark.parametrize("current", [True, False])
def test_a_window_and_a_learned_scale(current: bool) -> None:
    rules = attnorm.get("ssmax", heads=4).rules
    normalizer = make(current, scale=rules, select=attnorm.get("local", window=9).selections)
    found = run(draw(GROUPS), normalizer, "triton", causal=True)
    assert len(found) == 5
    assert_follows(found, run(exactly(draw(GROUPS)), normalizer, "blocked", causal=True), 2 * FLOAT32)


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision(dtype: torch.dtype) -> None:
    tensors, normalizer = draw(GROUPS, dtype), make(False)
    found = run(tensors, normalizer, "triton", causal=True)
    assert all(t.dtype == dtype for t in found)
    limit = torch.finfo(dtype).eps * (1 if DEVICE == "cpu" else 2)
    assert_follows(found, run(exactly(tensors), normalizer, "blocked", causal=True), limit)


@pytest.mark.parametrize("shift", [-3.0, 0.0, 1e4])
def test_rows_end_their_walk_only_where_nothing_is_left(shift: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among 600 keys a stick lasts for all, for some, or for one of them. Backward takes chunks of 32 queries."""
    from attnorm.kernels import stick_breaking_backward

    monkeypatch.setattr(stick_breaking_backward, "MAX_CARRIED", 1)
    q, k, v = draw((1, 1, 1, 40, 600, 16, 16))
    with torch.no_grad():
        q[..., 0], k[..., 0] = 4.0, shift
    found = run((q, k, v), make(True), "triton", causal=True)
    assert_follows(found, run(exactly((q, k, v)), make(True), "blocked", causal=True), 5 * FLOAT32)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("shift", "window"), [(-3.0, None), (0.0, None), (0.0, 70), (1e3, None)])
def test_backward_reads_the_costs_that_forward_has_kept(
    shift: float, window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same bits as without them. A stick of the first block lasts for all keys, for some, or for one."""
    from attnorm.kernels import stick_breaking as kernels

    tensors = draw((1, 1, 1, 70, 300, 16, 16), dtype)
    with torch.no_grad():
        tensors[0][..., :64, 0], tensors[0][..., 64:, 0], tensors[1][..., 0] = 4.0, -4.0, shift
    select = [] if window is None else attnorm.get("local", window=window).selections
    for current in (True, False):
        found = []
        for most in (kernels.MAX_KEPT_TILES, 0):
            monkeypatch.setattr(kernels, "MAX_KEPT_TILES", most)
            assert (kernels.kept_shapes(*tensors, trains=True) != ((0,), (0,))) == (most > 0)
            found.append(run(tensors, make(current, select=select), "triton", causal=True))
            monkeypatch.undo()
        assert all(torch.equal(kept, again) for kept, again in zip(*found, strict=True))


def test_a_row_that_sees_nothing_is_zero_and_a_nan_stays_one() -> None:
    q, k, v = draw((2, 2, 2, 20, 20, 16, 16))
    mask = torch.ones(2, 1, 20, 20, dtype=torch.bool, device=DEVICE)
    mask[0, :, 5] = False
    output, *grads = run((q, k, v), make(False), "triton", mask=mask)
    assert (output[0, :, 5] == 0).all()
    assert all(g.isfinite().all() for g in grads)
    with torch.no_grad():
        k[1, 1, 7] = torch.nan
        found = attnorm.attention(q, k, v, make(True), engine="triton", causal=True)
    assert found[1, 1, 7:].isnan().all()
    assert found[1, 1, :7].isfinite().all()
    assert found[0].isfinite().all()


def test_compiled_code_takes_the_kernels_as_one_operator() -> None:
    q, k, v = draw(SMALL)
    normalizer = make(False)

    def loss(q: Tensor) -> Tensor:
        return attnorm.attention(q, k, v, normalizer, causal=True, engine="triton").square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert torch.equal(torch.autograd.grad(compiled(q), q)[0], torch.autograd.grad(loss(q), q)[0])
    factor = torch.full((1, 1, 20), 0.7, device=DEVICE)
    given = [*(t.detach() for t in (q, k, v)), None, factor]
    options, trains = (True, True, 9, 0.25), True
    utilities = ("test_schema", "test_faketensor", "test_autograd_registration")
    arguments = (q, k, v, None, factor.clone().requires_grad_(), *options, trains)
    torch.library.opcheck(torch.ops.attnorm.stick_breaking_attention.default, arguments, test_utils=utilities)
    output, *saved = torch.ops.attnorm.stick_breaking_attention(*given, *options, trains)
    backward = torch.ops.attnorm.stick_breaking_attention_backward.default
    torch.library.opcheck(backward, (output, *given, *saved, *options), test_utils=utilities)


def test_what_the_kernels_have_no_form_for() -> None:
    call = validate_inputs(*draw(SMALL), mask=None, causal=True, scale=None, positions=None)
    placed = validate_inputs(*draw(SMALL), mask=None, causal=True, scale=None, positions=torch.arange(20) + 3)
    short = validate_inputs(*(t[..., :8, :] for t in draw(SMALL)), mask=None, causal=True, scale=None, positions=None)
    windowed = make(True, select=attnorm.get("local", window=3).selections)
    both_ways = validate_inputs(*draw(SMALL), mask=None, causal=False, scale=None, positions=None)
    assert stick_breaking.applies(call, make(False))
    assert stick_breaking.applies(call, windowed)
    assert stick_breaking.applies(placed, make(True)), "positions do not enter"
    assert not stick_breaking.applies(placed, make(False))
    assert not stick_breaking.applies(short, make(True))
    assert not stick_breaking.applies(both_ways, windowed)
    assert not stick_breaking.applies(call, make(True, select=attnorm.get("topk", k=3).selections))
    assert not stick_breaking.applies(call, make(True, scale=attnorm.get("softcap", cap=2.0).rules))
    assert not stick_breaking.applies(call, attnorm.get("softmax"))


@each_depth
def test_the_kernels_compile_for_gpus_that_are_not_here(lowered: bool) -> None:
    script = """
from attnorm.kernels import stick_breaking, stick_breaking_backward
types = dict(mask="*u8", live="*i32", live_out="*i32", scale="fp32", plain_scale="fp32")
types |= dict.fromkeys(("factor", "spent", "spent_in", "spent_out", "later", "earlier", "grad_factor"), "*fp32")
types |= dict.fromkeys(("q", "k", "v", "out", "grad", "grad_q", "grad_k", "grad_v"), "*bf16")
constants = dict(
    FAST=True, FACTORED=True, REST=True, CAUSAL=True, WINDOWED=False, MASKED=True, PRECISION="tf32", ROWS=16,
    COLUMNS=16, WIDTH=16, V_WIDTH=16, FULL=True, V_FULL=False, LIFT=1.0, ADD=True, KEEPS=True,
    KEPT=True,
    PART=triton.language.bfloat16,
)
backward = stick_breaking_backward.backward_queries, stick_breaking_backward.backward_keys
for kernel in (stick_breaking.forward_kernel, *backward):
    compiles(kernel, constants, types)
"""
    assert_compiles(script, lowered)
