"""The table of claims: well formed, every proof and correction exists, no row knows of another."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

import attnorm
from attnorm.normalizers.registry import BUILT_IN
from attnorm.theory import geometry
from attnorm_lab.errata import Claim, claims, verify
from attnorm_lab.errata.catalogue.claim import CaseSizes, at_least, at_most, between, draw_case, equals
from attnorm_lab.errata.catalogue.geometry import _same_moments
from attnorm_lab.errata.tables import built_in_claims, claims_markdown

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = {claim.id: claim for claim in claims()}
SEARCHED = [claim for claim in CLAIMS.values() if claim.searched]


def anchors(page: Path) -> set[str]:
    """What a code host makes of the headings: lower case, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def test_ids_are_unique_and_every_field_says_something() -> None:
    assert len(CLAIMS) == len(claims())
    for claim in CLAIMS.values():
        assert re.fullmatch(r"[a-z0-9_.\-]+", claim.id)
        assert claim.source
        assert claim.statement
        assert claim.domain
        assert claim.form in ("printed", "corrected", "added")


def test_every_false_claim_has_a_counterexample_and_a_correction() -> None:
    for claim in CLAIMS.values():
        if claim.status == "false":
            assert claim.counterexample
            assert claim.correction
        assert claim.form != "corrected" or claim.status == "holds"


def test_corrections_are_claims_that_hold_or_functions_that_exist() -> None:
    from attnorm.theory import distance

    named = {"critical-n-sub-linear": distance.fit_power_law, "at-most-80-percent": geometry.separability_null}
    for claim in CLAIMS.values():
        if claim.correction in CLAIMS:
            assert CLAIMS[claim.correction].status == "holds"
        elif claim.correction:
            assert named[claim.id].__name__ in claim.correction


@pytest.mark.parametrize("proof", sorted({claim.proof for claim in built_in_claims()}))
def test_every_proof_is_a_heading_of_a_chapter(proof: str) -> None:
    page, _, anchor = proof.partition("#")
    assert (ROOT / page).is_file()
    sections = {*BUILT_IN} if page == "docs/normalizers.md" else anchors(ROOT / page)  # the site writes the former
    assert not anchor or anchor in sections


def test_links_between_the_pages_of_the_theory_lead_somewhere() -> None:
    for page in [ROOT / "docs" / "theory.md", *(ROOT / "docs" / "theory").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            assert there.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(there), f"{page.name}: {target}"


def test_table_cells_show_their_text_as_it_is() -> None:
    claim = Claim(
        id="x", family="dispersion", source="a_b", form="added", statement="||J|| <= 1", domain="c*d", status="holds",
        proof="docs/theory/dispersion.md", ratio=lambda case: case.dial,
    )  # fmt: skip
    (row,) = [line for line in claims_markdown([claim]).splitlines() if line.startswith("| [x]")]
    assert row == r"| [x](theory/dispersion.md) | a\_b | `\|\|J\|\| <= 1`; c\*d | holds |  |"


# A row alone is the last of its sequence: distances to its keys are others.
@pytest.mark.parametrize(
    "claim",
    [claim for claim in SEARCHED if claim.id not in ("lipschitz-alibi", "lipschitz-nearmax")],
    ids=lambda claim: claim.id,
)
@pytest.mark.every_second("claim")
def test_rows_together_give_what_each_gives_alone(claim: Claim) -> None:
    assert claim.ratio is not None
    # In coverage four rows are four heads over one context.
    together, chosen = (4, [0, 1, 2, 3]) if claim.family == "coverage" else (1, [0, 3])
    for seed, structured in ((1, False), (2, True)):
        case = draw_case(seed, claim.sizes, structured=structured)
        with torch.no_grad():
            whole = claim.ratio(case)
            alone = [claim.ratio(case.rows(slice(i, i + together))) for i in chosen[::together]]
        assert len(whole) == len(case.dial)
        assert whole.dim() == 1 or len(claim.attained) in (0, whole.shape[-1])
        applies = ~whole[chosen].isnan()
        torch.testing.assert_close(torch.cat(alone)[applies], whole[chosen][applies], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("structured", [False, True])
def test_cases_depend_on_their_seed_alone_and_keep_to_their_sizes(structured: bool) -> None:
    sizes = CaseSizes(least_keys=3, most_keys=16, least_width=2, least_top_n=2, most_top_n=4)
    for seed in range(50):
        case, again = (draw_case(seed, sizes, structured=structured) for _ in range(2))
        assert torch.equal(case.logits, again.logits)
        assert torch.equal(case.vectors, again.vectors)
        assert 3 <= case.keys <= 16
        assert case.width >= 2
        assert 2 <= case.top_n <= min(4, case.keys - 1)
        assert (case.dial > 0).all()
        assert case.temperature > 0


def test_a_row_with_one_weight_refutes_corollary_2_by_the_factor_that_the_table_names() -> None:
    claim = CLAIMS["corollary-2-i"]
    case = draw_case(0, claim.sizes, structured=False)
    leads = torch.where(torch.arange(case.keys) == 0, 1e4, 0.0).double().expand_as(case.logits)
    assert claim.ratio is not None
    found = claim.ratio(dataclasses.replace(case, logits=leads))
    torch.testing.assert_close(found[:, 1], torch.full_like(case.dial, 2 * (1 - 1 / case.keys) / 1.25))


@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e3])
def test_moments_off_by_a_millionth_are_noticed_in_any_unit(unit: float) -> None:
    """And those that differ by rounding are not; the variance grows as the fourth power of the unit."""
    case = draw_case(3, CaseSizes(least_keys=4, most_keys=4, least_top_n=3, most_top_n=3), structured=False)
    rows = case.selected
    dealt = unit * rows.vectors[:, torch.tensor([[0, 1, 2], [2, 0, 1], [3, 1, 0]])].transpose(0, 1)
    y = rows.chosen_weights[:, 0, :, None] * dealt
    squares = (y.sum(-2, keepdim=True) - y).square().sum(-1)
    mean, variance = squares.mean(0)[:, None], squares.var(0, correction=0)[:, None]
    assert (_same_moments(rows, dealt, (mean * (1 + 1e-12), variance * (1 + 1e-12))) < 1).all()
    assert (_same_moments(rows, dealt, (mean * (1 + 1e-6), variance)) > 1).all()
    assert (_same_moments(rows, dealt, (mean, variance * (1 + 1e-4))) > 1).all()


def test_ratios_exceed_one_exactly_where_the_bound_fails() -> None:
    quantity, bound = torch.tensor([1.0, 2.0, 0.0, 3.0, -1.0]), torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0])
    assert at_most(quantity, bound).tolist() == [0.5, 2.0, 0.0, float("inf"), -1.0]
    assert at_least(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 1.0])).tolist() == [0.5, float("inf")]
    assert between(torch.tensor(2.0), torch.tensor(1.0), torch.tensor(8.0)).tolist() == [0.5, 0.25]
    assert equals(torch.tensor(1.5), torch.tensor(1.0), 0.25) == 2.0


def test_a_registered_normalizer_gets_its_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnorm.normalizers.registry._registered", {})

    class Doubled(attnorm.LogitRule):
        def forward(self, block):  # type: ignore[no-untyped-def]
            return 2 * block.logits

        def gain(self, n: int) -> float | None:
            return 1.0

    attnorm.register("doubled")(Doubled)
    found = {claim.id: claim for claim in claims() if "doubled" in claim.id}
    assert set(found) == {"lipschitz-doubled", "frontier-doubled"}
    assert found["lipschitz-doubled"].proof == ""
    assert not verify(found.values(), budget_seconds=1e-9, first_rounds=3)[0].stands
