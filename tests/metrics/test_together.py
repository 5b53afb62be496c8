"""Sampled rows measured as on a GPU, in a few operations for several layers, have the numbers of each layer alone."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnorm.metrics.call import AttentionCall, stack_calls
from attnorm.metrics.reads import coverage_sums
from attnorm.metrics.sensitivity import directions_ahead, measure_sensitivity
from attnorm.metrics.vectors import NULLS, NUMBERS, isotropy, measure_vectors, permutations_ahead
from tests.metrics.as_on_gpu import as_on_gpu
from tests.metrics.calls import HEADS, KEY_HEADS, generators, left_padding, make_call, window
from tests.metrics.layer_coverage import measure_coverage
from tests.metrics.test_rows import in_float64
from tests.metrics.test_vectors import check

LAYERS = 2
TOP_N = (1, 3, 20, 100)
TEMPERATURES, EPSILONS = (0.5, 1.0, 4.0), (0.1, 10.0)
ROWS = torch.arange(12, 33)  # more than have a null
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "bidirectional": {"causal": False, "kind": "encoder"},
    "left padding": {"mask": left_padding(33, 6)},
    "window": {"mask": window(33, 9)},
    "softcap": {"softcap": 3.0},
    "sharp": {"size": 60.0},
}

OFTEN = ("bidirectional", "left padding", "softcap", "sharp")


def in_turn(values: Iterable[Any]) -> list[Any]:
    """Each value with whole or cut blocks, in turn; with the other at night."""
    return [
        pytest.param(value, parts, marks=pytest.mark.nightly if (number + other) % 2 else ())
        for number, value in enumerate(values)
        for other, parts in enumerate(["whole", "in parts"])
    ]


@pytest.fixture
def _parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in parts":
        monkeypatch.setattr("attnorm.metrics.call.CUDA_BLOCK_ELEMENTS", 50_000)
        monkeypatch.setattr("attnorm.metrics.vectors.GPU_NULL_ELEMENTS", 7_000)
        monkeypatch.setattr("attnorm.metrics.vectors.GPU_POINT_ELEMENTS", 60_000)
        monkeypatch.setattr("attnorm.metrics.separability.ALONG_ELEMENTS", 20_000)
        monkeypatch.setattr("attnorm.metrics.sensitivity.GPU_ELEMENTS", 40_000)
        monkeypatch.setattr("attnorm.theory.distance.PAIRS_AT_ONCE", 20_000)
        monkeypatch.setattr("attnorm.theory.rank_one_eigenvalues.GPU_BLOCK", 1_000)


def layers(**options: Any) -> list[AttentionCall]:
    return [make_call(33, seed=seed, **options) for seed in range(LAYERS)]


def same(found: dict[str, torch.Tensor], expected: list[dict[str, torch.Tensor]], names: Any) -> None:
    for name in names:
        whole = torch.cat([one[name] for one in expected], 1)
        torch.testing.assert_close(found[name], whole, rtol=2e-5, atol=1e-6, equal_nan=True, msg=name)
        assert not whole.isnan().all()


@pytest.mark.usefixtures("_parts")
@pytest.mark.parametrize(
    ("kind", "_parts"),
    [
        one if one.values[0] in OFTEN else pytest.param(*one.values, marks=pytest.mark.nightly)
        for one in in_turn(OPTIONS)
    ],
    indirect=["_parts"],
)
def test_vectors(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = layers(**OPTIONS[kind])
    expected = [
        measure_vectors(call, [None, "ssmax"], ROWS, TOP_N, generator=generator, permutations=3)
        for call, generator in zip(calls, generators(LAYERS), strict=True)
    ]
    as_on_gpu(monkeypatch)
    found = measure_vectors(
        stack_calls(calls), [None, "ssmax"], ROWS, TOP_N, generator=generators(LAYERS), permutations=3
    )
    for name in ("model", "ssmax"):
        same(found[name], [one[name] for one in expected], (*NUMBERS, *NULLS))


@pytest.mark.usefixtures("_parts")
@pytest.mark.parametrize(("kind", "_parts"), in_turn(OPTIONS), indirect=["_parts"])
def test_sensitivity(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = layers(**OPTIONS[kind])
    choices = [None, "entmax15"]
    expected = [
        measure_sensitivity(call, choices, ROWS, TEMPERATURES, EPSILONS, generator)
        for call, generator in zip(calls, generators(LAYERS), strict=True)
    ]
    as_on_gpu(monkeypatch)
    found = measure_sensitivity(stack_calls(calls), choices, ROWS, TEMPERATURES, EPSILONS, generators(LAYERS))
    for name, numbers in found.items():
        same(numbers, [one[name] for one in expected], numbers)


@pytest.mark.usefixtures("_parts")
@pytest.mark.parametrize(("kind", "_parts"), in_turn(OPTIONS), indirect=["_parts"])
def test_coverage_and_isotropy(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = layers(**OPTIONS[kind])
    alone = [measure_coverage(call, [None], ROWS, TOP_N)["model"] for call in calls]
    distances = [isotropy(call.value_BGKE).smallest_distance for call in calls]
    as_on_gpu(monkeypatch)
    sums, counts = coverage_sums(stack_calls(calls), [None], ROWS, TOP_N, LAYERS)["model"]
    assert counts.tolist() == [one.rows for one in alone]
    expected = torch.stack([torch.stack([one.per_head, one.union, one.independent]) * one.rows for one in alone], 1)
    torch.testing.assert_close(sums, expected)
    torch.testing.assert_close(isotropy(stack_calls(calls).value_BGKE).smallest_distance, torch.cat(distances, 1))


@pytest.mark.parametrize("choice", [None, "sigmoid", "stick_breaking"])
def test_the_dense_reference(choice: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_gpu(monkeypatch)
    call = in_float64(make_call(20, batch=1))
    check(call, choice, call.value_BGKE.repeat_interleave(HEADS // KEY_HEADS, 1))


def test_equal_vectors_lie_at_distance_0_within_the_digits_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The subtraction that a CPU makes again takes float64 on a GPU."""
    call = make_call(40, batch=1, size=0.0)
    vectors = call.value_BGKE[:, :, :1].expand(-1, -1, 40, -1) * (1 + 1e-6 * torch.arange(40)[:, None])
    call = replace(call, value_BGKE=vectors.contiguous())
    rows = torch.tensor([20, 39])
    expected = measure_vectors(call, [None], rows, (1, 4))["model"]
    as_on_gpu(monkeypatch)
    found = measure_vectors(call, [None], rows, (1, 4))["model"]
    for name in ("d_tilde", "relative_distance", "fixed_tight", "random_lower", "random_upper"):
        scale = expected["random_upper"].abs().max()
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-6 * float(scale), msg=name)


@pytest.mark.usefixtures("_parts")
@pytest.mark.parametrize(
    ("options", "_parts"), in_turn([{}, {"causal": False, "kind": "encoder"}]), indirect=["_parts"]
)
def test_random_numbers_drawn_ahead_are_those_of_the_generator(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = layers(**options)
    as_on_gpu(monkeypatch)
    permuted = [permutations_ahead(call, ROWS, one) for call, one in zip(calls, generators(LAYERS), strict=True)]
    moved = [directions_ahead(call, ROWS, one) for call, one in zip(calls, generators(LAYERS), strict=True)]
    whole = stack_calls(calls)
    ahead, drawn = (
        measure_vectors(whole, [None], ROWS, TOP_N, generator=one) for one in (permuted, generators(LAYERS))
    )
    for name in NULLS:
        assert torch.equal(ahead["model"][name].nan_to_num(-1), drawn["model"][name].nan_to_num(-1))
    ahead, drawn = (
        measure_sensitivity(whole, [None], ROWS, TEMPERATURES, EPSILONS, one) for one in (moved, generators(LAYERS))
    )
    for name, value in drawn["model"].items():
        assert torch.equal(ahead["model"][name], value)


def test_permutations_of_keys_that_a_mask_hides_cannot_be_drawn_ahead() -> None:
    with pytest.raises(ValueError, match="layer 0"):
        permutations_ahead(make_call(33, mask=window(33, 9)), ROWS, torch.Generator())


def test_top_n_in_any_order() -> None:
    call = make_call(40, batch=1)
    rows = torch.tensor([30, 39])
    ordered, given = (
        measure_vectors(call, [None], rows, top_n, generator=torch.Generator().manual_seed(0))["model"]
        for top_n in ((1, 4, 9), (9, 1, 4))
    )
    for name in (*NUMBERS, *NULLS):
        torch.testing.assert_close(given[name], ordered[name][..., [2, 0, 1]], equal_nan=True)
