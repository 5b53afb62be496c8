"""Every registered normalizer on the frontier: the points are those of its map, the others have a reason."""

import math

import pytest
import torch

from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.registry import available, get
from attnorm_lab.errata import frontier
from attnorm_lab.errata.frontier import Frontier, FrontierPoint, frontier_effort, outside_the_law, place_on_frontier


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five normalizers, of which one declares no constant and two are outside the law."""
    made = {name: get(name) for name in ("softmax", "sparsemax", "hard", "softpick")}
    measured = get("softmax")
    assert isinstance(measured, Normalizer)
    measured.name = "undeclared"
    measured.lipschitz = lambda n: None  # type: ignore[method-assign]
    every = [*made.items(), ("undeclared", measured)]
    pairs = [(name, one.double()) for name, one in every if isinstance(one, Normalizer)]
    monkeypatch.setattr(frontier, "_registered", lambda: iter(pairs))
    monkeypatch.setattr(frontier, "LONGEST_MEASURED", 8)


@pytest.mark.usefixtures("few")
def test_points_have_the_gap_and_the_constant_of_their_map_and_the_others_a_reason() -> None:
    heard: list[str] = []
    found = place_on_frontier([4, 8, 16], (0.5, 0.9), heard.append)
    assert heard == ["softmax", "sparsemax", "undeclared"]
    assert (found.lengths, found.weights) == ((4, 8, 16), (0.5, 0.9))
    assert found.measured == {"undeclared"}
    assert found.absent.keys() == {"hard", "softpick"}
    assert {point.name for point in found.points} == set(heard)
    for point in found.points:
        odds = math.log(point.weight / (1 - point.weight))
        n = point.n
        gap = odds + math.log(n - 1) if point.name != "sparsemax" else (point.weight * n - 1) / (n - 1)
        constant = 1.0 if point.name == "sparsemax" else 0.5
        assert point.gap == pytest.approx(gap, rel=1e-6)
        assert point.effort == pytest.approx(gap * constant, rel=1e-3)
    assert [point.n for point in found.points if point.name == "undeclared" and point.weight == 0.9] == [4, 8]
    assert math.isnan(found.efforts("undeclared", 0.9)[2])
    assert found.efforts("softmax", 0.5) == pytest.approx([math.log(n - 1) / 2 for n in (4, 8, 16)], rel=1e-6)
    assert found.names == sorted(heard, key=lambda name: max(p.effort for p in found.points if p.name == name))
    assert found.least(0.9) == [frontier_effort(n, 0.9) for n in (4, 8, 16)]


def test_as_a_table_the_law_comes_by_weight_and_length_and_points_say_whether_k_was_measured() -> None:
    points = tuple(
        FrontierPoint(name=name, n=4, weight=0.5, gap=1.0, lipschitz=K, effort=K, least_effort=1.0, excess=K)
        for name, K in (("a", 3.0), ("b", 2.0))
    )
    found = Frontier(lengths=(4, 8), weights=(0.25, 0.5), points=points, measured=frozenset({"b"}), absent={"c": "why"})
    table = found.as_dict()
    assert [(row["weight"], row["n"]) for row in table["law"]] == [(0.25, 4), (0.25, 8), (0.5, 4), (0.5, 8)]
    assert [row["effort"] for row in table["law"]] == [frontier_effort(n, w) for w in (0.25, 0.5) for n in (4, 8)]
    assert [(row["name"], row["constant_measured"]) for row in table["points"]] == [("a", False), ("b", True)]
    assert table["absent"] == {"c": "why"}
    assert found.names == ["b", "a"]
    assert found.efforts("a", 0.25)[0] != found.efforts("a", 0.5)[0] == 3.0


def test_a_map_that_never_reaches_a_weight_is_absent_with_that_weight_and_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Capped(Normalizer):
        def weights(self, block):  # type: ignore[no-untyped-def]
            found = super().weights(block)
            return 0.7 * found + 0.3 / found.shape[-1]

    plain = get("softmax")
    assert isinstance(plain, Normalizer)
    capped = Capped(plain.map, name="capped").double()
    monkeypatch.setattr(frontier, "_registered", lambda: iter([("capped", capped)]))
    found = place_on_frontier([4], (0.5, 0.9))
    assert not found.points
    assert "4 keys" in found.absent["capped"]
    assert "0.9" in found.absent["capped"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("softmax", []), ("entmax15", []), ("softmax1", ["at most 1"]), ("sigmoid", ["any sum", "shift"]),
        ("stick_breaking", ["at most 1", "order"]), ("topk", ["jumps"]), ("hard", ["jumps"]),
        ("gaussian", ["not a map"]),
    ],
)  # fmt: skip
def test_each_reason_is_that_of_a_declared_property(name: str, why: list[str]) -> None:
    reason = outside_the_law(get(name))
    assert (reason is None) == (not why)
    assert all(part in str(reason) for part in why)
    assert len(str(reason).split(";")) >= len(why)


def test_every_name_is_registered_in_float64() -> None:
    every = dict(frontier._registered())
    assert list(every) == list(available())
    assert all(
        p.dtype == torch.float64 for one in every.values() if isinstance(one, Normalizer) for p in one.parameters()
    )


@pytest.mark.usefixtures("few")
def test_a_weight_that_needs_no_gap_at_one_length_is_searched_anew_at_the_next() -> None:
    found = place_on_frontier([2, 8], (0.5,))
    gaps = {(point.name, point.n): point.gap for point in found.points}
    assert gaps["softmax", 2] == 0.0
    assert gaps["softmax", 8] == pytest.approx(math.log(7), rel=1e-6)
    assert gaps["sparsemax", 8] == pytest.approx(0.5 - 0.5 / 7, rel=1e-6)
