"""The error that each check allows: computed here from its definition, for normalizers whose weights are known."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnorm.normalizers import Normalizer, contract_checks, get
from attnorm.normalizers.checked_normalizer import CheckedNormalizer, exceeds, largest, some_mask
from attnorm.normalizers.contract_checks import CHECKS
from attnorm.normalizers.declaration import Row
from attnorm.normalizers.threshold import newton_step

Limits = Callable[..., list[float]]


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Limits:
    """Runs a check and returns the errors that it allowed, in order."""
    allowed: list[float] = []

    def spy(found: float, limit: float) -> bool:
        allowed.append(limit)
        return exceeds(found, limit)

    monkeypatch.setattr(contract_checks, "exceeds", spy)

    def run(check: str, subject: CheckedNormalizer) -> list[float]:
        allowed.clear()
        assert not list(CHECKS[check](subject))
        return allowed

    return run


def softmax() -> CheckedNormalizer:
    return CheckedNormalizer.of(get("softmax"), 2, None)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def masked_softmax(logits: Tensor, mask: Tensor) -> Tensor:
    return logits.double().masked_fill(~mask, -torch.inf).softmax(-1)


def plain(low: Tensor, mask: Tensor) -> Tensor:
    """Softmax as a computation in float32 gives it at best: every number that is added up is one unit off."""
    n, eps = low.shape[-1], 2.0**-23
    signs, other_signs = (
        torch.randn(low.shape, generator=torch.Generator().manual_seed(seed)).double().sign() for seed in (11, 12)
    )
    off = signs * (low.double().abs() + 1 + math.log(n)) / 2**23
    return (masked_softmax(low.double() + off, mask) * (1 + other_signs * (eps + eps * math.log(n)))).float().double()


def twice_the_error(low: Tensor) -> float:
    mask = some_mask(low)
    exact = masked_softmax(low, mask)
    rounded = plain(low, mask) if low.dtype == torch.float32 else exact.to(low.dtype).double()
    return 2 * float((rounded - exact).abs().max())


def test_float32_may_lose_twice_what_plain_arithmetic_loses(limits: Limits) -> None:
    logits = drawn(2, 2, 7, 257)
    expected = [twice_the_error((spread * logits).float()) for spread in (1e-3, 0.3, 1.0, 10.0)]
    assert limits("single_precision", softmax()) == pytest.approx(expected, rel=1e-9)


def test_large_logits_may_lose_twice_what_plain_arithmetic_loses(limits: Limits) -> None:
    near = 2 * drawn(2, 2, 5, 67)
    expected = [twice_the_error(case.float()) for case in (near.sign() * 10_000, near + 10_000, near - 10_000)]
    assert limits("large_precision", softmax()) == pytest.approx(expected, rel=1e-9)


def test_half_precision_may_lose_twice_one_rounding(limits: Limits) -> None:
    logits = drawn(2, 2, 7, 257)
    spreads = (1e-3, 0.3, 1.0, 10.0)
    both = [[twice_the_error((s * logits).to(dtype)) for s in spreads] for dtype in (torch.float16, torch.bfloat16)]
    expected = [*both[0], *both[0], *both[1], *both[1]]  # with parameters in float32 and in the dtype itself
    assert limits("half_precision", softmax()) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("factor", [1, 50])
def test_the_reference_may_differ_by_1e_10_of_the_largest_number(limits: Limits, factor: int) -> None:
    def reference(row: Row) -> Tensor:
        return factor * row.z.softmax(-1)

    class Scaled(Normalizer):
        def forward(self, logits: Tensor, mask: Tensor | None = None, **_: object) -> Tensor:
            assert mask is not None
            return factor * masked_softmax(logits, mask)

    made = Scaled(get("softmax").map, name="scaled")
    heaviest = [
        factor * float(masked_softmax(spread * drawn(2, 2, 5, 7), some_mask(drawn(2, 2, 5, 7))).max())
        for spread in (0.1, 2.0, 20.0)
    ]
    expected = [1e-10 * max(1.0, spread, top) for spread, top in zip((0.1, 2.0, 20.0), heaviest, strict=True)]
    assert limits("reference", CheckedNormalizer.of(made, 2, None, reference)) == pytest.approx(expected, rel=1e-9)


def test_a_shift_may_change_64_units_of_what_the_map_sees(limits: Limits) -> None:
    assert limits("shift", softmax()) == [64 * 2.0**-52] * 4 + [64 * 2.0**-23] * 4
    scaled = CheckedNormalizer.of(get("log_scaled"), 2, None)
    logits = (2 * drawn(2, 2, 5, 7) * 8).round() / 8
    seen = [float(scaled.prepared(logits + offset).abs().max()) for offset in (1.0, -37.5, 1e6, -1e6)]
    assert seen[2] > 1e5
    assert limits("shift", scaled) == pytest.approx([2.0**-46 * (1 + each) for each in seen], rel=1e-9)


def test_jacobians_may_exceed_the_lipschitz_constant_by_1e_5_of_it(limits: Limits) -> None:
    assert set(limits("lipschitz", softmax())) == {1e-12, 0.5 * 1.00001 + 1e-12}


@pytest.mark.parametrize(
    ("check", "count", "limit"),
    [
        ("row_sums", 6, 1e-10), ("sign", 6, 0), ("permutation", 1, 1e-10), ("hidden_keys", 2, 0),
        ("padding", 5, 1e-10), ("mask_shapes", 9, 1e-10), ("single_key", 5, 1e-10), ("rows_alone", 13, 1e-10),
        ("strided", 6, 1e-10),
    ],
)  # fmt: skip
def test_all_other_checks_allow_rounding_of_1e_10_or_nothing(
    limits: Limits, check: str, count: int, limit: float
) -> None:
    assert limits(check, softmax()) == [limit] * count


def test_hidden_rows_may_change_nothing(limits: Limits) -> None:
    assert limits("empty_rows", softmax()) == [0, 0, 1e-10]


def test_compiled_code_may_differ_by_1e_5_of_the_largest_number(
    limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Normalizer, "compile", lambda self, **_: None)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    assert limits("compiled", softmax()) == [1e-5, 1e-5]

    class Steep(Normalizer):
        def forward(self, logits: Tensor, mask: Tensor | None = None, **_: object) -> Tensor:
            return 1000 * logits

    cotangent = drawn(2, 2, 5, 131, seed=3).float().abs().max()
    weights = 1000 * (2 * drawn(2, 2, 5, 131)).float().abs().max()
    steep = CheckedNormalizer.of(Steep(get("softmax").map, name="steep"), 2, None)
    assert limits("compiled", steep) == pytest.approx([1e-5 * float(weights), 1e-2 * float(cotangent)], rel=1e-6)


@pytest.mark.parametrize(("declared", "climbed"), [(1.0, [1, 2, 5]), (0.0, [])])
def test_only_rows_of_a_few_keys_that_keep_the_bound_are_searched_further(
    declared: float, climbed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key has the norm 0, so that a bound of 0 is exceeded from two keys on."""
    seen: list[int] = []

    def climb(_: CheckedNormalizer, rows: Tensor, bound: float) -> float:
        assert (len(rows), bound) == (contract_checks.CLIMBERS, declared)
        seen.append(rows.shape[-1])
        return 0.0

    monkeypatch.setattr(contract_checks, "_climb", climb)
    monkeypatch.setattr(Normalizer, "lipschitz", lambda *_: declared)
    complaints = list(contract_checks.lipschitz(softmax()))
    assert seen == (climbed or [1])
    assert len(complaints) == (0 if climbed else 3)


def test_the_largest_value_of_nothing_is_0() -> None:
    assert largest(torch.empty(0)) == 0.0
    assert largest(torch.tensor([1.0, -3.0])) == 3.0
    assert math.isnan(largest(torch.tensor([1.0, math.nan])))


def test_a_single_row_whose_sum_is_not_finite_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = CheckedNormalizer.__call__

    def broken(subject: CheckedNormalizer, logits: Tensor, mask: Tensor | None = None) -> Tensor:
        weights = plain(subject, logits, mask).clone()
        weights[0, 0, 0, 0] = math.inf
        return weights

    monkeypatch.setattr(CheckedNormalizer, "__call__", broken)
    complaints = list(contract_checks.row_sums(softmax()))
    assert len(complaints) == 6
    assert all(one.startswith("a row sums to inf for logits up to ") for one in complaints)


def test_a_single_number_that_is_not_finite_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: CheckedNormalizer, logits: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, None]:
        weights, gradient = torch.zeros(2, 2), torch.zeros(2, 2)
        weights[1, 0], gradient[0, 1] = math.nan, math.inf
        return weights, gradient, None

    monkeypatch.setattr(CheckedNormalizer, "gradients", broken)
    complaints = list(contract_checks.large_logits(softmax()))
    assert [one.rpartition(" a ")[2] for one in complaints[:2]] == ["weight of nan", "gradient of inf"]
    assert len(complaints) % 6 == 0  # three dtypes


def test_weights_may_differ_from_the_reference_by_1e_10_of_their_size_or_of_the_logits(limits: Limits) -> None:
    subject = replace(softmax(), reference=lambda row: torch.softmax(row.z, -1))
    assert limits("reference", subject) == pytest.approx([1e-10, 2e-10, 20e-10])


def test_a_newton_step_is_0_where_there_is_nothing_to_gain() -> None:
    excess, slope = torch.tensor([0.0, -1.0, 0.0, 1.0]), torch.tensor([0.0, 0.0, 2.0, 4.0])
    assert newton_step(excess, slope).tolist() == [0.0, 0.0, 0.0, 0.25]
