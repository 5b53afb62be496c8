"""Tables of several runs become one; no row twice, no row lost, no contradiction kept."""

import math

import pytest

from attnorm.analysis.tables import merge_runs
from tests.analysis.tables_of import table, tables


@pytest.mark.parametrize("name", ["heads", "by_length", "top_n", "sensitivity", "coverage"])
def test_different_rows_are_put_together_and_equal_rows_are_kept_once(name: str) -> None:
    here, there = tables(text="a")[name], tables(text="b")[name]
    both = merge_runs(name, [here, there, here])
    assert both.num_rows == here.num_rows + there.num_rows
    assert both.slice(0, here.num_rows).drop_columns([]).schema.equals(here.schema)
    assert both["text"].to_pylist() == [*here["text"].to_pylist(), *there["text"].to_pylist()]


def test_nan_equals_nan_but_not_a_number() -> None:
    here = table("heads", [{"head": 3, "entropy_nats": math.nan}])
    assert merge_runs("heads", [here, here]).num_rows == 1
    with pytest.raises(ValueError, match=r"head 3.*entropy_nats nan .* 0\.0"):
        merge_runs("heads", [here, table("heads", [{"head": 3}])])


def test_a_head_has_one_row_even_if_the_bins_differ() -> None:
    here, there = (table("heads", [{"n_low": low}]) for low in (4, 5))
    with pytest.raises(ValueError, match="n_low"):
        merge_runs("heads", [here, there])


def test_bins_of_one_head_are_different_rows() -> None:
    here, there = (table("by_length", [{"n_low": low, "n_high": 9}]) for low in (4, 5))
    assert merge_runs("by_length", [here, there]).num_rows == 2
