"""Division that rounds up; confidence intervals and corrected p-values, against scipy and numbers from tables."""

import numpy as np
import pytest
from scipy import stats

from attnorm.arithmetic import ceil_div, holm, round_up, student_half_width, student_interval, wilson_interval


def test_the_last_piece_may_be_smaller() -> None:
    assert [ceil_div(number, 3) for number in range(8)] == [0, 1, 1, 1, 2, 2, 2, 3]
    assert ceil_div(10**18 + 1, 10**9) == 10**9 + 1  # a float would lose the last piece
    assert [round_up(number, 4) for number in (0, 1, 4, 5)] == [0, 4, 4, 8]


def test_students_interval_is_that_of_the_t_test() -> None:
    values = [0.1, 0.3, 0.2, 0.25, 0.15]
    expected = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert student_interval(values) == pytest.approx((expected.low, expected.high))
    assert student_interval(np.array(values)) == student_interval(values)


def test_students_half_width_is_the_quantile_times_the_standard_error() -> None:
    assert student_half_width(0.1, 3) == pytest.approx(0.4302653)  # t of 2 degrees of freedom


def test_a_share_of_few_answers_is_uncertain() -> None:
    assert wilson_interval(0.0, 100) == (pytest.approx(0, abs=1e-9), pytest.approx(0.037, abs=1e-3))
    assert wilson_interval(0.3, 100) == (pytest.approx(0.219, abs=1e-3), pytest.approx(0.396, abs=1e-3))
    assert wilson_interval(0.3, 10)[1] > wilson_interval(0.3, 100)[1]


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.6]) == [1.0, 1.0]
    assert holm([]) == []
