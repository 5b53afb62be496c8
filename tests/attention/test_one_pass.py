"""The one-pass kernels against the blocks in float64, on a GPU or in Triton's interpreter."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import attnorm
from attnorm.attention import attend
from attnorm.engines import fused, one_pass, one_pass_operators
from attnorm.engines.inputs import row_factors, validate_inputs
from tests.attention import reference
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
from tests.attention.reference import Case

# The kernels compute values that they do not take, as an exponential that overflows beside its series.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")

NAMES: dict[str, dict[str, Any]] = {
    "softmax": {"temperature": 0.7, "learned": True, "heads": 4},
    "ssmax": {"heads": 4},
    "sink": {"heads": 4},
    "sigmoid": {"learned": True, "heads": 4},
    "softpick": {},
    "scale_invariant": {},
    "adaptive_temperature": {},
    "norm_softmax": {},
    "sa_softmax": {},
    "topk": {"k": 5},
}


def has_kernel(case: Case) -> bool:
    call = validate_inputs(*draw(GROUPS), mask=None, causal=True, scale=None, positions=None)
    return case.hidden_width is None and one_pass.lower(case.make(), call) is not None


DECLARED = [case for case in reference.DECLARED if has_kernel(case)]
TYPICAL = [case for case in DECLARED if case in reference.TYPICAL]
MORE: dict[str, Any] = {
    "polynomial": lambda: attnorm.get("kernel", function="polynomial", offset=0.5),
    "softpick behind ssmax": lambda: attnorm.compose("softpick", scale="ssmax"),
    "softpick behind a cap and ssmax": lambda: attnorm.compose(
        "softpick", scale=[attnorm.get("softcap", cap=2.0), "ssmax"]
    ),
    "distances behind a cap": lambda: attnorm.compose(scale=[attnorm.get("softcap", cap=2.0), "scale_invariant"]),
    "a penalty on the distance behind ssmax": lambda: attnorm.compose(
        "softmax", scale=[attnorm.get("ssmax", heads=4), attnorm.get("alibi", heads=4)], sink="softmax1"
    ),
    "range of a window behind a cap and ssmax": lambda: attnorm.compose(
        "sa_softmax",
        scale=[attnorm.get("softcap", cap=2.0), attnorm.get("ssmax", heads=4)],
        select=attnorm.get("local", window=9),
    ),
    "the top of a window behind ssmax and a sink": lambda: attnorm.compose(
        "softmax",
        scale=attnorm.get("ssmax", heads=4),
        select=[attnorm.get("local", window=9), attnorm.get("topk", k=4)],
        sink="softmax1",
    ),
    "a window behind adaptive temperature": lambda: attnorm.compose(
        "softmax", scale="adaptive_temperature", select=attnorm.get("local", window=9)
    ),
    "a window behind unit variance": lambda: attnorm.compose(
        "softmax", scale="norm_softmax", select=attnorm.get("local", window=9)
    ),
    "the top of a window behind log n and unit variance": lambda: attnorm.compose(
        "softmax",
        scale=[attnorm.get("log_scaled", train_length=16), "norm_softmax"],
        select=[attnorm.get("local", window=9), attnorm.get("topk", k=4)],
    ),
    "the top of a window behind ssmax and adaptive temperature": lambda: attnorm.compose(
        "softmax",
        scale=[attnorm.get("ssmax", heads=4), "adaptive_temperature"],
        select=[attnorm.get("local", window=9), attnorm.get("topk", k=4)],
    ),
    "sink in a window": lambda: attnorm.compose("softmax", select=attnorm.get("local", window=9), sink="softmax1"),
}


FLOAT32 = 5e-6

# A row of norm_softmax with two keys has the gradient 0, the difference of two terms as large as 1 / deviation.
OF_TWO_KEYS = {"norm_softmax": 100 * FLOAT32}

CASES = [
    (SQUARE, "rows", True), (WIDE, "none", True), (GROUPS, "padding", False),
    (MORE_QUERIES, "none", True), (PAST_THE_EDGES, "heads", True),
]  # fmt: skip


def assert_equals_blocks(case: Case, shape: tuple[int, ...], mask: str, causal: bool) -> None:
    options = {**case.options, **({"heads": shape[1]} if "heads" in case.options else {})}
    tensors, normalizer = draw(shape), attnorm.get(case.name, **options).to(DEVICE)
    causal = causal or case.name == "local"  # the kernels have windows in causal calls only
    given = {"mask": mask_of(mask, shape), "causal": causal}
    longer = 4 if shape == WIDE else 1  # products of more numbers round more
    checks: list[tuple[Tensor | None, float]] = [(None, OF_TWO_KEYS.get(case.name, FLOAT32))]
    if case.name in OF_TWO_KEYS:
        n = validate_inputs(*tensors, scale=None, positions=None, **given).n()[..., 0]
        checks.append((n != 2, FLOAT32))
    for rows, tolerance in checks:
        found = run(tensors, normalizer, "triton", rows, **given)
        expected = run(exactly(tensors), normalizer, "blocked", rows, **given)
        for one in (found, expected):
            # Rows nearly cancel in the gradient of a shared number: it is measured beside that of q.
            one[1:] = [torch.cat([t.flatten() for t in (one[1], *one[4:])]), *one[2:4]]
        assert_follows(found, expected, longer * tolerance)


@pytest.mark.parametrize("number", range(len(TYPICAL)), ids=[case.id for case in TYPICAL])
@pytest.mark.every_second("number", first=1)
def test_every_map_that_names_a_kernel_equals_the_blocks(number: int) -> None:
    """With one of the calls each, in turn; other options and all calls at night."""
    assert_equals_blocks(TYPICAL[number], *CASES[number % len(CASES)])


@pytest.mark.nightly
@pytest.mark.parametrize("call", CASES)
@pytest.mark.parametrize("case", DECLARED, ids=lambda case: case.id)
def test_every_map_and_every_call(case: Case, call: tuple[Any, ...]) -> None:
    assert_equals_blocks(case, *call)


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("ssmax", "triton"),
        ("adaptive_temperature", "triton"),
        ("norm_softmax", "triton"),
        ("stick_breaking", "triton"),
        ("entmax15", "sparse"),
    ],
)
def test_under_gradient_checkpointing(name: str, engine: Any) -> None:
    """Each saved tensor can be read only once then."""
    tensors, normalizer = draw(SMALL), attnorm.get(name).to(DEVICE)
    learned = list(normalizer.parameters())

    def gradients(output: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(output.sin().sum(), [*tensors, *learned])

    def attend_to(*given: Tensor) -> Tensor:
        return attnorm.attention(*given, normalizer, engine=engine, causal=True)

    kept = gradients(checkpoint(attend_to, *tensors, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(kept, gradients(attend_to(*tensors)), strict=True))


def test_the_maps_that_have_a_kernel() -> None:
    names = [
        "softmax",
        "ssmax",
        "sa_softmax",
        "adaptive_temperature",
        "sigmoid",
        "softmax1",
        "sink",
        "relu",
        "softpick",
    ]
    assert list(dict.fromkeys(case.name for case in DECLARED)) == [
        *names, "topk", "log_scaled", "scale_invariant", "kernel", "local", "softcap", "ssa", "norm_softmax",
        "threshold_relu",
        "odd_polynomial", "composed", "tempered", "alibi",
    ]  # fmt: skip


@pytest.mark.parametrize("map_", ["relu", "sigmoid", "threshold_relu"])
def test_a_rule_of_distances_runs_in_blocks_in_front_of_maps_that_count_keys(map_: str) -> None:
    """The kernels apply the rule last, but the factor or shift of such a map belongs behind it."""
    normalizer = attnorm.compose(map_, scale="scale_invariant")
    call = validate_inputs(*draw(GROUPS), mask=None, causal=True, scale=None, positions=None)
    assert one_pass.lower(normalizer, call) is None


@pytest.mark.parametrize("name", MORE)
@pytest.mark.every_second("name")
def test_compositions(name: str) -> None:
    tensors, normalizer = draw(GROUPS), MORE[name]().to(DEVICE)
    found = run(tensors, normalizer, "triton", causal=True)
    assert_follows(found, run(exactly(tensors), normalizer, "blocked", causal=True), FLOAT32)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_keeps_factors_in_float32(name: str, dtype: torch.dtype) -> None:
    options = {**NAMES[name], **({"heads": 4} if "heads" in NAMES[name] else {})}
    tensors, normalizer = draw(GROUPS, dtype), attnorm.get(name, **options).to(DEVICE)
    found = run(tensors, normalizer, "triton", causal=True)
    assert all(t.dtype == dtype for t in found[:4])
    step = torch.finfo(dtype).eps
    assert_follows(found, run(exactly(tensors), normalizer, "blocked", causal=True), 8 * step)


@pytest.mark.parametrize("name", ["softmax", "softpick", "kernel", "sigmoid"])
@pytest.mark.parametrize("shift", [0.0, -300.0, 300.0, 1e4])
def test_large_and_small_logits_neither_overflow_nor_vanish(name: str, shift: float) -> None:
    z = shift + torch.linspace(-3, 3, 50)
    q = torch.ones(1, 1, 16, 1).to(DEVICE)
    k, v = z[None, None, :, None].to(DEVICE), torch.eye(50)[None, None].to(DEVICE).requires_grad_()
    weights = attnorm.attention(q, k, v, name, scale=1.0, engine="triton")
    expected = attnorm.normalize(z.double()[None], name).to(DEVICE)
    steps = torch.finfo(torch.float32).eps * max(abs(shift), 8)  # of a logit
    assert ((weights.double() - expected).abs() <= 8 * steps * expected + 1e-30).all()
    (grad,) = torch.autograd.grad(weights[..., 0].sum(), v)
    assert grad.isfinite().all()


def test_a_soft_cap_of_the_model_is_kept() -> None:
    tensors = draw(GROUPS, spread=8.0)
    normalizer = attnorm.get("ssmax", heads=4).to(DEVICE)

    def capped(tensors: tuple[Tensor, ...], engine: Any) -> list[Tensor]:
        inputs = validate_inputs(*tensors, mask=None, causal=True, scale=None, positions=None)
        output = attend(replace(inputs, softcap=2.0), normalizer, engine)
        return [output, *torch.autograd.grad(output.double().square().sum(), [*tensors, *normalizer.parameters()])]

    assert_follows(capped(tensors, "triton"), capped(exactly(tensors), "blocked"), FLOAT32)


def test_a_row_that_sees_nothing_is_zero_and_a_nan_stays_one() -> None:
    q, k, v = draw(SQUARE)
    mask = torch.ones(2, 1, 40, 40, dtype=torch.bool, device=DEVICE)
    mask[0, :, 5] = False
    for name in ("softpick", "sink", "sigmoid", "sa_softmax", "topk", "adaptive_temperature", "norm_softmax"):
        normalizer = attnorm.get(name).to(DEVICE)
        output, *grads = run((q, k, v), normalizer, "triton", mask=mask)
        assert (output[0, :, 5] == 0).all()
        assert all(g.isfinite().all() for g in grads)
    poisoned = k.detach().clone()
    poisoned[1, 1, 7] = torch.nan
    for name in ("softpick", "sink", "sigmoid", "relu", "sa_softmax", "topk", "adaptive_temperature"):
        found = attnorm.attention(
            q.detach(), poisoned, v.detach(), attnorm.get(name).to(DEVICE), engine="triton", causal=True
        )
        assert found[1, 1, 7:].isnan().all(), name
        assert found[1, 1, :7].isfinite().all(), name
        assert found[0].isfinite().all(), name


def test_weights_of_sa_softmax_lie_between_0_and_1_and_that_of_the_smallest_logit_is_0() -> None:
    """Also where all logits lie far from 0, and where a row has one logit only."""
    z = torch.stack([torch.linspace(-3, 5, 40), torch.linspace(90, 91, 40), torch.linspace(-1e3, -999, 40)])
    q = torch.eye(3).repeat(6, 1)[None, None].to(DEVICE)
    k, v = z.T[None, None].contiguous().to(DEVICE), torch.eye(40)[None, None].to(DEVICE)
    found = attnorm.attention(q, k, v, "sa_softmax", scale=1.0, engine="triton")[0, 0, :3].double()
    expected = attnorm.normalize(z.double(), "sa_softmax").to(DEVICE)
    steps = torch.finfo(torch.float32).eps * z.abs().amax(-1, keepdim=True).clamp(min=8).to(DEVICE)
    assert ((found - expected).abs() <= 8 * steps * expected.amax(-1, keepdim=True)).all()
    assert ((found >= 0) & (found <= 1)).all()
    assert found[0, 0] == 0
    alone = attnorm.attention(q, k[..., :1, :], v[..., :1, :1], "sa_softmax", scale=1.0, engine="triton")[0, 0, :3, 0]
    assert torch.allclose(alone, torch.tensor([0.0, 1.0, 0.0], device=DEVICE), atol=1e-5)


def test_the_entropy_of_peaked_flat_and_empty_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.stack([torch.randn(70, generator=generator), torch.zeros(70), torch.arange(70), 9.0 * torch.arange(70)])
    hidden = torch.full((4, 1), torch.nan)
    q, k = torch.eye(4)[None, None].to(DEVICE), torch.cat([hidden, z], 1).T[None, None].contiguous().to(DEVICE)
    factor = torch.tensor([-2.0, 1.0, 0.0, 1.0], device=DEVICE)[None, None]
    mask = torch.ones(1, 1, 4, 71, dtype=torch.bool, device=DEVICE)
    mask[..., 0] = mask[..., 1, :] = False
    found, reference = torch.ops.attnorm.row_entropy(q, k, mask, factor, False, 1.0)
    log_p = (factor[0, 0, :, None].cpu().double() * z.double()).log_softmax(-1)
    expected = -(log_p.exp() * log_p).sum(-1)
    expected[1] = 0
    steps = 1e-7
    torch.testing.assert_close(found[0, 0].cpu().double(), expected, rtol=FLOAT32, atol=steps)
    assert 1e-3 < expected[3] < 2e-3
    assert reference[0, 0, 1] == 0


@pytest.mark.parametrize(("mask", "causal"), [("none", False), ("rows", True), ("padding", False)])
def test_the_variance_of_rows_and_its_gradient(mask: str, causal: bool) -> None:
    """Far from 0 too; rows without keys and with one have the variance 0."""
    shape = SQUARE if mask == "rows" else GROUPS
    q, k, _ = draw(shape)
    with torch.no_grad():
        q[..., 0], k[..., 0] = 4.0, 5.0  # a mean of 10 with a deviation near 1
    hidden = mask_of(mask, shape)
    full = None if hidden is None else hidden.expand(*q.shape[:3], k.shape[2])
    found, mean, count = torch.ops.attnorm.row_variance(q, k, full, causal, 0.5)
    exact = [t.detach().double().requires_grad_() for t in (q, k)]
    logits = 0.5 * exact[0] @ exact[1].repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    seen = torch.ones_like(logits, dtype=torch.bool) if full is None else full.clone()
    if causal:
        seen &= torch.ones_like(seen[0, 0]).tril(k.shape[2] - q.shape[2])
    n = seen.sum(-1)
    center = torch.where(seen, logits, 0.0).sum(-1) / n.clamp(min=1)
    expected = torch.where(seen, logits - center[..., None], 0.0).square().sum(-1) / n.clamp(min=1)
    assert torch.equal(count.long(), n)
    assert_follows([found, mean], [expected, center], 4 * FLOAT32)
    weights = torch.linspace(-1, 1, n.numel(), device=DEVICE).reshape(n.shape)
    grads = [torch.autograd.grad((weights * one).sum(), two) for one, two in ((found, (q, k)), (expected, exact))]
    assert_follows(*map(list, grads), 4 * FLOAT32)


@pytest.mark.parametrize("name", ["norm_softmax", "the top of a window behind log n and unit variance"])
@pytest.mark.parametrize("common", [0.0, 20.0, 200.0, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_unit_variance_keeps_its_digits_where_all_keys_share_a_large_component(
    dtype: torch.dtype, common: float, name: str
) -> None:
    """Errors of outputs and gradients: at most twice those of the blocks, and a few roundings."""
    q, k, v = draw(GROUPS)
    with torch.no_grad():
        k[..., 0], k[..., 1] = common, common + k[..., 1]
    tensors = tuple(t.detach().to(dtype).requires_grad_() for t in (q, k, v))
    normalizer = MORE[name]() if name in MORE else attnorm.get(name)
    expected = run(exactly(tensors), normalizer, "blocked", causal=True)
    found, blocks = (run(tensors, normalizer, engine, causal=True) for engine in ("triton", "blocked"))
    few = 8 * torch.finfo(dtype).eps
    for ours, theirs, true in zip(found, blocks, expected, strict=True):
        assert (ours.double() - true).norm() <= 2 * (theirs.double() - true).norm() + few * true.norm()


@pytest.mark.parametrize("common", [20.0, 1000.0])
def test_the_gradient_of_q_loses_what_sdpa_loses_to_a_component_of_all_keys_and_nothing_once_it_is_removed(
    common: float,
) -> None:
    q, k, v = draw(GROUPS)
    with torch.no_grad():
        k[..., 0], k[..., 1] = common, common + k[..., 1]
    tensors = tuple(t.detach().to(torch.float16).requires_grad_() for t in (q, k, v))

    def error(normalizer: Any, engine: str, keys: Tensor) -> Tensor:
        expected = run(exactly(tensors), normalizer, "blocked", causal=True)[1]
        found = run((tensors[0], keys, tensors[2]), normalizer, engine, causal=True)[1]
        return (found.double() - expected).norm() / expected.norm()

    ssmax, keys = attnorm.get("ssmax"), tensors[1]
    without = (keys - keys.mean(-2, keepdim=True)).detach().requires_grad_()
    if DEVICE == "cpu":  # on CUDA SDPA may choose a kernel that rounds less
        assert error(ssmax, "triton", keys) <= 2 * error(attnorm.get("softmax"), "fused", keys)
    assert error(ssmax, "triton", without) <= 2 * torch.finfo(torch.float16).eps


def test_a_key_that_is_not_finite_reaches_only_the_rows_of_unit_variance_that_see_it() -> None:
    q, k, v = (t.detach() for t in draw(SMALL))
    k += 5.0
    expected = attnorm.attention(q, k, v, "norm_softmax", causal=True, engine="blocked")
    for value in (torch.nan, torch.inf):
        k[..., 7, 0] = value
        found = attnorm.attention(q, k, v, "norm_softmax", causal=True, engine="triton")
        assert_follows([found[..., :7, :]], [expected[..., :7, :].double()], FLOAT32)


@pytest.mark.parametrize(("learns", "selection"), [(True, ()), (False, ()), (True, ("topk",))])
def test_factors_of_any_sign_and_logits_in_the_hundreds(learns: bool, selection: tuple[str, ...]) -> None:
    """The largest logit of a row with a negative factor has the smallest product. Top-k has its own kernel."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 150, 16, generator=generator) for heads in (4, 2, 2))
    q, k, v = (t.to(DEVICE).requires_grad_() for t in (12 * q, k, v))
    select = [attnorm.get(name, k=5) for name in selection]
    normalizer = attnorm.compose(scale=attnorm.get("ssmax", heads=4), select=select).to(DEVICE)
    with torch.no_grad():
        normalizer.get_parameter("scale.0.s").copy_(torch.tensor([-1.0, -0.3, 0.0, 0.5]))
    normalizer.requires_grad_(learns)
    tensors = (q, k, v)
    found = run(tensors, normalizer, "triton", causal=True)
    assert_follows(found, run(exactly(tensors), normalizer, "blocked", causal=True), 10 * FLOAT32)


def test_second_derivatives_are_refused() -> None:
    q, k, v = draw(SMALL)
    for name in ("sigmoid", "adaptive_temperature", "norm_softmax"):
        output = attnorm.attention(q, k, v, name, causal=True, engine="triton")
        (once,) = torch.autograd.grad(output.square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="engine='blocked'"):
            torch.autograd.grad(once.sum(), q)


def test_rows_are_summed_by_their_key() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 4, 70, 17, generator=generator, dtype=torch.float64).to(DEVICE)
    index = torch.randint(0, 90, (2, 4, 70), generator=generator, dtype=torch.int32).to(DEVICE)
    index[:, 1] = 88  # one key for all rows, as a sink
    found = torch.ops.attnorm.sum_by_key(rows.float(), index, 100, 2)
    ones = torch.nn.functional.one_hot(index.long(), 100).double()
    expected = torch.einsum("bhqk,bhqd->bhkd", ones, rows).unflatten(1, (2, 2)).sum(2)
    assert_follows([found], [expected], FLOAT32)


def test_the_same_call_gives_the_same_bits() -> None:
    tensors, normalizer = draw(GROUPS), attnorm.get("sink", heads=4).to(DEVICE)
    first, second = (run(tensors, normalizer, "triton", causal=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_compiled_code_contains_the_kernels_as_operators() -> None:
    q, k, v = draw(SMALL)
    composed = [attnorm.get(name) for name in ("adaptive_temperature", "norm_softmax", "sa_softmax", "topk")]

    def loss(q: Tensor) -> Tensor:
        outputs = [attnorm.attention(q, k, v, one, causal=True, engine="triton") for one in composed]
        return torch.stack(outputs).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    (found,), (expected,) = (torch.autograd.grad(one(q), q) for one in (compiled, loss))
    assert_follows([found], [expected.double()], 1e-6)
    sink, row = torch.zeros(1, device=DEVICE), torch.ones(1, 1, 20, device=DEVICE)
    slopes = torch.full((1,), 0.1, device=DEVICE)
    options = ("softmax", 1, 0.0, "linear", None, True, None, 0.25)
    fixed, learned, operators = row.clone(), row.requires_grad_(), torch.ops.attnorm
    for operator, arguments in (
        (operators.one_pass_attention, (q, k, v, None, learned, None, sink, None, slopes, *options, False)),
        (operators.row_entropy, (q, k, None, fixed, True, 0.25)),
        (operators.row_variance, (q, k, None, True, 0.25)),
        (
            operators.sharpened_attention,
            (q, k, v, None, learned, None, learned, fixed, fixed, fixed, True, None, 0.25),
        ),
    ):
        torch.library.opcheck(
            operator.default, arguments, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
        )


def test_where_there_is_no_kernel_the_error_says_what_to_use() -> None:
    q, k, v = draw(SQUARE)
    for name in ("entmax15", "hard"):
        with pytest.raises(ValueError, match="engine='auto' or 'blocked'"):
            attnorm.attention(q, k, v, name, engine="triton")
    inputs = validate_inputs(*(t[..., :8, :] for t in (q, k, v)), mask=None, causal=False, scale=None, positions=None)
    assert not one_pass.applies(inputs, attnorm.get("sigmoid")), "few queries, as in decoding"
    for width, runs in ((256, True), (257, False)):
        wide = [torch.zeros(1, 1, 16, width, device=DEVICE) for _ in range(3)]
        inputs = validate_inputs(*wide, mask=None, causal=False, scale=None, positions=None)
        assert one_pass.applies(inputs, attnorm.get("sigmoid")) == runs


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU computes in bfloat16")
def test_bfloat16_in_the_interpreter_is_an_error_and_not_a_wrong_number() -> None:
    with pytest.raises(ValueError, match="'ssmax'"):
        attnorm.attention(*draw(SQUARE, torch.bfloat16), "ssmax", engine="triton")


@each_depth
def test_the_kernels_compile_for_gpus_that_are_not_here(lowered: bool) -> None:
    script = """
from attnorm.kernels import extremes, kth_logit_by_lists, one_pass, one_pass_backward, row_spread
from attnorm.kernels.maps import MAPS, RULES
map_ = MAPS["softpick"]
constants = dict(
    MAP=map_.weights, SLOPES=map_.slopes, RULE=RULES["distance"], P=1, FAST=True, REFERENCE=int(map_.reference),
    NORMALISED=True, RULED=True, CAPPED=True, FACTORED=True, SHIFTED=True, SELECTED=True, SINK=False, PLAIN=False,
    CAUSAL=True, WINDOWED=True, MASKED=True, PRECISION="tf32", FULL=True, V_FULL=False, LIFT=1.0, SOFT_FACTORED=True,
    GRAD_OF_FACTOR=True, CHUNK=16, PARTS=1,
)
soft = MAPS["softmax"]
frozen_factor = constants | dict(
    MAP=soft.weights, SLOPES=soft.slopes, REFERENCE=int(soft.reference), RULED=False, CAPPED=False, SHIFTED=False,
    PLAIN=True, ENTROPY=False, GRAD_OF_FACTOR=False,
)
types = dict(mask="*u8")
types |= dict.fromkeys(("scale", "cap", "floor", "plain_scale"), "fp32")
rows = ("factor", "shift", "sink", "reference_out", "inverse_out", "reference", "inverse", "delta", "grad_factor")
types |= dict.fromkeys((*rows, "grad_shift", "cutoff", "largest", "parameters", "low_logit", "high_logit"), "*fp32")
types |= dict.fromkeys(("soft_factor", "entropy", "soft_reference", "grad_entropy"), "*fp32")
types |= dict.fromkeys(("variance", "mean", "count", "slope", "lift"), "*fp32")
types |= dict.fromkeys(("low_key", "high_key", "wanted", "listed", "index"), "*i32")
types |= dict.fromkeys(("q", "k", "v", "out", "rows_in", "sums", "grad", "grad_q", "grad_k", "grad_v"), "*bf16")
attention = (one_pass.forward_kernel, one_pass_backward.backward_queries, one_pass_backward.backward_keys)
searches = (extremes.extremes_kernel, extremes.sum_by_key_kernel, extremes.kth_largest, extremes.kth_of_lost_rows)
searches += (kth_logit_by_lists.kth_of_lists,)
entropies = (row_spread.row_entropy, row_spread.entropy_backward)
variances = (row_spread.row_variance, row_spread.variance_backward_queries, row_spread.variance_backward_keys)
every_kernel = (*attention, *searches, *entropies, *variances)
tiles = dict.fromkeys(("WIDTH", "V_WIDTH", "ROWS", "COLUMNS"), 32)
for capability, known, kernels in (
    (90, constants, every_kernel), (80, constants, attention), (90, frozen_factor, attention)
):
    known = dict(ENTROPY=capability == 90) | known | tiles
    for kernel in kernels:
        compiles(kernel, known, types, capability, num_stages=3)
"""
    assert_compiles(script, lowered)


@pytest.mark.parametrize("name", ["sigmoid", "sa_softmax", "topk", "adaptive_temperature", "norm_softmax"])
def test_a_dispatch_mode_sees_operators_and_no_launch(name: str) -> None:
    normalizer = attnorm.get(name)
    with FakeTensorMode():  # its tensors have no numbers that a kernel could read
        q, k, v = (torch.empty(1, 2, 32, 16, device=DEVICE, requires_grad=True) for _ in range(3))
        output = attnorm.attention(q, k, v, normalizer, causal=True, engine="triton")
        grads = torch.autograd.grad(output.sum(), (q, k, v))
    assert [tuple(t.shape) for t in (output, *grads)] == [(1, 2, 32, 16)] * 4


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_rows_times_their_factors(dtype: torch.dtype) -> None:
    """The queries are a view, as in models, with width and length that fill no tile; sequences share the factors."""
    generator = torch.Generator().manual_seed(0)
    stored = torch.randn(2, 70, 3, 24, generator=generator).to(DEVICE, dtype)
    q = stored.transpose(1, 2).requires_grad_()
    shared = torch.rand(3, 70, generator=generator).to(DEVICE).requires_grad_()
    factor = shared.expand(2, 3, 70)
    ours = one_pass_operators.scaled_rows(q, factor, 0.25, None, False, 1)
    expected = (0.25 * factor[..., None] * q.float()).to(dtype)
    probe = torch.randn(q.shape, generator=generator).to(DEVICE, dtype)
    assert ours.stride() == q.stride()
    assert torch.equal(ours, expected)
    for found, true in zip(*(torch.autograd.grad(out, (q, shared), probe) for out in (ours, expected)), strict=True):
        torch.testing.assert_close(found, true, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [None, 4])
@pytest.mark.parametrize("name", ["ssmax:s=0.7", "ssmax:s=0.7:bias=true", "log_scaled:train_length=9"])
@pytest.mark.parametrize(
    ("queries", "keys", "causal"), [(70, 70, True), (20, 50, True), (30, 20, True), (20, 50, False)]
)
def test_queries_times_factors_of_the_length(
    name: str, heads: int | None, queries: int, keys: int, causal: bool
) -> None:
    """The kernel counts the keys of each row. Products and gradients, those of s too, are as in float64."""
    normalizer = attnorm.get(name, **({"heads": heads} if name.startswith("ssmax") else {})).to(DEVICE)
    q, k, v = draw((2, 4, 2, queries, keys, 24, 24), torch.float16)
    probe = torch.randn_like(q)
    found, expected = [], []
    for dtype, results in ((torch.float16, found), (torch.float64, expected)):
        rows, rules = q.detach().to(dtype).requires_grad_(), normalizer.to(torch.promote_types(dtype, torch.float32))
        inputs = validate_inputs(rows, k.to(dtype), v.to(dtype), mask=None, causal=causal, scale=None, positions=None)
        if dtype == torch.float16:
            scaled = fused._with_scaled_queries(inputs, rules)
            output = scaled.q_BHQD * (scaled.scale / inputs.scale)
        else:
            factor = row_factors(inputs, rules)
            assert factor is not None
            output = inputs.q_BHQD * factor
        parameters = [p for p in rules.parameters() if p.requires_grad]
        results += [output, *torch.autograd.grad(output, [rows, *parameters], probe.to(dtype))]
    for ours, exact in zip(found, expected, strict=True):
        assert ours.shape == exact.shape
        assert (ours - exact).abs().max() <= 2e-3 * exact.abs().max()


def test_the_kernel_counts_keys_only_where_each_row_sees_all_of_its_past() -> None:
    q, k, v = draw((2, 4, 2, 20, 20, 16, 16), torch.float16)
    mask = torch.rand(2, 1, 1, 20, device=DEVICE) < 0.5
    positions = torch.arange(40, 60, device=DEVICE)
    for name in ("ssmax:s=0.7", "log_scaled:train_length=9"):
        normalizer = attnorm.get(name).to(DEVICE)
        for options in ({"mask": mask, "positions": None}, {"mask": None, "positions": positions}):
            inputs = validate_inputs(q, k, v, causal=True, scale=None, **options)
            factor = row_factors(inputs, normalizer)
            assert factor is not None
            scaled = fused._with_scaled_queries(inputs, normalizer)
            torch.testing.assert_close(
                scaled.q_BHQD.float() * (scaled.scale / inputs.scale), inputs.q_BHQD * factor, rtol=1e-3, atol=1e-3
            )


def test_rows_that_overlap_are_scaled_too() -> None:
    rows = torch.randn(83).to(DEVICE).as_strided((1, 1, 20, 64), (0, 0, 1, 1))
    factor = torch.rand(1, 1, 20).to(DEVICE)
    assert torch.equal(one_pass_operators.scaled_rows(rows, factor, 1.0, None, False, 1), rows * factor[..., None])


@pytest.mark.parametrize("deviation", [1.0, 4.0, 32.0])
@pytest.mark.parametrize("s", [0.1, 0.43, 2.0])
def test_rounded_queries_err_less_than_the_formula_in_half_precision(s: float, deviation: float) -> None:
    """The output of ssmax on SDPA against float64, beside the formula whose every step rounds to float16."""
    shape = (1, 2, 1, 128, 128, 64, 64)
    tensors = draw(shape, torch.float16, spread=deviation)
    normalizer = attnorm.get("ssmax", s=s).to(DEVICE)
    inputs = validate_inputs(*tensors, mask=None, causal=True, scale=None, positions=None)
    scaled = fused._with_scaled_queries(inputs, normalizer)
    rounded = scaled_dot_product_attention(
        scaled.q_BHQD.float(), *(t.float() for t in tensors[1:]), is_causal=True, scale=scaled.scale, enable_gqa=True
    )
    q, k, v = tensors[0], *(t.repeat_interleave(2, dim=1) for t in tensors[1:])
    logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    formula = attnorm.normalize(logits, normalizer, torch.ones(128, 128, dtype=torch.bool, device=DEVICE).tril()) @ v
    exact = attnorm.attention(*exactly(tensors), normalizer.double(), engine="blocked", causal=True)
    errors = [(output.double() - exact).norm() for output in (rounded, formula)]
    assert errors[0] <= errors[1]
