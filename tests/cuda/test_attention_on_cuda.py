"""On CUDA every engine must agree with the float64 reference, values and gradients. Skipped without a GPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import attnorm
from attnorm.engines import one_pass, sparse, stick_breaking
from attnorm.engines.execution import in_new_thread, runs_kernels
from attnorm.engines.inputs import validate_inputs
from attnorm.normalizers import Mechanism

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ROWS = [name for name in attnorm.available() if not isinstance(attnorm.get(name), Mechanism)]
MASKS = ["none", "padding", "full"]


def _inputs(lengths: tuple[int, int], heads: tuple[int, int], mask: str, dtype: torch.dtype, width: int = 32):
    generator = torch.Generator("cuda").manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, device="cuda", generator=generator).to(dtype)  # noqa: E731
    queries, keys = lengths
    q, k, v = (draw(2, *size, width) for size in ((heads[0], queries), (heads[1], keys), (heads[1], keys)))
    visible = {"none": None, "padding": (2, 1, 1, keys), "full": (2, 1, queries, keys)}[mask]
    shown = None if visible is None else torch.rand(visible, device="cuda", generator=generator) > 0.3
    return q, k, v, shown


def _values_and_gradients(q, k, v, normalizer, dtype, **options):
    leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
    output = attnorm.attention(*leaves, normalizer, **options)
    probe = torch.linspace(-1, 1, output.numel(), device="cuda", dtype=torch.float64).reshape(output.shape)
    grads = torch.autograd.grad((output.double() * probe).sum(), leaves)
    return [t.double() for t in (output, *grads)]


def _assert_close(found, expected, tolerance):
    for name, a, b in zip(["output", "dq", "dk", "dv"], found, expected, strict=True):
        error = (a - b).norm() / b.norm().clamp(min=1e-12)
        assert error < tolerance, f"{name}: relative error {error:.2e}"


# (lengths, heads, mask, causal): every pair of choices that meets in a kernel, without compiling every combination
CASES = [
    ((256, 256), (4, 4), "none", True),
    ((100, 300), (4, 2), "padding", True),
    ((128, 200), (4, 4), "full", False),
]


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize(("lengths", "heads", "mask", "causal"), CASES[:2])
def test_auto_engine_in_bfloat16_follows_float64(name, lengths, heads, mask, causal):
    if name == "hard":
        pytest.skip("rounding moves the argmax")
    normalizer = attnorm.get(name).cuda()
    q, k, v, shown = _inputs(lengths, heads, mask, torch.bfloat16)
    call = {"mask": shown, "causal": causal}
    found = _values_and_gradients(q, k, v, normalizer, torch.bfloat16, **call)
    expected = _values_and_gradients(q, k, v, normalizer, torch.float64, engine="blocked", **call)
    _assert_close(found, expected, 3e-2)


@pytest.mark.parametrize("name", ["sink", "sigmoid", "topk", "entmax15", "stick_breaking"])  # one per tile table
@pytest.mark.parametrize("width", [64, 128, 256])
def test_tiles_of_wide_heads_with_a_mask_fit_shared_memory(name, width):
    """A mask is one more tile in shared memory, which three stages of keys and values of width 128 nearly fill."""
    normalizer = attnorm.get(name).cuda()
    q, k, v, shown = _inputs((256, 256), (4, 4), "full", torch.bfloat16, width)
    found = _values_and_gradients(q, k, v, normalizer, torch.bfloat16, mask=shown)
    expected = _values_and_gradients(q, k, v, normalizer, torch.float64, engine="blocked", mask=shown)
    _assert_close(found, expected, 3e-2)


@pytest.mark.parametrize("name", ["sink", "sigmoid", "topk", "entmax15", "kneemax", "stick_breaking", "norm_softmax"])
@pytest.mark.parametrize("mask", ["none", "full"])
@pytest.mark.parametrize("width", [192, 256])
def test_wide_heads_in_float32_match_float64(name, mask, width):
    normalizer = attnorm.get(name).cuda()
    q, k, v, shown = _inputs((100, 256), (4, 2), mask, torch.float32, width)
    if not runs_kernels(q):
        pytest.skip("too little shared memory")
    call = {"mask": shown, "causal": True}
    engine = "sparse" if name in ("entmax15", "kneemax") else "triton"
    found = _values_and_gradients(q, k, v, normalizer, torch.float32, engine=engine, **call)
    expected = _values_and_gradients(q, k, v, normalizer, torch.float64, engine="blocked", **call)
    _assert_close(found, expected, 1e-4)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize(("lengths", "heads", "mask", "causal"), CASES)
def test_auto_engine_in_float32_matches_float64(name, lengths, heads, mask, causal):
    normalizer = attnorm.get(name).cuda()
    q, k, v, shown = _inputs(lengths, heads, mask, torch.float32)
    call = {"mask": shown, "causal": causal}
    found = _values_and_gradients(q, k, v, normalizer, torch.float32, **call)
    expected = _values_and_gradients(q, k, v, normalizer, torch.float64, engine="blocked", **call)
    _assert_close(found, expected, 2e-5)


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_see_nothing_are_zero_with_finite_gradients(name):
    q, k, v, _ = _inputs((64, 64), (4, 4), "none", torch.float32)
    mask = torch.ones(2, 1, 64, 64, dtype=torch.bool, device="cuda")
    mask[0, :, 5] = False
    output, *grads = _values_and_gradients(q, k, v, attnorm.get(name).cuda(), torch.float32, mask=mask)
    assert (output[0, :, 5] == 0).all()
    assert all(torch.isfinite(g).all() for g in grads)


LEARNED: dict[str, dict[str, Any]] = {  # beside those that learn by default
    "softmax": {"temperature": 0.7, "learned": True, "heads": 4},
    "entmax": {"alpha": 1.6, "learned": True},
    "ssmax": {"heads": 4},
    "asentmax": {"heads": 4},
    "sink": {"heads": 4},
    "sigmoid": {"learned": True, "heads": 4},
}


@pytest.mark.parametrize("name", ROWS)
def test_our_kernels_give_the_same_bits_again(name):
    """Output and gradients of q, k, v and of learned parameters, where several programs add to one sum."""
    normalizer = attnorm.get(name, **LEARNED.get(name, {})).cuda()
    q, k, v, _ = _inputs((1000, 1000), (4, 2), "none", torch.bfloat16, width=64)
    inputs = validate_inputs(q, k, v, mask=None, causal=True, scale=None, positions=None)
    engines = {one_pass: "triton", stick_breaking: "triton", sparse: "sparse"}
    engine = next((name for module, name in engines.items() if module.applies(inputs, normalizer)), None)
    if engine is None:
        pytest.skip("has no kernel of ours")
    learned = dict(normalizer.named_parameters())
    leaves = {"dq": q, "dk": k, "dv": v, **learned}
    probe = torch.randn_like(q)

    def attend():
        output = attnorm.attention(q, k, v, normalizer, causal=True, engine=engine)
        gradients = torch.autograd.grad(output, leaves.values(), probe, allow_unused=True, materialize_grads=True)
        return {"output": output} | dict(zip(leaves, gradients, strict=True))

    for leaf in leaves.values():
        leaf.requires_grad_()
    first = attend()
    for _ in range(3):
        again = attend()
        assert [part for part in first if not torch.equal(first[part], again[part])] == []


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("causal", [False, True])
def test_adaptive_temperature_in_two_fused_passes(mask, causal):
    normalizer = attnorm.get("adaptive_temperature")
    q, k, v, shown = _inputs((256, 256), (4, 2), mask, torch.float32)
    with torch.no_grad():
        found = attnorm.attention(q, k, v, normalizer, mask=shown, causal=causal, engine="fused").double()
        reference = (t.double() for t in (q, k, v))
        expected = attnorm.attention(*reference, normalizer, mask=shown, causal=causal, engine="blocked")
    assert (found - expected).norm() / expected.norm() < 1e-5


@pytest.mark.parametrize("name", ["gaussian", "linear", "selective", "soft", "differential", "laser", "forget"])
def test_mechanisms_match_their_cpu_result(name):
    mechanism = attnorm.get(name) if name != "differential" else attnorm.get(name, width=32)
    q, k, v, _ = _inputs((96, 96), (4, 4), "none", torch.float32)
    v = v[:, ::2] if name == "differential" else v
    on_cpu = attnorm.attention(*(t.cpu().double() for t in (q, k, v)), mechanism.double().cpu())
    on_gpu = attnorm.attention(q, k, v, mechanism.float().cuda())
    assert (on_gpu.cpu().double() - on_cpu).norm() / on_cpu.norm() < 1e-4


@pytest.mark.parametrize("name", ["sink", "softpick", "entmax15", "stick_breaking", "topk"])
def test_a_graph_contains_the_kernel_that_eager_mode_runs(name: str) -> None:
    operators: set[str] = set()

    def read(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        operators.update(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    q, k, v = (torch.randn(1, 2, 64, 32, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    call = partial(attnorm.attention, normalizer=attnorm.get(name).cuda(), causal=True)
    torch.compile(call, backend=read, fullgraph=True)(q, k, v)
    assert any(operator.startswith("attnorm.") and "attention" in operator for operator in operators), operators


@pytest.mark.parametrize(
    "name", ["entmax15", "entmax:alpha=1.3", "kneemax", "asentmax", "topk", "sa_softmax", "stick_breaking",
             "adaptive_temperature", "norm_softmax"],
)  # fmt: skip
def test_decoding_in_a_cuda_graph(name: str) -> None:
    """A captured call must not wait for the GPU, and replays with what its tensors then hold."""
    q, k, v = (torch.randn(1, 8, length, 64, device="cuda", dtype=torch.bfloat16) for length in (1, 3000, 3000))
    normalizer = attnorm.get(name).cuda().requires_grad_(False)
    call = partial(attnorm.attention, q, k, v, normalizer, causal=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()
    for t in (q, k, v):
        t.copy_(torch.randn_like(t))
    graph.replay()
    assert torch.equal(output, call())


@pytest.mark.parametrize("name", ["ssmax", "log_scaled"])
def test_a_rescaled_softmax_is_one_graph_with_its_factor(name: str) -> None:
    q, k, v = (torch.randn(1, 2, 64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    call = partial(attnorm.attention, normalizer=attnorm.get(name).cuda(), causal=True)
    found, expected = torch.compile(call, backend="aot_eager", fullgraph=True)(q, k, v), call(q, k, v)
    probe = torch.randn_like(found)
    gradients = (torch.autograd.grad(output, (q, k, v), probe) for output in (found, expected))
    torch.testing.assert_close((found, *next(gradients)), (expected, *next(gradients)))


def test_a_new_thread_works_on_the_stream_of_the_caller() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert in_new_thread(lambda: torch.cuda.current_stream(device), device) == stream


def test_compiled_statistics_of_a_map_without_a_kernel() -> None:
    q, k, _, _ = _inputs((100, 100), (4, 2), "none", torch.float32)
    for name in ("topk", "alibi"):
        normalizer = attnorm.get(name).cuda()
        measure = partial(attnorm.attention_statistics, normalizer=normalizer, causal=True)
        found = torch.compile(measure, fullgraph=True, backend="aot_eager")(q, k)
        torch.testing.assert_close(found, measure(q, k), equal_nan=True)
