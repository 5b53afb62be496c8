"""attnorm dispersion: how much weight a clear winner keeps as the context grows."""

from pathlib import Path
from typing import Annotated

import typer

from attnorm.cli.output import Json, say, show, show_json, status, usage_errors


def dispersion(
    out: Annotated[Path | None, typer.Option(help="Folder for dispersion.svg and dispersion.png.")] = None,
    gap: Annotated[float, typer.Option(help="Score of the winner above the mean of the others.")] = 6.0,
    noise: Annotated[float, typer.Option(help="Standard deviation of the other scores; 0 makes them equal.")] = 1.0,
    draws: Annotated[int, typer.Option(help="Random rows per length; the median is told.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the random rows.")] = 0,
    as_json: Json = False,
) -> None:
    """For every normalizer: the weight a clear winner keeps among 16 to 131,072 keys, as a table and a figure."""
    from attnorm.bench.dispersion import dispersion as measure
    from attnorm.bench.dispersion_table import dispersion_table

    with status("measuring") as line, usage_errors():
        measured = measure(
            gap=gap, noise=noise, draws=draws, seed=seed, progress=lambda name: line.update(f"measuring {name}")
        )
    if as_json:
        show_json(measured.as_dict())
    else:
        show(dispersion_table(measured))
    if out is not None:
        from attnorm.bench.dispersion_figure import save_dispersion_figure

        for path in save_dispersion_figure(measured, out):
            say(f"wrote {path}")
