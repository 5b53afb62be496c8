"""attnorm frontier: what every normalizer pays, in gradient, to keep a weight on one of many keys."""

from pathlib import Path
from typing import Annotated

import typer

from attnorm.cli.output import Json, say, show, show_json, status


def frontier(
    out: Annotated[Path | None, typer.Option(help="Folder for frontier.svg and frontier.png.")] = None,
    as_json: Json = False,
) -> None:
    """Effort K g that keeps weight 0.5 and 0.9 among 16 to 1,000,000 keys, beside the least that any map can pay.

    Every registered normalizer is placed, or it is said why the law does not speak about it.
    """
    from attnorm.claims.frontier_table import frontier_table
    from attnorm.theory.normalizer_frontier import place_on_frontier

    with status("measuring") as line:
        placed = place_on_frontier(progress=lambda name: line.update(f"measuring {name}"))
    if as_json:
        show_json(placed.as_dict())
    else:
        show(frontier_table(placed))
    if out is not None:
        from attnorm.claims.frontier_figure import save_frontier_figure

        for path in save_frontier_figure(placed, out):
            say(f"wrote {path}")
