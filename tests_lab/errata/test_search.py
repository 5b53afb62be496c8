"""The search: the same seed finds the same, a broken formula is found, a wrong status in the table is found."""

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnorm.normalizers.kneemax import Kneemax
from attnorm.normalizers.softmax import Softmax
from attnorm.theory import dispersion, distance, geometry, gradient
from attnorm.theory.dispersion import Bounds
from attnorm.theory.isotropic_law import IsotropicLaw
from attnorm_lab.errata import Claim, SearchInterrupted, claims, frontier, replay, search, verify
from attnorm_lab.errata.catalogue import claim as claim_module
from attnorm_lab.errata.catalogue.claim import draw_case

CLAIMS = {claim.id: claim for claim in claims()}
AT_ONCE = 1e-9  # seconds: the first rounds only


def found(name: str, first_rounds: int = search.FIRST_ROUNDS, seed: int = 0) -> search.Finding:
    (finding,) = verify([CLAIMS[name]], budget_seconds=AT_ONCE, first_rounds=first_rounds, seed=seed)
    return finding


LATE = {"entmax-constant"}  # refuted by later rounds
SEARCHED = [claim for claim in CLAIMS.values() if claim.searched]
# One claim of each family and status in every run; test_replayed.py compares the ratios of all claims with stored ones.
OFTEN = {(claim.family, claim.status): claim.id for claim in reversed(SEARCHED)}.values()


@pytest.mark.parametrize(
    "name",
    [pytest.param(claim.id, marks=() if claim.id in OFTEN else pytest.mark.nightly) for claim in SEARCHED],
)
@pytest.mark.every_second("name")
def test_the_first_rounds_alone_settle_every_claim(name: str) -> None:
    finding = found(name, first_rounds=search.FIRST_ROUNDS if name in LATE else 3)
    assert finding.stands, finding.verdict


def test_ascents_start_from_structured_and_from_random_rows_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[bool] = []

    def drawn(seed: int, sizes: Any, *, structured: bool) -> Any:
        started.append(structured)
        return draw_case(seed, sizes, structured=structured)

    monkeypatch.setattr(search, "draw_case", drawn)
    monkeypatch.setattr(search, "_ascend", lambda ratio, case: case)
    one = search._Search(CLAIMS["corollary-3"], seed=0)
    for round_number in range(5 * len(search.STRATEGIES)):
        one.case_of(round_number)
    ascents = started[search.STRATEGIES.index("ascent") :: len(search.STRATEGIES)]
    assert ascents == [True, False, True, False, True]


def test_the_same_seed_finds_the_same_and_another_does_not() -> None:
    one, again, other = (found("corollary-3", first_rounds=3, seed=seed) for seed in (3, 3, 4))
    assert one == again
    assert one.worst_ratio != other.worst_ratio


SLOWER = ("theorem-1-random", "figure-4")


@pytest.mark.parametrize(
    "name", ["corollary-3", "lemma-2", *(pytest.param(name, marks=pytest.mark.nightly) for name in SLOWER)]
)
def test_a_counterexample_can_be_made_again_exactly(name: str) -> None:
    smallest = found(name, first_rounds=3, seed=1).counterexample
    assert smallest is not None
    case, ratios = replay(CLAIMS[name], smallest.seed, smallest.round)
    assert float(ratios[smallest.row]) == smallest.ratio > 1
    assert (case.keys, case.width, case.top_n) == (smallest.keys, smallest.width, smallest.top_n)
    assert smallest.address == f"{name}:1:{smallest.round}:{smallest.row}"


def less(bound: Any) -> Any:
    """An upper bound made 3 % too small, a bracket 3 % too narrow."""
    if isinstance(bound, tuple):
        return Bounds(bound[0] * 1.03, bound[1] * 0.97)
    return bound * 0.97


def more(bound: Any) -> Any:
    return bound * 1.03


def changed(function: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: change(function(*args, **kwargs))


def half_variance(moments: Any) -> Any:
    return moments[0], moments[1] * 0.5


BROKEN = [
    ("lemma-1", dispersion, "lemma1_bounds", less),
    ("corollary-1", dispersion, "corollary1_bounds", less),
    ("lemma-2.1", dispersion, "lemma21_bounds", less),
    ("lemma-2.1-sharp", dispersion, "sharp_weight_bounds", less),
    ("entropy-floor", dispersion, "entropy_floor", more),
    ("entropy-deficit", dispersion, "entropy_floor_deficit", less),
    ("horizon", dispersion, "horizon", lambda n: 0.9 * n),
    ("effective-gap", dispersion, "effective_gap_from_logits", more),
    ("proposition-3.1", dispersion, "proposition31_bound", less),
    ("proposition-3.1-tight", dispersion, "proposition31_tight", less),
    ("theorem-1-fixed", distance, "theorem1_fixed_printed", less),
    ("theorem-1-fixed-tight", distance, "theorem1_fixed_tight", less),
    ("theorem-1-fixed-signed", distance, "theorem1_fixed_tight", less),
    ("theorem-1-any-set-tight", distance, "theorem1_fixed_tight", less),
    ("relative-distance", distance, "relative_distance_bounds", less),
    ("theorem-1-random-corrected", distance, "theorem1_random_bounds", less),
    ("theorem-1-random-conditioned", distance, "theorem1_random_bounds", less),
    ("theorem-1-random-epsilon", distance, "theorem1_random_epsilon", lambda e: 0.5 * e),
    ("corollary-2-corrected", distance, "corollary2_bounds", less),
    ("corollary-2-lower-end", distance, "corollary2_bounds", less),
    ("law-attained", frontier, "frontier_effort", more),
    ("gap-for-weight", frontier, "softmax_gap", more),
    ("xi-is-a-worst-case", geometry, "xi", less),
    ("theorem-2-lower", geometry, "theorem2_printed", lambda b: Bounds(b.lower + 0.2, b.upper)),
    ("theorem-2-corrected", geometry, "theorem2_bounds", less),
    ("theorem-2-moments", geometry, "isotropic_moments", half_variance),
    ("theorem-2-anisotropic", geometry, "anisotropic_bounds", less),
    ("anisotropic-moments", geometry, "permuted_norm_moments", half_variance),
    ("anisotropic-moments-independent", geometry, "independent_norm_moments", half_variance),
    ("lemma-2-corrected", gradient, "lemma2_corrected", less),
    ("corollary-3-corrected", gradient, "corollary3_corrected", less),
    ("corollary-3-local", gradient, "corollary3_local", less),
    ("jacobian-norm-exact", gradient, "threshold_jacobian_norm", more),
    ("kernel-norm-exact", gradient, "kernel_jacobian_norm", more),
    ("jacobian-norm-bracket", gradient, "entmax_norm_bracket", less),
    ("figure-4-corrected", gradient, "finite_difference_corrected", less),
    ("toy-2.3-corrected", gradient, "swap_example", lambda e: dataclasses.replace(e, corrected=1.03 * e.corrected)),
    ("entmax-worst-case", gradient, "entmax_worst_norm", less),
    ("head-coverage-bounds", geometry, "union_bounds", less),
    ("kneemax-weight-exact", frontier, "kneemax_weight", less),
    ("kneemax-weight-any-row", frontier, "kneemax_weight", more),
    ("kneemax-near-frontier", frontier, "frontier_weight", lambda w: w + 0.5),
    ("lipschitz-kneemax", Kneemax, "lipschitz", less),
    ("frontier-kneemax", Kneemax, "lipschitz", less),
    ("lipschitz-softmax", Softmax, "lipschitz", less),
]  # fmt: skip


def few(broken: list[Any], of_each: int) -> list[Any]:
    """The first ones of each family run with every commit, the others at night."""
    before = [sum(other[1] is one[1] for other in broken[:i]) for i, one in enumerate(broken)]
    nightly = pytest.mark.nightly
    return [pytest.param(*one, marks=nightly if n >= of_each else ()) for one, n in zip(broken, before, strict=True)]


@pytest.mark.parametrize(
    ("name", "owner", "attribute", "change"), few(BROKEN, 1), ids=[f"{b[0]}-{b[2]}" for b in BROKEN]
)
def test_breaking_a_formula_breaks_the_table(
    monkeypatch: pytest.MonkeyPatch, name: str, owner: Any, attribute: str, change: Callable[[Any], Any]
) -> None:
    monkeypatch.setattr(owner, attribute, changed(getattr(owner, attribute), change))
    assert not found(name, first_rounds=3).stands or not found(name).stands


def test_the_error_of_the_exact_law_is_in_favor_of_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """P = 0.5 up to 0.1 against a lower bound of 0.45 and an upper one of 0.8."""
    case, _ = replay(CLAIMS["theorem-2-corrected"], 0, 0)

    def law(rows: Any, radius: Tensor, *_: Any, **__: Any) -> Any:
        whole = torch.full((*radius.shape, *rows.indices.shape[1:]), 0.5, dtype=torch.float64).numpy()
        return IsotropicLaw(whole, 0.2 * whole, 1.0, "any")

    monkeypatch.setattr(geometry, "theorem2_exact", law)
    bounds = Bounds(torch.tensor(0.45).double(), torch.tensor(0.8).double())
    monkeypatch.setattr(geometry, "theorem2_bounds", lambda *_: bounds)
    ratio = CLAIMS["theorem-2-corrected"].ratio
    assert ratio is not None
    found = ratio(case)[0].reshape(-1, 2)
    assert found.mean(0).tolist() == pytest.approx([0.45 / 0.6, 0.4 / 0.8])


def test_every_corrected_claim_is_among_those_broken() -> None:
    corrected = {claim.id for claim in CLAIMS.values() if claim.form == "corrected"}
    assert corrected <= {name for name, *_ in BROKEN}


def a_tenth_more(bound: Any) -> Any:
    """An upper bound, or the upper of two, 10 % larger than it need be."""
    return Bounds(bound[0], 1.1 * bound[1]) if isinstance(bound, tuple) else 1.1 * bound


def a_tenth_less(bound: Any) -> Any:
    return Bounds(bound[0] / 1.1, bound[1]) if isinstance(bound, tuple) else bound / 1.1


LOOSENED = [
    ("lemma-2.1-sharp", dispersion, "sharp_weight_bounds", a_tenth_more),
    ("lemma-2.1-sharp", dispersion, "sharp_weight_bounds", a_tenth_less),
    ("entropy-floor", dispersion, "entropy_floor", a_tenth_less),
    ("horizon", dispersion, "horizon", a_tenth_more),
    ("theorem-1-fixed-tight", distance, "theorem1_fixed_tight", a_tenth_more),
    ("theorem-1-any-set-tight", distance, "theorem1_fixed_tight", a_tenth_more),
    ("corollary-2-corrected", distance, "corollary2_bounds", a_tenth_more),
    ("theorem-1-random-corrected", distance, "theorem1_random_bounds", a_tenth_more),
    ("theorem-1-random-corrected", distance, "theorem1_random_bounds", a_tenth_less),
    ("theorem-2-corrected", geometry, "theorem2_bounds", a_tenth_more),
    ("theorem-2-corrected", geometry, "theorem2_bounds", a_tenth_less),
    ("lemma-2-corrected", gradient, "lemma2_corrected", a_tenth_more),
    ("corollary-3-corrected", gradient, "corollary3_corrected", a_tenth_more),
    ("figure-4-corrected", gradient, "finite_difference_corrected", a_tenth_more),
    ("head-coverage-bounds", geometry, "union_bounds", a_tenth_more),
    ("head-coverage-bounds", geometry, "union_bounds", a_tenth_less),
    ("kneemax-weight-any-row", frontier, "kneemax_weight", a_tenth_less),
    ("lipschitz-kneemax", Kneemax, "lipschitz", a_tenth_more),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "owner", "attribute", "change"), few(LOOSENED, 1), ids=[f"{b[0]}-{b[3].__name__}" for b in LOOSENED]
)
def test_loosening_a_bound_by_a_tenth_breaks_the_table(
    monkeypatch: pytest.MonkeyPatch, name: str, owner: Any, attribute: str, change: Callable[[Any], Any]
) -> None:
    monkeypatch.setattr(owner, attribute, changed(getattr(owner, attribute), change))
    assert found(name).verdict == "NOT ATTAINED"


def test_every_corrected_bound_must_be_attained_but_for_one_that_no_row_is_known_to_reach() -> None:
    corrected = {claim.id for claim in CLAIMS.values() if claim.form == "corrected" and not any(claim.attained)}
    equalities = {"toy-2.3-corrected"}
    assert corrected - equalities == {"theorem-1-random-epsilon"}
    assert corrected.isdisjoint(name for name, *_ in LOOSENED)


def test_each_of_two_bounds_must_be_attained() -> None:
    def ratio(case: Any) -> Tensor:
        return torch.stack([torch.ones_like(case.dial), 0.9 * torch.ones_like(case.dial)], -1)

    (finding,) = verify([toy(ratio, attained=(0.99, 0.95))], budget_seconds=AT_ONCE, first_rounds=3)
    assert (finding.reached, finding.worst_ratio) == ((1.0, 0.9), 1.0)
    assert finding.verdict == "NOT ATTAINED"
    (finding,) = verify([toy(ratio, attained=(0.99, None))], budget_seconds=AT_ONCE, first_rounds=3)
    assert finding.verdict == "survived"


@pytest.mark.parametrize(
    ("name", "status", "verdict"),
    [
        ("corollary-3", "holds", "VIOLATED"),
        ("corollary-3-corrected", "false", "NOT REFUTED"),
        ("lemma-2.1", "vacuous", "NOT VACUOUS"),
        ("corollary-3", "false", "refuted"),
        ("theorem-2.2", "holds", "argument"),
    ],
)
def test_a_wrong_status_is_noticed(name: str, status: str, verdict: str) -> None:
    claim = dataclasses.replace(CLAIMS[name], status=status)  # type: ignore[arg-type]
    (finding,) = verify([claim], budget_seconds=AT_ONCE, first_rounds=3)
    assert finding.verdict == verdict
    assert finding.stands == (not verdict.isupper())


def toy(ratio: Callable[[Any], Tensor], **more: Any) -> Claim:
    return dataclasses.replace(CLAIMS["lemma-2.1"], id="toy", ratio=ratio, **more)


def test_a_claim_that_applies_to_no_row_does_not_stand() -> None:
    (finding,) = verify([toy(lambda case: case.not_applicable)], budget_seconds=AT_ONCE, first_rounds=3)
    assert finding.verdict == "NOT TRIED"
    assert not search.table_stands([finding])


@pytest.mark.parametrize("differentiable", [True, False])
def test_ascent_finds_what_random_rows_do_not(monkeypatch: pytest.MonkeyPatch, differentiable: bool) -> None:
    """A peak in the dial, on which few of the rows lie that an ascent starts from."""

    def ratio(case: Any) -> Tensor:
        return torch.exp(-(case.dial.log() - 1.0).square())

    claim = toy(ratio, differentiable=differentiable)
    reached = replay(claim, 0, 2)[1]
    monkeypatch.setattr(search, "ASCENT_STEPS", 0)
    start = replay(claim, 0, 2)[1]
    assert (reached >= start).all()
    assert reached.median() > 0.9 > 2 * start.median()


@pytest.mark.parametrize("differentiable", [True, False])
def test_ascent_does_not_run_to_where_only_rounding_is_left(
    monkeypatch: pytest.MonkeyPatch, differentiable: bool
) -> None:
    monkeypatch.setattr(search, "ASCENT_STEPS", 300)
    case, _ = replay(toy(lambda case: 1 / case.dial, differentiable=differentiable), 0, 2)
    assert case.dial.min() >= 0.99 * math.exp(-search.MAX_LOG_DIAL)


@pytest.mark.parametrize("slope", [1, -1, 0])  # of the ratio: +inf, -inf, NaN
def test_ascent_does_not_follow_a_slope_that_is_not_finite(slope: int) -> None:
    seen = []

    def ratio(case: Any) -> Tensor:
        seen.append(case.dial.detach().clone())
        return 1 + slope * (case.dial - case.dial.detach()).sqrt()

    replay(toy(ratio), 0, 2)
    assert len(seen) > 2
    assert all(torch.equal(one, seen[0]) for one in seen)


class Clock:
    """Every look at it takes a hundredth of a second: a budget then means the same on every machine."""

    now = 0.0

    def monotonic(self) -> float:
        self.now += 0.01
        return self.now


def test_more_budget_means_more_rounds_and_refuted_claims_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "time", Clock())
    finding, refuted = verify([CLAIMS["lemma-2.1"], CLAIMS["must-collapse"]], budget_seconds=0.4, first_rounds=3)
    assert finding.rounds > 3
    assert refuted.violations < search.ENOUGH_VIOLATIONS + 100


def test_progress_is_the_share_of_the_first_rounds_or_of_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    clock.now = 100.0
    monkeypatch.setattr(search, "time", clock)
    seen: list[float] = []
    pair = [toy(lambda case: 0.5 * case.dial / case.dial)] * 2
    verify(pair, budget_seconds=1.0, first_rounds=3, progress=lambda claim, share: seen.append(share))
    # A look at the clock at the start, one per report and two per round: 0.08 s until the second claim.
    assert seen[:3] == pytest.approx([0.01, 0.25, 0.5])
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(1.0, abs=0.05)


def test_quantiles_and_silent_rows_are_those_of_random_rounds() -> None:
    drawn: list[Tensor] = []

    def ratio(case: Any) -> Tensor:
        drawn.append(case.dial.detach())
        return case.dial / 1e6

    def says_nothing(case: Any) -> Tensor:
        return torch.where(case.dial > 3, torch.nan, (case.dial < 1).double())

    claim = toy(ratio, says_nothing=says_nothing, differentiable=False)
    one = search._Search(claim, seed=0)
    expected = []
    for round_number in range(6):
        drawn.clear()
        one.run_round()
        if search.STRATEGIES[round_number % len(search.STRATEGIES)] == "random":
            expected.append(drawn[-1])
    dials = torch.cat(expected).sort().values
    finding = one.finding()
    ranks = [round(share * (len(dials) - 1)) for share in (0.05, 0.5, 0.95)]
    assert finding.tightness == pytest.approx([float(dials[rank]) / 1e6 for rank in ranks])
    assert finding.says_nothing_share == pytest.approx(float((dials < 1).sum()) / float((dials <= 3).sum()))
    assert finding.rounds == 6


def test_by_default_every_strategy_runs_three_times_and_the_budget_is_a_minute() -> None:
    (finding,) = verify([toy(lambda case: 0.5 * case.dial / case.dial)], budget_seconds=AT_ONCE)
    assert finding.rounds == 3 * len(search.STRATEGIES)
    assert inspect.signature(verify).parameters["budget_seconds"].default == 60


@pytest.mark.parametrize(("least", "missed"), [(claim_module.EXACTLY, 1e-6), (claim_module.NEARLY, 5e-3)])
def test_how_near_a_row_must_come_to_a_bound(least: float, missed: float) -> None:
    for share, verdict in ((0.995, "survived"), (1.005, "NOT ATTAINED")):
        reached = 1 - share * missed
        claim = toy(lambda case, r=reached: torch.full_like(case.dial, r), attained=(least,))  # type: ignore[misc]
        (finding,) = verify([claim], budget_seconds=AT_ONCE, first_rounds=1)
        assert finding.verdict == verdict


# Numbers of keys, widths and numbers of selected keys of the cases that a claim is searched on.
ANY_KEYS, ANY_WIDTH, ANY_TOP = [2, 3, 4, 6, 9, 16, 33, 64], [1, 2, 3, 8], list(range(1, 9))
SIZES = {
    "lemma-1": (ANY_KEYS, ANY_WIDTH, ANY_TOP),
    "theorem-1-random": ([2, 3, 4, 6], ANY_WIDTH, [1, 2, 3, 4, 5]),
    "theorem-1-random-epsilon": ([4, 6], ANY_WIDTH, [1, 2]),
    "corollary-2-i": ([9, 16], ANY_WIDTH, ANY_TOP),
    "corollary-2-ii-decay": ([6], ANY_WIDTH, [1, 2]),
    "theorem-2-lower": ([6, 9, 16, 33, 64], ANY_WIDTH, [5, 6, 7, 8]),
    "theorem-2-upper": (ANY_KEYS, [2, 3, 8], ANY_TOP),
    "theorem-2-upper-below": ([6], [8], [4, 5]),
    "theorem-2-corrected": ([2, 3, 4, 6], [2, 3, 8], [1, 2, 3, 4, 5]),
    "theorem-2-moments": ([3, 4], ANY_WIDTH, [2, 3]),
    "anisotropic-moments": ([3, 4, 6], ANY_WIDTH, [2, 3, 4]),
    "anisotropic-moments-independent": ([3, 4, 6], ANY_WIDTH, [2, 3]),
    "theorem-2-anisotropic": ([2, 3, 4], ANY_WIDTH, [1, 2, 3]),
    "theorem-2-anisotropic-independent": ([2, 3, 4], ANY_WIDTH, [1, 2, 3]),
    "entmax-constant": ([64], ANY_WIDTH, ANY_TOP),
    "kneemax-jacobian": ([2, 3, 4, 6, 9, 16], ANY_WIDTH, ANY_TOP),
    "at-most-80-percent": ([6, 9, 16, 33, 64], ANY_WIDTH, [5, 6, 7, 8]),
    "lemma-1-softmax": ([2, 3, 4, 6, 9, 16], ANY_WIDTH, ANY_TOP),
}


def test_the_sizes_of_the_cases_of_every_claim() -> None:
    """What can be drawn: numbers of keys between the limits and above that of selected keys, and so on."""
    for claim in claims():
        if claim.id in SIZES:
            sizes = claim.sizes
            least = max(sizes.least_keys, sizes.least_top_n + 1)
            keys = [size for size in ANY_KEYS if least <= size <= sizes.most_keys]
            widths = [size for size in ANY_WIDTH if size >= sizes.least_width]
            top = list(range(sizes.least_top_n, min(keys[-1] - 1, sizes.most_top_n) + 1))
            assert (keys, widths, top) == SIZES[claim.id], claim.id


@pytest.mark.parametrize("name", ["lemma-1", "theorem-2-upper-below", "anisotropic-moments", "corollary-2-i"])
def test_cases_of_all_these_sizes_are_drawn(name: str) -> None:
    cases = [draw_case(seed, CLAIMS[name].sizes, structured=False) for seed in range(120)]
    drawn = zip(*((case.keys, case.width, case.top_n) for case in cases), strict=True)
    assert tuple(sorted(set(sizes)) for sizes in drawn) == SIZES[name]


def test_an_interrupted_search_tells_what_it_found() -> None:
    def ratio(case: Any) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(SearchInterrupted) as stopped:
        verify([CLAIMS["corollary-3"], toy(ratio)], budget_seconds=AT_ONCE)
    first, second = stopped.value.findings
    assert first.verdict == "refuted"
    assert second.tried == 0


def test_the_search_leaves_torch_as_it_was() -> None:
    before = torch.get_num_threads()
    found("horizon", first_rounds=1)
    assert torch.get_num_threads() == before
    assert torch.is_grad_enabled()


def claim_of(ratios: list[float], **options: Any) -> Claim:
    """A claim whose ratios are these, row after row."""
    values = torch.tensor(ratios, dtype=torch.float64)

    def ratio(case: Any) -> Tensor:
        return values[torch.arange(len(case.dial)) % len(values)]

    about = dict.fromkeys(("source", "statement", "domain", "proof"), "")
    settings: dict[str, Any] = {"id": "x", "family": "x", "form": "added", "status": "holds", **options}
    return Claim(**about, **settings, differentiable=False, ratio=ratio)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"tried": 1}, "survived"),
        ({}, "NOT TRIED"),
        ({"tried": 1, "violations": 1}, "VIOLATED"),
        ({"tried": 1, "violations": 1, "status": "false"}, "refuted"),
        ({"tried": 1, "status": "false"}, "NOT REFUTED"),
        ({"tried": 1, "status": "vacuous", "says_nothing_share": 0.3}, "says nothing"),
        ({"tried": 1, "status": "vacuous", "says_nothing_share": 0.299}, "NOT VACUOUS"),
        ({"tried": 1, "status": "vacuous"}, "NOT VACUOUS"),
        ({"tried": 1, "attained": (0.9, None), "reached": (0.9, 0.1)}, "survived"),
        ({"tried": 1, "attained": (None, 0.9), "reached": (1.0, 0.89)}, "NOT ATTAINED"),
    ],
)
def test_verdicts(changes: dict[str, Any], verdict: str) -> None:
    about = {name: changes[name] for name in ("status", "attained") if name in changes}
    rest = {name: value for name, value in changes.items() if name not in about}
    finding = search.Finding(claim_of([0.5], **about), **rest)
    assert finding.verdict == verdict
    assert finding.stands == (not verdict.isupper())
    assert search.table_stands([finding]) == finding.stands
    argument = dataclasses.replace(finding.claim, ratio=None)
    assert search.Finding(argument).verdict == "argument"


def test_shares_of_rows_where_a_bound_says_nothing_are_those_of_random_rounds() -> None:
    def silent(case: Any) -> Tensor:
        kinds = torch.arange(len(case.dial)) % 4
        return torch.where(kinds == 0, math.nan, (kinds == 1).double())

    (finding,) = verify([claim_of([0.5], says_nothing=silent)], budget_seconds=AT_ONCE, first_rounds=3)
    assert finding.says_nothing_share == pytest.approx(1 / 3, abs=0.05)
    assert finding.tightness == (0.5, 0.5, 0.5)
    (nothing,) = verify([claim_of([math.nan])], budget_seconds=AT_ONCE, first_rounds=1)
    assert (nothing.tried, nothing.says_nothing_share, nothing.tightness) == (0, None, None)


def test_progress_rises_to_one_and_stays_there() -> None:
    shares: list[float] = []
    some = [claim_of([0.5]), claim_of([0.25])]
    verify(some, budget_seconds=0.2, first_rounds=1, progress=lambda claim, share: shares.append(share))
    assert shares[0] < 0.5
    assert all(0 <= share <= 1 for share in shares)
    late: list[float] = []
    verify(some, budget_seconds=AT_ONCE, first_rounds=1, progress=lambda claim, share: late.append(share))
    assert late == [1.0, 1.0]


@pytest.mark.parametrize(
    ("quantity", "bound", "rounding", "ratio"),
    [
        (1.0, 2.0, 0.0, 0.5),
        (0.0, 0.0, 0.0, 0.0),
        (-1.0, 2.0, 0.0, -1.0),
        (1.0, -1.0, 0.5, 2.0),
        (1.0, 0.0, 0.0, math.inf),
    ],
)
def test_ratios_of_a_quantity_to_its_bound(quantity: float, bound: float, rounding: float, ratio: float) -> None:
    one, other = torch.tensor([quantity]), torch.tensor([bound])
    options = {"rounding": rounding} if rounding else {}
    assert claim_module.at_most(one, other, **options).item() == ratio
    assert claim_module.at_least(other, one, **options).item() == ratio
