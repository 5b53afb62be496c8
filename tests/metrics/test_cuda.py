"""On CUDA the same numbers as on the CPU. Skipped without a GPU."""

import dataclasses

import pytest
import torch

from attnorm.metrics.call import AttentionCall, logit_blocks, stack_calls
from attnorm.metrics.catalogue import PER_ROW
from attnorm.metrics.reads import coverage_sums
from attnorm.metrics.rows import measure_rows
from attnorm.metrics.sensitivity import measure_sensitivity
from attnorm.metrics.vectors import NULLS, NUMBERS, isotropy, measure_vectors
from tests.metrics.calls import CALLS, ROW_NORMALIZERS, generators, make_call
from tests.metrics.layer_coverage import measure_coverage
from tests.metrics.test_rows import TOP_N, in_float64, same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=["kernel", "blocks"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls have few rows, which go through blocks of logits unless the kernel takes one row already."""
    if request.param == "kernel":
        monkeypatch.setattr("attnorm.metrics.fused_rows.MIN_KERNEL_ROWS", 1)


def on_cuda(call: AttentionCall) -> AttentionCall:
    moved = {name: value.cuda() for name, value in vars(call).items() if isinstance(value, torch.Tensor)}
    return dataclasses.replace(call, **moved)


@pytest.mark.parametrize("kind", [kind for kind in CALLS if kind != "large logits"])
def test_rows(kind: str) -> None:
    call = CALLS[kind]
    rows = torch.arange(call.query_BHQD.shape[-2])
    expected, found = (measure_rows(one, [None], rows, TOP_N, mass_rows=None)["model"] for one in (call, on_cuda(call)))
    for name in PER_ROW:
        if not name.startswith("horizon"):
            same(found.values[name].cpu(), expected.values[name], 1e-4, name)
    same(found.top_mass.cpu(), expected.top_mass, 1e-4, "top_mass")


@pytest.mark.parametrize("name", ROW_NORMALIZERS)
def test_every_normalizer(name: str) -> None:
    call = CALLS["causal"]
    rows = torch.arange(33)
    expected, found = (measure_rows(one, [name], rows, TOP_N, mass_rows=None)[name] for one in (call, on_cuda(call)))
    for metric in ("entropy_nats", "row_sum", "sink_mass", "max_weight"):
        same(found.values[metric].cpu(), expected.values[metric], 1e-4, metric)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_half_precision_are_those_of_float32(dtype: torch.dtype) -> None:
    call, rows = CALLS["causal"], torch.arange(33)
    call = dataclasses.replace(call, query_BHQD=call.query_BHQD.to(dtype), key_BGKD=call.key_BGKD.to(dtype))
    expected, found = (
        [block.logits.cpu().clone() for block in logit_blocks(one, rows, block_elements=2**10)]
        for one in (call, on_cuda(call))
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_what_needs_few_rows() -> None:
    call, rows = CALLS["causal"], torch.tensor([10, 20, 32])
    expected, found = (measure_vectors(one, [None], rows, (1, 5))["model"] for one in (call, on_cuda(call)))
    for name in NUMBERS:
        same(found[name].cpu(), expected[name], 1e-3, name)
    covered = [measure_coverage(one, [None], rows, (1, 5))["model"] for one in (call, on_cuda(call))]
    torch.testing.assert_close(covered[0].union, covered[1].union)
    norms = [measure_sensitivity(one, [None], rows, (0.5, 1.0), (0.1,))["model"] for one in (call, on_cuda(call))]
    same(norms[1]["jacobian_norm"].cpu(), norms[0]["jacobian_norm"], 1e-4, "jacobian_norm")


def test_sampled_rows_of_several_layers_have_the_numbers_of_each_alone() -> None:
    calls, rows = [in_float64(make_call(150, seed=seed)) for seed in range(3)], torch.arange(120, 150)
    together = on_cuda(stack_calls(calls))
    found = measure_vectors(together, [None], rows, (1, 5, 100), generator=generators(3))["model"]
    moves = measure_sensitivity(together, [None], rows, (0.5, 1.0), (0.1,), generators(3))["model"]
    for layer, (call, one, other) in enumerate(zip(calls, generators(3), generators(3), strict=True)):
        heads = slice(4 * layer, 4 * layer + 4)
        alone = measure_vectors(call, [None], rows, (1, 5, 100), generator=one)["model"]
        for name in (*NUMBERS, *NULLS):
            same(found[name][:, heads].cpu(), alone[name], 1e-3, name)
        for name, value in measure_sensitivity(call, [None], rows, (0.5, 1.0), (0.1,), other)["model"].items():
            same(moves[name][:, heads].cpu(), value, 1e-3, name)


def test_sampled_rows_do_not_wait_for_the_gpu() -> None:
    call, rows = on_cuda(stack_calls([make_call(150, seed=seed) for seed in range(3)])), torch.arange(120, 150)

    def measure() -> None:
        measure_vectors(call, [None], rows, (1, 5, 100), generator=generators(3))
        measure_sensitivity(call, [None], rows, (0.5, 1.0), (0.1,), generators(3))
        coverage_sums(call, [None], rows, (1, 5, 100), 3)
        isotropy(call.value_BGKE)

    measure()  # libraries that are loaded at first use may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        measure()
    finally:
        torch.cuda.set_sync_debug_mode("default")
