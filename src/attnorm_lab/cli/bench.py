"""attnorm lab bench: time and memory against what a user would pick instead."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import torch
import typer

from attnorm.cli.output import Json, ProgressBar, failures, say, say_result, show, show_json
from attnorm.files import append_jsonl, finite
from attnorm.machine import this_machine
from attnorm_lab.bench.suites import Suite

if TYPE_CHECKING:
    from attnorm_lab.bench.results import Result


def bench(
    suite: Annotated[Suite, typer.Argument(help="Suite of benchmarks to run.")] = "all",
    threads: Annotated[
        int | None, typer.Option(help="Number of CPU threads (default: 2 for analyze, else PyTorch's default).")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="analyze: folder of SmolLM2-135M (default: $ATTNORM_SMOLLM2).")
    ] = None,
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="analyze: text to measure --model on.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Output folder: results.jsonl with a line per finished comparison, and growth.svg."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Use tiny sizes, only to check that the benchmarks run.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print tables in GitHub's Markdown.")] = False,
    as_json: Json = False,
) -> None:
    """Measure time and memory against the entmax package, torch SDPA, and dense and eager attention.

    All suites together take many minutes, so choose one. The suite cuda runs all suites whose names begin with cuda-.
    DIR/results.jsonl keeps the finished comparisons of an interrupted run.

    Exit codes: 1 a promised limit is exceeded, or no disk space or memory; 2 wrong usage; 130 interrupted.

    Example: attnorm lab bench normalizers --quick
    """
    from rich.markdown import Markdown

    from attnorm_lab.bench.results import benchmark_markdown
    from attnorm_lab.bench.suites import run_benchmarks

    if as_json and markdown:
        raise typer.BadParameter("expected --json or --markdown, got both. Remove one.")
    if suite not in ("analyze", "all") and any(option is not None for option in (model, text)):
        raise typer.BadParameter(f"--model and --text: expected the suite analyze or all, got {suite}. Remove them.")
    for option, path, exists in (("--model", model, Path.is_dir), ("--text", text, Path.is_file)):
        if path is not None and not exists(path):
            kind = "folder" if exists is Path.is_dir else "file"
            raise typer.BadParameter(f"{option}: expected a {kind}, got {path}, which does not exist. Check the path.")
    if suite == "all":
        say(_all_suites(quick=quick))
    lines = None if out is None else out / "results.jsonl"
    is_first = True

    def when_interrupted() -> str:
        if is_first:
            return "Interrupted before the first comparison ended."
        kept = (
            "To keep finished comparisons, pass --out DIR."
            if lines is None
            else f"Finished comparisons are in {lines}."
        )
        return f"Interrupted. {kept}"

    out_of_memory = "Run one suite alone, or pass --quick."
    with failures(when_interrupted, out, out_of_memory), ProgressBar("measuring") as progress:
        if lines is not None:
            lines.parent.mkdir(parents=True, exist_ok=True)

        def finished(result: "Result") -> None:
            nonlocal is_first
            progress(f"measured {result}")
            if lines is not None:
                # only here the number of threads is that of the measurement
                start = [{"suite": suite, "quick": quick, "machine": asdict(this_machine())}] if is_first else []
                append_jsonl(lines, [*start, finite(result.as_dict())])
            is_first = False

        results = run_benchmarks(suite, threads=threads, quick=quick, model=model, text=text, finished=finished)
    if as_json:
        show_json(results.as_dict())
    elif markdown:
        say_result(benchmark_markdown(results))
    else:
        show(Markdown(benchmark_markdown(results)))
    if quick:
        say(
            "note: --quick uses tiny sizes, which only show that the benchmarks run. Leave it out to measure times "
            "and ratios."
        )
    if out is not None:
        from attnorm_lab.bench.analyze import GROWTH

        if growth := [result for result in results.results if result.table.startswith(GROWTH)]:
            from attnorm_lab.bench.figures import save_growth_figure

            say(f"wrote {save_growth_figure(growth, out)}")
    if results.missed:
        raise typer.Exit(1)


def _all_suites(*, quick: bool) -> str:
    """Say what `bench` without a suite runs, how long it takes, and how to run less."""
    names = [name for name in get_args(Suite) if name not in ("cuda", "all")]
    on_gpu = [name for name in names if name.startswith("cuda-") or (name == "training" and not quick)]
    skipped = [] if torch.cuda.is_available() else on_gpu
    measured = [name for name in names if name not in skipped]
    sentences = [f"Running {len(measured)} suites: {', '.join(measured)}."]
    if skipped:
        sentences.append(f"Skipping {', '.join(skipped)}: this machine has no CUDA device.")
    if not quick:
        sentences.append(
            "This takes many minutes; on a CPU linear alone does, with softmax at 65,536 tokens. "
            "To run one suite: attnorm lab bench NAME. To try all with tiny sizes: attnorm lab bench --quick."
        )
    return " ".join(sentences)
