"""The command `attnorm`: one function per command; each parses options, calls the package and prints the result.

Results go to stdout (as JSON with --json), progress to stderr. Exit codes: 0 success; 1 a check failed, or no disk
space or memory; 2 wrong usage or input; 3 unfinished work; 130 interrupted.
"""

from functools import cache
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer

from attnorm.cli import analyze, compare, doctor, normalizers
from attnorm.cli.output import SafeGroup, add_command, show_version


class Commands(SafeGroup):
    """The commands of attnorm, and those of the entry point group "attnorm.commands", such as `attnorm lab`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *_added()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name) or _added().get(cmd_name)


@cache
def _added() -> dict[str, Any]:
    """Return the commands that other packages add; a package that is not there adds none."""
    commands = {}
    for entry in entry_points(group="attnorm.commands"):
        try:
            commands[entry.name] = typer.main.get_command(entry.load())
        except ModuleNotFoundError as error:
            if error.name != entry.module.partition(".")[0]:
                raise
    return commands


app = typer.Typer(
    name="attnorm",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="Example: attnorm analyze --out run",
)
for command in (
    analyze.analyze, compare.compare, analyze.report, compare.evaluate, normalizers.normalizers, doctor.doctor,
):  # fmt: skip
    add_command(app, command)


@app.callback()
def attnorm(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=show_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Measure how sharply attention selects in any model, compare it with theory, and replace softmax."""


__all__ = ["app"]
