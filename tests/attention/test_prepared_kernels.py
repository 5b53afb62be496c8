"""Kernels that are launched many times: which launches share a compiled kernel, and where numbers of rows come from."""

from typing import Any

import pytest
import torch
from torch import Tensor

import attnorm
from attnorm.kernels.launch import PreparedKernel, kinds_of
from tests.attention.kernel_calls import DEVICE, draw

BYTES = torch.zeros(128, dtype=torch.uint8)
# Integers around every limit, and tensors of several dtypes and alignments.
ARGUMENTS: list[Any] = [
    *(sign * 2**power + step for sign in (-1, 1) for power in (0, 1, 4, 5, 31, 32, 62) for step in (-1, 0, 1)),
    *(BYTES[start : start + 32].view(dtype) for start in (0, 8, 16, 24) for dtype in (torch.float16, torch.float32)),
    *(0, 0.0, 1.0, 0.25),
]


def test_arguments_of_one_kind_are_the_same_to_triton() -> None:
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    backend = make_backend(GPUTarget("cuda", 90, 32))
    of_kind: dict[tuple[object, ...], set[object]] = {}
    for argument in ARGUMENTS:
        to_triton = native_specialize_impl(type(backend), argument, False, True, True)
        of_kind.setdefault(kinds_of((argument,)), set()).add(to_triton)
    assert all(len(kernels) == 1 for kernels in of_kind.values()), of_kind
    assert len(of_kind) < len(ARGUMENTS) / 2, "too many kinds: hardly any launch would be one of a known kind"


class Compiled:
    function = 1

    def __init__(self, launches: list[Any], source: str) -> None:
        self.launches, self.source = launches, source

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.launches.append((self.source, grid, arguments))


class Kernel(Compiled):
    """Stands for a jitted function: records launches, and returns a compiled kernel."""

    arg_names = ("x", "n", "SECOND", "FIRST")

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> Compiled:
            self.launches.append((self.source, grid, arguments, constants))
            return Compiled(self.launches, "compiled")

        return launch


def test_a_launch_of_a_known_kind_takes_the_compiled_kernel() -> None:
    launches: list[Any] = []
    kernel = PreparedKernel(Kernel(launches, "jit"), {"FIRST": 1, "SECOND": 2}, warps=4)
    x = torch.zeros(8)
    constants = {"SECOND": 2, "FIRST": 1, "num_warps": 4, "num_stages": 3}
    kernel.launch(5, x, 32)
    kernel.launch(6, x, 48)
    assert launches == [("jit", (5,), (x, 32), constants), ("compiled", (6, 1, 1), (x, 48, 2, 1))]
    for other in ((x, 33), (x, 1), (x, 2**31), (x.double(), 32), (x[1:], 32)):
        kernel.launch(5, *other)
        assert launches[-1][0] == "jit", other


FAST = {"causal": True, "engine": "triton"}


@pytest.mark.as_installed
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ssmax", {"heads": 4}),
        ("ssmax", {}),
        ("relu", {"power": 2.0}),
        ("sigmoid", {"bias": -2.0}),
        ("kernel", {"function": "polynomial", "offset": 0.5}),
        ("sink", {"heads": 4}),
        ("sink", {}),
        ("alibi", {"heads": 4}),
        ("asentmax", {"heads": 4, "gamma": 0.7}),
        ("asentmax", {}),
        ("kneemax", {"share": 2.0, "temperature": 0.7, "learned": True}),
        ("entmax", {"alpha": 1.3}),
    ],
)
def test_numbers_of_rows_reach_the_kernels_as_they_are(name: str, options: dict[str, Any]) -> None:
    """Per head, one for all, or computed from n: the same as with a mask that hides nothing, which counts keys."""
    q, k, v = (t.detach() for t in draw((1, 4, 2, 1, 300, 16, 16)))
    normalizer = attnorm.get(name, **options).to(DEVICE)
    everything = torch.ones(1, 1, 1, 300, dtype=torch.bool, device=DEVICE)
    with torch.no_grad():
        for parameter in normalizer.parameters():
            parameter += torch.linspace(0.1, 0.4, max(1, parameter.numel())).to(DEVICE).view(parameter.shape)
        found = attnorm.attention(q, k, v, normalizer, **FAST)
        counted = attnorm.attention(q, k, v, normalizer, mask=everything, **FAST)
        expected = attnorm.attention(q, k, v, normalizer, causal=True, engine="blocked")
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-6)
        torch.testing.assert_close(counted, expected, rtol=2e-4, atol=2e-6)
        for parameter in normalizer.parameters():
            parameter.mul_(1.5)
            changed = attnorm.attention(q, k, v, normalizer, causal=True, engine="blocked")
            torch.testing.assert_close(attnorm.attention(q, k, v, normalizer, **FAST), changed, rtol=2e-4, atol=2e-6)


@pytest.mark.as_installed
def test_parameters_of_half_precision_and_of_other_strides() -> None:
    q, k, v = (t.detach() for t in draw((1, 4, 2, 1, 300, 16, 16)))
    normalizer = attnorm.get("ssmax", heads=4).to(DEVICE, torch.bfloat16)

    def both() -> list[Tensor]:
        return [attnorm.attention(q, k, v, normalizer, causal=True, engine=engine) for engine in ("triton", "blocked")]

    with torch.no_grad():
        torch.testing.assert_close(*both(), rtol=2e-4, atol=2e-6)
        normalizer.scale[0].s = torch.nn.Parameter(torch.rand(4, 2, device=DEVICE)[:, 1])
        torch.testing.assert_close(*both(), rtol=2e-4, atol=2e-6)
        with pytest.raises(ValueError, match="4"):
            attnorm.attention(q[:, :2], k, v, normalizer, causal=True, engine="triton")
