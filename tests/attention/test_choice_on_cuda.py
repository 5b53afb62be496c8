"""Which engine `auto` takes on CUDA. The tensors are fake: they have a device and no numbers, so no GPU is needed."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import attnorm
from attnorm import mechanisms
from attnorm.attention import choose_engine
from attnorm.engines import execution, one_pass
from attnorm.engines.inputs import Inputs, validate_inputs
from attnorm.kernels import launch
from attnorm.kernels.one_pass import _forward_tile as forward_tile
from attnorm.kernels.threshold import tiles as tiles_of
from attnorm.metrics.fused_rows import output_tile
from attnorm.normalizers.contract import Normalizer
from attnorm_lab.training.lm.attention import _runs_on_kernels, fastest_attention

FOLDED: dict[str, dict[str, Any]] = {
    "ssmax": {"s": 0.43},
    "softmax": {"temperature": 0.3},
    "log_scaled": {"train_length": 8},
    "adaptive_temperature": {},
}
H200, A100, RTX = 232_448, 166_912, 101_376  # bytes of shared memory that a program may have


@pytest.fixture(autouse=True)
def capability(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    """That of the GPU the tensors are on, to be changed by a test."""
    found = {"gpu": (9, 0)}
    monkeypatch.setattr(execution, "HAS_TRITON", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: found["gpu"])
    for module, name in ((execution, "_has_capability"), (launch, "_shared_memory")):
        monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)  # remembers nothing
    return found


def with_shared_memory(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(shared_memory_per_block_optin=size)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)


def on_cuda(
    dtype: torch.dtype = torch.bfloat16,
    queries: int = 64,
    width: int = 64,
    scale: float | None = None,
    keys: int = 64,
    groups: int = 1,
) -> Inputs:
    with FakeTensorMode():
        q = torch.empty(1, 2 * groups, queries, width, dtype=dtype, device="cuda")
        k = torch.empty(1, 2, keys, width, dtype=dtype, device="cuda")
        return validate_inputs(q, k, k, mask=None, causal=True, scale=scale, positions=None)


def with_padding(inputs: Inputs) -> Inputs:
    with FakeTensorMode():
        return replace(inputs, mask=torch.empty(1, 1, 1, inputs.keys, dtype=torch.bool, device="cuda"))


def normalizer(name: str, **options: Any) -> Normalizer:
    found = attnorm.get(name, **options)
    assert isinstance(found, Normalizer)
    return found


def choice(inputs: Inputs, one: Normalizer) -> str:
    with torch.no_grad():
        return choose_engine(inputs, one)


@pytest.mark.parametrize("name", FOLDED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_where_half_precision_does_not_round_q_after_a_factor(name: str, dtype: torch.dtype) -> None:
    one = normalizer(name, **FOLDED[name])
    assert choice(replace(on_cuda(dtype), dropout=0.1), one) == "blocked"
    assert choice(on_cuda(dtype, queries=1), one) == ("triton" if name == "adaptive_temperature" else "blocked")
    assert choice(on_cuda(dtype, width=320), one) == "blocked"
    assert choice(on_cuda(dtype, queries=32), one) == "triton"
    assert choice(with_padding(on_cuda(dtype)), one) == "triton"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_rounds_q_for_speed_after_factors_of_ordinary_size_only(
    dtype: torch.dtype, capability: dict[str, tuple[int, int]]
) -> None:
    def choices() -> dict[str, str]:
        return {name: choice(on_cuda(dtype), normalizer(name, **options)) for name, options in FOLDED.items()}

    rounded = {"ssmax": "fused", "log_scaled": "fused"}
    assert choices() == {"softmax": "triton", "adaptive_temperature": "triton", **rounded}
    with_gradient = choose_engine(on_cuda(dtype), normalizer("ssmax"))  # in float16 that of q might overflow
    assert with_gradient == ("fused" if dtype == torch.bfloat16 else "triton")
    capability["gpu"] = (7, 5)
    assert choices() == {"softmax": "blocked", "adaptive_temperature": "blocked", **rounded}


@pytest.mark.parametrize("name", ["sa_softmax", "stick_breaking", "topk"])
def test_what_ran_in_blocks_runs_on_a_kernel(name: str) -> None:
    for inputs in (on_cuda(), on_cuda(torch.float32), on_cuda(width=256)):
        assert choice(inputs, normalizer(name)) == "triton"


@pytest.mark.parametrize("name", ["sigmoid", "relu", "softpick", "kernel"])
def test_float64_runs_in_blocks(name: str) -> None:
    assert choice(on_cuda(torch.float64), normalizer(name)) == "blocked"


@pytest.mark.parametrize("name", ["sigmoid", "entmax15", "stick_breaking"])
def test_wide_heads_in_float32_run_on_a_kernel_where_its_tiles_fit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wide, narrow, half = on_cuda(torch.float32, width=129), on_cuda(torch.float32, width=128), on_cuda(width=256)
    with_shared_memory(H200, monkeypatch)
    kernels = choice(wide, normalizer(name))
    assert kernels in ("triton", "sparse")
    with_shared_memory(A100, monkeypatch)
    chosen = [choice(inputs, normalizer(name)) for inputs in (wide, narrow, half)]
    assert chosen == ["blocked", kernels, kernels]


def test_tiles_that_a_gpu_does_not_hold_are_smaller_there(monkeypatch: pytest.MonkeyPatch) -> None:
    half, wide, single = (
        on_cuda(*of).q_BHQD for of in ((torch.bfloat16, 64, 128), (torch.bfloat16, 64, 256), (torch.float32, 64, 128))
    )
    tiles = {}
    for size in (H200, A100, RTX):
        with_shared_memory(size, monkeypatch)
        forward = [forward_tile(half, half, True, masked) for masked in (False, True)]
        tiles[size] = [*forward, tiles_of(half, half).queries_on(half), output_tile(wide), output_tile(single)]
    assert tiles[A100] == tiles[H200]
    for large, small in zip(tiles[H200], tiles[RTX], strict=True):
        assert small[0] * small[1] * small[3] < large[0] * large[1] * large[3]


def test_decoding_with_more_rows_than_a_gpu_holds_runs_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (on_cuda(torch.float32, 1, 128, keys=1024, groups=groups) for groups in (32, 33))
    for name in ("sigmoid", "entmax15"):
        chosen = []
        for size in (H200, A100, RTX):
            with_shared_memory(size, monkeypatch)
            chosen += [choice(inputs, normalizer(name)) for inputs in (few, many)]
        assert chosen == ["triton", "triton", "triton", "blocked", "triton", "blocked"]


def test_decoding_runs_on_a_kernel_where_sdpa_would_round_q_or_copy_the_cache() -> None:
    cache = on_cuda(queries=1, keys=1024)
    expected = {"softmax": "fused", "softmax1": "triton", "ssmax": "triton", "sigmoid": "triton"}
    searched = ("entmax15", "kneemax", "topk", "sa_softmax", "stick_breaking", "adaptive_temperature", "norm_softmax")
    expected |= dict.fromkeys(searched, "triton")
    assert {name: choice(cache, normalizer(name)) for name in expected} == expected
    assert choose_engine(cache, normalizer("ssmax")) == "blocked", "its parameter needs a gradient"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sdpa_runs_with_factors_where_q_has_the_digits(dtype: torch.dtype) -> None:
    one = normalizer("ssmax")
    assert choice(on_cuda(dtype), one) == "fused"
    assert choice(replace(on_cuda(dtype, queries=1), dropout=0.1), one) == "fused"


def test_sdpa_runs_without_factors() -> None:
    for inputs in (on_cuda(), replace(on_cuda(), dropout=0.1), on_cuda(queries=1), on_cuda(width=320)):
        assert choice(inputs, normalizer("softmax")) == "fused"
    assert choice(replace(on_cuda(), dropout=0.1), normalizer("softmax1")) == "fused"
    assert choice(on_cuda(), normalizer("softmax1")) == "triton"


def test_a_small_scale_is_a_factor_as_well() -> None:
    assert choice(on_cuda(scale=7e-4), normalizer("softmax")) == "triton"
    assert choice(on_cuda(scale=7e-4, queries=1), normalizer("softmax")) == "blocked"
    assert choice(on_cuda(torch.float32, scale=7e-4), normalizer("softmax")) == "fused"


def test_an_exported_graph_does_not_round_q_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", True)
    assert choice(on_cuda(), normalizer("softmax")) == "fused"
    assert choice(on_cuda(), normalizer("ssmax")) == "blocked"


def test_a_mechanism_does_not_round_q_either(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((mechanisms.fused, "fused"), (mechanisms, "blocked")):
        monkeypatch.setattr(module, name, lambda *_, name=name: name)
    assert mechanisms.attend(on_cuda(queries=1), normalizer("softmax")) == "fused"  # type: ignore[comparison-overlap]
    assert mechanisms.attend(on_cuda(queries=1), normalizer("ssmax")) == "blocked"  # type: ignore[comparison-overlap]


def test_a_mechanism_in_an_exported_graph_runs_without_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((mechanisms.fused, "fused"), (mechanisms, "blocked"), (one_pass, "one_pass")):
        monkeypatch.setattr(module, name, lambda *_, name=name: name)
    assert mechanisms.attend(on_cuda(), normalizer("ssmax")) == "one_pass"  # type: ignore[comparison-overlap]
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", True)
    assert mechanisms.attend(on_cuda(), normalizer("ssmax")) == "blocked"  # type: ignore[comparison-overlap]


def test_a_block_is_compiled_whole_where_a_kernel_takes_its_normalizer(monkeypatch: pytest.MonkeyPatch) -> None:
    with_shared_memory(RTX, monkeypatch)
    in_bfloat16 = ("sigmoid", "entmax15", "stick_breaking", "nearmax", "alibi", "gaussian", "adaptive_temperature")
    in_float32 = in_bfloat16[:-1]
    made = {name: attnorm.get(name) for name in (*in_bfloat16, "linear", "hard")}
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    with FakeTensorMode():
        for dtype, names in (("bfloat16", in_bfloat16), ("float32", in_float32)):
            assert tuple(name for name, one in made.items() if _runs_on_kernels(one, 64, gpu, [dtype])) == names
        assert not _runs_on_kernels(made["gaussian"], 64, gpu, ["float16"])  # its squares leave the range
        assert not _runs_on_kernels(made["gaussian"], 128, gpu, ["float32"])  # with them it is too wide
        assert not _runs_on_kernels(made["sigmoid"], 64, cpu, ["bfloat16"])
        assert fastest_attention("nearmax", gpu) == "engine"
        assert fastest_attention("hard", gpu) == "dense"
