"""attention() compiles to one graph with the same outputs and gradients."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.testing import assert_close

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


# A loop of Newton steps takes 4 s to trace; tests/normalizers/test_entmax.py traces one on every commit.
@pytest.mark.parametrize(
    "name",
    ["ssmax", "differential_v2", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("softmax", "entmax15"))],
)
def test_one_graph_gives_the_same_outputs_and_gradients(name: str) -> None:
    assert_compiles(name, "aot_eager", causal=True)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ROWS)
def test_every_normalizer_compiles(name: str) -> None:
    assert_compiles(name, "inductor", causal=True)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", sorted(set(attnorm.available()) - set(ROWS)))
def test_every_mechanism_compiles(name: str) -> None:
    assert_compiles(name, "inductor", causal=name != "soft")


def test_names_in_a_compiled_model_are_one_graph() -> None:
    """Several names: each must be found although others were traced before it. Some have options."""
    torch._dynamo.reset()

    def attend(x: Tensor) -> Tensor:
        weights = attnorm.normalize(x @ x.mT, attnorm.get("ssmax", heads=2, s=0.3))
        weights = weights + attnorm.normalize(x @ x.mT, attnorm.get("composed", map="softpick", scale="ssmax"))
        attended = attnorm.attention(x, x, x, "sigmoid", causal=True)
        return weights @ (attended + attnorm.attention(x, x, x, "relu:power=2.0", causal=True))

    x = torch.randn(1, 2, 9, 8)
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), attend(x))


def test_get_in_a_compiled_function_builds_each_normalizer_once() -> None:
    """Other options of one name are another normalizer; a second function does not compile the first one again."""
    torch._dynamo.reset()

    def attend(x: Tensor) -> Tensor:
        narrow = attnorm.attention(x, x, x, attnorm.get("sigmoid", bias=-1.0), causal=True)
        wide = attnorm.attention(x, x, x, attnorm.get("sigmoid", bias=1.0), causal=True)
        return narrow - wide

    def attend_twice(x: Tensor) -> Tensor:
        return 2 * attend(x)

    x, counters = torch.randn(1, 2, 9, 8), [CompileCounter(), CompileCounter()]
    functions = [attend, attend_twice]
    compiled = [
        torch.compile(function, backend=counter, fullgraph=True)
        for function, counter in zip(functions, counters, strict=True)
    ]
    for _ in range(2):
        for function, expected in zip(compiled, functions, strict=True):
            torch.testing.assert_close(function(x), expected(x))
    assert [counter.frame_count for counter in counters] == [1, 1]


def test_an_unknown_name_in_a_compiled_model_is_an_error() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: attnorm.normalize(x, "entmax51"), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="entmax15"):
        compiled(torch.randn(2, 5, 5))


class Named(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attnorm.attention(q, k, v, self.name, causal=True)


@pytest.mark.parametrize("name", ["ssmax", "tda"])
def test_a_name_with_parameters_is_exported_in_strict_mode(name: str) -> None:
    q, k, v = Call(batch=1, queries=9, keys=9, width=8).tensors()[:3]
    v = v[:, :2] if name == "tda" else v
    program = torch.export.export(Named(name), (q, k, v), strict=True).module()
    assert_close(program(q, k, v), Named(name)(q, k, v))
