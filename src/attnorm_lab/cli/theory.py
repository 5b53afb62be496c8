"""attnorm lab dispersion, frontier, verify: compare normalizers in theory, and search the papers' claims."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnorm.cli.output import Json, ProgressBar, failures, say, show, show_json, usage_errors

if TYPE_CHECKING:
    from attnorm_lab.errata import Claim


def dispersion(
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also write the figure to this folder: dispersion.svg and dispersion.png."),
    ] = None,
    gap: Annotated[float, typer.Option(help="Largest logit minus the mean of the other logits.")] = 6.0,
    noise: Annotated[float, typer.Option(help="Standard deviation of the other logits; 0 makes them equal.")] = 1.0,
    draws: Annotated[int, typer.Option(help="Number of random rows per length; the table shows their median.")] = 5,
    seed: Annotated[int, typer.Option(help="Random seed for the rows.")] = 0,
    as_json: Json = False,
) -> None:
    """Show how much weight each normalizer gives to the largest of 16 to 131,072 logits.

    Example: attnorm lab dispersion --gap 8 --out figures
    """
    from rich.markdown import Markdown

    from attnorm_lab.bench.dispersion import dispersion as measure
    from attnorm_lab.bench.dispersion import dispersion_table

    with failures(out_of_memory="Use fewer --draws."), ProgressBar() as progress:
        measured = measure(
            gap=gap, noise=noise, draws=draws, seed=seed, progress=lambda name: progress(f"measuring {name}")
        )
    if as_json:
        show_json(measured.as_dict())
    else:
        show(Markdown(dispersion_table(measured)))
    if out is not None:
        from attnorm_lab.bench.figures import save_dispersion_figure

        with failures(writes_to=out):
            for path in save_dispersion_figure(measured, out):
                say(f"wrote {path}")


def frontier(
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also write the figure to this folder: frontier.svg and frontier.png."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what each normalizer needs to keep a weight of 0.5 or 0.9 on one key among 16 to 1,000,000.

    The cost is the product K g of the Lipschitz constant K and the gap g between the largest logit and the others. The
    table also has the lower bound for all normalizers. Normalizers that the bound does not cover are listed with the
    reason.

    Example: attnorm lab frontier --out figures
    """
    from attnorm_lab.errata.frontier import place_on_frontier
    from attnorm_lab.errata.tables import frontier_table

    with ProgressBar() as progress:
        placed = place_on_frontier(progress=lambda name: progress(f"measuring {name}"))
    if as_json:
        show_json(placed.as_dict())
    else:
        show(frontier_table(placed))
    if out is not None:
        from attnorm_lab.errata.figures import save_frontier_figure

        with failures(writes_to=out):
            for path in save_frontier_figure(placed, out):
                say(f"wrote {path}")


def verify(
    names: Annotated[list[str] | None, typer.Argument(metavar="CLAIM", help="Claims to search (default: all).")] = None,
    budget: Annotated[
        float,
        typer.Option(
            help="Time for the search in seconds. Every claim gets at least nine rounds, which take up to a "
            "minute for all claims; the remaining time is used for more rounds."
        ),
    ] = 60.0,
    seed: Annotated[
        int, typer.Option(help="Random seed for the rows; the same seed finds the same counterexamples.")
    ] = 0,
    figure: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also write the figure to this folder: tightness.svg and tightness.png."),
    ] = None,
    again: Annotated[
        str | None,
        typer.Option("--replay", metavar="CLAIM:SEED:ROUND:ROW", help="Show one counterexample of the table in full."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Search the claims of the papers, their corrections and the properties of all normalizers for counterexamples.

    Exit codes: 0 every claim has the expected status; 1 a claim does not; 130 interrupted, with the results so far.

    Example: attnorm lab verify corollary-3 --budget 20
    """
    with usage_errors():
        if again is not None:
            _replay(again, as_json)
            return
        claims = _claims_by_name(names or [])
    from attnorm_lab.errata.search import SearchInterrupted, table_stands
    from attnorm_lab.errata.search import verify as search
    from attnorm_lab.errata.tables import findings_as_dict, findings_table

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
        from attnorm_lab.errata.figures import save_tightness_figure

        with failures(writes_to=figure):
            for path in save_tightness_figure(findings, figure):
                say(f"wrote {path}")
    if not table_stands(findings):
        raise typer.Exit(1)


def _claims_by_name(names: list[str]) -> "list[Claim]":
    """Return the claims with these names in the order of the table; all if none is named."""
    from attnorm.text import did_you_mean
    from attnorm_lab.errata import claims

    known = {claim.id: claim for claim in claims()}
    for name in names:
        if name not in known:
            raise ValueError(f"unknown claim {name!r}; {did_you_mean(name, known)}")
    return [claim for claim in known.values() if not names or claim.id in names]


def _replay(address: str, as_json: bool) -> None:
    from attnorm_lab.errata import replay
    from attnorm_lab.errata.catalogue.claim import ROWS
    from attnorm_lab.errata.tables import counterexample_as_dict, counterexample_text

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
