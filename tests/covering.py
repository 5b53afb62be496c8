"""Of a test with many cases every commit runs a few that cover all values; the nightly run has the rest.

A test over normalizers x masks x dtypes has hundreds of cases, most of which repeat what two others show together. The
few are chosen so that every value of every parameter occurs, on as few cases as a greedy choice finds.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import pytest

MANY = 6  # cases; below it little would be gained


def mark_further_cases(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that a commit can do without as `further_case`. Nightly cases are neither counted nor marked."""
    cases: dict[tuple[Any, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not item.get_closest_marker("nightly"):
            cases[item.parent, item.originalname].append(item)
    for several in cases.values():
        if len(several) > MANY:
            kept = covering([item.callspec.params for item in several])
            for number, item in enumerate(several):
                if number not in kept:
                    item.add_marker(pytest.mark.further_case)


def covering(cases: Sequence[dict[str, Any]]) -> set[int]:
    """Return the indices of cases in which every value of every parameter occurs; the first of equally good ones."""
    values = [{(name, _key(value)) for name, value in case.items()} for case in cases]
    missing: set[tuple[str, Hashable]] = set().union(*values)
    kept: set[int] = set()
    while missing:
        best = max(range(len(values)), key=lambda number: (len(values[number] & missing), -number))
        kept.add(best)
        missing -= values[best]
    return kept


def _key(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return type(value), value
