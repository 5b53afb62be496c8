"""attnorm frontier: what every normalizer pays, in gradient, to keep a weight on one of many keys."""

from pathlib import Path
from typing import Annotated

import typer

from attnorm.cli.output import Json, show, show_json, status


def frontier(
    out: Annotated[Path | None, typer.Option(help="Folder for frontier.svg and frontier.png.")] = None,
    as_json: Json = False,
) -> None:
    """Effort K g that keeps weight 0.5 and 0.9 among 16 to 1,000,000 keys, beside the least that any map can pay."""
    from attnorm.report.frontier import frontier_table, measure_frontier

    with status("measuring") as line:
        measured = measure_frontier(progress=lambda name: line.update(f"measuring {name}"))
    if as_json:
        show_json(measured.as_dict())
    else:
        show(frontier_table(measured))
    if out is not None:
        from attnorm.report.frontier_figure import save_frontier_figure

        for path in save_frontier_figure(measured, out):
            typer.echo(f"wrote {path}", err=True)
