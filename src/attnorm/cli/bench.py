"""attnorm bench: speed and memory against what one would use instead."""

from pathlib import Path
from typing import Annotated

import typer

from attnorm.bench.suites import Suite
from attnorm.cli.output import Json, say, say_result, show, show_json, status, usage_errors


def bench(
    suite: Annotated[Suite, typer.Argument(help="What to measure.")] = "all",
    threads: Annotated[
        int | None, typer.Option(help="Threads torch may use; by default 2 for analyze, else its own choice.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Of analyze: a folder of SmolLM2-135M; $ATTNORM_SMOLLM2 by default.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Of analyze: the text that --model reads.")] = None,
    out: Annotated[Path | None, typer.Option(help="Of analyze: folder for growth.svg.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes: shows that it runs, not how fast.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print GitHub tables.")] = False,
    as_json: Json = False,
) -> None:
    """Time and memory against what one would use instead: the entmax package, torch SDPA, dense and eager attention.

    Exit code 1: a promise is missed.
    """
    from attnorm.bench.results import benchmark_markdown, benchmark_tables
    from attnorm.bench.suites import run_benchmarks

    if as_json and markdown:
        raise typer.BadParameter("choose one of --json and --markdown")
    if suite not in ("analyze", "all") and any(option is not None for option in (model, text, out)):
        raise typer.BadParameter(f"--model, --text and --out belong to analyze, and this is {suite}")
    for option, path, found in (("--model", model, Path.is_dir), ("--text", text, Path.is_file)):
        if path is not None and not found(path):
            raise typer.BadParameter(f"{option}: there is no {'folder' if found is Path.is_dir else 'file'} {path}")
    with status("measuring") as line, usage_errors():
        results = run_benchmarks(
            suite,
            threads=threads,
            quick=quick,
            model=model,
            text=text,
            progress=lambda finished: line.update(f"measured {finished}"),
        )
    if as_json:
        show_json(results.as_dict())
    elif markdown:
        say_result(benchmark_markdown(results))
    else:
        show(benchmark_tables(results))
    if out is not None:
        from attnorm.bench.growth_figure import save_growth_figure

        for growth in results.growth:
            say(f"wrote {save_growth_figure(growth, out)}")
    if results.missed:
        raise typer.Exit(1)
