"""The dispersion measurement: right against closed forms, open to normalizers it has never heard of."""

import math

import pytest
from torch import Tensor

import attnorm
from attnorm.normalizers import registry
from attnorm_lab.bench.dispersion import LENGTHS, NOT_MEASURED, Curve, Dispersion, dispersion

SHORT = (16, 128, 1024)


@pytest.fixture(scope="module")
def everything() -> Dispersion:
    return dispersion(lengths=SHORT, draws=2)


@pytest.fixture(autouse=True)
def _no_leftovers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


def of(measured: Dispersion, label: str) -> Curve:
    (curve,) = (curve for curve in measured.curves if curve.label == label)
    return curve


def test_every_normalizer_is_measured_or_left_out_with_a_reason(everything: Dispersion) -> None:
    measured = {curve.name for curve in everything.curves}
    assert measured | set(everything.left_out) == set(attnorm.available())
    assert set(everything.left_out) == set(NOT_MEASURED)
    for curve in everything.curves:
        assert all(math.isfinite(kept) and 0 <= kept <= 1 + 1e-9 for kept in curve.kept), curve.label


def test_the_context_grows_from_16_to_131072_keys() -> None:
    assert LENGTHS[0] == 16
    assert LENGTHS[-1] == 131_072


def difference(winner: float, other: float, n: int) -> float:
    """Of two softmax maps, the second uniform: the winner's part of what may sum to more than 1 in size."""
    kept, rest = abs(winner - 0.2 / n), (n - 1) * abs(other - 0.2 / n)
    return kept / max(1.0, kept + rest)


@pytest.mark.parametrize("gap", [2.0, 6.0])
def test_among_equal_keys_the_closed_forms_come_out(gap: float) -> None:
    names = ["softmax", "softmax1", "relu", "gaussian", "differential", "sparsemax", "hard"]
    measured = dispersion(gap=gap, noise=0.0, lengths=SHORT, names=names)
    e = math.exp(gap)
    expected = {
        "softmax": lambda n: e / (e + n - 1),
        "softmax1": lambda n: e / (e + n),
        "relu": lambda n: gap / n,
        "gaussian": lambda n: e / (e + n - 1),  # exp(0) = 1 out of a row that sums to more than 1
        "differential, λ = 0.2": lambda n: difference(e / (e + n - 1), 1 / (e + n - 1), n),
        "sparsemax": lambda n: 1.0,
        "hard": lambda n: 1.0,
    }
    for label, form in expected.items():
        assert of(measured, label).kept == pytest.approx([form(n) for n in SHORT], rel=1e-6), label


def test_a_key_outside_the_window_keeps_nothing() -> None:
    curve = of(dispersion(lengths=SHORT, names=["local"]), "local, 256 keys")
    assert curve.kept[1] > 0.3
    assert curve.kept[2] == 0
    assert curve.verdict == "collapses"


def test_linear_attention_is_asked_by_keys_that_give_the_scores() -> None:
    # With positive features the winner gets more than its equal share, and less than softmax would give it.
    measured = dispersion(lengths=SHORT, names=["linear", "softmax"])
    for n, linear, softmax in zip(SHORT, *(of(measured, name).kept for name in ("linear", "softmax")), strict=True):
        assert 1 / n < linear < softmax


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others() -> None:
    first, again, other = (dispersion(lengths=SHORT, names=["softmax"], seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.curves[0].kept != other.curves[0].kept


def test_a_registered_normalizer_is_picked_up() -> None:
    @attnorm.register("twice_as_sharp")
    class TwiceAsSharp(attnorm.LogitRule):
        def forward(self, block: object) -> Tensor:
            return 2 * block.logits  # type: ignore[attr-defined]

    measured = dispersion(noise=0.0, lengths=SHORT)
    assert of(measured, "twice_as_sharp").kept[-1] == pytest.approx(math.exp(12) / (math.exp(12) + 1023))


def test_what_cannot_be_asked_is_left_out_with_its_own_words() -> None:
    @attnorm.register("reads_tea_leaves")
    class ReadsTeaLeaves(attnorm.LogitRule):
        def forward(self, block: object) -> Tensor:
            raise ValueError("pass tea_leaves=")

    @attnorm.register("mystery")
    class Mystery(attnorm.Mechanism):
        name = "mystery"
        properties = attnorm.Properties(row_sum="one")

    measured = dispersion(lengths=(16,), names=["softmax", "reads_tea_leaves", "mystery"])
    assert measured.left_out["reads_tea_leaves"] == "pass tea_leaves="
    assert "queries and keys" in measured.left_out["mystery"]
    assert len(measured.curves) == 1


def test_verdicts_follow_the_last_length() -> None:
    def verdict(kept: float) -> str:
        return Curve(name="x", label="x", lengths=(10, 100), kept=(1.0, kept)).verdict

    assert [verdict(kept) for kept in (0.51, 0.5, 0.01, 0.0099)] == ["stays", "fades", "fades", "collapses"]
