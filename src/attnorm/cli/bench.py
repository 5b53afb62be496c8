"""attnorm bench: speed and memory against what one would use instead."""

from typing import Annotated

import typer

from attnorm.bench.suites import Suite
from attnorm.cli.output import Json, show, show_json, status, usage_errors


def bench(
    suite: Annotated[Suite, typer.Argument(help="What to measure.")] = "all",
    threads: Annotated[int | None, typer.Option(help="Threads torch may use; its own choice by default.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes: shows that it runs, not how fast.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print GitHub tables.")] = False,
    as_json: Json = False,
) -> None:
    """Time and memory against the entmax package, torch SDPA and dense attention. Exit code 1: a promise is missed."""
    from attnorm.bench.suites import run_benchmarks
    from attnorm.report.benchmarks import benchmark_markdown, benchmark_tables

    if as_json and markdown:
        raise typer.BadParameter("choose one of --json and --markdown")
    with status("measuring") as line, usage_errors():
        results = run_benchmarks(
            suite, threads=threads, quick=quick, progress=lambda finished: line.update(f"measured {finished}")
        )
    if as_json:
        show_json(results.as_dict())
    elif markdown:
        typer.echo(benchmark_markdown(results))
    else:
        show(benchmark_tables(results))
    if results.missed:
        raise typer.Exit(1)
