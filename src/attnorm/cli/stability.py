"""attnorm stability: do the verdicts of a model hold on other passages of a text?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnorm.cli.analysis_options import (
    Bos,
    Budget,
    Judging,
    Lengths,
    Threads,
    Windows,
    check_model,
    measure,
    numbers_of,
    thresholds_of,
    use_threads,
    windows_of,
)
from attnorm.cli.output import Json, show, show_json, usage_errors

if TYPE_CHECKING:
    from rich.console import RenderableType

    from attnorm.analysis.result import Analysis
    from attnorm.analysis.stability import Stability


def stability(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub name or folder.")] = "bundled",
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="A long text, such as a book.")] = None,
    passages: Annotated[int, typer.Option(min=2, help="Equal parts of the text, each measured as a text.")] = 3,
    seeds: Annotated[
        str, typer.Option(metavar="N,N,...", help="Random seeds; every passage is judged with each of them.")
    ] = "0",
    lengths: Lengths = None,
    windows: Windows = "auto",
    budget: Budget = 8192,
    bos: Bos = None,
    threads: Threads = None,
    threshold: Judging = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the runs; resumes there.")] = None,
    as_json: Json = False,
) -> None:
    """Measure a model on several passages of a text and count the heads that keep their verdict.

    A head is judged where its verdict is not "undecided". The share that keeps its verdict in another run is
    printed twice: counting "undecided" as a change, and not counting it.
    Verdicts use no random numbers. --seeds 0,1,2 measures the first window again with each further seed. A seed that
    gives the same numbers adds no run; any other is measured on every passage.
    Example: attnorm stability bundled --text war-and-peace.txt --lengths 512
    """
    from attnorm.analysis.stability import passages as parts_of
    from attnorm.analysis.stability import same_numbers
    from attnorm.analysis.stability import stability as of_runs
    from attnorm.files import read_text
    from attnorm.models.inputs import Text

    with usage_errors():
        check_model(model)
        use_threads(threads)
        if text is None:
            raise ValueError("expected --text FILE, got none. Give a long text, such as a book.")
        options: dict[str, Any] = {
            "lengths": numbers_of("--lengths", lengths),
            "windows": windows_of(windows),
            "budget": budget,
            "bos": bos,
            "thresholds": thresholds_of(threshold),
            "metrics": ("core",),
            "read_keys": 0,
        }
        run_seeds = tuple(dict.fromkeys(numbers_of("--seeds", seeds) or (0,)))
        parts = parts_of(read_text(text), passages)

    def run(number: int, seed: int) -> "Analysis":
        folder = f"{number}-seed-{seed}" if seed else f"{number}"
        return measure(model, inputs=inputs[number], seed=seed, out=out and out / folder, **options)

    inputs = {number: {name: Text(name, content)} for number, (name, content) in enumerate(parts.items(), 1)}
    first = {number: run(number, run_seeds[0]) for number in inputs}
    runs = {f"passage {number}, seed {run_seeds[0]}": analysis for number, analysis in first.items()}
    alike = [run_seeds[0]]
    for seed in run_seeds[1:]:
        one_window = {**options, "windows": 1, "lengths": first[1].manifest["settings"]["lengths"]}
        if same_numbers(first[1], measure(model, inputs=inputs[1], seed=seed, **one_window)):
            alike.append(seed)  # a second copy of the same verdicts would only raise the rates
        else:
            runs |= {f"passage {number}, seed {seed}": run(number, seed) for number in inputs}
    result = of_runs(runs)
    if as_json:
        show_json({**result.as_dict(), "passages": passages, "seeds": list(run_seeds), "seeds_alike": alike})
    else:
        show(_table(result, f"{passages} passages" + (f" x {len(run_seeds)} seeds" if len(run_seeds) > 1 else "")))
        if len(alike) > 1:
            show(f"Seeds {', '.join(map(str, alike))} give the same numbers and count as one run of each passage.")


def _table(result: "Stability", measured: str) -> "RenderableType":
    from rich.table import Table

    size = f"{result.windows} window{'s' * (result.windows > 1)} of {result.length:,} tokens"
    table = Table(title=f"{result.heads} heads, {measured}, {size}", title_justify="left", box=None)
    table.add_column("")
    table.add_column("heads", justify="right")
    table.add_column("share", justify="right")
    heads, judged = max(result.heads, 1), max(result.judged, 1)
    table.add_row(
        "judged per run (not undecided)", f"{result.heads - result.undecided:.1f}", _share(1 - result.undecided / heads)
    )
    table.add_row("of heads judged in one run, in another run:")
    table.add_row("  the same verdict (undecided is a change)", "", _share(result.again))
    table.add_row("  the same verdict or undecided", "", _share(result.uncontradicted))
    table.add_row("judged in at least one run", str(result.judged), _share(result.judged / heads))
    table.add_row("  never given two verdicts", str(result.kept), _share(result.kept / judged))
    table.add_row("  the same verdict in every run", str(result.same), _share(result.same / judged))
    table.add_row("the same by the first window alone", str(result.one_window), _share(result.one_window / heads))
    for head, verdicts in result.changing.items():
        table.add_row(f"{head}: {', '.join(f'{count} x {name}' for name, count in verdicts.items())}", "", "")
    return table


def _share(value: float) -> str:
    return f"{value:.1%}"
