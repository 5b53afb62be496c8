"""attnorm doctor: what is installed, and does it work?"""

import typer

from attnorm.cli.output import Json, show, show_json, status


def doctor(as_json: Json = False) -> None:
    """Show versions, devices and optional packages, and check attnorm on this machine. Exit code 1 if a check fails."""
    from attnorm.cli.health import examine, health_tables

    with status("examining"):
        health = examine()
    if as_json:
        show_json(health.as_dict())
    else:
        show(health_tables(health))
    if not health.well:
        raise typer.Exit(1)
