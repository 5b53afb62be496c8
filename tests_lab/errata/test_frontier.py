"""The frontier of weight against gradient: the law holds for every map, and each map lies where its formula says."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.registry import get
from attnorm.theory.gradient import entmax_worst_norm
from attnorm_lab.errata import frontier
from attnorm_lab.errata import frontier as fr
from attnorm_lab.errata.catalogue.claim import ClaimCase
from attnorm_lab.errata.catalogue.normalizers import CLAIMS
from attnorm_lab.errata.frontier import Frontier, FrontierPoint, frontier_effort, outside_the_law, place_on_frontier
from tests.theory.reference.threshold_maps import entmax, kneemax


def entmax_contender(name: str, alpha: float, scale: Callable[[int], float] = lambda n: 1.0) -> fr.FrontierContender:
    """alpha-entmax(scale(n) z) with its exact Lipschitz constant."""
    return fr.FrontierContender(
        name,
        lambda weight, n: fr.entmax_gap(weight, n, alpha) / scale(n),
        lambda n: entmax_worst_norm(n, alpha) * scale(n),
    )


SOFTMAX = entmax_contender("softmax", 1.0)
ENTMAX15 = entmax_contender("entmax15", 1.5)
SPARSEMAX = entmax_contender("sparsemax", 2.0)
SSMAX = entmax_contender("ssmax", 1.0, lambda n: 0.168 * math.log(n))
ASENTMAX = entmax_contender("asentmax", 1.5, lambda n: 1 + 0.55 * math.log(n + 1) ** 0.5)
KNEEMAX = fr.FrontierContender("kneemax", fr.kneemax_gap, lambda n: 0.5)
ALL = (SOFTMAX, ENTMAX15, SPARSEMAX, SSMAX, ASENTMAX, KNEEMAX)


@given(st.integers(2, 10**7), st.floats(0, 1))
@settings(max_examples=100)
def test_no_map_pays_less_than_the_law(n: int, position: float) -> None:
    weight = 1 / n + position * (1 - 1 / n)
    for contender in ALL:
        effort = contender.gap(weight, n) * contender.lipschitz(n)
        assert effort >= fr.frontier_effort(n, weight) * (1 - 1e-9) - 1e-12


def mixture(z: Tensor) -> Tensor:
    return (torch.softmax(3 * z, -1) + entmax(z, 2.0)) / 2


@pytest.mark.parametrize(
    ("row_map", "constant"),
    [
        (lambda z: torch.softmax(z, -1), 0.5),
        (lambda z: entmax(z, 1.5), 1.0),
        (lambda z: entmax(z, 2.0), 1.0),
        (kneemax, 0.5),
        (mixture, (1.5 + 1) / 2),
    ],
)
@pytest.mark.parametrize("n", [2, 5, 40])
def test_the_law_holds_for_maps_that_are_run(row_map: Callable[[Tensor], Tensor], constant: float, n: int) -> None:
    for gap in torch.linspace(0, 4, 30).tolist():
        assert fr.two_level_weight(row_map, gap, n) <= fr.frontier_weight(n, constant * gap) + 1e-12


def test_sparsemax_attains_the_law() -> None:
    for n in (2, 10, 10**6):
        for weight in (1 / n, 0.5, 0.9, 1.0):
            point = fr.frontier([SPARSEMAX], [n], [weight])[0]
            assert point.effort == pytest.approx(point.least_effort, rel=1e-12, abs=1e-12)
    assert fr.two_level_weight(lambda z: entmax(z, 2.0), 0.3, 10) == pytest.approx(fr.frontier_weight(10, 0.3))


@pytest.mark.parametrize(
    ("contender", "n", "effort"),
    [(SOFTMAX, 1024, 4.56), (SOFTMAX, 131072, 6.99), (SPARSEMAX, 1024, 0.90), (SPARSEMAX, 131072, 0.90)],
)
def test_published_efforts_for_weight_0_9(contender: fr.FrontierContender, n: int, effort: float) -> None:
    assert fr.frontier([contender], [n], [0.9])[0].effort == pytest.approx(effort, abs=0.005)


def test_published_efforts_of_entmax15_use_the_cap_and_not_its_exact_constant() -> None:
    for n, with_cap, exact in [(1024, 1.88, 1.631), (131072, 1.90, 1.841)]:
        point = fr.frontier([ENTMAX15], [n], [0.9])[0]
        assert point.gap * 1.0 == pytest.approx(with_cap, abs=0.005)
        assert point.effort == pytest.approx(exact, abs=0.0005)


def test_the_table_is_data_in_a_fixed_order() -> None:
    points = fr.frontier([SOFTMAX, KNEEMAX], [10, 100], [0.5, 0.9])
    assert [(p.name, p.n, p.weight) for p in points[:3]] == [
        ("softmax", 10, 0.5),
        ("softmax", 10, 0.9),
        ("softmax", 100, 0.5),
    ]
    assert len(points) == 8
    assert all(p.excess == pytest.approx(p.effort / p.least_effort) for p in points)


def test_a_temperature_or_length_scale_moves_no_map_on_the_frontier() -> None:
    for n in (10, 1000):
        softmax, ssmax = (fr.frontier([c], [n], [0.7])[0] for c in (SOFTMAX, SSMAX))
        assert softmax.effort == pytest.approx(ssmax.effort)
        assert softmax.gap != pytest.approx(ssmax.gap)


@pytest.mark.parametrize("n", [2, 7, 3000])
@pytest.mark.parametrize("weight", [0.6, 0.97])
def test_root_finding_on_a_map_equals_the_closed_form(n: int, weight: float) -> None:
    maps: list[tuple[fr.FrontierContender, Callable[[Tensor], Tensor]]] = [
        (SOFTMAX, lambda z: torch.softmax(z, -1)),
        (ENTMAX15, lambda z: entmax(z, 1.5)),
        (KNEEMAX, kneemax),
    ]
    for contender, row_map in maps:
        assert fr.gap_to_keep(row_map, weight, n) == pytest.approx(contender.gap(weight, n), rel=1e-9)


def test_a_gap_for_weight_one_is_finite_only_for_sparse_maps() -> None:
    assert fr.gap_to_keep(lambda z: entmax(z, 2.0), 1.0, 50) == pytest.approx(1, abs=1e-9)
    assert fr.gap_to_keep(kneemax, 1.0, 50) == pytest.approx(2 * (1 + 1 / 50), abs=1e-6)
    assert fr.softmax_gap(1.0, 50) == math.inf
    assert fr.gap_to_keep(torch.zeros_like, 0.5, 50) == math.inf
    assert fr.gap_to_keep(lambda z: torch.softmax(z, -1), 1 / 50, 50) == 0


def test_a_gap_near_zero_is_found() -> None:
    needed = fr.softmax_gap(0.2501, 4)
    assert 0 < needed < 1e-3
    assert fr.gap_to_keep(lambda z: torch.softmax(z, -1), 0.2501, 4) == pytest.approx(needed, rel=1e-6)


def test_a_measured_constant_comes_close_from_below() -> None:
    def root_entmax(z: Tensor) -> Tensor:  # differentiable entmax15 on two-level rows: the threshold is detached
        p = entmax(z.detach(), 1.5)
        root = torch.where(p > 0, z / 2 - (z.detach() / 2 - p.sqrt()), 0.0)
        u = p.sqrt()
        tau = (u / u.sum(-1, keepdim=True) * (z - z.detach()) / 2).sum(-1, keepdim=True)
        return torch.where(p > 0, (root - tau).square(), 0.0)

    measured = fr.measured_lipschitz(root_entmax, 100)
    exact = entmax_worst_norm(100, 1.5)
    assert exact * 0.999 <= measured <= exact * (1 + 1e-9)


@pytest.mark.parametrize(("gap", "checked"), [(11.0, True), (17.0, True), (19.0, False)])
def test_the_gap_of_softmax_is_checked_down_to_a_millionth_beside_the_leader(gap: float, checked: bool) -> None:
    keys = 64
    dial, nothing = torch.tensor([gap], dtype=torch.float64), torch.zeros(1, keys, 2, dtype=torch.float64)
    case = ClaimCase(nothing[..., 0], nothing, 1.0, 1, dial, torch.tensor([0]), torch.zeros(1, 2, 2, 2))
    (claim,) = [each for each in CLAIMS if each.id == "gap-for-weight"]
    assert claim.ratio is not None
    assert bool(claim.ratio(case).isfinite().all()) is checked


def test_weights_that_reach_one_up_to_rounding_count_as_one() -> None:
    calls = iter([0.0, 1.0, *[1.0 - 1e-15, 1.0 - 2.0**-49] * 40])

    def row_map(logits: Tensor) -> Tensor:
        return torch.full_like(logits, next(calls))

    assert fr.gap_to_keep(row_map, 1.0, 4) == pytest.approx(1 / 3)  # upper and lower halves are left out in turn


def test_the_sides_of_the_limits_of_weights_and_gaps() -> None:
    for n in (2, 5):
        assert fr.frontier_effort(n, 1 / n) == pytest.approx(0, abs=1e-15)
        assert fr.frontier_effort(n, 1.0) == 1
        assert fr.frontier_weight(n, 0.0) == 1 / n
        assert fr.kneemax_weight(0.0, n) == pytest.approx(1 / n)
        assert fr.kneemax_weight(2 + 2 / n, n) == 1
        assert fr.kneemax_weight(2 + 2 / n - 1e-3, n) < 1
    assert fr.kneemax_gap(0.25, 4) == pytest.approx(0, abs=1e-15)  # both keys at the knee
    assert fr.kneemax_gap(0.625, 4, 0.5) == pytest.approx(2 * (0.625 + 0.125 - (0.125 + 0.125)))
    assert fr.kneemax_gap(0.85, 4, 1.0) == pytest.approx(2 * (0.85 + 0.25 - 2 * math.sqrt(0.25 * 0.05)))


def test_an_effort_of_zero_is_on_the_frontier() -> None:
    (point,) = fr.frontier([SPARSEMAX], [4], [0.25])
    assert (point.least_effort, point.excess) == (0, 1)
    (point,) = fr.frontier([fr.FrontierContender("three", lambda weight, n: 3.0, lambda n: 5.0)], [4], [0.5])
    assert point.effort == 15
    assert point.excess == pytest.approx(45)


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


@pytest.mark.usefixtures("few")
def test_a_weight_that_needs_no_gap_at_one_length_is_searched_anew_at_the_next() -> None:
    found = place_on_frontier([2, 8], (0.5,))
    gaps = {(point.name, point.n): point.gap for point in found.points}
    assert gaps["softmax", 2] == 0.0
    assert gaps["softmax", 8] == pytest.approx(math.log(7), rel=1e-6)
    assert gaps["sparsemax", 8] == pytest.approx(0.5 - 0.5 / 7, rel=1e-6)
