"""attnorm normalizers, dispersion, frontier: what normalizers promise, and what they do as the context grows."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from attnorm.cli.output import ByWidth, Json, ProgressBar, say, show, show_json, usage_errors


def normalizers(as_json: Json = False) -> None:
    """List all normalizers with their properties and papers.

    Example: attnorm normalizers --json
    """
    from attnorm.cli.normalizer_table import describe_all, normalizer_table

    descriptions = describe_all()
    if as_json:
        show_json([asdict(description) for description in descriptions])
    else:
        show(ByWidth(normalizer_table(descriptions), normalizer_table(descriptions, narrow=True)))


def dispersion(
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for dispersion.svg and .png.")] = None,
    gap: Annotated[float, typer.Option(help="Logit of the winner minus the mean of the other logits.")] = 6.0,
    noise: Annotated[float, typer.Option(help="Standard deviation of the other logits; 0 makes them equal.")] = 1.0,
    draws: Annotated[int, typer.Option(help="Random rows per length; the table shows their median.")] = 5,
    seed: Annotated[int, typer.Option(help="Random seed for the rows.")] = 0,
    as_json: Json = False,
) -> None:
    """Show the weight that the largest of 16 to 131,072 logits keeps under every normalizer.

    Example: attnorm dispersion --gap 8 --out figures
    """
    from attnorm.bench.dispersion import dispersion as measure
    from attnorm.bench.dispersion import dispersion_table

    with ProgressBar() as progress, usage_errors():
        measured = measure(
            gap=gap, noise=noise, draws=draws, seed=seed, progress=lambda name: progress(f"measuring {name}")
        )
    if as_json:
        show_json(measured.as_dict())
    else:
        show(dispersion_table(measured))
    if out is not None:
        from attnorm.bench.figures import save_dispersion_figure

        for path in save_dispersion_figure(measured, out):
            say(f"wrote {path}")


def frontier(
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for frontier.svg and frontier.png.")] = None,
    as_json: Json = False,
) -> None:
    """Show the effort K g that each normalizer needs to keep a weight of 0.5 or 0.9 among 16 to 1,000,000 keys.

    The table has the lower bound for all normalizers next to it. A normalizer that the bound does not cover is listed
    with the reason.

    Example: attnorm frontier --out figures
    """
    from attnorm.claims.tables import frontier_table
    from attnorm.theory.frontier import place_on_frontier

    with ProgressBar() as progress:
        placed = place_on_frontier(progress=lambda name: progress(f"measuring {name}"))
    if as_json:
        show_json(placed.as_dict())
    else:
        show(frontier_table(placed))
    if out is not None:
        from attnorm.claims.figures import save_frontier_figure

        for path in save_frontier_figure(placed, out):
            say(f"wrote {path}")
