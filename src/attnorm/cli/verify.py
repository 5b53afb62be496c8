"""attnorm verify: search every claim for counterexamples."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnorm.cli.output import Json, ProgressBar, say, show, show_json, usage_errors

if TYPE_CHECKING:
    from attnorm.theory import Claim


def verify(
    names: Annotated[list[str] | None, typer.Argument(metavar="CLAIM", help="Claims to search (default: all).")] = None,
    budget: Annotated[
        float,
        typer.Option(
            help="Seconds to search. Every claim gets at least nine rounds, which take half a minute for all claims; "
            "the remaining time is used for more rounds."
        ),
    ] = 60.0,
    seed: Annotated[
        int, typer.Option(help="Random seed for the rows; the same seed finds the same counterexamples.")
    ] = 0,
    figure: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for tightness.svg and tightness.png.")
    ] = None,
    again: Annotated[
        str | None, typer.Option("--replay", metavar="CLAIM:SEED:ROUND:ROW", help="Show one counterexample in full.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Search the claims of the papers, their corrections and the properties of all normalizers for counterexamples.

    Exit codes: 0 every claim has the expected status; 1 one has not; 130 interrupted, with the results so far.

    Example: attnorm verify corollary-3 --budget 20
    """
    with usage_errors():
        if again is not None:
            _replay(again, as_json)
            return
        claims = _claims_by_name(names or [])
    from attnorm.claims.tables import findings_as_dict, findings_table
    from attnorm.theory.search import SearchInterrupted, table_stands
    from attnorm.theory.search import verify as search

    interrupted = False
    try:
        with usage_errors(), ProgressBar("searching") as progress:
            findings = search(
                claims,
                budget_seconds=budget,
                seed=seed,
                progress=lambda claim, share: progress("searching", share, 1.0, detail=claim.id),
            )
    except SearchInterrupted as stopped:
        findings, interrupted = [finding for finding in stopped.findings if finding.rounds], True
    if as_json:
        show_json(findings_as_dict(findings, seed))
    else:
        show(findings_table(findings))
    if interrupted:
        say("Interrupted: the table shows the claims searched so far.")
        raise typer.Exit(130)
    if figure is not None:
        from attnorm.claims.figures import save_tightness_figure

        with usage_errors():
            for path in save_tightness_figure(findings, figure):
                say(f"wrote {path}")
    if not table_stands(findings):
        raise typer.Exit(1)


def _claims_by_name(names: list[str]) -> "list[Claim]":
    """Return the claims with these names in the order of the table; all if none is named."""
    from attnorm.text import did_you_mean
    from attnorm.theory import claims

    known = {claim.id: claim for claim in claims()}
    for name in names:
        if name not in known:
            raise ValueError(f"unknown claim {name!r}; {did_you_mean(name, known)}")
    return [claim for claim in known.values() if not names or claim.id in names]


def _replay(address: str, as_json: bool) -> None:
    from attnorm.claims.tables import counterexample_as_dict, counterexample_text
    from attnorm.theory import replay
    from attnorm.theory.catalogue.claim import ROWS

    name, *numbers = address.split(":")
    if len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
        raise ValueError(
            f"--replay: expected CLAIM:SEED:ROUND:ROW from the table, e.g. corollary-3:0:6:29, got {address!r}"
        )
    (claim,) = _claims_by_name([name])
    seed, round_number, row = map(int, numbers)
    if row >= ROWS:
        raise ValueError(f"--replay: expected a row from 0 to {ROWS - 1}, got {row}")
    case, ratios = replay(claim, seed, round_number)
    show_one = (claim, case, row, float(ratios[row]))
    if as_json:
        show_json(counterexample_as_dict(*show_one))
    else:
        show(counterexample_text(*show_one))
