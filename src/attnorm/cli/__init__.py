"""The command `attnorm`: one file per verb; each parses, calls, prints.

Results go to stdout (`--json` for machines), progress to stderr. Exit codes: 0 done, 1 a check or promise failed or
the machine gave out (disk, memory), 2 wrong usage or input, 130 interrupted.
"""

from typing import Annotated

import typer

from attnorm.cli import (
    analyze,
    bench,
    compare,
    dispersion,
    doctor,
    frontier,
    normalizers,
    report,
    reproduce,
    stability,
    train,
    verify,
)
from attnorm.cli.output import SafeGroup, show_version

app = typer.Typer(
    name="attnorm",
    cls=SafeGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for verb in (
    analyze.analyze, compare.compare, report.report, normalizers.normalizers, dispersion.dispersion, frontier.frontier,
    verify.verify, reproduce.reproduce, bench.bench, doctor.doctor, stability.stability,
):  # fmt: skip
    app.command()(verb)
app.add_typer(train.train)


@app.callback()
def attnorm(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=show_version, help="Print the version and leave.")
    ] = False,
) -> None:
    """How sharply attention selects: measure any model, know the limit, replace softmax."""


__all__ = ["app"]
