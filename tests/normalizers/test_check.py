"""check_normalizer finds what is broken: for every check there is a normalizer that fails it."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from attnorm.normalizers import Block, Map, Normalizer, Properties, ScaleRule, compose, get, mixture, register
from attnorm.normalizers.check import Check, ContractError, Report, check_normalizer
from attnorm.normalizers.checked_normalizer import CheckedNormalizer
from attnorm.normalizers.contract_checks import CHECKS, _against_differences, _by_position, _farthest, _two_level_rows
from attnorm.normalizers.declaration import declare
from attnorm.normalizers.entmax import Entmax
from attnorm.normalizers.softmax import Softmax, softmax_row

ONE = Properties(row_sum="one")
FREE = Properties(row_sum="free", shift_invariant=False)


def made(function: Any, properties: Properties = ONE) -> Normalizer:
    """A normalizer with this function of a block as its map."""

    class Broken(Map):
        def forward(self, block: Block) -> Tensor:
            return block.hide(function(block))

    Broken.properties = properties
    return Normalizer(Broken(), name="broken")


def softmax(block: Block) -> Tensor:
    return torch.softmax(block.filled_low(), -1)


def unstable_softmax(block: Block) -> Tensor:
    e = block.hide(torch.exp(block.logits))
    return e / e.sum(-1, keepdim=True).clamp(min=1e-300)


def softmax_that_drops_digits(block: Block) -> Tensor:
    return torch.softmax(block.filled_low() + 1e4 - 1e4, -1)


def over_mask_row_sum(block: Block) -> Tensor:
    n = block.logits.shape[-1] if block.mask is None else block.mask.sum(-1, keepdim=True).clamp(min=1)
    return torch.sigmoid(block.logits) / n


def writes_to_its_input(block: Block) -> Tensor:
    return torch.softmax(block.logits.detach().mul_(2), -1) + 0 * block.logits


class LengthOfThePaddedRow(ScaleRule):
    """The scale of PyPI's scalable-softmax: it counts hidden keys too."""

    def forward(self, block: Block) -> Tensor:
        return block.logits * math.log(block.logits.shape[-1])


class OverNUnclamped(Map):
    """Where no key is seen, n = 0 and the gain's gradient is 0 / 0."""

    properties = FREE

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, block: Block) -> Tensor:
        return block.hide(self.gain * torch.sigmoid(block.logits) / block.n)


class StaysInHalf(Normalizer):
    def forward(self, logits: Tensor, mask: Tensor | None = None, **others: Any) -> Tensor:
        seen = torch.ones_like(logits, dtype=torch.bool) if mask is None else mask
        e = torch.where(seen, torch.exp(torch.where(seen, logits, -30.0).clamp(max=30)), 0.0)
        return e / e.sum(-1, keepdim=True).clamp(min=1e-6)


class Steeper(Entmax):
    def lipschitz(self, n: int) -> float | None:
        return 0.5


class SteepFarFromZero(Map):
    """As steep as 1/4 at z = 2.7317 only, which no fixed row of the check contains."""

    properties = FREE

    def forward(self, block: Block) -> Tensor:
        return block.hide(torch.sigmoid(block.logits - 2.7317))

    def lipschitz(self, n: int) -> float | None:
        return 0.24999 if n <= 5 else 0.25


class DropsNaN(Normalizer):
    def weights(self, block: Block) -> Tensor:
        return super().weights(block.narrowed(~block.logits.isnan()))


class KeepsHiddenWeights(Normalizer):
    def weights(self, block: Block) -> Tensor:
        return torch.softmax(block.logits, -1)


class ReadsHiddenLogits(Normalizer):
    def forward(self, logits: Tensor, mask: Tensor | None = None, **others: Any) -> Tensor:
        return super().forward(logits - logits.amax(-1, keepdim=True), mask, **others)


class OnceDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        p = torch.softmax(z, -1)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (p,) = ctx.saved_tensors
        return p * (grad - (p * grad).sum(-1, keepdim=True))


BROKEN = [
    ("runs", made(writes_to_its_input)),
    ("row_sums", made(lambda block: 1.001 * softmax(block))),
    ("row_sums", made(lambda block: 1.001 * softmax(block), Properties(row_sum="at most one"))),
    ("sign", made(lambda block: softmax(block) - 1e-3, FREE)),
    ("exact_zeros", made(lambda block: 1 / (1 + block.logits.abs()), Properties(row_sum="free", exact_zeros=True))),
    ("exact_zeros", made(lambda block: block.logits.relu(), FREE)),
    ("permutation", made(lambda block: torch.sigmoid(block.hide(block.logits).cumsum(-1)), FREE)),
    ("shift", made(lambda block: torch.sigmoid(block.logits), Properties(row_sum="free"))),
    ("shift", made(unstable_softmax)),
    ("lipschitz", Normalizer(Steeper(1.5), name="broken")),
    ("lipschitz", Normalizer(SteepFarFromZero(), name="broken")),
    ("visible_nan", DropsNaN(Softmax(), name="broken")),
    ("hidden_keys", KeepsHiddenWeights(Softmax(), name="broken")),
    ("hidden_values", ReadsHiddenLogits(Softmax(), name="broken")),
    ("empty_rows", Normalizer(OverNUnclamped(), name="broken")),
    ("padding", Normalizer(Softmax(), scale=[LengthOfThePaddedRow()], name="broken")),
    ("mask_shapes", made(over_mask_row_sum, FREE)),
    ("single_key", made(lambda block: torch.softmax(block.filled_low() / torch.log(block.n), -1))),
    ("rows_alone", made(lambda block: torch.sigmoid(block.logits - block.logits.mean()), FREE)),
    (
        "strided",
        made(lambda block: torch.softmax(block.logits.view(-1, block.logits.shape[-1]), -1).view_as(block.logits)),
    ),
    ("empty_batch", made(lambda block: torch.sigmoid(block.logits - block.logits.max()), FREE)),
    ("empty_batch", made(lambda block: torch.stack([*torch.softmax(block.filled_low(), -1)]))),
    ("empty_batch", made(lambda block: torch.stack(torch.softmax(block.filled_low(), -1).unbind(-2), -2))),
    ("half_precision", StaysInHalf(Softmax(), name="broken")),
    ("single_precision", made(softmax_that_drops_digits)),
    ("large_logits", made(unstable_softmax)),
    ("large_precision", made(lambda block: (block.logits + 1e8 - 1e8).relu(), FREE)),
    ("first_derivative", made(lambda block: torch.sigmoid(block.logits / (1 + block.logits.detach().abs())), FREE)),
    ("second_derivative", made(lambda block: OnceDifferentiable.apply(block.filled_low()))),
]


@pytest.mark.parametrize(("check", "normalizer"), BROKEN, ids=[f"{name}-{i}" for i, (name, _) in enumerate(BROKEN)])
def test_each_check_finds_what_it_is_for(check: str, normalizer: Normalizer) -> None:
    others = {name: "not asked here" for name in CHECKS if name not in ("runs", check)}
    report = check_normalizer(normalizer, exceptions=others, raise_on_failure=False)
    assert check in {failure.name for failure in report.failures}, str(report)


@pytest.mark.parametrize("options", [{"k": 1}, {"k": 2}, {"k": "sqrt"}], ids=str)
def test_topk_and_what_is_composed_with_it_do_not_hide_nan(options: dict[str, Any]) -> None:
    row = torch.tensor([[1.0, math.nan, 0.5, 2.0]])
    topk = get("topk", **options)
    assert isinstance(topk, Normalizer)
    assert topk(row).isnan().all()
    assert compose("entmax15", select=topk)(row).isnan().all()
    hidden = torch.tensor([True, False, True, True])
    assert topk(row, hidden).isfinite().all()


@pytest.mark.parametrize("map", ["relu", mixture("relu", "softmax"), mixture("sparsemax", "relu")], ids=str)
def test_a_sink_does_not_lower_the_constant_of_relu(map: Any) -> None:
    sunk = compose(map, sink="softmax1")
    for n in (1, 2, 3):
        row = torch.full((1, n), 3.0, dtype=torch.float64)
        jacobian = torch.autograd.functional.jacobian(lambda z: sunk(z)[0], row)[:, 0]
        declared = sunk.double().lipschitz(n)
        assert declared is not None
        assert torch.linalg.matrix_norm(jacobian, ord=2).item() <= declared * (1 + 1e-12)
    assert compose("relu", sink="softmax1").lipschitz(2) == 0.5


def test_there_is_a_broken_normalizer_for_every_check() -> None:
    assert {name for name, _ in BROKEN} | {"compiled", "reference"} == set(CHECKS)


def test_a_difference_to_the_declared_reference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnorm.normalizers.registry._registered", {})

    @register("nearly_softmax")
    @declare(reference=lambda row: softmax_row(1.001 * row.z))
    def nearly_softmax() -> Normalizer:
        return Normalizer(Softmax())

    report = check_normalizer("nearly_softmax", raise_on_failure=False)
    assert [failure.name for failure in report.failures] == ["reference"]


@pytest.mark.nightly
def test_a_compiled_difference_is_found() -> None:
    broken = made(lambda block: softmax(block) ** (1.1 if torch.compiler.is_compiling() else 1.0), FREE)
    others = {name: "not of interest here" for name in CHECKS if name not in ("runs", "compiled")}
    report = check_normalizer(broken, compile=True, exceptions=others, raise_on_failure=False)
    assert [failure.name for failure in report.failures] == ["compiled"]


def test_the_error_names_every_failed_check_with_its_numbers() -> None:
    with pytest.raises(ContractError, match="'broken'") as caught:
        check_normalizer(made(lambda block: 1.5 * softmax(block)))
    assert isinstance(caught.value, AssertionError)
    assert "1.5" in str(caught.value)
    assert all(failure.name in str(caught.value) for failure in caught.value.report.failures)


def test_the_report_lists_what_was_checked() -> None:
    report = check_normalizer("softmax")
    assert report.passed
    assert report.normalizer == "softmax"
    assert f"{len(CHECKS) - 1} of {len(CHECKS) - 1} checks passed" in str(report)
    failed = Report("x", (Check("sign", False, "a weight is -1"), Check("shift", True)))
    assert failed.failures == (failed.checks[0],)
    assert str(failed).splitlines()[1:] == ["  FAILED  sign: a weight is -1", "  passed  shift"]


def test_an_exception_passes_with_its_reason_and_only_there() -> None:
    broken = made(lambda block: softmax(block) - 1e-3, FREE)
    failing = {check.name for check in check_normalizer(broken, raise_on_failure=False).failures}
    report = check_normalizer(broken, exceptions=dict.fromkeys(failing, "a known flaw"))
    assert {check.detail for check in report.checks if check.name in failing} == {"excepted, a known flaw"}


def test_a_third_partys_normalizer_is_checked_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnorm.normalizers.registry._registered", {})

    @register("cauchy")
    class Cauchy(Map):
        properties = Properties(row_sum="at most one", shift_invariant=False)

        def forward(self, block: Block) -> Tensor:
            value = block.hide(1 / (1 + block.logits**2))
            return value / value.sum(-1, keepdim=True).clamp(min=1e-30)

    report = check_normalizer("cauchy")
    assert report.normalizer == "cauchy"
    assert [check.name for check in report.checks if check.detail] == ["reference"], "it passes, and says it is empty"
    del Cauchy.properties
    with pytest.raises(TypeError, match=r"Cauchy.*properties = attnorm\.Properties\("):
        check_normalizer("cauchy")


def test_the_normalizer_itself_is_left_as_it_was() -> None:
    normalizer, seed = get("ssmax", heads=2), torch.get_rng_state()
    check_normalizer(normalizer)
    assert all(p.dtype == torch.float32 and p.grad is None for p in normalizer.parameters())
    assert torch.equal(torch.get_rng_state(), seed)


def test_what_cannot_run_at_all_says_what_to_pass() -> None:
    report = check_normalizer(get("ssmax", heads=3), raise_on_failure=False)
    assert [check.name for check in report.checks] == ["runs"]
    assert "heads=2" in report.failures[0].detail
    assert check_normalizer(get("ssmax", heads=3), heads=3).passed


def test_only_selections_by_position_hide_keys_whatever_their_logits() -> None:
    """A NaN at a key that top-k would drop must show; at a key outside a window it must not."""
    for name, options, hidden in (("local", {"window": 2}, True), ("topk", {"k": 2}, False)):
        subject = CheckedNormalizer.of(get(name, **options), 1, None)
        logits = subject.logits(4, 4)
        mask = torch.ones(4, 4, dtype=torch.bool).tril()
        left = _by_position(subject, logits, mask)
        assert bool((left != mask).any()) is hidden


@pytest.mark.parametrize(("n", "tops"), [(2, {1, 2}), (5, {1, 2, 4, 5}), (8, {1, 2, 4, 7, 8})])
def test_rows_of_two_levels_have_one_key_two_half_and_all_but_one_at_the_top(n: int, tops: set[int]) -> None:
    rows = _two_level_rows(n)
    assert len(rows) == 13 * len(tops)
    assert set((rows[rows.amin(-1) == -12] == 0).sum(-1).tolist()) == tops - {n}
    assert (rows.amin(-1) == rows.amax(-1)).sum() == 13 + len(tops) - 1  # all n at the top, and the gap of 0


@pytest.mark.parametrize("factor", [0.5, torch.inf])
def test_complaints_about_a_single_key_name_the_length_of_its_row(factor: float) -> None:
    report = check_normalizer(made(lambda block: factor * softmax(block)), raise_on_failure=False)
    (failure,) = (check for check in report.failures if check.name == "single_key")
    assert re.findall(r"visible key of (\d+)", failure.detail) == ["1", "5", "263"]


def test_derivatives_are_compared_on_one_item_of_two_rows_at_two_spreads() -> None:
    subject, seen = CheckedNormalizer(Normalizer(Softmax(), name="softmax"), heads=2, width=3), []

    def record(function: Any, inputs: list[Tensor]) -> bool:
        seen.append((tuple(inputs[0].shape), float(inputs[0].detach().abs().max())))
        return True

    assert not list(_against_differences(subject, record))
    (small, least), (large, most) = seen
    assert small == large == (1, 2, 2, 5)
    assert 0.3 < least < 1.5 < 3.0 < most < 15.0


def test_the_number_farthest_from_a_target() -> None:
    assert _farthest(torch.tensor([[0.25, 1.3], [0.9, 1.1]]).double(), 1.0) == 0.25
    assert _farthest(torch.tensor([-2.0, 1.5]).double(), 0.0) == -2.0
    assert _farthest(torch.tensor([-2.0, 1.5]).double(), -1.0) == 1.5


@pytest.mark.parametrize("empty", ["batch", "queries"])
def test_weights_of_another_shape_for_an_empty_batch_are_named(empty: str) -> None:
    class Wider(Normalizer):
        def forward(self, logits: Tensor, *args: Any, **more: Any) -> Tensor:
            weights = super().forward(logits, *args, **more)
            size = logits.shape[0 if empty == "batch" else 2]
            return weights if size else torch.cat([weights, weights], -1)

    (complaint, *_) = CHECKS["empty_batch"](CheckedNormalizer(Wider(Softmax(), name="wider"), heads=2, width=3))
    assert re.search(r"\(.*0.*\).*\(.*0.*\)", complaint)


def test_logits_behind_rules_that_read_hidden_states_are_those_of_the_map() -> None:
    subject = CheckedNormalizer.of(get("asentmax", heads=3, width=4), heads=3, width=4)
    logits = subject.logits(queries=5, keys=7, batch=2)
    prepared = subject.prepared(logits)
    expected = get("entmax15")(prepared)
    torch.testing.assert_close(subject(logits), expected)
