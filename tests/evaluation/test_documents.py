"""Intervals and paired tests of scores against textbook numbers."""

import numpy as np
import pytest
from scipy.stats import ttest_rel

from attnorm.evaluation.result import Scores, mean_interval, paired


def scores(values: list[float], names: str = "abcdefghijklmnopqrstuvwxyz") -> Scores:
    return Scores("share", "higher", values, list(names[: len(values)]))


def test_wilson_for_right_or_wrong() -> None:
    assert mean_interval([1.0] * 8 + [0.0] * 2) == pytest.approx((0.4902, 0.9433), abs=1e-4)


def test_no_interval_for_a_single_loss() -> None:
    assert mean_interval([2.5]) is None


def test_a_change_of_losses_is_students_paired_test() -> None:
    before, after = [2.0, 3.0, 2.5, 2.2], [2.1, 3.3, 2.4, 2.6]
    found = paired(scores(before), scores(after))
    assert found is not None
    assert found.mean == pytest.approx(0.175)
    assert found.p == pytest.approx(float(ttest_rel(after, before).pvalue))


def test_right_or_wrong_is_mcnemars_exact_test() -> None:
    before, after = [1.0] * 6 + [0.0] * 4, [0.0] * 5 + [1.0] + [0.0] * 4
    found = paired(scores(before), scores(after))
    assert found is not None
    assert found.p == pytest.approx(2 * 0.5**5)
    assert found.interval is not None
    assert found.interval[0] < found.mean < found.interval[1]


def test_the_interval_of_a_change_of_shares_holds_the_truth_about_19_times_in_20() -> None:
    generator, names = np.random.default_rng(0), [str(number) for number in range(30)]
    held = 0
    for _ in range(200):
        before = (generator.random(30) < 0.8).astype(float)
        after = np.where(generator.random(30) < 0.5, before, generator.random(30) < 0.4)  # truth: 0.6 - 0.8
        found = paired(*(Scores("share", "higher", side.tolist(), names) for side in (before, after)))
        assert found is not None
        assert found.interval is not None
        held += found.interval[0] <= -0.2 <= found.interval[1]
    assert 182 <= held <= 198


def test_documents_are_matched_by_name_and_strangers_are_left_out() -> None:
    found = paired(scores([1.0, 0.0, 1.0], "abc"), scores([0.0, 1.0, 0.5], "cax"))
    assert found is not None
    assert (found.documents, found.mean) == (2, -0.5)
    assert paired(scores([1.0], "a"), scores([1.0], "b")) is None
