"""The command `attnorm`: one function per command; each parses options, calls the package and prints the result.

Results go to stdout (as JSON with --json), progress to stderr. Exit codes: 0 success; 1 a check failed, or no disk
space or memory; 2 wrong usage or input; 3 unfinished work; 130 interrupted.
"""

from typing import Annotated

import typer

from attnorm.cli import analyze, compare, machine, normalizers, reproduce, sweep, train
from attnorm.cli.output import SafeGroup, add_command, show_version

app = typer.Typer(
    name="attnorm",
    cls=SafeGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="Example: attnorm analyze --out run",
)
for command in (
    analyze.analyze, compare.compare, analyze.report, compare.evaluate, normalizers.normalizers,
    normalizers.dispersion, normalizers.frontier, normalizers.verify, reproduce.reproduce, sweep.sweep, sweep.search,
    machine.bench, machine.doctor, compare.stability,
):  # fmt: skip
    add_command(app, command)
app.add_typer(train.train)


@app.callback()
def attnorm(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=show_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Measure how sharply attention selects in any model, compare it with theory, and replace softmax."""


__all__ = ["app"]
