"""Every value of every parameter occurs in the cases that a commit runs."""

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.case_selection import MANY, covering, every_second

pytest_plugins = ["pytester"]

VALUES = st.sampled_from([0, 1, True, "1", None, (1, 2), [1, 2]])


@given(st.lists(st.fixed_dictionaries({"a": VALUES, "b": VALUES, "c": VALUES}), min_size=1, max_size=40))
def test_every_value_occurs(cases: list[dict[str, Any]]) -> None:
    kept = [cases[number] for number in covering(cases)]
    for case in cases:
        for name, value in case.items():
            assert any(type(other[name]) is type(value) and other[name] == value for other in kept)


def test_a_product_needs_as_many_cases_as_its_longest_factor() -> None:
    cases = [{"map": map_, "mask": mask, "dtype": dtype} for map_, mask, dtype in product(range(20), "abc", "xy")]
    assert len(covering(cases)) == 20


def test_two_tests_of_the_same_values_run_all_of_them_together() -> None:
    cases = [{"map": map_, "mask": mask} for mask in "abc" for map_ in range(7)]
    kept = [{cases[number]["map"] for number in every_second(cases, "map", first=first)} for first in (0, 1)]
    assert kept == [{0, 2, 4, 6}, {1, 3, 5}]


CASES = """
import pytest
@pytest.mark.parametrize("a", range({many}))
@pytest.mark.parametrize("b", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_many(a, b): pass
@pytest.mark.parametrize("a, b", [(0, 0), (0, 1), (1, 0)])
def test_few(a, b): pass
@pytest.mark.parametrize("a", range(8))
@pytest.mark.every_second("a", first=1)
def test_in_turn(a): pass
@pytest.mark.nightly
def test_long(): pass
"""


@pytest.mark.parametrize(
    ("options", "passed"),
    [((), MANY + 7), (("-m", "nightly or further_case"), MANY + 5), (("-m", "slow and not further_case"), None)],
)
def test_the_rest_runs_where_it_is_named(
    pytester: pytest.Pytester, options: tuple[str, ...], passed: int | None
) -> None:
    pytester.makeconftest(
        "from tests.case_selection import pytest_collection_modifyitems\n"
        "def pytest_configure(config):\n"
        "    for name in ('nightly', 'further_case', 'slow', 'every_second'):\n"
        "        config.addinivalue_line('markers', name)\n"
    )
    pytester.makepyfile(CASES.format(many=MANY))
    found = pytester.inline_run("-p", "no:cacheprovider", *options)
    counts = [len(each) for each in found.listoutcomes()]
    assert counts[1:] == [0, 0]
    if passed is None:
        assert 0 < counts[0] < MANY
    else:
        assert counts[0] == passed
