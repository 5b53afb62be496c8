"""Calls for the Triton kernels, on a GPU or in Triton's interpreter, and their comparison with float64."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import attnorm

triton = pytest.importorskip("triton", reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

HALF = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]  # the interpreter knows no bfloat16

SQUARE = (2, 2, 2, 40, 40, 16, 16)  # batch, heads, key heads, queries, keys, width, width of the values
GROUPS = (1, 4, 2, 20, 70, 24, 40)
WIDE = (1, 4, 2, 20, 70, 192, 256)  # in float32 they have tiles of their own
MORE_QUERIES = (1, 2, 1, 70, 20, 16, 16)
SMALL = (1, 1, 1, 20, 20, 16, 16)
PAST_THE_EDGES = (1, 2, 1, 33, 129, 17, 3)  # of tiles


def draw(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, spread: float = 2.0) -> tuple[Tensor, ...]:
    batch, heads, key_heads, queries, keys, width, v_width = shape
    generator = torch.Generator().manual_seed(0)
    sizes = ((batch, heads, queries, width), (batch, key_heads, keys, width), (batch, key_heads, keys, v_width))
    q, k, v = (torch.randn(size, generator=generator).to(DEVICE) for size in sizes)
    return tuple(t.to(dtype).requires_grad_() for t in (spread * q, k, v))


def mask_of(kind: str, shape: tuple[int, ...]) -> Tensor | None:
    if kind == "none":
        return None
    batch, heads, _, queries, keys, _, _ = shape
    size = {"padding": (batch, 1, 1, keys), "rows": (batch, 1, queries, keys), "heads": (1, heads, queries, keys)}[kind]
    mask = torch.rand(size, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[..., : keys // 2] &= keys < 128  # whole tiles are hidden
    return mask.to(DEVICE)


def run(
    tensors: tuple[Tensor, ...], normalizer: Any, engine: Any, rows: Tensor | None = None, **options: Any
) -> list[Tensor]:
    """Output and gradients, those of the normalizer's parameters too. rows: (B, H, Q), True = has a gradient."""
    output = attnorm.attention(*tensors, normalizer, engine=engine, **options)
    learned = [p for p in normalizer.parameters() if p.requires_grad]
    probe = torch.linspace(-1, 1, output.numel(), device=DEVICE, dtype=torch.float64).reshape(output.shape)
    probe = probe if rows is None else probe * rows[..., None]
    return [output, *torch.autograd.grad((output.double() * probe).sum(), [*tensors, *learned])]


def assert_follows(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).norm() <= tolerance * b.norm().clamp(min=1e-6)


def exactly(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.detach().double().requires_grad_() for t in tensors)


# Triton's front end finds and verifies the mistakes that the kernels themselves can hold: names, types, shapes,
# constants. To lower what it makes to machine code takes nine tenths of the time, and is done at night, as other
# constants of the same kernel are.
COMPILER = """
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

class FrontEndPassed(Exception):
    pass

def stop(*_):
    raise FrontEndPassed

triton.runtime.cache.triton_key = lambda: triton.__version__  # or it hashes the libraries, a third of the time
lower, compiled = CUDABackend.make_ttir, set()

def compiles(kernel, constants, types, capability=90, *, lowered=LOWERED, **options):
    if kernel in compiled and not lowered:
        return
    compiled.add(kernel)
    given = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {name: "constexpr" if name in given else types.get(name, "i32") for name in kernel.arg_names}
    source, target = ASTSource(kernel, signature, constexprs=given), GPUTarget("cuda", capability, 32)
    CUDABackend.make_ttir = staticmethod(lower if lowered else stop)
    try:
        assert "ptx" in triton.compile(source, target=target, options=options).asm
    except FrontEndPassed:
        pass
"""
each_depth = pytest.mark.parametrize("lowered", [False, pytest.param(True, marks=pytest.mark.nightly)])


def assert_compiles(script: str, lowered: bool) -> None:
    """Run a script that calls `compiles` for each of its kernels, without the interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    program = COMPILER.replace("LOWERED", str(lowered)) + script
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
