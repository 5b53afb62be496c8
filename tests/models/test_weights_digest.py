"""Weights that are tensor subclasses are hashed by what is inside them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnorm
from attnorm.models.describe import fingerprint
from tests.analysis.tiny_models import llama


class Int8(Tensor):
    """A weight in 8 bits that, as torchao's, can neither be reshaped nor indexed."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> "Int8":
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype)

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self.inner, self.scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["inner", "scale"], {"by": object()}

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner, args[0].scale)
        if func in (torch.ops.aten.t.default, torch.ops.aten.linear.default):
            plain = [arg.inner * arg.scale if isinstance(arg, cls) else arg for arg in args]
            return func(*plain, **(kwargs or {}))
        raise NotImplementedError(f"no {func}")


def quantized(seed: int = 0) -> Any:
    model = llama(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not model.lm_head:
            scale = module.weight.abs().amax(1, keepdim=True).detach() / 127
            weight = Int8((module.weight.detach() / scale).round().to(torch.int8), scale)
            module.weight = nn.Parameter(weight, requires_grad=False)
    return model


def test_quantized_weights_have_a_fingerprint_that_depends_on_their_values() -> None:
    assert fingerprint(quantized()) == fingerprint(quantized())
    assert fingerprint(quantized()) != fingerprint(llama())
    changed = quantized()
    weight = changed.model.layers[1].mlp.up_proj.weight
    weight.inner[3, 4] += 1
    assert fingerprint(changed) != fingerprint(quantized())


@pytest.mark.filterwarnings("ignore")
def test_a_model_quantized_by_torchao_is_analyzed() -> None:
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = llama()
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    analysis = attnorm.analyze(model, torch.arange(1, 33), metrics="core")
    assert analysis.heads.num_rows == 8
