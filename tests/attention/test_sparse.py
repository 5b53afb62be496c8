"""The kernels of entmax against the blocks in float64, on a GPU or in Triton's interpreter."""

import pytest
import torch
from torch import Tensor

import attnorm
from attnorm.engines import sparse
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
    assert_compiles,
    assert_follows,
    draw,
    exactly,
    mask_of,
    run,
)  # fmt: skip

# In rows that see nothing a step is 0 / 0, which the kernel computes and does not take.
pytestmark = [pytest.mark.as_installed, pytest.mark.filterwarnings("ignore:.* encountered in divide:RuntimeWarning")]

CASES = [
    (SQUARE, "none", True), (SQUARE, "rows", True), (SQUARE, "heads", False), (GROUPS, "none", True),
    (GROUPS, "padding", True), (GROUPS, "none", False), (MORE_QUERIES, "none", True), (MORE_QUERIES, "padding", False),
    (PAST_THE_EDGES, "none", True), (PAST_THE_EDGES, "heads", True),
]  # fmt: skip


# Each call with one of the maps, in turn; with the other at night.
IN_TURN = [
    pytest.param(name, *call, marks=pytest.mark.nightly if (number + other) % 2 else ())
    for number, call in enumerate(CASES)
    for other, name in enumerate(["entmax15", "sparsemax"])
]


@pytest.mark.parametrize(("name", "shape", "mask", "causal"), IN_TURN)
def test_values_and_gradients(name: str, shape: tuple[int, ...], mask: str, causal: bool) -> None:
    tensors, normalizer = draw(shape), attnorm.get(name)
    options = {"mask": mask_of(mask, shape), "causal": causal}
    found = run(tensors, normalizer, "sparse", **options)
    assert_follows(found, run(exactly(tensors), normalizer, "blocked", **options), 2e-6 if DEVICE == "cpu" else 2e-5)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", ["entmax15", "sparsemax"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    """The interpreter knows no bfloat16."""
    tensors, normalizer = draw(GROUPS, dtype), attnorm.get(name)
    found = run(tensors, normalizer, "sparse", causal=True)
    assert all(t.dtype == dtype for t in found)
    assert_follows(found, run(exactly(tensors), normalizer, "blocked", causal=True), 2e-2)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), *((dtype, 8) for dtype in HALF)])
@pytest.mark.parametrize("map_", ["entmax15", "sparsemax"])
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


@pytest.mark.parametrize("name", ["entmax15", "sparsemax"])
@pytest.mark.parametrize("rows", ["equal", "one for all", "far from 0", "huge", "layers"])
def test_rows_that_are_hard_to_solve(name: str, rows: str) -> None:
    """All keys alike; one key far above the rest; large logits; layers of keys, each larger than the last."""
    keys = 128
    z = {
        "equal": torch.zeros(keys),
        "one for all": torch.cat([torch.tensor([50.0]), torch.zeros(keys - 1)]),
        "far from 0": 1e3 + torch.linspace(0, 1, keys),
        "huge": 2.0**30 * torch.arange(keys),
        "layers": -0.1 * torch.log1p(torch.arange(keys).float()).div(0.4).floor(),
    }[rows]
    q = torch.ones(1, 1, 16, 1).to(DEVICE)
    k, v = z[None, None, :, None].to(DEVICE), torch.eye(keys)[None, None].to(DEVICE).requires_grad_()
    weights = attnorm.attention(q, k, v, name, scale=1.0, engine="sparse")
    expected = attnorm.normalize(z.double()[None], name).to(DEVICE)
    tolerance = 2e-4 if rows == "far from 0" and DEVICE == "cuda" else 2e-6  # products there have two digits less
    assert (weights - expected).abs().max() < tolerance
    assert (weights.sum(-1) - 1).abs().max() < 1e-6
    (grad,) = torch.autograd.grad(weights[..., 0].sum(), v)
    assert (grad[0, 0, :, 0] / 16 - expected).abs().max() < tolerance, "backward has the same weights"


def test_small_weights_keep_their_digits_in_half_precision() -> None:
    """One key far above 500 with weights of 7e-7, where float16 has steps of 6e-8."""
    q = torch.ones(1, 1, 16, 1).half().to(DEVICE)
    k, v = (torch.cat([torch.full((1,), first), torch.full((500,), rest)]) for first, rest in ((1.0, 1e-3), (0.0, 1e3)))
    tensors = q, *(t.half().to(DEVICE)[None, None, :, None] for t in (k, v))
    found = attnorm.attention(*tensors, "entmax15", scale=2.0, engine="sparse")
    expected = attnorm.attention(*(t.double() for t in tensors), "entmax15", scale=2.0, engine="blocked")
    assert_follows([found], [expected], 2e-3)


def test_a_row_that_sees_nothing_is_zero_and_a_nan_stays_one() -> None:
    q, k, v = draw(SQUARE)
    mask = torch.ones(2, 1, 40, 40, dtype=torch.bool, device=DEVICE)
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


def test_strides_of_a_model_are_taken_as_they_are() -> None:
    """Heads are cut out of a wider row, as after a projection."""
    packed = torch.randn(2, 40, 3, 4, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE).requires_grad_()
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
    untrained = torch.ops.attnorm.sparse_attention(q, k, v, None, None, True, 0.25, 1.5, False)[0]
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
    factor, options = torch.full((1, 1, 20), 0.7, device=DEVICE), (True, 0.25, 1.5)
    given = [*(t.detach() for t in (q, k, v)), mask.expand(1, 1, 20, 20), factor]
    arguments = (q, k, v, given[3], factor.clone().requires_grad_(), *options, True)
    torch.library.opcheck(torch.ops.attnorm.sparse_attention.default, arguments)
    output, *kept = torch.ops.attnorm.sparse_attention(*given, *options, True)
    arguments = (output, *given, *kept, *options)
    torch.library.opcheck(torch.ops.attnorm.sparse_attention_backward.default, arguments)


def test_where_there_is_no_kernel_the_error_says_what_to_use() -> None:
    q, k, v = draw(SQUARE)
    for name, options in (("softmax", {}), ("entmax", {"alpha": 1.25}), ("entmax", {"learned": True})):
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


def test_the_kernels_compile_for_gpus_that_are_not_here() -> None:
    script = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attnorm.kernels import entmax
constants = dict(CAUSAL=True, MASKED=True, SQUARED=True, PRECISION="tf32", WIDTH=32, V_WIDTH=32, ROWS=32, COLUMNS=32)
constants["FACTORED"] = True
types = dict(mask="*u8", factor="fp32", scale="fp32", tolerance="fp32")
types |= dict.fromkeys(("out_u", "threshold", "delta", "row_factor", "grad_factor"), "*fp32")
types |= dict.fromkeys(("q", "k", "v", "out", "grad", "grad_q", "grad_k", "grad_v"), "*bf16")
for capability in (80, 90):
    for kernel in (entmax.forward, entmax.backward_queries, entmax.backward_keys):
        given = constants | (dict(TRAINS=True, MOST=9) if kernel is entmax.forward else {})
        signature = {name: "constexpr" if name in given else types.get(name, "i32") for name in kernel.arg_names}
        target = GPUTarget("cuda", capability, 32)
        assert "ptx" in triton.compile(ASTSource(kernel, signature, constexprs=given), target=target).asm
"""
    assert_compiles(script)
