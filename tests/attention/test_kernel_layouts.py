"""Where the kernels put outputs and gradients in memory: as models hold their queries, keys and values."""

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import attnorm
from attnorm import kernels
from attnorm.kernels.launch import FARTHEST_ROWS, in_rows
from tests.attention.kernel_calls import DEVICE, draw, run

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")

SHAPE = (1, 4, 2, 16, 20, 24, 40)  # batch, heads, key heads, queries, keys, width, width of the values
ENGINES = {
    "sigmoid": "triton", "topk": "triton", "adaptive_temperature": "triton", "sa_softmax": "triton",
    "stick_breaking": "triton", "entmax15": "sparse", "sparsemax": "sparse",
}  # fmt: skip


def inputs(*, as_in_models: bool) -> tuple[Tensor, ...]:
    """Draw the same numbers, as in models with the heads of a position next to each other."""
    tensors = draw(SHAPE)
    if not as_in_models:
        return tensors
    return tuple(t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in tensors)


@functools.cache
def computed(name: str, *, as_in_models: bool) -> list[Tensor]:
    """Output and gradients by the kernels, which both tests compare."""
    tensors = inputs(as_in_models=as_in_models)
    return run(tensors, attnorm.get(name).to(DEVICE), ENGINES[name], causal=True)


@pytest.mark.parametrize("name", ENGINES)
def test_outputs_and_gradients_lie_in_memory_as_the_inputs_do(name: str) -> None:
    for ours, same in zip(computed(name, as_in_models=True), computed(name, as_in_models=False), strict=True):
        assert same.is_contiguous()
        assert ours.transpose(1, 2).is_contiguous()
        torch.testing.assert_close(ours, same)


@pytest.mark.parametrize("name", ENGINES)
def test_traced_strides_are_those_that_the_kernels_write(name: str) -> None:
    """A graph that expects other strides would read wrong numbers."""
    normalizer = attnorm.get(name).to(DEVICE)
    for layout in (False, True):
        real = computed(name, as_in_models=layout)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = tuple(mode.from_tensor(t) for t in inputs(as_in_models=layout))
            traced = run(fakes, normalizer, ENGINES[name], causal=True)
        assert [(t.shape, t.stride()) for t in traced] == [(t.shape, t.stride()) for t in real]


def test_rows_too_far_apart_for_places_in_32_bits_are_copied() -> None:
    memory = torch.empty(FARTHEST_ROWS + 8, dtype=torch.int8)
    near, far = (memory.as_strided((1, 1, 2, 8), (0, 0, stride, 1)) for stride in (FARTHEST_ROWS - 1, FARTHEST_ROWS))
    assert in_rows(near) is near
    assert in_rows(far).stride(-2) == 8


def test_no_kernel_adds_in_the_order_in_which_programs_finish() -> None:
    """Atomic sums of floats would differ from call to call; tests/cuda compares the bits."""
    assert [file.name for file in Path(kernels.__file__).parent.glob("*.py") if "tl.atomic" in file.read_text()] == []
