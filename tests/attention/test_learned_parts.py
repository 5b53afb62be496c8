"""What learns must receive its gradient whichever engine runs, and what is fixed must stay fixed."""

import copy

import pytest
import torch
from torch import Tensor, nn

import attnorm
from attnorm.engines import blocked as blocked_engine
from attnorm.normalizers.kernel import FUNCTIONS


@pytest.fixture
def tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_engine, "BLOCK_ELEMENTS", 40)


def _qkv(length: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, 1, 2, length, 8, dtype=torch.float64).unbind()
    return q, k, v


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.normalizer = attnorm.compose("entmax15", scale=attnorm.get("ssmax", heads=2))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attnorm.attention(q, k, v, self.normalizer, causal=True)


def test_blocks_give_gradients_to_parameters_put_in_by_torch_func(tiny_blocks: None) -> None:
    layer, qkv = Layer().double(), _qkv()
    given = {name: (p.detach() * 3).requires_grad_() for name, p in layer.named_parameters()}
    output = torch.func.functional_call(layer, given, qkv)
    found = torch.autograd.grad(output.square().sum(), list(given.values()))
    layer.load_state_dict({name: p.detach() for name, p in given.items()})
    expected = torch.autograd.grad(layer(*qkv).square().sum(), list(layer.parameters()))
    for a, b in zip(found, expected, strict=True):
        assert b.abs().max() > 0
        torch.testing.assert_close(a, b)


def test_a_learned_feature_map_of_linear_attention_learns_in_blocks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism = attnorm.get("linear", feature_map=nn.Sequential(nn.Linear(8, 8), nn.Softplus())).double()
    mask = torch.rand(11, 11) > 0.3
    gradients = []
    for elements in (10**6, 40):
        monkeypatch.setattr(blocked_engine, "BLOCK_ELEMENTS", elements)
        torch.manual_seed(0)
        output = attnorm.attention(*_qkv(), mechanism, mask=mask)
        gradients.append(torch.autograd.grad(output.square().sum(), list(mechanism.parameters())))
    for a, b in zip(*gradients, strict=True):
        assert a.abs().max() > 0
        torch.testing.assert_close(a, b)


def test_a_fixed_number_is_no_parameter() -> None:
    for name, options in (("softmax1", {}), ("softmax", {"temperature": 0.5}), ("ssmax", {"learned": False})):
        normalizer = attnorm.get(name, **options)
        assert list(normalizer.parameters()) == []
        assert len(normalizer.state_dict()) == 1


def test_a_copy_declares_what_the_original_does() -> None:
    normalizer = attnorm.get("kernel", function=FUNCTIONS["exp"])
    assert copy.deepcopy(normalizer).lipschitz(8) == normalizer.lipschitz(8) == 0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_sink_of_minus_infinity_is_softmax(dtype: torch.dtype) -> None:
    q, k, v = (t.to(dtype) for t in _qkv())
    without = attnorm.attention(q, k, v, "softmax", causal=True)
    sink = attnorm.get("sink", logit=-torch.inf)
    torch.testing.assert_close(attnorm.attention(q, k, v, sink, causal=True), without)


@pytest.mark.parametrize("logit", [10.3, 20.7])
def test_half_precision_keeps_the_digits_of_a_sink(logit: float) -> None:
    q, k, v = (t.to(torch.bfloat16) for t in _qkv(64))
    sink = attnorm.get("sink", logit=logit)
    exact = attnorm.attention(q.double(), k.double(), v.double(), sink, causal=True)
    errors = [
        (attnorm.attention(q, k, v, sink, causal=True, engine=engine).double() - exact).abs().max()
        for engine in ("fused", "blocked")
    ]
    assert errors[0] <= 3 * errors[1]  # blocks compute in float32; one rounding of the logit would give 8


@pytest.mark.parametrize("name", ["softmax", "ssmax", "adaptive_temperature", "sink", "sigmoid", "entmax15"])
def test_queries_before_the_first_key_may_hold_anything(name: str) -> None:
    q, k, v = torch.randn(1, 2, 7, 8), torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    q[..., :3, :] = torch.nan
    output = attnorm.attention(q, k, v, name, causal=True)
    assert (output[..., :3, :] == 0).all()
    assert torch.isfinite(output).all()


def test_a_sink_does_not_count_as_a_key() -> None:
    logits = torch.rand(2, 3, 5, dtype=torch.float64)
    torch.testing.assert_close(attnorm.compose("relu", sink="sink")(logits), attnorm.get("relu")(logits))


@pytest.mark.parametrize("name", ["ssmax", "sink", "asentmax", "entmax:alpha=1.3", "forget"])
def test_a_normalizer_made_by_name_for_one_call_asks_for_no_gradient(name: str) -> None:
    qkv = _qkv()
    assert not attnorm.attention(*qkv, name, causal=True).requires_grad
    q, k, v = (t.requires_grad_() for t in qkv)
    output = attnorm.attention(q, k, v, name, causal=True)
    torch.testing.assert_close(output, attnorm.attention(q, k, v, attnorm.get(name), causal=True))
    assert all(gradient.abs().max() > 0 for gradient in torch.autograd.grad(output.square().sum(), (q, k, v)))


def test_a_normalizer_made_by_name_under_compile_asks_for_no_gradient_and_one_of_get_does() -> None:
    q, k, v = _qkv()
    for normalizer, learns in (("ssmax", False), ("get", True)):

        @torch.compile(backend="eager", fullgraph=True)
        def run(q: Tensor, k: Tensor, v: Tensor, normalizer: str = normalizer) -> Tensor:
            return attnorm.attention(q, k, v, attnorm.get("ssmax") if normalizer == "get" else normalizer)

        assert run(q, k, v).requires_grad == learns


def test_a_registered_normalizer_keeps_the_parameters_that_its_owner_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnorm.normalizers import registry

    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    own = attnorm.get("ssmax")
    attnorm.register("own_ssmax")(lambda: own)
    assert attnorm.attention(*_qkv(), "own_ssmax").requires_grad
