"""Division that rounds up; confidence intervals and corrected p-values, against scipy and numbers from tables."""

import numpy as np
import pytest
from scipy import stats

from attnorm.arithmetic import (
    ceil_div,
    difference_over_seeds,
    difference_over_seeds_and_questions,
    holm,
    round_up,
    student_half_width,
    student_interval,
    wilson_interval,
)


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


def test_seeds_are_paired_where_two_are_common_and_welchs_test_otherwise() -> None:
    ours, theirs = {0: 1.0, 1: 2.0, 2: 3.5}, {0: 0.5, 1: 1.8, 2: 3.1, 3: 9.0}
    paired = stats.ttest_rel([1.0, 2.0, 3.5], [0.5, 1.8, 3.1])
    found = difference_over_seeds(ours, theirs)
    assert found is not None
    assert (found.p, found.value) == pytest.approx((paired.pvalue, 1.1 / 3))
    assert (found.low, found.high) == pytest.approx(tuple(paired.confidence_interval(0.95)))
    elsewhere = {7: 0.5, 8: 1.8, 2: 3.1}
    welch = stats.ttest_ind([1.0, 2.0, 3.5], [0.5, 1.8, 3.1], equal_var=False)
    found = difference_over_seeds(ours, elsewhere)
    assert found is not None
    assert (found.p, found.low, found.high) == pytest.approx((welch.pvalue, *welch.confidence_interval(0.95)))
    assert difference_over_seeds(ours, {0: 1.0}) is None


def test_a_difference_that_is_equal_in_every_seed_has_the_p_of_a_sign_test() -> None:
    found = difference_over_seeds(dict.fromkeys(range(4), 2.0), dict.fromkeys(range(4), 1.0))
    assert found is not None
    assert found.p == 1 / 8
    found = difference_over_seeds({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0})
    assert found is not None
    assert found.p == 1.0


@pytest.mark.parametrize(("of_seeds", "of_questions"), [(0.1, 0.0), (0.0, 0.3), (0.1, 0.3)])
def test_seeds_and_questions_that_both_vary_give_few_false_alarms(of_seeds: float, of_questions: float) -> None:
    """A test over the questions alone finds a difference in most draws if seeds vary, one over seeds if these do."""
    draw = np.random.default_rng(0)
    found = [
        difference_over_seeds_and_questions(
            of_seeds * draw.normal(size=(3, 1)) + of_questions * draw.normal(size=(1, 32))
            + 0.3 * draw.normal(size=(3, 32))
        )
        for _ in range(400)
    ]  # fmt: skip
    assert np.mean([one.p < 0.05 for one in found]) < 0.08
    assert all((one.low > 0 or one.high < 0) == (one.p < 0.05) for one in found)


def test_one_question_leaves_the_seeds_and_none_leaves_nothing() -> None:
    one = difference_over_seeds_and_questions([[1.0], [0.5], [0.75]])
    seeds = stats.ttest_1samp([1.0, 0.5, 0.75], 0.0)
    assert (one.p, one.low, one.high) == pytest.approx((seeds.pvalue, *seeds.confidence_interval(0.95)))
    assert difference_over_seeds_and_questions([[], []]).p == 1.0
    assert difference_over_seeds_and_questions([[1.0, 1.0], [1.0, 1.0]]).p == 0.5


def test_a_difference_of_all_seeds_and_questions_is_found() -> None:
    draw = np.random.default_rng(0)
    found = difference_over_seeds_and_questions(0.5 + 0.3 * draw.normal(size=(3, 32)))
    assert found.p < 0.001
    assert found.value == pytest.approx(0.5, abs=0.1)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.6]) == [1.0, 1.0]
    assert holm([]) == []
