"""Where the kernels put outputs and gradients in memory: as models hold their queries, keys and values."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import attnorm
from tests.attention.kernel_calls import DEVICE, draw, run

pytestmark = [pytest.mark.as_installed, pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")]

SHAPE = (2, 4, 2, 20, 70, 24, 40)  # batch, heads, key heads, queries, keys, width, width of the values
ENGINES = {
    "sigmoid": "triton", "topk": "triton", "adaptive_temperature": "triton", "sa_softmax": "triton",
    "stick_breaking": "triton", "entmax15": "sparse", "sparsemax": "sparse",
}  # fmt: skip


def as_in_models(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The same numbers, with the heads of a position next to each other."""
    return tuple(t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in tensors)


@pytest.mark.parametrize("name", ENGINES)
def test_outputs_and_gradients_lie_in_memory_as_the_inputs_do(name: str) -> None:
    tensors = draw(SHAPE)
    normalizer = attnorm.get(name).to(DEVICE)
    expected = run(tensors, normalizer, ENGINES[name], causal=True)
    found = run(as_in_models(tensors), normalizer, ENGINES[name], causal=True)
    for ours, same in zip(found, expected, strict=True):
        assert same.is_contiguous()
        assert ours.transpose(1, 2).is_contiguous()
        torch.testing.assert_close(ours, same)


@pytest.mark.parametrize("name", ENGINES)
def test_compiled_code_is_told_the_strides_that_the_kernels_write(name: str) -> None:
    """A graph that expects other strides would read wrong numbers."""
    normalizer = attnorm.get(name).to(DEVICE)
    for tensors in (draw(SHAPE), as_in_models(draw(SHAPE))):
        real = run(tensors, normalizer, ENGINES[name], causal=True)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = tuple(mode.from_tensor(t) for t in tensors)
            told = run(fakes, normalizer, ENGINES[name], causal=True)
        assert [(t.shape, t.stride()) for t in told] == [(t.shape, t.stride()) for t in real]
