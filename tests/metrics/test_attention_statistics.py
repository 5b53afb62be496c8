"""attnorm.attention_statistics against the whole matrix in float64."""

import copy
import math
import re

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

import attnorm
from attnorm.engines import blocked
from attnorm.metrics import attention_statistics
from attnorm.metrics.call import AttentionCall
from attnorm.normalizers import registry
from tests.metrics.reference import dense_logits, dense_visible, dense_weights

B, H, G, Q, K, D = 2, 4, 2, 21, 37, 8
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of the kernels; the interpreter runs them on a CPU


def draw(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(B, H, Q, D, generator=generator), torch.randn(B, G, K, D, generator=generator)


def dense(q: torch.Tensor, k: torch.Tensor, name: str, **options: object) -> dict[str, torch.Tensor]:
    call = AttentionCall(0, "decoder", q, k, k, D**-0.5, **{"causal": False, **options})
    normalizer = attnorm.get(name)
    z = dense_logits(call).masked_fill(~dense_visible(call), -math.inf)
    w = dense_weights(call, normalizer).detach()
    p = w.abs() / w.abs().sum(-1, keepdim=True)
    jacobian = torch.func.vmap(torch.func.jacrev(lambda row: normalizer(row[None])[0]))
    found = {
        "n": dense_visible(call).sum(-1).double(),
        "max_logit": z.amax(-1),
        "min_logit": z.masked_fill(z == -math.inf, math.inf).amin(-1),
        "entropy": -torch.xlogy(p, p).sum(-1),
        "effective_keys": 1 / p.square().sum(-1),
        "max_weight": w.abs().amax(-1),
        "row_sum": w.sum(-1),
        "top_mass": torch.stack([p.topk(N, -1).values.sum(-1) for N in (1, 5)], -1),
    }
    if not options:
        norms = torch.linalg.matrix_norm(jacobian(z.reshape(-1, K)), 2).detach()
        found["jacobian_norm"] = norms.reshape(B, H, Q)
    return found


@pytest.mark.parametrize("name", ["softmax", "ssmax", "entmax15", "sparsemax", "kneemax", "sigmoid", "relu"])
def test_every_number_of_every_row(name: str) -> None:
    q, k = draw()
    found = attnorm.attention_statistics(q.double(), k.double(), name, top_n=(1, 5))._asdict()
    for column, exact in dense(q, k, name).items():
        torch.testing.assert_close(
            found[column].double(), exact, rtol=1e-9, atol=1e-9, msg=lambda t, c=column: f"{c}: {t}"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_causal_call_with_padding_and_a_soft_cap(dtype: torch.dtype) -> None:
    q, k = (t.to(dtype) for t in draw(1))
    mask = torch.arange(K) >= torch.tensor([0, 9])[:, None]
    found = attnorm.attention_statistics(
        q, k, causal=True, mask=mask[:, None, None], softcap=4.0, top_n=(1, 5)
    )._asdict()
    exact = dense(q, k, "softmax", causal=True, mask=mask[:, None, None], softcap=4.0)
    for column, value in exact.items():
        assert found[column].dtype in (torch.float32, torch.int64)
        torch.testing.assert_close(found[column].double(), value, rtol=2e-5, atol=2e-5)


def test_a_soft_cap_may_be_any_number() -> None:
    q, k = draw()
    expected = attnorm.attention_statistics(q, k, softcap=3.0)
    for softcap in (3, np.float32(3), np.float64(3), torch.tensor(3.0), torch.tensor([3])):
        torch.testing.assert_close(attnorm.attention_statistics(q, k, softcap=softcap), expected, rtol=0, atol=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_soft_cap_far_above_all_logits_changes_nothing(dtype: torch.dtype) -> None:
    q, k = (t.to(dtype) for t in draw())
    expected = attnorm.attention_statistics(q, k)
    for softcap in (1e29, 1e38, 3e38, 1e39, 1e300, 10**400):
        found = attnorm.attention_statistics(q, k, softcap=softcap)
        torch.testing.assert_close(found, expected, msg=lambda t, cap=softcap: f"{cap}: {t}")


def test_causal_and_a_mask_with_a_row_for_each_query() -> None:
    q, k = draw()
    mask = torch.rand(Q, K, generator=torch.Generator().manual_seed(5)) < 0.7
    mask[:, 0] = True
    found = attnorm.attention_statistics(q, k, causal=True, mask=mask)
    ordered = mask & torch.ones(Q, K, dtype=torch.bool).tril(K - Q)
    torch.testing.assert_close(found, attnorm.attention_statistics(q, k, mask=ordered))
    assert torch.equal(found.n[0, 0], ordered.sum(-1))


def test_logsumexp_and_sink_mass_of_softmax_with_a_learned_sink() -> None:
    q, k = draw()
    found = attnorm.attention_statistics(q.double(), k.double(), attnorm.get("sink", heads=H, logit=0.7))
    z = q.double() @ k.double().repeat_interleave(2, 1).mT * D**-0.5
    total = torch.logsumexp(torch.nn.functional.pad(z, (0, 1), value=0.7), -1)
    torch.testing.assert_close(found.logsumexp, total)
    torch.testing.assert_close(found.sink_mass, (z[..., 0] - total).exp() + (0.7 - total).exp())
    torch.testing.assert_close(found.row_sum, (torch.logsumexp(z, -1) - total).exp())


def test_rows_whose_weights_a_learned_sink_rounds_to_zero() -> None:
    """Softmax takes the shares of the keys from the logits, which a sink does not change; other maps have none."""
    q, k = draw()
    plain = attnorm.attention_statistics(q, k, top_n=(1,))
    sink = attnorm.get("sink", logit=1e4)
    softmax, sparse = (
        attnorm.attention_statistics(q, k, attnorm.compose(name, sink=sink), top_n=(1,))
        for name in ("softmax", "entmax15")
    )
    for found in (softmax, sparse):
        assert found.row_sum.eq(0).all()
        assert found.jacobian_norm.eq(0).all()
        assert found.sink_mass.eq(1).all()
    assert softmax.max_weight.eq(0).all()
    assert sparse.max_weight.isnan().all()
    for column in ("entropy", "effective_keys", "top_mass"):
        torch.testing.assert_close(getattr(softmax, column), getattr(plain, column))
        assert getattr(sparse, column).isnan().all()


def test_masses_of_all_keys_do_not_exceed_one_by_rounding() -> None:
    q, k = (torch.randn(1, 4, 200, 16, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    masses = attnorm.attention_statistics(q, k, "softmax", top_n=(2, 150, 200)).top_mass
    assert masses.max() <= 1
    torch.testing.assert_close(masses[..., 2], torch.ones(1, 4, 200))


def test_the_shape_follows_q_and_rows_that_see_nothing_are_nan() -> None:
    q, k = torch.randn(3, 5, 8), torch.randn(3, 4, 8)
    found = attnorm.attention_statistics(q, k, causal=True, top_n=(2,))
    assert found.n.shape == (3, 5)
    assert found.top_mass.shape == (3, 5, 1)
    assert (found.n[:, 0] == 0).all()
    assert found.entropy[:, 0].isnan().all()
    assert found.entropy[:, 1:].isfinite().all()
    assert attnorm.attention_statistics(q, k).top_mass.shape == (3, 5, 0)


def test_bad_input_is_named() -> None:
    q, k = draw()
    with pytest.raises(TypeError, match="causal"):
        attnorm.attention_statistics(q, k, causal="no")
    with pytest.raises(ValueError, match="softcap"):
        attnorm.attention_statistics(q, k, softcap=-1)
    with pytest.raises(ValueError, match="softcap"):
        attnorm.attention_statistics(q, k, softcap=0)
    assert attnorm.attention_statistics(q, k, softcap=0.5).max_logit.max() <= 0.5
    for softcap in (math.inf, math.nan, "3", True, torch.ones(2)):
        with pytest.raises(ValueError, match=r"expected a finite softcap above 0, got .*Leave it out"):
            attnorm.attention_statistics(q, k, softcap=softcap)  # type: ignore[arg-type]
    vector, fraction = torch.tensor([2, 3]), torch.tensor(2.5)
    for top_n in ((0, 3), 5, (2.5,), ("a",), "15", (True,), (None,), None, {1, 2}, b"\1", (vector,), (fraction,)):
        with pytest.raises(ValueError, match=r"expected top_n as a sequence .*, got .*\. Pass for example top_n="):
            attnorm.attention_statistics(q, k, top_n=top_n)  # type: ignore[arg-type]
    found = attnorm.attention_statistics(q, k, top_n=(np.int64(2), torch.tensor(3)))  # type: ignore[arg-type]
    torch.testing.assert_close(found, attnorm.attention_statistics(q, k, top_n=(2, 3)))
    with pytest.raises(TypeError, match=r"the mechanism 'linear', .*\. Pass one such as 'softmax'"):
        attnorm.attention_statistics(q, k, "linear")
    with pytest.raises(TypeError, match=r"attention_statistics\(\) does not take is_causal=; .* write causal=True"):
        attnorm.attention_statistics(q, k, is_causal=True)
    with pytest.raises(TypeError, match=r"attention_statistics\(\) does not take masc=; help\(attnorm\."):
        attnorm.attention_statistics(q, k, masc=None)
    for wrong in (attnorm.get("alibi", heads=3), attnorm.get("nearmax", heads=3)):
        with pytest.raises(ValueError, match=r"expected logits \(\.\.\., 3, .*, got 4 heads\. Build it with heads=4"):
            attnorm.attention_statistics(q, k, wrong)
    for heads in (1, 2, 3, 5):
        with pytest.raises(ValueError, match=f"for {heads} heads?, but q has {H} heads"):
            attnorm.attention_statistics(q, k, attnorm.get("sink", heads=heads))
    for heads in (2, 3, 5):
        with pytest.raises(ValueError, match=f"for {heads} heads?, but q has {H} heads"):
            attnorm.attention_statistics(q, k, attnorm.get("ssmax", heads=heads))


def test_errors_name_only_what_the_caller_gave() -> None:
    q, k = draw()
    wrong: list[tuple[object, type[Exception], str]] = [
        (k.numpy(), TypeError, "q, k: expected torch tensors, got Tensor, ndarray"),
        (k.double(), TypeError, "got torch.float32, torch.float64. Convert them, e.g. q.float()."),
        (k.to("meta"), ValueError, "q, k: expected one device for all, got cpu, meta. Move them, e.g. k.to(q.device)."),
        (k[0], ValueError, f"q, k must all be .*; got q {(B, H, Q, D)}, k {(G, K, D)}"),
        (k[..., 1:], ValueError, f"q {(B, H, Q, D)}, k {(B, G, K, D - 1)}"),
        (k[:, :, :0], ValueError, f"q {(B, H, Q, D)}, k {(B, G, 0, D)}"),
        (k[:1], ValueError, f"q {(B, H, Q, D)}, k {(1, G, K, D)}"),
    ]
    for keys, error, message in wrong:
        with pytest.raises(error, match=re.sub(r"([()])", r"\\\1", message) + r"\)?$"):
            attnorm.attention_statistics(q, keys)  # type: ignore[arg-type]


def test_the_text_form_is_short_and_has_the_means() -> None:
    q, k = torch.randn(3, 50, 8), torch.randn(3, 50, 8)
    found = attnorm.attention_statistics(q, k, causal=True, top_n=(1, 4))
    text = repr(found)
    assert len(text) < 200
    assert "(3, 50)" in text
    assert "(3, 50, 2)" in text
    assert f"{found.entropy.mean():.4g}" in text
    assert f"{25.5:.4g}" in text  # the mean of n
    assert repr(attnorm.attention_statistics(q, k)) == str(attnorm.attention_statistics(q, k))
    hidden = attnorm.attention_statistics(q, k, mask=torch.ones(50, 50).tril(-1) > 0)
    assert f"{hidden.max_weight.nanmean():.4g}" in repr(hidden)  # rows that see nothing do not count
    assert "(3, 0)" in repr(attnorm.attention_statistics(q[:, :0], k))
    assert "(3, 50)" in repr(type(found)._make(t.to("meta") for t in found))


@pytest.mark.parametrize("name", ["softmax", "ssmax", "entmax15"])
def test_no_rows_have_no_statistics(name: str) -> None:
    q, k = draw()
    for queries, keys in ((q[:, :, :0], k), (q[:0], k[:0])):
        output, found = attnorm.attention(queries, keys, keys, name, return_statistics=True)
        assert output.numel() == 0
        assert found.entropy.shape == queries.shape[:-1]
        found = attnorm.attention_statistics(queries, keys, name, top_n=(1, 5), causal=True)
        assert found.top_mass.shape == (*queries.shape[:-1], 2)
        assert found.n.dtype == torch.int64


def test_effective_keys_of_many_equal_weights_are_exact() -> None:
    q, k = torch.full((1, 1, 1, 1), 100.0), torch.ones(1, 1, 4000, 1)
    found = attnorm.attention_statistics(q, k, "sigmoid")
    assert abs(float(found.effective_keys) / 4000 - 1) < 1e-6


@pytest.mark.parametrize("name", ["local", "alibi", "scale_invariant", "log_scaled", "stick_breaking"])
def test_positions_are_those_that_the_caller_gives(name: str) -> None:
    options: dict[str, dict[str, object]] = {
        "local": {"window": 9}, "alibi": {"heads": H}, "log_scaled": {"train_length": 8}
    }  # fmt: skip
    normalizer = attnorm.get(name, **options.get(name, {}))
    q, k = (t.double() for t in draw(3))
    steps = torch.randint(1, 5, (B, K), generator=torch.Generator().manual_seed(4))
    key = steps.cumsum(-1)
    positions = attnorm.Positions(key[:, -Q:], key)
    found = attnorm.attention_statistics(q, k, normalizer, causal=True, positions=positions)
    counted = attnorm.attention_statistics(q, k, normalizer, causal=True)
    _, weights = attnorm.attention(q, k, k, normalizer, causal=True, positions=positions, return_weights=True)
    p = weights.abs() / weights.abs().sum(-1, keepdim=True)
    torch.testing.assert_close(found.row_sum, weights.sum(-1), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.entropy, -torch.xlogy(p, p).sum(-1), rtol=1e-9, atol=1e-9)
    if name != "stick_breaking":  # it reads the order alone
        assert not torch.allclose(found.entropy, counted.entropy)


@pytest.mark.parametrize("name", ["softmax", "entmax15", "sigmoid", "relu", "softpick"])
def test_jacobian_norms_take_the_positions_that_the_caller_gives(name: str) -> None:
    normalizer = attnorm.compose(name, scale=attnorm.get("log_scaled", train_length=8))
    q, k = (0.3 * t.double() for t in draw(3))
    positions = 50 * torch.arange(K)[-Q:]
    found = attnorm.attention_statistics(q, k, normalizer, causal=True, positions=positions)
    z = (q @ k.repeat_interleave(H // G, 1).mT * D**-0.5)[0, 0]
    visible = torch.ones(Q, K, dtype=torch.bool).tril(K - Q)
    derivative = torch.autograd.functional.jacobian(lambda z: normalizer(z, visible, positions=positions)[-1], z)
    norm = torch.linalg.matrix_norm(derivative[:, -1], 2)
    assert norm > 1e-3
    torch.testing.assert_close(found.jacobian_norm[0, 0, -1], norm, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["softmax", "ssmax", "entmax15", "sigmoid", "topk", "alibi"])
@pytest.mark.parametrize("engine", ["auto", "blocked"])
def test_attention_returns_them_with_its_output(name: str, engine: str) -> None:
    (q, k), v = draw(), torch.randn(B, G, K, 5)
    mask = torch.arange(K) >= torch.tensor([0, 9])[:, None]
    options: dict[str, object] = {"causal": True, "mask": mask[:, None, None]}
    output, found = attnorm.attention(q, k, v, name, return_statistics=True, engine=engine, **options)
    torch.testing.assert_close(output, attnorm.attention(q, k, v, name, **options), rtol=1e-5, atol=1e-6)
    assert output.shape == (B, H, Q, 5)
    torch.testing.assert_close(found, attnorm.attention_statistics(q, k, name, **options), equal_nan=True)


def test_the_output_beside_them_has_a_gradient() -> None:
    (q, k), v = draw(), torch.randn(B, G, K, 5)
    q.requires_grad_()
    for name in ("softmax", "entmax15"):
        output, found = attnorm.attention(q, k, v, name, return_statistics=True)
        (gradient,) = torch.autograd.grad(output.sum(), q)
        (expected,) = torch.autograd.grad(attnorm.attention(q, k, v, name).sum(), q)
        torch.testing.assert_close(gradient, expected)
        assert not found.entropy.requires_grad
    two = attnorm.attention(q[0, 0].detach(), k[0, 0], v[0, 0], "entmax15", return_statistics=True)
    assert two[1].entropy.shape == (Q,)


def test_several_blocks_compute_weights_once_before_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", 8 * B * H * K)
    inputs = [t.half().requires_grad_() for t in (*draw(), torch.randn(B, G, K, 5))]
    normalizer = attnorm.get("entmax", alpha=1.4, learned=True, heads=H)
    wanted = [*inputs, *normalizer.parameters()]
    expected = attnorm.attention(*inputs, normalizer, causal=True)
    gradients = torch.autograd.grad(expected.float().square().sum(), wanted)
    with pytest.MonkeyPatch.context() as patched:
        patched.delattr(blocked._BlockedCall, "block_weights")
        output, found = attnorm.attention(*inputs, normalizer, causal=True, return_statistics=True)
    torch.testing.assert_close(output, expected)
    assert not found.entropy.requires_grad
    torch.testing.assert_close(torch.autograd.grad(output.float().square().sum(), wanted), gradients)


def test_weights_and_statistics_are_not_returned_together() -> None:
    q, k = draw()
    with pytest.raises(ValueError, match="return_weights"):
        attnorm.attention(q, k, k, return_weights=True, return_statistics=True)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="linear"):
        attnorm.attention(q, k, k, "linear", return_statistics=True)


def test_a_compiled_function_keeps_one_graph() -> None:
    q, k = draw()
    mask = torch.arange(K) >= torch.tensor([0, 9])[:, None]
    normalizer = attnorm.compose(scale="ssmax", sink=attnorm.Sink(heads=H))

    def measure(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, attnorm.AttentionStatistics]:
        found = attnorm.attention_statistics(q, k, normalizer, causal=True, mask=mask[:, None, None], top_n=(1, 5))
        return 2 * found.entropy, found

    doubled, found = torch.compile(measure, fullgraph=True, backend="aot_eager")(q, k)
    expected = measure(q, k)[1]
    torch.testing.assert_close(found, expected, equal_nan=True)
    torch.testing.assert_close(doubled, 2 * expected.entropy)


NIGHTLY_MAPS = ("sparsemax", "kneemax", "sigmoid", "relu", "softpick", "topk:k=4", "stick_breaking", "kernel")


@pytest.mark.parametrize(
    "name", ["entmax15", "alibi", *(pytest.param(name, marks=pytest.mark.nightly) for name in NIGHTLY_MAPS)]
)
def test_a_compiled_function_keeps_one_graph_with_every_map(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_statistics, "runs_kernels", lambda q: False)
    torch.compiler.reset()
    q, k = draw()
    normalizer = attnorm.get(name)

    def measure(q: torch.Tensor, k: torch.Tensor) -> attnorm.AttentionStatistics:
        return attnorm.attention_statistics(2 * q, k, normalizer, causal=True, top_n=(1, 5))

    expected = measure(q, k)
    assert expected.jacobian_norm.isfinite().any(), "some need a gradient of the map, which operators do not have"
    found = torch.compile(measure, fullgraph=True, backend="aot_eager")(q, k)
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_compiled_statistics_follow_the_normalizer_and_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator finds its normalizer by id: another one, a copy and a changed parameter must be noticed."""
    monkeypatch.setattr(attention_statistics, "runs_kernels", lambda q: False)
    q, k = draw()
    states = torch.randn(B, Q, 6, generator=torch.Generator().manual_seed(1))
    learned = attnorm.get("asentmax", heads=H, width=6)

    def measure(normalizer: attnorm.Normalizer) -> torch.Tensor:
        found = attnorm.attention_statistics(q, k, normalizer, causal=True, hidden_states=states)
        return found.entropy

    compiled = torch.compile(measure, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(learned), measure(learned))
    copied = copy.deepcopy(learned)
    for parameter in copied.parameters():
        torch.nn.init.normal_(parameter, std=2.0, generator=torch.Generator().manual_seed(2))
    assert not torch.allclose(measure(copied), measure(learned))
    torch.testing.assert_close(compiled(copied), measure(copied))
    torch.testing.assert_close(compiled(learned), measure(learned))
    with torch.no_grad():
        for parameter in learned.parameters():
            parameter.add_(1.0)
    torch.testing.assert_close(compiled(learned), measure(learned))


def test_layers_share_one_compiled_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile gives up on a function after 8 graphs; a model has more layers than that."""
    monkeypatch.setattr(attention_statistics, "runs_kernels", lambda q: False)
    torch.compiler.reset()
    q, k = draw()
    counter = CompileCounter()

    def measure(normalizer: attnorm.Normalizer) -> torch.Tensor:
        return attnorm.attention_statistics(q, k, normalizer, causal=True).entropy

    compiled = torch.compile(measure, fullgraph=True, backend=counter)
    layers = [attnorm.get("topk", k=1 + layer % 5) for layer in range(12)]
    for normalizer in layers:
        torch.testing.assert_close(compiled(normalizer), measure(normalizer))
    assert counter.frame_count == 1


def test_compiled_statistics_see_parameters_that_the_graph_changes_or_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled graph writes a changed parameter back at its end, after the operator."""
    monkeypatch.setattr(attention_statistics, "runs_kernels", lambda q: False)
    q, k = draw()
    learned = attnorm.compose("entmax15", scale=attnorm.get("ssmax", heads=H))
    (parameter,) = learned.parameters()
    start = parameter.detach().clone()

    def step(q: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            parameter.add_(0.5)
        return attnorm.attention_statistics(q, k, learned, causal=True).entropy

    before = attnorm.attention_statistics(q, k, learned, causal=True).entropy
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(q)
    torch.testing.assert_close(parameter.detach(), start + 0.5)
    expected = attnorm.attention_statistics(q, k, learned, causal=True).entropy
    assert not torch.allclose(before, expected)
    torch.testing.assert_close(found, expected)

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.normalizer = learned

        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return attnorm.attention_statistics(q, k, self.normalizer, causal=True).entropy

    layer = Layer()
    (name,) = (name for name, _ in layer.named_parameters())

    def call(value: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {name: value}, (q,))

    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(start), before)


def test_an_exported_graph_has_no_normalizer_of_this_process() -> None:
    class Layer(torch.nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.normalizer = attnorm.get(name)

        def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return attnorm.attention_statistics(q, k, self.normalizer, causal=True).entropy

    q, k = draw()
    ssmax = Layer("ssmax")
    torch.testing.assert_close(torch.export.export(ssmax, (q, k)).module()(q, k), ssmax(q, k))
    with pytest.raises(ValueError, match=r"torch.export, got 'topk'"):
        torch.export.export(Layer("topk"), (q, k), strict=False)


@pytest.mark.parametrize("name", ["alibi", "sa_softmax"])
def test_inference_mode_has_jacobian_norms_too(name: str) -> None:
    mask = torch.rand(Q, K, generator=torch.Generator().manual_seed(5)) < 0.7
    expected = attnorm.attention_statistics(*draw(), name, mask=mask)
    assert expected.jacobian_norm.isfinite().any()
    with torch.inference_mode():
        torch.testing.assert_close(
            attnorm.attention_statistics(*draw(), name, mask=mask.clone()), expected, equal_nan=True
        )


def test_the_operator_of_any_normalizer_is_sound() -> None:
    q, k = draw()
    learned = attnorm.get("asentmax", heads=H)
    state = [one.detach() for one in learned.parameters()]
    given = (q, k, None, None, None, None, learned.handle, state, 0.3, True, None, "entropy_nats max_logit", [1, 5])
    torch.library.opcheck(
        attention_statistics.row_statistics_operator, given, test_utils=("test_schema", "test_faketensor")
    )


def test_output_and_statistics_are_one_graph() -> None:
    q, k = draw()

    def measure(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, attnorm.AttentionStatistics]:
        return attnorm.attention(q, k, k, "sigmoid", causal=True, return_statistics=True)

    torch.testing.assert_close(
        torch.compile(measure, fullgraph=True, backend="aot_eager")(q, k), measure(q, k), equal_nan=True
    )


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch has no such rule for SDPA on a CPU
@pytest.mark.parametrize(
    ("name", "kernels"),
    [("softmax", False), ("ssmax", False), ("sink", False), ("entmax15", False), ("alibi", False), ("sigmoid", True)],
)
def test_vmap_equals_a_loop(name: str, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over queries and masks, for the statistics alone and beside an output."""
    monkeypatch.setattr(attention_statistics, "runs_kernels", lambda q: kernels)
    normalizer = attnorm.get(name, **({"heads": H} if name in ("sink", "alibi") else {}))
    generator = torch.Generator().manual_seed(7)
    q, k = torch.randn(3, B, H, Q, D, generator=generator), torch.randn(B, G, K, D, generator=generator)
    masks = torch.rand(3, B, 1, Q, K, generator=generator) < 0.7
    if kernels:  # the interpreter takes time
        q, k, masks = (t.to(DEVICE) for t in (q[:2, :1, :, :4], k[:1, :, :16], masks[:2, :1, :, :4, :16]))

    def measure(q: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, attnorm.AttentionStatistics]:
        alone = attnorm.attention_statistics(q, k, normalizer, mask=mask, top_n=(1, 5))
        output, beside = attnorm.attention(q, k, k, normalizer, mask=mask, return_statistics=True)
        return output, alone._replace(entropy=beside.entropy)

    loop = [measure(*one) for one in zip(q, masks, strict=True)]
    found, statistics = torch.func.vmap(measure, in_dims=(1, 0))(q.movedim(0, 1), masks)
    torch.testing.assert_close(found, torch.stack([output for output, _ in loop]), atol=1e-6, rtol=1e-5)
    assert statistics.jacobian_norm.isfinite().any()
    for column, expected in zip(statistics, zip(*(one for _, one in loop), strict=True), strict=True):
        torch.testing.assert_close(column, torch.stack(expected), equal_nan=True)


def test_vmap_over_the_parameters_of_a_normalizer_equals_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_statistics, "runs_kernels", lambda q: False)
    q, k = draw()
    learned = attnorm.compose("entmax15", scale=attnorm.get("ssmax", heads=H))
    ((name, start),) = learned.named_parameters()
    values = start.detach() + torch.arange(3.0)[:, None]

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.normalizer = learned

        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return attnorm.attention_statistics(q, k, self.normalizer, causal=True).entropy

    def measure(value: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(Layer(), {f"normalizer.{name}": value}, (q,))

    expected = torch.stack([measure(value) for value in values])
    assert not torch.allclose(expected[0], expected[2])
    torch.testing.assert_close(torch.func.vmap(measure)(values), expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch has no such rule for SDPA on a CPU
@pytest.mark.parametrize("name", ["alibi", "nearmax", "ssmax", "sa_softmax"])
def test_a_normalizer_can_be_built_in_a_gradient_of_torch_func(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_statistics, "runs_kernels", lambda q: False)
    monkeypatch.setattr(registry, "_stateless_normalizers", {})
    q, k = draw()
    before = attnorm.get(name).requires_grad_(False)

    def loss(q: torch.Tensor, normalizer: str | attnorm.Normalizer) -> tuple[torch.Tensor, torch.Tensor]:
        output, statistics = attnorm.attention(q, k, k, normalizer, return_statistics=True)
        return output.square().sum(), statistics.entropy

    grad = torch.func.grad(loss, has_aux=True)
    expected = grad(q, before)
    torch.testing.assert_close(grad(q, name), expected)
    torch.testing.assert_close(torch.func.grad(lambda q: loss(q, attnorm.get(name)), has_aux=True)(q), expected)
    in_vmap = torch.func.vmap(grad, in_dims=(0, None))(q[None], name)
    torch.testing.assert_close([t[0] for t in in_vmap], list(expected))
    compiled = torch.compile(lambda q: grad(q, name), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), expected)
    copy.deepcopy(registry.resolve_for_call(name, q))  # those that calls share are copied with a layer


def reads_states(generator: torch.Generator) -> attnorm.Normalizer:
    learned = attnorm.get("asentmax", heads=H, width=6)
    for parameter in learned.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=generator)
    return learned


@pytest.mark.parametrize("by_operator", [False, True], ids=["eager", "operator"])
@pytest.mark.parametrize("shape", [(B, Q, 6), (1, Q, 6), (Q, 6)], ids=str)
@pytest.mark.parametrize("keys", [K, Q, 5])
def test_hidden_states_are_those_of_the_queries(
    keys: int, shape: tuple[int, ...], by_operator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_statistics, "runs_kernels", lambda q: False)
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(B, H, Q, D, generator=generator), torch.randn(B, G, keys, D, generator=generator)
    states = torch.randn(shape, generator=generator)
    learned = reads_states(generator)
    weights = attnorm.attention(q, k, k, learned, hidden_states=states, return_weights=True)[1].detach()

    def measure(q: torch.Tensor) -> torch.Tensor:
        return attnorm.attention_statistics(q, k, learned, hidden_states=states).max_weight

    found = torch.func.vmap(measure)(q[None])[0] if by_operator else measure(q)
    torch.testing.assert_close(found, weights.amax(-1))
    beside = attnorm.attention(q, k, k, learned, hidden_states=states, return_statistics=True)[1]
    torch.testing.assert_close(beside.max_weight, weights.amax(-1))
    reads_none = attnorm.attention_statistics(q, k, "entmax15", hidden_states=states)
    torch.testing.assert_close(reads_none, attnorm.attention_statistics(q, k, "entmax15"), equal_nan=True)


def test_hidden_states_of_queries_without_a_batch() -> None:
    generator = torch.Generator().manual_seed(3)
    q, k = (t[0] for t in draw())
    states, learned = torch.randn(Q, 6, generator=generator), reads_states(generator)
    weights = attnorm.attention(q, k, k, learned, hidden_states=states, return_weights=True)[1].detach()
    found = attnorm.attention_statistics(q, k, learned, hidden_states=states)
    torch.testing.assert_close(found.max_weight, weights.amax(-1))


@pytest.mark.parametrize("name", ["asentmax", "entmax15"])
@pytest.mark.parametrize("shape", [(B, K, 6), (3, Q, 6), (B, 1, 6), (B, 1, Q, 6), (6,)], ids=str)
def test_hidden_states_of_other_tokens_are_rejected(name: str, shape: tuple[int, ...]) -> None:
    q, k = draw()
    normalizer = reads_states(torch.Generator()) if name == "asentmax" else attnorm.get(name)
    states = torch.randn(shape)
    expected = re.escape(f"expected hidden_states of the queries, ({B}, {Q}, width), got shape {shape}. Pass ")
    with pytest.raises(ValueError, match=expected):
        attnorm.attention_statistics(q, k, normalizer, hidden_states=states)
    for more in ({"return_statistics": True}, {"return_weights": True}, {}):
        with pytest.raises(ValueError, match=expected):
            attnorm.attention(q, k, k, normalizer, hidden_states=states, **more)


def test_the_operator_is_sound() -> None:
    q, k = draw()
    factor = torch.rand(B, H, Q, 1)
    inputs = (q, k, None, factor, torch.zeros(H), 0.3, True, None, "entropy_nats max_logit", [1, 5])
    torch.library.opcheck(torch.ops.attnorm.softmax_statistics, inputs, test_utils=("test_schema", "test_faketensor"))
