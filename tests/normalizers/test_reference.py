"""Every normalizer equals the reference that its file declares: to rounding in float64, and as closely below it."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnorm.normalizers import get
from attnorm.normalizers.checked_normalizer import by_definition
from attnorm.normalizers.declaration import HEADS
from attnorm.normalizers.registry import BUILT_IN
from tests.normalizers.variants import ROW_NAMES, VARIANTS, Variant

KEYS, QUERIES = 11, 6

# Hidden states enter only through learned weights: tests/attention compares those.
DECLARED = [variant for variant in VARIANTS if variant.name in BUILT_IN and variant.width is None]
each_variant = pytest.mark.parametrize("variant", DECLARED, ids=str)

# A parameter is a float32 number: 0.43 there is not 0.43.
OF_A_PARAMETER = 1e-7
EXACT = 1e-12


def allowed(normalizer: Any) -> float:
    return OF_A_PARAMETER if normalizer.state_dict() else EXACT


def expected_weights(variant: Variant, logits: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    reference = BUILT_IN[variant.name].declaration.reference
    assert reference is not None
    return by_definition(reference, logits, mask, variant.options)


def test_every_row_normalizer_declares_a_reference_and_the_default_options() -> None:
    assert len(ROW_NAMES) > 20
    for name in ROW_NAMES:
        declared = BUILT_IN[name].declaration
        assert declared.reference is not None, name
        assert {} in declared.examples, name


@each_variant
@pytest.mark.parametrize("spread", [0.1, 2.0, 20.0])
def test_equals_the_reference_under_any_mask(variant: Variant, spread: float) -> None:
    logits = spread * torch.randn(1, HEADS, QUERIES, KEYS, dtype=torch.float64)
    mask = torch.rand(HEADS, QUERIES, KEYS) < 0.6
    mask[0, 2] = False
    expected, normalizer = expected_weights(variant, logits, mask), get(variant.name, **variant.options)
    error = (normalizer(logits, mask) - expected).abs().max()
    assert error <= allowed(normalizer) * max(1.0, spread, expected.abs().max())


@each_variant
@pytest.mark.every_second("variant")
def test_equals_the_reference_on_ties(variant: Variant) -> None:
    rows = [[1.0] * KEYS, [0.0] * (KEYS - 1) + [1.0], [2.0, 2.0] + [-1.0] * (KEYS - 2), [-3.0] * KEYS]
    rows = [*rows, [0.5, -0.5] * 5 + [0.5], [1.0, 2.0, 3.0] * 3 + [3.0, 3.0]]
    logits = torch.tensor(rows, dtype=torch.float64).expand(HEADS, -1, -1)
    normalizer = get(variant.name, **variant.options)
    expected = expected_weights(variant, logits)
    torch.testing.assert_close(normalizer(logits), expected, rtol=0, atol=10 * allowed(normalizer))


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.5, 2.0])
@pytest.mark.every_second("variant", first=1)
def test_errs_at_most_twice_as_much_as_the_reference_in_the_same_dtype(
    variant: Variant, dtype: torch.dtype, spread: float
) -> None:
    logits = (spread * torch.randn(1, HEADS, 3, KEYS)).to(dtype)
    normalizer = get(variant.name, **variant.options)
    exact = normalizer.double()(logits.double())
    plain = expected_weights(variant, logits)
    error, plain_error = ((w.double() - exact).abs().max() for w in (normalizer.float()(logits), plain))
    # A plain formula may by luck make no error at all, as hard attention does; one unit in the last place is allowed.
    assert error <= 2 * plain_error + torch.finfo(dtype).eps * exact.abs().max()


rows = st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40)


@settings(max_examples=60)
@given(rows)
def test_sparsemax_equals_sorting_on_any_row(row: list[float]) -> None:
    """Martins & Astudillo's algorithm: the support is the longest prefix with 1 + k z_(k) > sum of the k largest."""
    z = torch.tensor(row, dtype=torch.float64)
    z = z - z.max()
    ordered = z.sort(descending=True).values
    sums = ordered.cumsum(0)
    k = int((1 + torch.arange(1, len(z) + 1) * ordered > sums).nonzero().max()) + 1
    expected = (z - (sums[k - 1] - 1) / k).clamp(min=0)
    torch.testing.assert_close(get("sparsemax")(z[None])[0], expected, rtol=0, atol=1e-9)


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


OTHER_NUMBERS: list[tuple[str, dict[str, Any]]] = [
    ("adaptive_temperature", {"coefficients": (-1.0, 5.0), "monotone": True}),
    ("asentmax", {"alpha": 1.7, "delta": 0.8, "beta": 0.4, "gamma": 0.3}),
    ("entmax", {"alpha": 1.2}),
    ("kernel", {"function": "polynomial", "power": 4, "offset": 0.7}),
    ("kernel", {"function": "polynomial", "offset": -0.7}),
    ("kneemax", {"share": 2.5, "temperature": 0.7}),
    ("kneemax", {"knee": 0.1, "temperature": 1.3}),
    ("local", {"window": 4}),
    ("log_scaled", {"train_length": 3}),
    ("log_scaled", {"rule": "llama4", "attention_scale": 0.3, "floor_scale": 3}),
    ("log_scaled", {"rule": "yarn", "extension": 2.5}),
    ("norm_softmax", {"temperature": 1.4}),
    ("odd_polynomial", {"power": 7}),
    ("relu", {"power": 1.5}),
    ("scale_invariant", {"tau": 3.0}),
    ("sigmoid", {"bias": 0.7}),
    ("sink", {"logit": -0.4}),
    ("softcap", {"cap": 1.7}),
    ("softmax", {"temperature": 1.9}),
    ("softpick", {"eps": 0.3}),
    ("ssa", {"beta": 0.8}),
    ("ssmax", {"s": 0.9, "train_length": 7}),
    ("ssmax", {"rho": 0.4, "size": 0.5}),
    ("ssmax", {"train_length": 7}),
    ("tempered", {"map": "entmax15", "temperature": 0.6}),
    ("threshold_relu", {"beta": 0.7, "power": 1.5}),
    ("topk", {"k": 2}),
    ("nearmax", {"knee": 0.4}),
]


@pytest.mark.parametrize(("name", "options"), OTHER_NUMBERS)
def test_equals_the_reference_with_numbers_that_are_no_example(name: str, options: dict[str, Any]) -> None:
    logits = 2 * torch.randn(1, HEADS, QUERIES, KEYS, dtype=torch.float64)
    expected, normalizer = expected_weights(Variant(name, options), logits), get(name, **options)
    error = (normalizer(logits) - expected).abs().max()
    assert error <= allowed(normalizer) * max(2.0, float(expected.abs().max()))
