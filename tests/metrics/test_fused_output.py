"""attention(..., return_statistics=True) by the kernels that compute both, in Triton's interpreter."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

import attnorm
from attnorm.engines import one_pass_operators
from attnorm.engines.execution import HAS_TRITON, runs_kernels
from attnorm.metrics import fused_maps, fused_rows
from attnorm.metrics.call import AttentionCall
from tests.attention.kernel_calls import assert_compiles, each_depth
from tests.metrics.naive_softmax import KINDS, LENGTHS, assert_at_most_twice_the_naive_error, drawn
from tests.metrics.reference import dense_weights

# In rows that see nothing and in hidden keys -inf is subtracted from -inf; the kernel does not use the result.
pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="needs Triton, which runs on Linux alone"),
    pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning"),
]


attention_module = importlib.import_module("attnorm.attention")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let the kernel take these small calls, on a CPU too; returns the launches."""
    made: list[Any] = []

    def record(module: Any, name: str) -> None:
        kernel = getattr(module, name)

        def recorded(*arguments: Any, **options: Any) -> Any:
            made.append((name, *options))
            return kernel(*arguments, **options)

        monkeypatch.setattr(module, name, recorded)

    record(fused_rows, "output_and_sums")
    record(fused_maps, "_map_sums")
    record(fused_maps, "_threshold_sums")
    monkeypatch.setattr(fused_rows, "_on_gpu", runs_kernels)
    monkeypatch.setattr(fused_rows, "MIN_KERNEL_ROWS", 1)
    return made


@pytest.fixture
def attention_on_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU for what SDPA does not compute."""
    monkeypatch.setattr(attention_module, "choose_engine", lambda *_: "triton")


def both(*tensors: Tensor, normalizer: Any = "softmax", **options: Any) -> tuple[Tensor, attnorm.AttentionStatistics]:
    return attnorm.attention(*tensors, normalizer, return_statistics=True, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_at_most_twice_the_error_of_the_plain_formula(
    kind: str, length: int, dtype: torch.dtype, launches: list[Any]
) -> None:
    q, k, v, visible = drawn(kind, length, dtype, device=DEVICE)
    unmasked = kind not in ("padded", "rows that see nothing")
    found = both(q, k, v, causal=unmasked, mask=None if unmasked else visible)
    assert_at_most_twice_the_naive_error(found, q, k, v, visible)
    if kind == "rows that see nothing":
        assert (found[0][:, :, :7] == 0).all()
    assert len(launches) == 1


MASKS = {
    "causal": {"causal": True},
    "every key": {},
    "window": {"mask": (torch.ones(70, 90).tril(20) * torch.ones(70, 90).triu(-5)).bool()},
    "mask per head": {"mask": torch.rand(1, 2, 70, 90, generator=torch.Generator().manual_seed(1)) < 0.2},
    "padding": {"causal": True, "mask": (torch.arange(90) >= torch.tensor([0, 35])[:, None])[:, None, None]},
}
NORMALIZERS = {
    "softmax": lambda: attnorm.get("softmax"),
    "ssmax": lambda: attnorm.get("ssmax", s=0.7),
    "a negative factor": lambda: attnorm.get("ssmax", s=-1.3),
    "a factor of 0": lambda: attnorm.get("ssmax", s=0.0),
    "log_scaled": lambda: attnorm.get("log_scaled", train_length=16),
    "sink": lambda: attnorm.get("sink", heads=2, logit=1.5),
    "a sink above every key": lambda: attnorm.get("sink", heads=2, logit=400.0),
    "ssmax with a sink": lambda: attnorm.compose(scale="ssmax", sink=attnorm.Sink(heads=2)),
    "sigmoid": lambda: attnorm.get("sigmoid"),
    "a negative factor of sigmoid": lambda: attnorm.compose("sigmoid", scale=attnorm.get("ssmax", s=-0.7)),
    "threshold relu": lambda: attnorm.get("threshold_relu", beta=0.3),
    "softpick": lambda: attnorm.get("softpick"),
    "kneemax": lambda: attnorm.get("kneemax"),
    "learned alpha": lambda: attnorm.get("entmax", alpha=1.6, learned=True, heads=2),
    "a negative factor of entmax15": lambda: attnorm.compose("entmax15", scale=attnorm.get("ssmax", s=-0.7)),
}


def other_lengths(
    queries: int = 70, keys: int = 90, width: int = 10, batch: int = 1, heads: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((heads, queries), (heads // 2, keys), (heads // 2, keys))
    q, k, v = (torch.randn(batch, count, length, width, generator=generator).to(DEVICE) for count, length in sizes)
    return 2 * q, k, v


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", NORMALIZERS)
@pytest.mark.every_second("name", first=1)
@pytest.mark.usefixtures("attention_on_our_kernels")
def test_every_normalizer_with_every_mask(name: str, mask: str, launches: list[Any]) -> None:
    q, k, v = other_lengths(batch=2 if mask == "padding" else 1)
    options = {key: one.to(DEVICE) if isinstance(one, Tensor) else one for key, one in MASKS[mask].items()}
    normalizer = NORMALIZERS[name]().to(DEVICE)
    output, found = both(q, k, v, normalizer=normalizer.requires_grad_(False), **options)
    assert len(launches) == 1
    q, k, v = (t.cpu().double() for t in (q, k, v))
    normalizer = NORMALIZERS[name]().double().requires_grad_(False)
    exact = attnorm.attention(q, k, v, normalizer, engine="blocked", **MASKS[mask])
    torch.testing.assert_close(output.cpu().double(), exact, rtol=1e-5, atol=1e-5)
    for column, value in attnorm.attention_statistics(q, k, normalizer, **MASKS[mask])._asdict().items():
        got = getattr(found, column).cpu()
        torch.testing.assert_close(
            got.double(), value.double(), rtol=3e-5, atol=3e-5, equal_nan=True, msg=lambda t, c=column: f"{c}: {t}"
        )


def test_some_rows_of_1100_keys() -> None:
    q, k, v = other_lengths(3, 1100)
    output, found = both(q, k, v, causal=True)
    q, k, v = (t.cpu().double() for t in (q, k, v))
    torch.testing.assert_close(output.cpu().double(), attnorm.attention(q, k, v, causal=True), rtol=1e-5, atol=1e-6)
    exact = attnorm.attention_statistics(q, k, causal=True)
    torch.testing.assert_close([t.cpu().double() for t in found], [t.double() for t in exact], rtol=1e-5, atol=1e-5)


def test_more_queries_than_keys_and_tensors_in_another_layout(launches: list[Any]) -> None:
    q, k, v = other_lengths(70, 40)
    q, k, v = (t.mT.contiguous().mT for t in (q, k, v))
    output, found = both(q, k, v, causal=True)
    exact = attnorm.attention(*(t.cpu().double() for t in (q, k, v)), causal=True, engine="blocked")
    torch.testing.assert_close(output.cpu().double(), exact, rtol=1e-5, atol=1e-5)
    assert (output[:, :, :30] == 0).all()
    assert found.entropy[:, :, :30].isnan().all()
    assert len(launches) == 1


def test_capped_logits_and_sinks_of_a_model() -> None:
    tensors = other_lengths(heads=4)
    sinks = torch.tensor([0.0, 5.0, -30.0, 2.0])
    call, exact = (
        AttentionCall(0, "decoder", *(t.to(like) for t in tensors), 0.4, True, softcap=3.0, sinks_H=sinks.to(like))
        for like in (tensors[0], torch.zeros(0, dtype=torch.float64))
    )
    output, _n, (entropy, largest), _ = fused_maps.output_and_statistics(
        call.query_BHQD, call.key_BGKD, call.value_BGKE, None, None, None, call.sinks_H, 0.4, True, 3.0, "softmax", 1,
        0.0, False, "entropy_nats max_logit",
    )  # fmt: skip
    weights = dense_weights(exact)
    expected = weights @ exact.value_BGKE.repeat_interleave(2, 1)
    torch.testing.assert_close(output.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    p = weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(entropy.cpu().double(), -torch.xlogy(p, p).sum(-1), rtol=1e-5, atol=0)
    assert float(largest.max()) <= 3


def test_a_key_that_is_not_finite_breaks_the_rows_that_see_it_and_no_others() -> None:
    q, k, v = other_lengths(70, 70, heads=4)
    k[:, 0, 40] = torch.nan
    output, found = both(q, k, v, causal=True)
    assert output[:, :2, 40:].isnan().all()
    assert found.entropy[:, :2, 40:].isnan().all()
    assert output[:, :2, :40].isfinite().all()
    assert output[:, 2:].isfinite().all()


def exact_gradients(tensors: Any, normalizer: Any, grad: Tensor, **options: Any) -> list[Tensor]:
    """Gradients of q, k, v and the parameters in float64."""
    inputs = [t.detach().cpu().double().requires_grad_() for t in tensors]
    options = {key: one.cpu() if isinstance(one, Tensor) else one for key, one in options.items()}
    output = attnorm.attention(*inputs, normalizer, engine="blocked", **options)
    wanted = [*inputs, *(p for p in normalizer.parameters() if p.requires_grad)]
    return list(torch.autograd.grad(output, wanted, grad.cpu().double()))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", NORMALIZERS)
@pytest.mark.every_second("name")
@pytest.mark.usefixtures("attention_on_our_kernels")
def test_gradients_by_our_kernels(name: str, mask: str, launches: list[Any]) -> None:
    tensors = [t.requires_grad_() for t in other_lengths(batch=2 if mask == "padding" else 1)]
    options = {key: one.to(DEVICE) if isinstance(one, Tensor) else one for key, one in MASKS[mask].items()}
    normalizer = NORMALIZERS[name]().to(DEVICE)
    output, found = both(*tensors, normalizer=normalizer, **options)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    gradients = torch.autograd.grad(output, [*tensors, *normalizer.parameters()], grad)
    assert len(launches) == 1
    assert not any(t.requires_grad for t in found)
    exact = exact_gradients(tensors, NORMALIZERS[name]().double(), grad, **options)
    for got, expected in zip(gradients, exact, strict=True):
        torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("attention_on_our_kernels")
def test_a_tile_whose_only_weight_is_the_first_key_has_gradients() -> None:
    q, k, v = other_lengths()
    q[..., 0], k[..., 0] = 4.0, 0.0
    k[:, :, 0, 0], k[:, :, 70:75, 0] = 8.0, 7.9
    tensors = [t.requires_grad_() for t in (q, k, v)]
    output, _ = both(*tensors, normalizer="entmax15")
    grad = torch.ones_like(output)
    exact = exact_gradients(tensors, attnorm.get("entmax15"), grad)
    assert exact[2][:, :, 0].abs().min() > 1
    for got, expected in zip(torch.autograd.grad(output, tensors, grad), exact, strict=True):
        torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [pytest.param("sigmoid", marks=pytest.mark.nightly), "softpick", "learned alpha"])
@pytest.mark.usefixtures("attention_on_our_kernels")
def test_output_and_gradients_of_maps_in_half_precision(name: str) -> None:
    tensors = [t.half().requires_grad_() for t in other_lengths()]
    normalizer = NORMALIZERS[name]().to(DEVICE)
    output, _ = both(*tensors, normalizer=normalizer, causal=True)
    assert output.dtype == torch.float16
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output)
    gradients = torch.autograd.grad(output, [*tensors, *normalizer.parameters()], grad)
    exact = exact_gradients(tensors, NORMALIZERS[name]().double(), grad, causal=True)
    for got, expected in zip(gradients, exact, strict=True):
        assert (got.cpu().double() - expected).norm() <= 2e-3 * expected.norm()


@pytest.mark.usefixtures("attention_on_our_kernels")
def test_small_weights_keep_their_digits_in_half_precision() -> None:
    """One key far above 500 with weights of 7e-7, which the tolerance of the search would let pass."""
    q = torch.ones(1, 1, 8, 1)
    k, v = (torch.cat([torch.full((1,), first), torch.full((500,), rest)]) for first, rest in ((1.0, 1e-3), (0.0, 1e3)))
    tensors = [t.half().to(DEVICE) for t in (q, k[None, None, :, None], v[None, None, :, None])]
    output, found = both(*tensors, normalizer="entmax15", scale=2.0)
    call, rows = AttentionCall(0, "encoder", *tensors, 2.0, causal=False), torch.arange(8)
    alone = fused_maps.fused_map(call, rows, ("entropy_nats",), fused_maps.RowMap("entmax15"))
    exact, expected = both(*(t.cpu().double() for t in tensors), normalizer="entmax15", scale=2.0)
    torch.testing.assert_close(output.cpu().double(), exact, rtol=2e-3, atol=0)
    for entropy in (found.entropy, alone.values["entropy_nats"]):
        torch.testing.assert_close(entropy.cpu().double(), expected.entropy.double(), rtol=2e-3, atol=0)


@pytest.mark.parametrize("by_sdpa", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_softmax_in_half_precision(
    causal: bool, by_sdpa: bool, launches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch's backward kernel of a CPU in the place of cuDNN's, and with ours where torch has none."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 2, 90, 16, generator=generator).to(DEVICE, torch.float16) for _ in range(3)]
    calls: list[Any] = []

    def on_cpu(*given: Any) -> tuple[Tensor, ...] | None:
        calls.append(given)
        *tensors, causal, scale = given
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(t.float().cpu() for t in tensors), 0.0, causal, scale=scale
        )
        return tuple(t.to(DEVICE, torch.float16) for t in found) if by_sdpa else None

    monkeypatch.setattr(one_pass_operators, "sdpa_gradients", on_cpu)
    inputs = [t.requires_grad_() for t in tensors]
    output, _ = both(*inputs, causal=causal)
    grad = torch.randn(output.shape, generator=generator).to(DEVICE, torch.float16)
    gradients = torch.autograd.grad(output, inputs, grad)
    assert len(launches) == len(calls) == 1
    exact = exact_gradients(tensors, attnorm.get("softmax").double(), grad, causal=causal)
    for got, expected in zip(gradients, exact, strict=True):
        torch.testing.assert_close(got.cpu().double(), expected, rtol=3e-3, atol=3e-3)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["softmax", "sigmoid", "softpick", "learned alpha"])
@pytest.mark.usefixtures("attention_on_our_kernels")
def test_a_compiled_step_has_one_pass_for_both(name: str, launches: list[Any]) -> None:
    normalizer = NORMALIZERS[name]().to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 2, 70, 16, generator=generator).to(DEVICE, torch.float16) for _ in range(3)]

    def step(*inputs: Tensor) -> tuple[Tensor, ...]:
        output, found = both(*inputs, normalizer=normalizer, causal=True)
        return output, found.entropy

    results = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        inputs = [t.clone().requires_grad_() for t in tensors]
        output, entropy = run(*inputs)
        trained = [*inputs, *normalizer.parameters()]
        results.append([output, entropy, *torch.autograd.grad(output.float().square().sum(), trained)])
    torch.testing.assert_close(results[1], results[0], equal_nan=True)
    assert len(launches) == 2


@pytest.mark.parametrize("why", ["width of values", "gradient", "learned", "dropout", "engine", "few rows", "no rows"])
def test_calls_that_take_two_passes(why: str, launches: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = other_lengths()
    options: dict[str, Any] = {}
    if why == "width of values":
        v = v[..., :7]
    elif why == "gradient":
        v.requires_grad_()
    elif why == "learned":
        options = {"normalizer": attnorm.get("ssmax", heads=2).to(DEVICE)}
    elif why == "dropout":
        options = {"dropout_p": 0.5}
    elif why == "engine":
        options = {"engine": "blocked"}
    elif why == "few rows":
        monkeypatch.setattr(fused_rows, "MIN_KERNEL_ROWS", 71)
    else:
        q, k, v = q[:0], k[:0], v[:0]
    output, found = both(q, k, v, **options)
    assert not launches
    assert output.shape == (*q.shape[:-1], v.shape[-1])
    assert found.entropy.shape == q.shape[:-1]
    assert output.requires_grad == (why in ("gradient", "learned"))


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        pytest.param("softmax", "output_and_statistics", marks=pytest.mark.nightly),
        pytest.param("ssmax with a sink", "output_and_statistics", marks=pytest.mark.nightly),
        pytest.param("softpick", "output_and_statistics", marks=pytest.mark.nightly),
        ("kneemax", "threshold_output_and_statistics"),
    ],
)
@pytest.mark.usefixtures("attention_on_our_kernels")
def test_a_graph_has_one_operator_for_both(name: str, operator: str, launches: list[Any]) -> None:
    q, k, v = other_lengths(20, 24)
    normalizer = NORMALIZERS[name]().to(DEVICE).requires_grad_(False)
    operators: set[str] = set()

    def read(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        operators.update(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    def measure(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, attnorm.AttentionStatistics]:
        return both(q, k, v, normalizer=normalizer, causal=True)

    found = torch.compile(measure, fullgraph=True, backend=read)(q, k, v)
    assert {one for one in operators if one.startswith("attnorm.")} == {f"attnorm.{operator}.default"}
    torch.testing.assert_close(found, measure(q, k, v), equal_nan=True)
    assert len(launches) == 2


def test_the_operators_are_sound() -> None:
    q, k, v = other_lengths(20, 24)
    rows, sink = torch.rand(1, 2, 20).to(q), torch.zeros(2).to(q)
    inputs = (q, k, v, None, rows, None, sink, 0.3, True, None, "softmax", 1, 0.0, False, "entropy_nats")
    calls = [
        (fused_maps.output_and_statistics, inputs),
        (fused_maps.output_and_statistics, (*inputs[:5], rows, None, *inputs[7:10], "relu", *inputs[11:])),
        (fused_maps.threshold_output_and_statistics, (*inputs[:5], rows, True, 0.3, "kneemax", True, "entropy_nats")),
    ]
    for operator, given in calls:
        torch.library.opcheck(operator.operator, given, test_utils=("test_schema", "test_faketensor"))


@each_depth
def test_the_kernel_compiles_for_gpus_that_are_not_here(lowered: bool) -> None:
    script = """
from attnorm.kernels.softmax_sums import softmax_output as kernel
types = dict(q="*bf16", k="*bf16", v="*bf16", output="*bf16", mask="*u8", row_queries="*i32", scale="fp32", cap="fp32")
types |= dict.fromkeys(("factor", "learned_sink", "reference_out", "out"), "*fp32")
for flag in (True, False):
    given = dict(
        CAUSAL=True, MASKED=flag, CAPPED=flag, FACTORED=flag, SINK=flag, PRECISION="tf32", ROWS=64, KEYS=16, WIDTH=16,
        FULL=not flag, LEVELS=1,
    )
    compiles(kernel, given, types)
"""
    assert_compiles(script, lowered)


@pytest.mark.parametrize(
    ("dtype", "width", "key"),
    [
        (torch.float32, 5, (4, 64)),
        (torch.float32, 65, (4, 128)),
        (torch.float32, 129, (4, 256)),
        (torch.bfloat16, 64, (2, 64)),
        (torch.float16, 96, (2, 128)),
        (torch.bfloat16, 256, (2, 256)),
    ],
)
def test_tiles_by_dtype_and_width(dtype: torch.dtype, width: int, key: tuple[int, int]) -> None:
    assert fused_rows.output_tile(torch.zeros(1, 1, 1, width, dtype=dtype)) == fused_rows.OUTPUT_TILES[key]
