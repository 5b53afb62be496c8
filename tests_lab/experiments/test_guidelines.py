"""The four guidelines: the numbers they are judged by, and that every answer can come out."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from attnorm.theory.selection import select
from attnorm_lab.experiments.experiment import ExperimentFinding, ExperimentSubject, Outcome, no_progress
from attnorm_lab.experiments.gradients import TEMPERATURES
from attnorm_lab.experiments.guidelines import experiment
from attnorm_lab.experiments.guidelines.experiment import EXPERIMENT, judge_claims
from attnorm_lab.experiments.guidelines.measure import (
    SHARES,
    Cooled,
    Covered,
    EarlySign,
    GuidelineNumbers,
    Selected,
    _measure_coverage,
    _triples,
)

QUICK = ExperimentSubject(quick=True)


def early(entropy: list[float], apart: list[float], chance: list[float]) -> EarlySign:
    return EarlySign(np.array(entropy), np.array(entropy), np.array(apart) + 0.1, np.array(apart), np.array(chance))


WINDOWS = np.array([3.0, 2.5, 3.5, 3.1])  # losses


def numbers() -> GuidelineNumbers:
    """A model on which every guideline holds."""
    few = np.linspace(0.9, 1, len(SHARES))
    cooled = np.stack([np.full(3, 1 / T) for T in TEMPERATURES])
    return GuidelineNumbers(
        Selected(few, few, few, dict.fromkeys((*SHARES, 1.0), WINDOWS)),
        early([0.1, 0.2, 0.8, 0.9], [0.9, 0.95, 0.5, 0.4], [0.5] * 4),
        Cooled(np.full((len(TEMPERATURES), 3), 0.8), cooled, 8.0),
        Covered(0.8, 0.992, 0.995, 0.99),
    )


def test_where_every_guideline_holds_every_answer_is_yes() -> None:
    assert [finding.verdict for finding in judge_claims(numbers())] == ["reproduces"] * 4


def test_each_answer_can_be_no() -> None:
    good = numbers()
    lossy = replace(good.selected, losses={**good.selected.losses, 0.06: WINDOWS + 1})
    blind = early([0.9, 0.8, 0.2, 0.1], [0.9, 0.95, 0.5, 0.4], [0.5] * 4)
    apart = np.stack([np.full(3, 1 - T / 4) for T in TEMPERATURES])
    frozen = Cooled(apart, 1 / good.cooled.norm, 8.0)
    bad = GuidelineNumbers(lossy, blind, frozen, Covered(0.8, 0.992, 0.85, 0.8))
    assert [finding.verdict for finding in judge_claims(bad)] == ["does not"] * 4
    assert all(finding.ours.startswith("no: ") for finding in judge_claims(bad))


def test_the_first_guideline_is_judged_by_the_mean_of_windows_and_its_error() -> None:
    def with_changes(*changes: float) -> ExperimentFinding:
        good = numbers().selected
        lossy = replace(good, losses={**good.losses, 0.06: WINDOWS + np.array(changes)})
        return judge_claims(replace(numbers(), selected=lossy))[0]

    one_high = with_changes(0.21, 0.17, 0.18, 0.16)  # the first window alone would be a no
    assert one_high.verdict == "partly"
    assert "+0.180 ± 0.011 nats per token" in one_high.ours
    assert "across our line at 0.2" in one_high.ours
    assert with_changes(0.31, 0.29, 0.3, 0.3).verdict == "does not"
    across = with_changes(0.5, 0.1, 0.4, 0.1)  # the mean is above the line, and may not be
    assert across.verdict == "partly"
    assert "across our line at 0.02 and 0.2" in across.ours
    assert across.ours.startswith("partly: ")


def test_norms_that_explode_in_few_heads_and_vanish_in_most_are_partly_what_is_said_of_low_temperatures() -> None:
    good = numbers()
    norm = good.cooled.norm.copy()
    norm[0, :2], norm[0, 2] = 0.0, 50.0
    apart = np.stack([np.full(3, 1 - T / 4) for T in TEMPERATURES])
    assert judge_claims(replace(good, cooled=Cooled(apart, norm, 8.0)))[2].verdict == "partly"


def test_without_a_saturated_head_there_is_nothing_to_predict() -> None:
    found = replace(numbers(), early=early([0.1, 0.2], [0.9, 0.95], [0.5, 0.5]))
    assert judge_claims(found)[1].verdict == "not decided"


def test_the_area_is_the_share_of_pairs_in_the_right_order() -> None:
    sign = early([0.1, 0.5, 0.3, 0.9], [0.9, 0.9, 0.4, 0.4], [0.5] * 4)
    assert sign.area_under_curve(sign.by_level) == pytest.approx(3 / 4)
    assert sign.area_under_curve(sign.by_null) == pytest.approx(3 / 4)
    assert sign.area_under_curve(~sign.by_null) == pytest.approx(1 / 4)


def test_three_copies_of_a_head_cover_no_more_than_one() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.softmax(torch.randn(1, 5, 64, generator=generator), -1).repeat(3, 1, 1)
    vectors = torch.randn(1, 64, 4, generator=generator)
    chosen = select(weights.reshape(1, 15, 64), vectors, 20)
    alone, own, together = _measure_coverage(chosen, 3)
    assert 0 < alone < 1
    assert own == pytest.approx(alone)
    assert together == pytest.approx(alone)


def test_triples_are_of_different_heads_and_not_too_many() -> None:
    assert _triples(2) == [(0, 1)]
    assert all(len(set(three)) == 3 for three in _triples(32))
    assert 10 < len(_triples(32)) < 50


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "QUICK_LENGTH", 96)
        yield EXPERIMENT.run(QUICK, no_progress, tmp_path_factory.mktemp("parts"))


def test_on_the_bundled_model_the_numbers_are_shares_and_cooling_sharpens(outcome: Outcome, tmp_path: Path) -> None:
    active, cooled = (outcome.tables[name].to_pydict() for name in ("active-set", "temperature"))
    assert active["mass"] == sorted(active["mass"])
    for name in ("mass", "separability", "separability_null"):
        assert all(0 <= value <= 1 for value in active[name])
    assert active["loss"][-1] == pytest.approx(active["loss_as_it_runs"][0], abs=0.3)
    assert active["loss"][0] > active["loss"][-1]
    assert all(norm <= 1 / (2 * T) for norm, T in zip(cooled["norm_largest"], cooled["temperature"], strict=True))
    assert cooled["papers_temperature"][4] == pytest.approx(32**0.5)
    assert active["windows"] == [3] * len(SHARES)
    assert all(error > 0 for error in active["change_error"])
    assert "± " in outcome.summary.split(";")[0]
    assert len(outcome.findings) == 4
