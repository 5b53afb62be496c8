"""Every normalizer computes its paper's formula, exactly in float64 and as exactly as can be below it."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnorm.normalizers import get
from tests.normalizers import reference

KEYS, QUERIES = 11, 6


def distance(query: int, keys: Tensor) -> Tensor:
    return KEYS - QUERIES + query - keys


def current(query: int, keys: Tensor) -> int | None:
    place = (keys == KEYS - QUERIES + query).nonzero()
    return int(place) if len(place) else None


def log_factor(train_length: int) -> Callable[[int, Tensor], float]:
    return lambda _, keys: max(1.0, math.log(len(keys)) / math.log(train_length))


def step_factor(_: int, keys: Tensor) -> float:
    return 1 + 0.1 * math.log(1 + len(keys) // 4)


# name, its options; the naive function, its options (functions of the row's query and visible keys where it needs them)
SAME: list[tuple[str, dict[str, Any], Callable[..., Tensor], dict[str, Any]]] = [
    ("softmax", {}, reference.softmax, {}),
    ("softmax", {"temperature": 0.37}, reference.softmax, {"temperature": 0.37}),
    ("sparsemax", {}, reference.sparsemax, {}),
    ("entmax15", {}, reference.entmax15, {}),
    ("entmax", {"alpha": 1.5}, reference.entmax15, {}),
    ("entmax", {"alpha": 1.2}, reference.entmax, {"alpha": 1.2}),
    ("entmax", {"alpha": 1.85}, reference.entmax, {"alpha": 1.85}),
    ("kneemax", {}, reference.kneemax, {}),
    ("kneemax", {"share": 30.0}, reference.kneemax, {"share": 30.0}),
    ("kneemax", {"knee": 0.25}, reference.kneemax, {"knee": 0.25}),
    ("ssmax", {"s": 0.43}, reference.ssmax, {"s": 0.43}),
    ("asentmax", {}, reference.asentmax, {"delta": 1.0, "beta": 0.55, "gamma": 0.0}),
    ("asentmax", {"gamma": 1.5}, reference.asentmax, {"delta": 1.0, "beta": 0.55, "gamma": 1.5}),
    ("sa_softmax", {}, reference.sa_normalised, {}),
    ("sa_softmax", {"normalised": False}, reference.sa_plain, {}),
    ("adaptive_temperature", {}, reference.adaptive_temperature, {}),
    ("sigmoid", {}, reference.sigmoid, {}),
    ("sigmoid", {"bias": -2.0}, reference.sigmoid, {"bias": -2.0}),
    ("softmax1", {}, reference.sink, {}),
    ("sink", {"logit": 1.5}, reference.sink, {"logit": 1.5}),
    ("relu", {}, reference.relu, {}),
    ("relu", {"power": 2.0}, reference.relu, {"power": 2.0}),
    ("softpick", {}, reference.softpick, {}),
    ("stick_breaking", {}, reference.stick_breaking, {}),
    ("stick_breaking", {"attend_current": False}, reference.stick_breaking, {"current": current}),
    ("topk", {"k": 3}, reference.topk, {"k": 3}),
    ("topk", {"k": "sqrt"}, reference.topk, {"k": lambda _, keys: math.ceil(math.sqrt(len(keys)))}),
    ("hard", {}, reference.hard, {}),
    ("log_scaled", {"train_length": 5}, reference.scaled, {"factor": log_factor(5)}),
    ("log_scaled", {"rule": "llama4", "floor_scale": 4}, reference.scaled, {"factor": step_factor}),
    ("log_scaled", {"rule": "yarn"}, reference.scaled, {"factor": (0.1 * math.log(4.0) + 1) ** 2}),
    ("scale_invariant", {}, reference.scale_invariant, {"distance": distance}),
    ("scale_invariant", {"tau": 2.0}, reference.scale_invariant, {"distance": distance, "tau": 2.0}),
    ("kernel", {"function": "exp"}, reference.kernel, {"function": "exp"}),
    ("kernel", {}, reference.kernel, {"function": "softplus"}),
    ("kernel", {"function": "elu+1"}, reference.kernel, {"function": "elu+1"}),
    ("kernel", {"function": "polynomial"}, reference.kernel, {"function": "square"}),
    ("local", {"window": 3}, reference.local, {"distance": distance, "window": 3}),
]
IDS = [",".join([name, *map(str, options.values())]) for name, options, _, _ in SAME]
each_normalizer = pytest.mark.parametrize(("name", "options", "naive", "naive_options"), SAME, ids=IDS)

# A parameter is a float32 number: 0.43 there is not 0.43.
OF_A_PARAMETER = 1e-7
EXACT = 1e-12


def allowed(name: str) -> float:
    return OF_A_PARAMETER if name in ("ssmax", "asentmax", "softmax") else EXACT


@each_normalizer
@pytest.mark.parametrize("spread", [0.1, 2.0, 20.0])
def test_equals_the_naive_formula_under_any_mask(
    name: str, options: dict[str, Any], naive: Callable[..., Tensor], naive_options: dict[str, Any], spread: float
) -> None:
    logits = spread * torch.randn(2, QUERIES, KEYS, dtype=torch.float64)
    mask = torch.rand(2, QUERIES, KEYS) < 0.6
    mask[0, 2] = False
    expected = reference.rowwise(naive, logits, mask, **naive_options)
    error = (get(name, **options)(logits, mask) - expected).abs().max()
    assert error <= allowed(name) * max(1.0, spread, expected.abs().max())


@each_normalizer
def test_equals_the_naive_formula_on_ties(
    name: str, options: dict[str, Any], naive: Callable[..., Tensor], naive_options: dict[str, Any]
) -> None:
    rows = [[1.0] * KEYS, [0.0] * (KEYS - 1) + [1.0], [2.0, 2.0] + [-1.0] * (KEYS - 2), [-3.0] * KEYS]
    logits = torch.tensor([*rows, [0.5, -0.5] * 5 + [0.5], [1.0, 2.0, 3.0] * 3 + [3.0, 3.0]], dtype=torch.float64)
    expected = reference.rowwise(naive, logits, **naive_options)
    torch.testing.assert_close(get(name, **options)(logits), expected, rtol=0, atol=10 * allowed(name))


@each_normalizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.5, 2.0])
def test_errs_at_most_twice_as_much_as_the_naive_formula_in_the_same_dtype(
    name: str,
    options: dict[str, Any],
    naive: Callable[..., Tensor],
    naive_options: dict[str, Any],
    dtype: torch.dtype,
    spread: float,
) -> None:
    logits = (spread * torch.randn(8, QUERIES, KEYS)).to(dtype)
    normalizer = get(name, **options)
    exact = normalizer.double()(logits.double())
    plain = reference.rowwise(naive, logits, dtype=dtype, **naive_options)
    error, plain_error = ((w.double() - exact).abs().max() for w in (normalizer.float()(logits), plain))
    # A naive formula may by luck make no error at all, as hard attention does; one unit in the last place is allowed.
    assert error <= 2 * plain_error + torch.finfo(dtype).eps * exact.abs().max()


rows = st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40)


@settings(max_examples=60)
@given(rows)
def test_the_sparse_maps_equal_sorting_on_any_row(row: list[float]) -> None:
    z = torch.tensor([row], dtype=torch.float64)
    for name, naive in (("sparsemax", reference.sparsemax), ("entmax15", reference.entmax15)):
        torch.testing.assert_close(get(name)(z), naive(z[0])[None], rtol=0, atol=1e-9)


@settings(max_examples=60)
@given(rows, st.floats(1.001, 1.999))
def test_entmax_solves_its_equation_on_any_row(row: list[float], alpha: float) -> None:
    """A distribution, ordered as the logits, with p^(alpha-1)/(alpha-1) - z the same on the whole support."""
    z = torch.tensor([row], dtype=torch.float64)
    p = get("entmax", alpha=alpha)(z)[0]
    assert abs(p.sum().item() - 1) < 1e-12
    order = z[0].argsort()
    assert (p[order].diff() >= -1e-12).all()
    multiplier = p ** (alpha - 1) / (alpha - 1) - z[0]
    on_support = multiplier[p > 0]
    scale = 1e-9 * (1 + z.abs().max().item())
    assert on_support.max() - on_support.min() <= scale
    assert (multiplier[p == 0] >= on_support.max() - scale).all()
