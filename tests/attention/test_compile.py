"""attention() compiles to one graph with the same outputs and gradients."""

import platform

import pytest
import torch
from torch import Tensor

import attnorm
from tests.attention.calls import Call, assert_all_close, learned, outputs_and_gradients

ROWS = [name for name in attnorm.available() if isinstance(attnorm.get(name), attnorm.Normalizer)]


def assert_compiles(name: str, backend: str, **options: object) -> None:
    torch._dynamo.reset()
    normalizer = attnorm.get(name).double()
    tensors = Call(batch=1, queries=13, keys=13, width=8).tensors()[:3]
    if name in ("differential", "tda"):
        tensors[2] = tensors[2][:, :2]
    if name == "differential_v2":
        tensors[1:] = [t[:, :2] for t in tensors[1:]]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attnorm.attention(q, k, v, normalizer, **options)

    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    assert_all_close(
        outputs_and_gradients(compiled, tensors, learned(normalizer)),
        outputs_and_gradients(attend, tensors, learned(normalizer)),
        atol=1e-9,
    )


# The test below this one compiles ssmax, and reads the same graph first.
@pytest.mark.parametrize(
    "name", ["entmax15", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("softmax", "ssmax"))]
)
@pytest.mark.as_installed
def test_one_graph_gives_the_same_outputs_and_gradients(name: str) -> None:
    assert_compiles(name, "aot_eager", causal=True)


@pytest.mark.as_installed
def test_compiled_code_gives_the_same_outputs_and_gradients() -> None:
    """Scalar C++ without precompiled headers takes two thirds of the time. At night the code is as users get it."""
    from torch._inductor import config

    with config.patch({"cpp.simdlen": 1, "cpp_cache_precompile_headers": False}):
        assert_compiles("ssmax", "inductor", causal=True)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.as_installed
def test_every_normalizer_compiles(name: str) -> None:
    assert_compiles(name, "inductor", causal=True)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", sorted(set(attnorm.available()) - set(ROWS)))
@pytest.mark.as_installed
def test_every_mechanism_compiles(name: str) -> None:
    if name == "laser" and platform.machine() == "aarch64":
        pytest.skip("torch 2.13 generates C++ for laser that does not compile on NEON (convert of int32 to double)")
    assert_compiles(name, "inductor", causal=name != "soft")


def test_names_in_a_compiled_model_are_one_graph() -> None:
    """Several names: each must be found although others were traced before it. One has options."""
    torch._dynamo.reset()

    def attend(x: Tensor) -> Tensor:
        weights = attnorm.normalize(x @ x.mT, "ssmax") + attnorm.normalize(x @ x.mT, "entmax15")
        attended = attnorm.attention(x, x, x, "sparsemax", causal=True)
        return weights @ (attended + attnorm.attention(x, x, x, "entmax:alpha=1.3", causal=True))

    x = torch.randn(1, 2, 9, 8)
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), attend(x))


def test_an_unknown_name_in_a_compiled_model_is_an_error() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: attnorm.normalize(x, "entmax51"), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="entmax15"):
        compiled(torch.randn(2, 5, 5))
