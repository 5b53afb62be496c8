"""Tables of claims: for the terminal, JSON (`attnorm lab verify`, `frontier`) and the site (tools/site.py)."""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from attnorm.normalizers.registry import BUILT_IN
from attnorm.text import markdown_table
from attnorm_lab.errata.catalogue import Claim, ClaimCase, claims
from attnorm_lab.errata.frontier import Frontier
from attnorm_lab.errata.search import Counterexample, Finding, table_stands

COLOR = {"refuted": "yellow", "survived": "green", "says nothing": "yellow", "argument": "dim"}
CAPTION = """\
form: printed in the paper, corrected by us, or added by us. status: what we expect.
rows: random and optimized rows that were tried. violated: rows on which the claim is false.
worst ratio: largest quantity / upper bound, or lower bound / quantity. Above 1 the claim is false.
5, 50, 95 %: quantiles of this ratio over random rows. Near 1 the bound is tight.
smallest counterexample: n keys, top N, width d, temperature T, and its SEED:ROUND:ROW.
Show a counterexample: attnorm lab verify --replay CLAIM:SEED:ROUND:ROW
result: refuted (counterexample found), survived (none found), argument (proved, not searched),
says nothing (true, but trivial on many rows). Capital letters: not as expected.
NOT ATTAINED: no row reached a bound that is known to be reached, so it has become looser."""
STATED = 5  # claims up to which the table is preceded by their statements


def findings_table(findings: Sequence[Finding]) -> RenderableType:
    table = Table(
        title="Claims searched for counterexamples",
        caption=CAPTION,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for heading in (
        "claim",
        "form",
        "status",
        "rows",
        "violated",
        "worst ratio",
        "5, 50, 95 %",
        "smallest counterexample",
        "result",
    ):
        right = heading in ("rows", "violated", "worst ratio", "5, 50, 95 %")
        table.add_column(heading, justify="right" if right else "left", no_wrap=heading != "smallest counterexample")
    family = ""
    for finding in findings:
        if finding.claim.family != family:
            family = finding.claim.family
            table.add_section()
            table.add_row(Text(family, style="italic dim"))
        table.add_row(*_cells(finding))
    statements = [Text(_statement(finding.claim)) for finding in findings] if len(findings) <= STATED else []
    return Group(*statements, table, Text(closing_sentence(findings)))


def _statement(claim: Claim) -> str:
    correction = f" Use instead: {claim.correction}." if claim.correction else ""
    return f"{claim.id}: {claim.statement}. Domain: {claim.domain}. From: {claim.source}.{correction}"


def _cells(finding: Finding) -> tuple[str | Text, ...]:
    claim = finding.claim
    verdict = Text(finding.verdict, style=COLOR.get(finding.verdict, "bold red"))
    if not claim.searched:
        return claim.id, claim.form, claim.status, "", "", "", "", "", verdict
    tightness = " ".join(number(value) for value in finding.tightness) if finding.tightness else ""
    return (
        claim.id,
        claim.form,
        claim.status,
        f"{finding.tried:,}",
        f"{finding.violations:,}" if finding.violations else "",
        number(finding.worst_ratio),
        tightness,
        format_location(finding.counterexample) if finding.counterexample else "",
        verdict,
    )


def format_location(counterexample: Counterexample) -> str:
    """Return the location: n = 2, N = 1, d = 1, T = 0.5, 0:2:17, where the last three are seed, round and row."""
    where = f"{counterexample.seed}:{counterexample.round}:{counterexample.row}"
    size = f"n={counterexample.keys} N={counterexample.top_n} d={counterexample.width}"
    return f"{size} T={counterexample.temperature:.3g} at {where}"


def number(value: float) -> str:
    """Format with three digits, and more near 1."""
    if not math.isfinite(value):
        return "inf" if value > 0 else "-"
    if 1e-6 < abs(value - 1) < 1e-2:
        return f"{value:.6f}".rstrip("0") if abs(value - 1) < 1e-3 else f"{value:.4f}"
    if value == 0 or 0.001 <= abs(value) < 1000:
        return f"{value:.3g}"
    return f"{value:.0e}"


def closing_sentence(findings: Sequence[Finding]) -> str:
    searched = [finding for finding in findings if finding.claim.searched]
    rows = sum(finding.tried for finding in searched)
    if not table_stands(findings):
        broken = ", ".join(f"{finding.claim.id} ({finding.verdict})" for finding in findings if not finding.stands)
        return f"Not as expected: {broken}."
    wrong = sum(finding.claim.status == "false" for finding in searched)
    claims = f"{len(searched)} claim{'s' * (len(searched) != 1)}"
    return (
        f"All as expected: {claims} searched on {rows:,} rows, {wrong} false claim{'s' * (wrong != 1)} refuted, no "
        "other claim violated."
    )


def findings_as_dict(findings: Sequence[Finding], seed: int) -> dict[str, Any]:
    """Return plain values for JSON; a ratio that is not finite becomes null."""
    return {
        "stands": table_stands(findings),
        "seed": seed,
        "findings": [
            {
                **claim_as_dict(finding.claim),
                "verdict": finding.verdict,
                "stands": finding.stands,
                "tried": finding.tried,
                "rounds": finding.rounds,
                "violations": finding.violations,
                "worst_ratio": _finite(finding.worst_ratio),
                "says_nothing_share": finding.says_nothing_share,
                "reached": [_finite(value) for value in finding.reached],
                "tightness": [_finite(value) for value in finding.tightness] if finding.tightness else None,
                "counterexample_found": _counterexample(finding.counterexample),
            }
            for finding in findings
        ],
    }


def claim_as_dict(claim: Claim) -> dict[str, Any]:
    names = ("id", "family", "source", "form", "statement", "domain", "status", "counterexample", "correction", "proof")
    return {name: getattr(claim, name) for name in names}


def _counterexample(counterexample: Counterexample | None) -> dict[str, Any] | None:
    return (
        None
        if counterexample is None
        else {**vars(counterexample), "ratio": _finite(counterexample.ratio), "address": counterexample.address}
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def counterexample_as_dict(claim: Claim, case: ClaimCase, row: int, ratio: float) -> dict[str, Any]:
    """Return one row in full, with everything needed to check it by hand."""
    return {
        "claim": claim.id,
        "statement": claim.statement,
        "domain": claim.domain,
        "status": claim.status,
        "ratio": _finite(ratio),
        "violated": ratio > 1,
        "keys": case.keys,
        "top_n": case.top_n,
        "temperature": case.temperature,
        "dial": float(case.dial[row]),
        "pick": int(case.pick[row]),
        "logits": case.logits[row].tolist(),
        "softmax": case.weights[row].tolist(),
        "vectors": case.vectors[row].tolist(),
        "matrices": case.matrices[row].tolist(),
    }


def counterexample_text(claim: Claim, case: ClaimCase, row: int, ratio: float) -> RenderableType:
    verdict = "fails" if ratio > 1 else "does not fail"
    lines = [
        f"{claim.id}: {claim.statement}",
        f"Domain: {claim.domain}",
        f"It {verdict} here: the ratio of quantity and bound is {ratio:.17g}.",
        f"keys n = {case.keys}, top N = {case.top_n}, width d = {case.width}, temperature T = {case.temperature:.17g}",
        f"Random numbers of the claim: dial {float(case.dial[row]):.17g}, pick {int(case.pick[row])}",
    ]
    table = Table("key", "logit", "softmax weight", "vector", box=SIMPLE_HEAD, padding=(0, 2, 0, 0))
    for key in range(case.keys):
        vector = _format_numbers(case.vectors[row, key])
        table.add_row(str(key), _format_exact(case.logits[row, key]), _format_exact(case.weights[row, key]), vector)
    matrices = [
        f"{name}: {_format_matrix(case.matrices[row, i])}" for i, name in enumerate(("query matrix", "key matrix"))
    ]
    return Group(Text("\n".join(lines)), table, Text("\n".join(matrices)))


def _format_exact(value: Tensor) -> str:
    return f"{float(value):.17g}"


def _format_numbers(values: Tensor) -> str:
    return " ".join(f"{float(value):.6g}" for value in values)


def _format_matrix(values: Tensor) -> str:
    return "; ".join(_format_numbers(row) for row in values)


MEASURED = "*"  # after a name whose Lipschitz constant is measured


def frontier_table(placed: Frontier) -> RenderableType:
    table = Table(
        title="Effort K g needed to keep a weight w on one of n keys (smaller is better)",
        caption="g: gap between the logit of this key and the n-1 other logits, which are equal.\n"
        "K: Lipschitz constant of the normalizer. A temperature does not change K g.\n"
        "the law: the lower bound (n w - 1)/(n - 1) for all shift-invariant,\n"
        "permutation-equivariant maps with row sum 1.\n"
        f"{MEASURED} K is measured, not declared, so the effort may be larger. Empty: takes too long.",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
    )
    table.add_column("normalizer", no_wrap=True)
    table.add_column("w", justify="right")
    for n in placed.lengths:
        table.add_column(f"{n:,}", justify="right", no_wrap=True)
    for weight in placed.weights:
        table.add_section()
        table.add_row("the law", f"{weight:g}", *map(_format_effort, placed.least(weight)), style="bold")
        for name in placed.names:
            table.add_row(label(name, placed), f"{weight:g}", *map(_format_effort, placed.efforts(name, weight)))
    return Group(table, _absent_table(placed)) if placed.absent else table


def label(name: str, placed: Frontier) -> str:
    return name + MEASURED * (name in placed.measured)


def _format_effort(effort: float) -> str:
    return "" if math.isnan(effort) else f"{effort:.3f}"


def _absent_table(placed: Frontier) -> Table:
    table = Table(title="Normalizers that the law does not cover", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("normalizer", no_wrap=True)
    table.add_column("reason")
    for name, reason in placed.absent.items():
        table.add_row(name, reason)
    return table


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
        table = markdown_table(("claim", "from", "statement", "status", "use instead"), map(_row, members), left=5)
        parts += ["", f"### {HEADINGS.get(family, family)}", "", table]
    return "\n".join([*parts, ""])


def _row(claim: Claim) -> tuple[str, ...]:
    link = claim.proof.removeprefix("docs/")
    name = f"[{claim.id}]({link})" if link else claim.id
    status = {"holds": "holds", "vacuous": "holds, says nothing", "false": "**false**"}[claim.status]
    if claim.counterexample:
        status += f": {_safe(claim.counterexample)}"
    if not claim.searched:
        status += " (an argument, not searched)"
    statement = f"`{claim.statement}`; {_safe(claim.domain)}"
    return name, _safe(claim.source), statement, status, _safe(claim.correction)


def _safe(text: str) -> str:
    """Escape plain text for a table cell."""
    for character in ("\\", "*", "_", "<", "$"):
        text = text.replace(character, f"\\{character}")
    return text


def built_in_claims() -> list[Claim]:
    """Return the claims without those about normalizers of other packages."""
    names = {f"{kind}-{name}" for kind in ("lemma-1", "lipschitz", "frontier") for name in BUILT_IN}
    return [claim for claim in claims() if claim.family not in ("normalizers", "frontier") or claim.id in names]
