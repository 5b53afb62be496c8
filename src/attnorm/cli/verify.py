"""attnorm verify: search every claim for counterexamples; does the table still stand?"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from attnorm.cli.output import Json, SafeConsole, say, show, show_json, usage_errors

if TYPE_CHECKING:
    from attnorm.theory import Claim


def verify(
    names: Annotated[list[str] | None, typer.Argument(metavar="[CLAIM]...", help="Claims to search; all.")] = None,
    budget: Annotated[
        float,
        typer.Option(
            help="Seconds to search for. The least: nine rounds of every claim are searched whatever it says (half a "
            "minute for all of them), so that the table is judged on enough rows. The time left goes to more rounds."
        ),
    ] = 60.0,
    seed: Annotated[int, typer.Option(help="Of the rows; the same seed finds the same counterexamples.")] = 0,
    figure: Annotated[Path | None, typer.Option(help="Folder for tightness.svg and tightness.png.")] = None,
    again: Annotated[
        str | None, typer.Option("--replay", metavar="CLAIM:SEED:ROUND:ROW", help="Show one counterexample in full.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Search every claim of the papers, its correction and every normalizer's declarations for counterexamples.

    Exit code 0: the table of claims stands; 1: it does not; 130: interrupted, with what was found so far.
    """
    with usage_errors():
        if again is not None:
            _replay(again, as_json)
            return
        chosen = _named(names or [])
    from attnorm.claims.search_report import findings_as_dict, findings_table
    from attnorm.theory.search import SearchInterrupted, table_stands
    from attnorm.theory.search import verify as search

    interrupted = False
    try:
        with usage_errors(), _progress() as report:
            findings = search(
                chosen, budget_seconds=budget, seed=seed, progress=lambda claim, share: report(claim.id, share)
            )
    except SearchInterrupted as stopped:
        findings, interrupted = [finding for finding in stopped.findings if finding.rounds], True
    if as_json:
        show_json(findings_as_dict(findings, seed))
    else:
        show(findings_table(findings))
    if interrupted:
        say("Interrupted: these are the claims searched so far.")
        raise typer.Exit(130)
    if figure is not None:
        from attnorm.claims.tightness_figure import save_tightness_figure

        with usage_errors():
            for path in save_tightness_figure(findings, figure):
                say(f"wrote {path}")
    if not table_stands(findings):
        raise typer.Exit(1)


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """A bar on stderr: what is searched, and the share of the time that has passed."""
    columns = (
        TextColumn("{task.description:34}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=SafeConsole(stderr=True), transient=True) as bar:
        task = bar.add_task("searching", total=1.0)
        yield lambda name, share: bar.update(task, description=name, completed=share)


def _named(names: list[str]) -> "list[Claim]":
    """The claims of these names, in the table's order; all where none is named."""
    from attnorm.suggest import did_you_mean
    from attnorm.theory import claims

    known = {claim.id: claim for claim in claims()}
    for name in names:
        if name not in known:
            raise ValueError(f"unknown claim {name!r}; {did_you_mean(name, known)}")
    return [claim for claim in known.values() if not names or claim.id in names]


def _replay(address: str, as_json: bool) -> None:
    from attnorm.claims.search_report import counterexample_as_dict, counterexample_text
    from attnorm.theory import replay
    from attnorm.theory.catalogue.claim import ROWS

    name, *numbers = address.split(":")
    if len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
        raise ValueError(
            f"expected CLAIM:SEED:ROUND:ROW as the table prints it, e.g. corollary-3:0:1:4, got {address!r}"
        )
    (claim,) = _named([name])
    seed, round_number, row = map(int, numbers)
    if row >= ROWS:
        raise ValueError(f"a round has {ROWS} rows, counted from 0; got row {row}")
    case, ratios = replay(claim, seed, round_number)
    show_one = (claim, case, row, float(ratios[row]))
    if as_json:
        show_json(counterexample_as_dict(*show_one))
    else:
        show(counterexample_text(*show_one))
