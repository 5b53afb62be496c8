"""Lemma 1's constants come from the normalizer itself, or it says why there are none."""

import math
from typing import Any

import pytest
import torch

import attnorm
from attnorm.normalizers.registry import available
from attnorm.theory.dispersion import lemma1_constants_of, not_covered
from attnorm_lab.errata import claims, verify

COVERED = [
    ("softmax", {}),
    ("softmax", {"temperature": 0.5}),
    ("kernel", {"function": "softplus"}),
    ("kernel", {"function": "elu+1"}),
    ("kernel", {"function": "polynomial", "offset": 3.0}),
]
NOT_COVERED = {
    "sparsemax": "Entmax", "topk": "hides keys", "ssmax": "log n", "sink": "sink", "sigmoid": "Sigmoid",
    "adaptive_temperature": "entropy",
}  # fmt: skip


@pytest.mark.parametrize(("name", "options"), COVERED)
def test_weights_stay_between_the_constants_over_n_and_come_close(name: str, options: dict[str, object]) -> None:
    normalizer = attnorm.get(name, **options).double()
    C1, C2 = lemma1_constants_of(normalizer, -2.0, 2.0)
    largest = smallest = 1.0
    for n in (2, 17, 2**18):
        for logits in (torch.rand(4, n, dtype=torch.float64) * 4 - 2, _one_against_the_rest(n)):
            weights = normalizer(logits) * n
            assert weights.min() >= C1 - 1e-9
            assert weights.max() <= C2 + 1e-9
            largest, smallest = max(largest, float(weights.max())), min(smallest, float(weights.min()))
    assert largest > 0.95 * C2
    assert smallest < 1.05 * C1


def _one_against_the_rest(n: int) -> torch.Tensor:
    ends = torch.tensor([[-2.0, 2.0], [2.0, -2.0], [0.0, 2.0], [2.0, 0.0]], dtype=torch.float64)
    return torch.cat([ends[:, :1], ends[:, 1:].expand(-1, n - 1)], dim=1)


def test_softmax_has_the_constants_of_corollary_1() -> None:
    C1, C2 = lemma1_constants_of(attnorm.get("softmax", temperature=0.5), -1.0, 1.0)
    assert (float(C1), float(C2)) == (pytest.approx(math.exp(-4)), pytest.approx(math.exp(4)))


@pytest.mark.parametrize(("name", "reason"), NOT_COVERED.items())
def test_what_the_lemma_does_not_cover_says_why(name: str, reason: str) -> None:
    normalizer = attnorm.get(name)
    assert reason in (not_covered(normalizer) or "")
    with pytest.raises(ValueError, match=f"'{name}'"):
        lemma1_constants_of(normalizer, -1.0, 1.0)


def test_what_the_lemma_covers_has_a_row_in_the_table_of_claims() -> None:
    covered = {name for name in available() if isinstance(attnorm.get(name), attnorm.Normalizer)}
    covered = {name for name in covered if not_covered(attnorm.get(name)) is None}
    assert {"softmax", "kernel"} <= covered
    rows = {claim.id.removeprefix("lemma-1-"): claim for claim in claims() if claim.id.startswith("lemma-1-")}
    assert set(rows) == covered


@pytest.mark.parametrize(
    ("name", "factor", "verdict"), [("softmax", 0.97, "VIOLATED"), ("kernel", 1.1, "NOT ATTAINED")]
)
def test_wrong_constants_are_noticed(monkeypatch: pytest.MonkeyPatch, name: str, factor: float, verdict: str) -> None:
    def wrong(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        C1, C2 = lemma1_constants_of(*args)
        return C1 / factor, C2 * factor

    monkeypatch.setattr("attnorm_lab.errata.catalogue.normalizers.lemma1_constants_of", wrong)
    chosen = [claim for claim in claims() if claim.id == f"lemma-1-{name}"]
    assert verify(chosen, budget_seconds=1e-9)[0].verdict == verdict
