"""attnorm doctor: check the installation."""

import typer

from attnorm.cli.output import Json, show, show_json
from attnorm.cli.progress import ProgressBar


def doctor(as_json: Json = False) -> None:
    """Show versions, devices and optional packages, and check that attnorm works on this machine.

    Exit code 1: a check failed.

    Example: attnorm doctor --json
    """
    from attnorm.cli.health import examine, health_tables

    with ProgressBar() as progress:
        health = examine(lambda check, done, total: progress("checking", done, total, detail=check))
    if as_json:
        show_json(health.as_dict())
    else:
        show(health_tables(health))
    if not health.well:
        raise typer.Exit(1)
