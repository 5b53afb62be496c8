"""The threshold kernels against the blocks in float64, on a GPU or in Triton's interpreter."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import attnorm
from attnorm.engines import sparse
from attnorm.engines.inputs import validate_inputs
from attnorm.kernels import threshold
from attnorm.kernels.threshold_maps import add_tile, no_leaders
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

# In rows that see nothing and in hidden keys -inf is subtracted from -inf; the kernels do not use the result.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

CASES = [
    (SQUARE, "rows", True), (SQUARE, "heads", False), (GROUPS, "padding", True), (WIDE, "none", False),
    (MORE_QUERIES, "none", True), (MORE_QUERIES, "padding", False), (PAST_THE_EDGES, "none", True),
    (PAST_THE_EDGES, "heads", True),
]  # fmt: skip
MAPS: dict[str, tuple[str, dict[str, Any]]] = {
    "entmax15": ("entmax15", {}),
    "sparsemax": ("sparsemax", {}),
    "kneemax": ("kneemax", {"share": 1.0}),
    "fixed knee": ("kneemax", {"knee": 0.25}),
    "entmax": ("entmax", {"alpha": 1.3}),
    "learned alpha": ("entmax", {"alpha": 1.6, "learned": True}),
}
FEW = (1, 2, 1, 20, 70, 16, 24)


# Each call with one of the maps, in turn; with the others at night.
IN_TURN = [
    pytest.param(name, *call, marks=() if (number - other) % len(MAPS) == 0 else pytest.mark.nightly)
    for number, call in enumerate(CASES)
    for other, name in enumerate(MAPS)
]


def make(name: str) -> Normalizer:
    map_, options = MAPS[name]
    found = attnorm.get(map_, **options)
    assert isinstance(found, Normalizer)
    return found.to(DEVICE)


@pytest.mark.parametrize(("name", "shape", "mask", "causal"), IN_TURN)
def test_values_and_gradients(name: str, shape: tuple[int, ...], mask: str, causal: bool) -> None:
    tensors, normalizer, options = draw(shape), make(name), {"mask": mask_of(mask, shape), "causal": causal}
    found = run(tensors, normalizer, "sparse", **options)
    expected = run(exactly(tensors), normalizer, "blocked", **options)
    assert len(found) == 4 + (name == "learned alpha")
    for one in (found, expected):  # rows nearly cancel in the gradient of alpha: it is measured beside that of q
        one[1:] = [torch.cat([t.flatten() for t in (one[1], *one[4:])]), *one[2:4]]
    assert_follows(found, expected, 4e-6)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", MAPS)
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    """One unit in the last place. The interpreter knows no bfloat16."""
    tensors, normalizer = draw(FEW, dtype), make(name)
    found = run(tensors, normalizer, "sparse", causal=True)
    assert all(t.dtype == dtype for t in found[:4])
    limit = torch.finfo(dtype).eps * (1 if DEVICE == "cpu" else 2)
    assert_follows(found, run(exactly(tensors), normalizer, "blocked", causal=True), limit)


@pytest.mark.parametrize("width", [64, 128, pytest.param(256, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("dtype", HALF)
def test_backward_finds_the_tiles_of_forward_though_its_own_differ(dtype: torch.dtype, width: int) -> None:
    """Queries of the first half read keys of one tile, those of the second half keys of another."""
    q, k, v = draw((1, 1, 1, 128, 150, width, width), dtype)
    with torch.no_grad():
        q[..., 0] = torch.where(torch.arange(128, device=DEVICE) < 64, -60.0, 60.0)
        k[..., 0] = torch.linspace(-1, 1, 150, device=DEVICE)
    found, exact = run((q, k, v), attnorm.get("entmax15"), "sparse"), exactly((q, k, v))
    expected = run(exact, attnorm.get("entmax15"), "blocked")
    assert_follows(found, expected, torch.finfo(dtype).eps * (1 if DEVICE == "cpu" else 2))
    seen = expected[3][0, 0].abs().amax(-1) > 0
    assert 0 < seen.sum() < 150


@triton.jit
def _add_two_tiles(gaps, best, first, second, level, SKIPS: tl.constexpr):
    """Add two tiles of 4 rows and 8 equal logits; store the sum of the second leaders that are finite."""
    leaders, peak = no_leaders(4, 4), tl.full([4], float("-inf"), tl.float32)
    size = tl.full([4], 1.0, tl.float32)
    for tile in tl.static_range(2):
        logits = tl.full([4, 4], 0.0, tl.float32) + (second if tile else first)
        leaders, peak = add_tile(leaders, peak, logits, logits, size, level, gaps, tile * 8, 8, SKIPS)
    tl.store(best, tl.sum(tl.sum(tl.where(leaders.two > float("-inf"), leaders.two, 0.0), 1), 0))


@pytest.mark.parametrize("skips", [False, True])
def test_tiles_below_the_level_are_not_compared_with_the_leaders(skips: bool) -> None:
    """The second tile lies 1.5 below the first: above a level of -2, below one of -1."""
    for level, compared in ((-2.0, True), (-1.0, not skips)):
        gaps, best = torch.zeros(2, device=DEVICE), torch.zeros(1, device=DEVICE)
        _add_two_tiles[(1,)](gaps, best, 5.0, 3.5, level, SKIPS=skips)
        assert best.item() == (16 * 3.5 if compared else 0)
        assert gaps.tolist() == [0.0, -1.5]


@pytest.mark.parametrize("name", ["entmax15", "entmax", "kneemax"])
def test_long_rows_without_their_far_tiles_are_as_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here rows count as long from one key on. Weights lie in one tile of three, at either end."""
    monkeypatch.setattr("attnorm.kernels.threshold.LONG_ROWS", 1)
    q, k, v = draw((1, 1, 1, 70, 190, 16, 16))
    with torch.no_grad():
        q[..., 0] = torch.where(torch.arange(70, device=DEVICE) < 64, -60.0, 60.0)
        k[..., 0] = torch.linspace(-1, 1, 190, device=DEVICE)
    normalizer = attnorm.get(name)
    found = run((q, k, v), normalizer, "sparse")
    assert_follows(found, run(exactly((q, k, v)), normalizer, "blocked"), 2e-5)


@pytest.mark.parametrize("dtype", HALF)
def test_what_all_keys_share_does_not_reach_the_gradient_of_a_scale(dtype: torch.dtype) -> None:
    """It adds the same to all logits of a row, here 40; each gradient of a logit is rounded before its product."""
    q, k, v = draw((1, 2, 2, 40, 70, 16, 16), dtype)
    with torch.no_grad():
        q[..., 0], k[..., 0] = 4.0, 40.0
    normalizer = attnorm.compose("entmax15", scale=attnorm.get("ssmax", s=0.5)).to(DEVICE)
    found = run((q, k, v), normalizer, "sparse")[4]
    expected = run(exactly((q, k, v)), normalizer, "blocked")[4]
    assert (found - expected).abs() <= 4 * torch.finfo(dtype).eps * expected.abs()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), *((dtype, 2) for dtype in HALF)])
@pytest.mark.parametrize("map_", ["entmax15", pytest.param("sparsemax", marks=pytest.mark.nightly)])
def test_learned_scales_multiply_the_logits_in_float32(map_: str, dtype: torch.dtype, tolerance: float) -> None:
    """A factor of 0 too, which a row of one key has under ssmax."""
    rules = [attnorm.get("asentmax", heads=4).rules[0], attnorm.get("ssmax", s=0.4, heads=4).rules[0]]
    normalizer = attnorm.compose(map_, scale=rules).to(DEVICE)
    with torch.no_grad():
        for parameter in normalizer.parameters():
            parameter += torch.linspace(-0.3, 0.3, 4, device=DEVICE)
    tensors = draw(GROUPS, dtype, spread=0.5)
    mask = mask_of("padding", GROUPS)
    found = run(tensors, normalizer, "sparse", causal=True, mask=mask)
    assert len(found) == 7
    step = 1.0 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert_follows(found, run(exactly(tensors), normalizer, "blocked", causal=True, mask=mask), tolerance * step)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("map_", ["entmax15", "sparsemax"])
def test_a_small_temperature_costs_no_digits(map_: str, dtype: torch.dtype) -> None:
    """At most twice the error of the output of float64, rounded once: q is not rounded a second time."""
    normalizer = attnorm.compose(map_, scale=attnorm.get("softmax", temperature=0.01)).to(DEVICE)
    tensors = tuple(t.detach() for t in draw(GROUPS, dtype, spread=4.0))
    exact = attnorm.attention(*(t.double() for t in tensors), normalizer, engine="blocked", causal=True)
    found = attnorm.attention(*tensors, normalizer, engine="sparse", causal=True)
    rounded_once = (exact.to(dtype).double() - exact).abs().max()
    assert (found.double() - exact).abs().max() <= 2 * rounded_once


@pytest.mark.parametrize(
    ("map_", "shape", "mask", "causal"),
    [
        ("kneemax", SQUARE, "none", True), ("entmax15", GROUPS, "padding", True),
        ("sparsemax", MORE_QUERIES, "none", True), ("entmax15", SQUARE, "heads", False),
    ],
)  # fmt: skip
def test_a_penalty_on_the_distance(map_: str, shape: tuple[int, ...], mask: str, causal: bool) -> None:
    tensors = draw(shape)
    normalizer = attnorm.compose(map_, scale=attnorm.get("alibi", heads=tensors[0].shape[1])).to(DEVICE)
    options = {"mask": mask_of(mask, shape), "causal": causal}
    found = run(tensors, normalizer, "sparse", **options)
    expected = run(exactly(tensors), normalizer, "blocked", **options)
    assert_follows(found, expected, 4e-6)


def test_far_keys_without_weight_are_left_out_of_backward() -> None:
    shape = (1, 2, 2, 200, 200, 16, 16)
    tensors = draw(shape)
    normalizer = attnorm.compose("entmax15", scale=attnorm.get("alibi", heads=2)).to(DEVICE)
    normalizer.rules[0].slopes.fill_(0.5)
    found = run(tensors, normalizer, "sparse", causal=True)
    assert_follows(found, run(exactly(tensors), normalizer, "blocked", causal=True), 4e-6)


def test_a_negative_factor_turns_the_order_of_the_keys() -> None:
    tensors, normalizer = draw(FEW), attnorm.get("entmax15")
    found = run(tensors, normalizer, "sparse", causal=True, scale=-0.3)
    assert_follows(found, run(exactly(tensors), normalizer, "blocked", causal=True, scale=-0.3), 2e-5)


HARD = {
    "equal": torch.zeros(128),
    "one for all": torch.cat([torch.tensor([50.0]), torch.zeros(127)]),
    "far from 0": 1e3 + torch.linspace(0, 1, 128),
    "huge": 2.0**30 * torch.arange(128),
    "layers": -0.1 * torch.log1p(torch.arange(128).float()).div(0.4).floor(),  # each larger than the last
}


@pytest.mark.parametrize("name", MAPS)
def test_rows_that_are_hard_to_solve(name: str) -> None:
    """All keys alike; one key far above the rest; large logits; layers of keys. Each query sees one kind of row."""
    map_, options = MAPS[name]
    normalizer = attnorm.get(map_, **{**options, "learned": False} if "learned" in options else options)
    rows = [row for row in HARD if row != "huge" or name in ("entmax15", "sparsemax")]
    q = torch.eye(len(rows)).repeat(8, 1)[None, None].to(DEVICE)
    z = torch.stack([HARD[row] for row in rows])
    k, v = z.T[None, None].contiguous().to(DEVICE), torch.eye(128)[None, None].to(DEVICE).requires_grad_()
    weights = attnorm.attention(q, k, v, normalizer, scale=1.0, engine="sparse")
    expected = attnorm.normalize(z.double(), normalizer).to(DEVICE)
    for found in (weights, attnorm.attention(q, k, v.detach(), normalizer, scale=1.0, engine="sparse")):
        by_kind = found[0, 0].unflatten(0, (8, len(rows)))
        assert ((by_kind - expected).abs().amax((0, 2)) < 2e-6).all(), rows
        assert (by_kind.sum(-1) - 1).abs().max() < 1e-6
    (grad,) = torch.autograd.grad(weights[..., 0].sum(), v)
    assert (grad[0, 0, :, 0] / 8 - expected.sum(0)).abs().max() < 2e-6 * len(rows), "backward has the same weights"


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_weights_that_the_leaders_leave_out_are_found(dtype: torch.dtype) -> None:
    """Many keys of one column of the tiles, and pairs of keys that lie half a tile apart."""
    keys = 200
    column, pairs, spread = (torch.full((keys,), -9.0) for _ in range(3))
    column[:: 32 if dtype == torch.float32 else 64] = 0.0
    pairs[torch.tensor([0, 16, 32, 48, 64, 80] if dtype == torch.float32 else [0, 32, 64, 96, 128, 160])] = (
        torch.linspace(0.6, 0, 6)
    )
    spread[:] = torch.linspace(-0.3, 0, keys)
    z = torch.stack([column, pairs, spread]).to(dtype)
    q, k = torch.eye(3).repeat(6, 1).to(DEVICE, dtype)[None, None], z.T[None, None].contiguous().to(DEVICE)
    v = torch.eye(keys).to(DEVICE, dtype)[None, None, :, :128]
    for name in ("entmax15", "sparsemax", "kneemax") if dtype == torch.float32 else ("entmax15",):
        expected = attnorm.normalize(z.double(), attnorm.get(name)).to(DEVICE)[:, :128].repeat(6, 1)
        for trained in (v, v.detach().clone().requires_grad_()):
            found = attnorm.attention(q, k, trained, name, scale=1.0, engine="sparse")
            assert (found[0, 0].double() - expected).abs().max() < (2e-6 if dtype == torch.float32 else 1e-3), name


def test_the_excess_that_entmax_may_have_in_bfloat16_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leaders leave out some percent of the weight of these rows. In training and without."""
    allowed = threshold.ENTMAX_TOLERANCES[torch.bfloat16]
    monkeypatch.setitem(threshold.ENTMAX_TOLERANCES, torch.float16, allowed)
    tensors = draw((1, 1, 1, 64, 3000, 32, 16), torch.float16, spread=0.9)
    normalizer = attnorm.get("entmax", alpha=1.3).to(DEVICE)
    expected = run(exactly(tensors), normalizer, "blocked")
    assert_follows(run(tensors, normalizer, "sparse"), expected, 4e-3)
    with torch.no_grad():
        output = attnorm.attention(*tensors, normalizer, engine="sparse")
    assert_follows([output], expected[:1], 1e-3)


@pytest.mark.parametrize(("n", "lowest"), [(1_500, 0.0288), (3_000, 0.0187)])
def test_many_small_weights_outside_the_leaders_are_not_left_to_the_first_order(
    n: int, lowest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key far above n others. The excess of their sum is small, but one step takes a large part of each weight.

    The first order alone takes 21 % too much of the weight of 1,500 others, and 28 % of that of 3,000.
    """
    monkeypatch.setitem(threshold.ENTMAX_TOLERANCES, torch.float16, threshold.ENTMAX_TOLERANCES[torch.bfloat16])
    alpha = 1.4
    q = torch.ones(1, 1, 64, 1)  # a whole tile: rows behind the end repeat the pass for all rows of a tile
    k, v = torch.zeros(1, 1, n + 1, 1), torch.ones(1, 1, n + 1, 1)
    k[..., 0, :], v[..., 0, :] = (1 - lowest) / (alpha - 1), 0.0
    tensors = tuple(t.half().to(DEVICE) for t in (q, k, v))
    normalizer = attnorm.get("entmax", alpha=alpha).to(DEVICE)
    found = attnorm.attention(*tensors, normalizer, scale=1.0, engine="sparse")
    expected = attnorm.attention(*(t.double() for t in tensors), normalizer, scale=1.0, engine="blocked")
    assert (found.double() / expected - 1).abs().max() < 5e-3


@pytest.mark.parametrize("gap", [0.6, 1.5])
def test_many_equal_keys_at_the_threshold_in_half_precision(gap: float) -> None:
    """Whether they have the weight 0 depends on digits that half precision does not have."""
    n = 100_000 if DEVICE == "cuda" else 1_500
    ones = torch.ones(1, 1, 16, 16, dtype=torch.float16, device=DEVICE)
    k, v = torch.zeros(2, 1, 1, n + 1, 16, dtype=torch.float16, device=DEVICE)
    k[..., 0, 0] = gap * 2 - 0.01
    v += 1
    v[..., 0, 1] = 0
    tensors = tuple(t.clone().requires_grad_() for t in (ones, k, v))
    exact = exactly(tensors)
    found = attnorm.attention(*tensors, "entmax15", scale=1.0, engine="sparse")
    expected = attnorm.attention(*exact, "entmax15", scale=1.0, engine="blocked")
    assert (found[..., 0] - 1).abs().max() <= torch.finfo(torch.float16).eps
    assert (found[..., 1].double() - expected[..., 1]).abs().max() < 5e-4
    grads = (torch.autograd.grad(o[..., 1].sum(), t[:2]) for o, t in ((found, tensors), (expected, exact)))
    assert_follows(*map(list, grads), 2e-3)


@pytest.mark.parametrize(
    ("queries", "keys", "causal"), [(70, 70, True), (30, 41, True), (41, 30, True), (20, 33, False)]
)
@pytest.mark.parametrize("heads", [None, 3])
def test_factors_of_asentmax_and_their_gradients_from_one_kernel(
    heads: int | None, queries: int, keys: int, causal: bool
) -> None:
    """Rows before the first key have the factor of one key."""
    normalizer = attnorm.get("asentmax", heads=heads, gamma=1.2).to(DEVICE)
    q, k, v = draw((2, 3, 3, queries, keys, 8, 8))
    inputs = validate_inputs(q, k, v, mask=None, causal=causal, scale=None, positions=None)
    grad = torch.linspace(-1, 2, 6 * queries, dtype=torch.float64, device=DEVICE).reshape(2, 3, queries)
    parameters = list(normalizer.parameters())
    found = sparse._length_factors(inputs, normalizer)
    assert found is not None
    found_gradients = torch.autograd.grad(found, parameters, grad.float())
    exact = sparse.row_factors(inputs, normalizer.double())[..., 0].double()
    expected = torch.autograd.grad(exact, parameters, grad)
    for a, b in zip([found, *found_gradients], [exact, *expected], strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=2e-5, atol=1e-6)


def test_small_weights_keep_their_digits_in_half_precision() -> None:
    """One key far above 500 with weights of 7e-7, where float16 has steps of 6e-8."""
    q = torch.ones(1, 1, 64, 1).half().to(DEVICE)
    k, v = (torch.cat([torch.full((1,), first), torch.full((500,), rest)]) for first, rest in ((1.0, 1e-3), (0.0, 1e3)))
    tensors = q, *(t.half().to(DEVICE)[None, None, :, None] for t in (k, v))
    found = attnorm.attention(*tensors, "entmax15", scale=2.0, engine="sparse")
    expected = attnorm.attention(*(t.double() for t in tensors), "entmax15", scale=2.0, engine="blocked")
    assert_follows([found], [expected], 2e-3)


def test_a_row_that_sees_nothing_is_zero_and_a_nan_stays_one() -> None:
    q, k, v = draw((2, 2, 2, 20, 20, 16, 16))
    mask = torch.ones(2, 1, 20, 20, dtype=torch.bool, device=DEVICE)
    mask[0, :, 5] = False
    output, *grads = run((q, k, v), attnorm.get("entmax15"), "sparse", mask=mask)
    assert (output[0, :, 5] == 0).all()
    assert all(g.isfinite().all() for g in grads)
    with torch.no_grad():
        k[1, 1, 7] = torch.nan
        found = attnorm.attention(q, k, v, "entmax15", engine="sparse", causal=True)
    assert found[1, 1, 7:].isnan().all()
    assert found[1, 1, :7].isfinite().all()
    assert found[0].isfinite().all()


def test_nan_behind_the_mask_and_beside_the_tensors_is_not_read() -> None:
    buffer = torch.full((3, 1, 2, 140, 40), torch.nan, device=DEVICE)
    buffer[..., 3:73, 5:22] = torch.stack(draw((1, 2, 2, 70, 70, 17, 17))).detach()
    q, k, v = (t[..., 3:73, 5:22] for t in buffer)
    mask = mask_of("padding", (1, 2, 2, 70, 70, 17, 17))
    assert mask is not None
    hidden = ~mask[0, 0, 0]
    expected = attnorm.attention(q, k, v, "entmax15", engine="sparse", mask=mask)
    assert expected.isfinite().all()
    k[..., hidden, :] = v[..., hidden, :] = torch.nan
    assert torch.equal(attnorm.attention(q, k, v, "entmax15", engine="sparse", mask=mask), expected)


def test_the_same_call_gives_the_same_bits() -> None:
    first, second = (run(draw(SMALL), attnorm.get("entmax15"), "sparse", causal=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_strides_of_a_model_are_taken_as_they_are() -> None:
    """Heads are cut out of a wider row, as after a projection."""
    packed = torch.randn(2, 20, 3, 2, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE).requires_grad_()
    q, k, v = packed.transpose(1, 3).unbind(2)
    assert q.stride(-1) == 1
    assert not q.is_contiguous()
    found = attnorm.attention(q, k, v, "entmax15", causal=True, engine="sparse")
    exact = attnorm.attention(*(t.double() for t in (q, k, v)), "entmax15", causal=True, engine="blocked")
    assert_follows([found], [exact], 1e-5)
    (grad,) = torch.autograd.grad(found.square().sum(), packed, retain_graph=True)
    assert_follows([grad], [*torch.autograd.grad(exact.square().sum(), packed)], 1e-4)


def test_what_was_saved_may_come_back_with_other_strides() -> None:
    q, k, v = draw(SMALL)
    expected = run((q, k, v), attnorm.get("entmax15"), "sparse")

    def turned(t: Tensor) -> Tensor:
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)

    with torch.autograd.graph.saved_tensors_hooks(turned, lambda t: t):
        found = run((q, k, v), attnorm.get("entmax15"), "sparse")
    assert all(map(torch.equal, found, expected))


def test_tf32_may_be_asked_for_in_torchs_newer_way() -> None:
    """Then torch refuses to say what the older way would have been."""
    tensors, products = draw(SMALL), torch.backends.cuda.matmul
    expected = attnorm.attention(*tensors, "entmax15", engine="sparse").double()
    before = products.fp32_precision
    try:
        products.fp32_precision = "tf32"
        found = attnorm.attention(*tensors, "entmax15", engine="sparse")
    finally:
        products.fp32_precision = before
    assert_follows([found], [expected], 1e-2)


def test_what_the_kernels_cannot_differentiate_is_said() -> None:
    q, k, v = draw(SMALL)
    once = torch.autograd.grad(attnorm.attention(q, k, v, "entmax15", engine="sparse").sum(), q, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="engine='blocked'"):
        once.sum().backward()
    untrained = torch.ops.attnorm.sparse_attention(q, k, v, None, None, None, None, True, 0.25, "entmax15", False)[0]
    with pytest.raises(RuntimeError, match="without gradients"):
        untrained.sum().backward()
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match="entmax15"):
        attnorm.attention(q, k, v, "entmax15", engine="sparse")


def test_compiled_code_takes_the_kernels_as_one_operator() -> None:
    q, k, v = draw(SMALL)
    normalizer = attnorm.get("entmax15")

    def loss(q: Tensor) -> Tensor:
        return attnorm.attention(q, k, v, normalizer, causal=True, engine="sparse").square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert torch.equal(torch.autograd.grad(compiled(q), q)[0], torch.autograd.grad(loss(q), q)[0])
    mask = mask_of("padding", SMALL)
    assert mask is not None
    factor, alpha = torch.full((1, 1, 20), 0.7, device=DEVICE), torch.full((1, 1, 20), 0.4, device=DEVICE)
    penalties = torch.full((1,), 0.01, device=DEVICE)
    given = [*(t.detach() for t in (q, k, v)), mask.expand(1, 1, 20, 20), factor, alpha, penalties]
    learned = (t.clone().requires_grad_() for t in (factor, alpha))
    arguments = (q, k, v, given[3], *learned, penalties, True, 0.25, "entmax", True)
    torch.library.opcheck(torch.ops.attnorm.sparse_attention.default, arguments)
    output, *kept = torch.ops.attnorm.sparse_attention(*given, True, 0.25, "entmax", True)
    arguments = (output, *given, *kept, True, 0.25, "entmax", True)
    torch.library.opcheck(torch.ops.attnorm.sparse_attention_backward.default, arguments)


def test_where_there_is_no_kernel_the_error_says_what_to_use() -> None:
    q, k, v = draw(SQUARE)
    for name, options in (("softmax", {}), ("entmax", {"alpha": 1.001}), ("topk", {"k": 3})):
        with pytest.raises(ValueError, match="engine='auto' or 'blocked'"):
            attnorm.attention(q, k, v, attnorm.get(name, **options), engine="sparse")
    normalizer = attnorm.get("entmax15")
    assert isinstance(normalizer, Normalizer)
    for wrong in (tuple(t[..., :8, :] for t in (q, k, v)), tuple(t.double() for t in (q, k, v))):
        call = validate_inputs(*wrong, mask=None, causal=False, scale=None, positions=None)
        assert not sparse.applies(call, normalizer), "few queries; no kernel for this precision"
    with torch.no_grad():  # a transform of torch.func goes through the blocks
        found = torch.func.vmap(lambda q: attnorm.attention(q, k[0], v[0], normalizer))(q)
        assert_follows([found[0]], [attnorm.attention(q[0], k[0], v[0], normalizer, engine="blocked")], 1e-5)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU computes in bfloat16")
def test_bfloat16_in_the_interpreter_is_an_error_and_not_a_wrong_number() -> None:
    with pytest.raises(ValueError, match="entmax15"):
        attnorm.attention(*draw(SQUARE, torch.bfloat16), "entmax15", engine="sparse")


@each_depth
def test_the_kernels_compile_for_gpus_that_are_not_here(lowered: bool) -> None:
    script = """
from attnorm.kernels import threshold, threshold_backward
from attnorm.kernels.threshold_maps import MAPS
types = dict(mask="*u8", live="*u8", listed="*i32")
types |= dict.fromkeys(("unit", "slope", "enough", "tolerance", "doubt"), "fp32")
rows = ("row_factor", "parameter", "penalties", "threshold", "gaps", "delta", "grad_factor", "grad_parameter")
types |= dict.fromkeys(rows, "*fp32")
types |= dict.fromkeys(("q", "k", "v", "out", "out_u", "grad", "grad_q", "grad_k", "grad_v"), "*bf16")
forward, queries, keys = threshold.forward_kernel, threshold_backward.backward_queries, threshold_backward.backward_keys
for kernel, name, trains, capability in (
    (forward, "entmax15", True, 90), (queries, "entmax", True, 80), (keys, "kneemax", True, 90),
    (forward, "entmax", False, 90), (forward, "kneemax", True, 80), (queries, "sparsemax", True, 90),
):
    one = MAPS[name]
    constants = dict(
        WEIGHTS=one.weights, NEWTON=one.newton, START=one.start, DECLINE=one.decline, COUNTED=one.counted,
        DEFORMED=one.deformed, PARAMETER=one.parameter, LEARNED=True, EXACT=False, FAST=True, LIFT=1.0, CAUSAL=True,
        MASKED=True, FACTORED=True, PENALIZED=True, CORRECTED=trains, PRECISION="tf32", ROWS=32,
        COLUMNS=16, WIDTH=16, V_WIDTH=16,
        FULL=True, V_FULL=False, SIGNED=True, SKIPS=trains, MAX_STEPS=9, EARLY=3, LIVE_ROWS=64, LIVE_COLUMNS=32,
    )
    compiles(kernel, constants, types, capability)
"""
    assert_compiles(script, lowered)
