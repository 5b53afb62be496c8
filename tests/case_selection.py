"""Choose a few cases of a test with many for every commit, so that all values occur; the nightly run has the rest.

A test over normalizers x masks x dtypes has hundreds of cases, most of which repeat what two others show together. The
few are chosen so that every value of every parameter occurs, on as few cases as a greedy choice finds.

Several tests run over the same normalizers. `@pytest.mark.every_second("name", first=0)` leaves every second value of
a parameter to the nightly run; another test of the same values begins with the second one, `first=1`.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from heapq import heapify, heapreplace
from typing import Any

import pytest

MANY = 3  # cases; below it little would be gained


@pytest.hookimpl(tryfirst=True)  # the markers must be there before -m is applied
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out nightly tests, and further cases of a test, unless the -m expression names them."""
    mark_further_cases(items)
    for name in ("nightly", "further_case"):
        if name not in config.option.markexpr:
            left_out = {id(item): item for item in items if item.get_closest_marker(name)}
            config.hook.pytest_deselected(items=[*left_out.values()])
            items[:] = [item for item in items if id(item) not in left_out]


def mark_further_cases(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that a commit can do without as `further_case`. Nightly cases are neither counted nor marked."""
    cases: dict[tuple[Any, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not item.get_closest_marker("nightly"):
            cases[item.parent, item.originalname].append(item)
    for several in cases.values():
        if len(several) > MANY:
            params = [item.callspec.params for item in several]
            numbers = range(len(several))
            if marker := several[0].get_closest_marker("every_second"):
                numbers = every_second(params, *marker.args, **marker.kwargs)
            kept = {numbers[number] for number in covering([params[number] for number in numbers])}
            for number, item in enumerate(several):
                if number not in kept:
                    item.add_marker(pytest.mark.further_case)


def every_second(cases: Sequence[dict[str, Any]], name: str, *, first: int = 0) -> Sequence[int]:
    """Return the indices of cases with the first, third, ... value of a parameter; with first=1 second, fourth, ..."""
    values = list(dict.fromkeys(_key(case[name]) for case in cases))
    kept = set(values[first::2])
    return [number for number, case in enumerate(cases) if _key(case[name]) in kept]


def covering(cases: Sequence[dict[str, Any]]) -> set[int]:
    """Return the indices of cases in which every value of every parameter occurs; the first of equally good ones."""
    values = [{(name, _key(value)) for name, value in case.items()} for case in cases]
    missing: set[tuple[str, Hashable]] = set().union(*values)
    kept: set[int] = set()
    found = [(-len(some), number) for number, some in enumerate(values)]  # at most as many of them are missing
    heapify(found)
    while missing:
        count, best = found[0]
        still = -len(values[best] & missing)
        if still != count:
            heapreplace(found, (still, best))
            continue
        kept.add(best)
        missing -= values[best]
    return kept


def _key(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return type(value), value
