"""attnorm bench: time and memory against the usual alternatives."""

from pathlib import Path
from typing import Annotated

import typer

from attnorm.bench.suites import Suite
from attnorm.cli.output import Json, ProgressBar, say, say_result, show, show_json, usage_errors


def bench(
    suite: Annotated[Suite, typer.Argument(help="Suite to run.")] = "all",
    threads: Annotated[
        int | None, typer.Option(help="Number of CPU threads (default: 2 for analyze, else the choice of torch).")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="analyze: folder of SmolLM2-135M (default: $ATTNORM_SMOLLM2).")
    ] = None,
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="analyze: text for --model.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="analyze: folder for growth.svg.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes, to check that the benchmarks run.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print GitHub tables.")] = False,
    as_json: Json = False,
) -> None:
    """Measure time and memory against the entmax package, torch SDPA, and dense and eager attention.

    Exit code 1: a promised limit is exceeded.

    Example: attnorm bench normalizers --quick
    """
    from attnorm.bench.results import benchmark_markdown, benchmark_tables
    from attnorm.bench.suites import run_benchmarks

    if as_json and markdown:
        raise typer.BadParameter("expected one of --json and --markdown, got both")
    if suite not in ("analyze", "all") and any(option is not None for option in (model, text, out)):
        raise typer.BadParameter(f"--model, --text and --out belong to the suite analyze, got {suite}")
    for option, path, exists in (("--model", model, Path.is_dir), ("--text", text, Path.is_file)):
        if path is not None and not exists(path):
            kind = "folder" if exists is Path.is_dir else "file"
            raise typer.BadParameter(f"{option}: expected a {kind}, got {path}, which does not exist")
    with ProgressBar("measuring") as progress, usage_errors():
        results = run_benchmarks(
            suite,
            threads=threads,
            quick=quick,
            model=model,
            text=text,
            progress=lambda finished: progress(f"measured {finished}"),
        )
    if as_json:
        show_json(results.as_dict())
    elif markdown:
        say_result(benchmark_markdown(results))
    else:
        show(benchmark_tables(results))
    if out is not None:
        from attnorm.bench.figures import save_growth_figure

        for growth in results.growth:
            say(f"wrote {save_growth_figure(growth, out)}")
    if results.missed:
        raise typer.Exit(1)
