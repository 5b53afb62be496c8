"""The table of docs/theory.md, generated from the claims.

python -m attnorm.claims.page docs/theory.md     updates the page
"""

import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from attnorm.normalizers.registry import BUILT_IN
from attnorm.theory.catalogue import Claim, claims

BEGIN, END = "<!-- claims: begin -->", "<!-- claims: end -->"
HEADINGS = {
    "dispersion": "Dispersion: how large a weight can be",
    "distance": "Distance: what is selected against the rest",
    "geometry": "Geometry: how many keys stay distinguishable",
    "gradient": "Gradient: how fast weights move",
    "coverage": "Coverage: several heads together",
    "kneemax": "Kneemax: what our own normalizer promises",
    "law": "The law of weight against gradient",
    "normalizers": "What every normalizer declares",
    "frontier": "The frontier of weight against gradient",
}


def claims_markdown(shown: Sequence[Claim]) -> str:
    """Return one table per family: claim, source, statement, status, correction; each claim links to its proof."""
    parts = []
    for family, members in groupby(shown, key=lambda claim: claim.family):
        parts += ["", f"### {HEADINGS.get(family, family)}", "", "| claim | from | statement | status | use instead |"]
        parts += ["|---|---|---|---|---|", *map(_row, members)]
    return "\n".join([*parts, ""])


def _row(claim: Claim) -> str:
    link = claim.proof.removeprefix("docs/")
    name = f"[{claim.id}]({link})" if link else claim.id
    status = {"holds": "holds", "vacuous": "holds, says nothing", "false": "**false**"}[claim.status]
    if claim.counterexample:
        status += f": {_safe(claim.counterexample)}"
    if not claim.searched:
        status += " (an argument, not searched)"
    statement = f"`{claim.statement}`".replace("|", "\\|")
    cells = (name, _safe(claim.source), f"{statement}; {_safe(claim.domain)}", status, _safe(claim.correction))
    return f"| {' | '.join(cells)} |"


def _safe(text: str) -> str:
    """Escape plain text for a table cell."""
    for character in ("\\", "|", "*", "_", "<", "$"):
        text = text.replace(character, f"\\{character}")
    return text


def built_in_claims() -> list[Claim]:
    """Return the claims without those about normalizers of other packages."""
    names = {f"{kind}-{name}" for kind in ("lemma-1", "lipschitz", "frontier") for name in BUILT_IN}
    return [claim for claim in claims() if claim.family not in ("normalizers", "frontier") or claim.id in names]


def updated(page: str) -> str:
    """Return the page with the current table."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected the lines {BEGIN} and {END} in the page; add them where the table belongs")
    return f"{before}{BEGIN}\n{claims_markdown(built_in_claims())}\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(updated(path.read_text(encoding="utf-8")), encoding="utf-8")
