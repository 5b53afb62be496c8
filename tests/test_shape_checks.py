"""The runtime shape checks of the test run bite, and leave alone what they must not touch."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import jaxtyping
import pytest
import torch

from attnorm.theory.dispersion import entropy_nats
from tests.shape_checks import check_shapes_in

MODULE = """
from dataclasses import dataclass
from functools import cached_property
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

def masked(logits: Float[Tensor, "*b q k"], mask: Bool[Tensor, "#q #k"]) -> Float[Tensor, "*b q k"]:
    return torch.where(mask, logits, 0.0)

def loses_a_key(logits: Float[Tensor, "*b q k"]) -> Float[Tensor, "*b q k"]:
    return logits[..., 1:]

def warm(temperature: float) -> float:
    return temperature

class Square(torch.autograd.Function):
    @staticmethod
    def forward(x: Float[Tensor, "*b k"]) -> Float[Tensor, "*b k"]:
        return x * x

    @staticmethod
    def setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Float[Tensor, "*b k"]) -> Float[Tensor, "*b k"]:
        (x,) = ctx.saved_tensors
        return 2 * x * grad

@dataclass(frozen=True)
class Row:
    logits: Float[Tensor, " k"]

    @classmethod
    def of(cls, logits: Float[Tensor, " k"]) -> "Row":
        return cls(logits)

    @cached_property
    def spread(self) -> Float[Tensor, ""]:
        return self.logits.max() - self.logits.min()

class Layer(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(heads, 1))

    def forward(self, x: Float[Tensor, "h k"]) -> Float[Tensor, "h k"]:
        mask = torch.ones_like(x, dtype=torch.bool)
        return masked(Square.apply(x) * self.scale, mask) + Row.of(x[0]).logits
"""


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (tmp_path / "annotated.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "annotated", raising=False)
    with check_shapes_in("annotated"):
        return importlib.import_module("annotated")


def test_a_call_with_the_wrong_shape_or_dtype_is_refused(checked: ModuleType) -> None:
    assert checked.masked(torch.ones(5, 2, 3), torch.ones(1, 3, dtype=torch.bool)).shape == (5, 2, 3)
    with pytest.raises(jaxtyping.TypeCheckError, match="mask"):
        checked.masked(torch.ones(5, 2, 3), torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(jaxtyping.TypeCheckError, match="logits"):
        checked.masked(torch.ones(5, 2, 3, dtype=torch.int64), torch.ones(1, 3, dtype=torch.bool))


def test_a_result_of_the_wrong_shape_is_refused(checked: ModuleType) -> None:
    with pytest.raises(jaxtyping.TypeCheckError, match="return value"):
        checked.loses_a_key(torch.ones(2, 3))


def test_an_int_may_stand_for_a_float(checked: ModuleType) -> None:
    assert checked.warm(2) == 2


def test_frozen_dataclasses_and_cached_properties_work(checked: ModuleType) -> None:
    assert checked.Row(torch.tensor([1.0, 3.0])).spread == 2
    with pytest.raises(jaxtyping.TypeCheckError, match="logits"):
        checked.Row(torch.ones(2, 2))


def test_autograd_functions_and_modules_keep_their_gradients(checked: ModuleType) -> None:
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(checked.Layer(2).double(), (x,))


@pytest.mark.nightly  # the nightly run compiles everything with checks in every call
def test_the_checks_leave_no_break_in_a_compiled_graph(checked: ModuleType) -> None:
    layer, x = checked.Layer(2), torch.randn(2, 3)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.as_installed
def test_a_marked_test_runs_as_users_do(checked: ModuleType) -> None:
    assert checked.loses_a_key(torch.ones(2, 3)).shape == (2, 2)


def test_the_package_is_checked() -> None:
    with pytest.raises(jaxtyping.TypeCheckError, match="weights"):
        entropy_nats(torch.ones(3, dtype=torch.int64))
