"""attnorm lab stability: how often repeated measurements agree in their verdicts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnorm.cli import analysis_options as options
from attnorm.cli.output import Json, plain_table, show, show_json, usage_errors

if TYPE_CHECKING:
    from rich.console import RenderableType

    from attnorm.analysis.compare import Stability
    from attnorm.analysis.result import Analysis


def stability(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub name or folder.")] = "bundled",
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Long text to measure on, such as a book (required).")
    ] = None,
    passages: Annotated[
        int, typer.Option(min=2, help="Number of equal parts of the text; each is measured separately.")
    ] = 3,
    seeds: Annotated[
        str,
        typer.Option(
            metavar="N,N,...",
            help="Random seeds. A further seed adds a run of every passage if it changes the numbers of the first one.",
        ),
    ] = "0",
    lengths: options.Lengths = None,
    windows: options.Windows = "auto",
    budget: options.Budget = 8192,
    bos: options.Bos = None,
    threads: options.Threads = None,
    threshold: options.Judging = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Output folder for the runs. The same command resumes an interrupted run from it."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure a model on several passages of a text and count the heads that keep their verdict.

    A head counts as judged if its verdict is not "undecided". The share of heads that keep their verdict in another run
    is printed twice: once "undecided" counts as a change, once it does not.

    Verdicts use no random numbers. --seeds 0,1,2 measures the first window again with each further seed. A seed that
    gives the same numbers adds no run. Any other seed is measured on every passage.

    Example: attnorm lab stability bundled --text war-and-peace.txt --lengths 512
    """
    from attnorm.analysis.compare import passages as parts_of
    from attnorm.analysis.compare import same_numbers
    from attnorm.analysis.compare import stability as of_runs
    from attnorm.files import read_text
    from attnorm.models.inputs import Text

    with usage_errors():
        options.check_model(model)
        options.use_threads(threads)
        if text is None:
            raise ValueError("expected --text FILE, got none. Give a long text, such as a book.")
        settings: dict[str, Any] = {
            "lengths": options.numbers_of("--lengths", lengths),
            "windows": options.windows_of(windows),
            "budget": budget,
            "bos": bos,
            "thresholds": options.thresholds_of(threshold),
            "metrics": ("core",),
            "read_keys": 0,
        }
        run_seeds = tuple(dict.fromkeys(options.numbers_of("--seeds", seeds) or (0,)))
        parts = parts_of(read_text(text), passages)

    def run(number: int, seed: int) -> "Analysis":
        folder = f"{number}-seed-{seed}" if seed else f"{number}"
        return options.measure(model, inputs=inputs[number], seed=seed, out=out and out / folder, **settings)

    inputs = {number: {name: Text(name, content)} for number, (name, content) in enumerate(parts.items(), 1)}
    first = {number: run(number, run_seeds[0]) for number in inputs}
    runs = {f"passage {number}, seed {run_seeds[0]}": analysis for number, analysis in first.items()}
    alike = [run_seeds[0]]
    for seed in run_seeds[1:]:
        one_window = {**settings, "windows": 1, "lengths": first[1].manifest["settings"]["lengths"]}
        if same_numbers(first[1], options.measure(model, inputs=inputs[1], seed=seed, **one_window)):
            alike.append(seed)  # a second copy of the same verdicts would only raise the rates
        else:
            runs |= {f"passage {number}, seed {seed}": run(number, seed) for number in inputs}
    result = of_runs(runs)
    if as_json:
        show_json({**result.as_dict(), "passages": passages, "seeds": list(run_seeds), "seeds_alike": alike})
    else:
        show(
            _stability_table(
                result, f"{passages} passages" + (f" x {len(run_seeds)} seeds" if len(run_seeds) > 1 else "")
            )
        )
        if len(alike) > 1:
            show(f"Seeds {', '.join(map(str, alike))} give the same numbers and count as one run of each passage.")


def _stability_table(result: "Stability", measured: str) -> "RenderableType":
    size = f"{result.windows} window{'s' * (result.windows > 1)} of {result.length:,} tokens"
    title = f"{result.heads} heads, {measured}, {size}"
    table = plain_table("", "heads", "share", right=("heads", "share"), title=title, padding=(0, 1))
    heads, judged = max(result.heads, 1), max(result.judged, 1)
    table.add_row(
        "judged per run (not undecided)", f"{result.heads - result.undecided:.1f}", _share(1 - result.undecided / heads)
    )
    table.add_row("heads judged in one run have in another run")
    table.add_row("  the same verdict (undecided counts as a change)", "", _share(result.again))
    table.add_row("  the same verdict or undecided", "", _share(result.uncontradicted))
    table.add_row("judged in at least one run", str(result.judged), _share(result.judged / heads))
    table.add_row("  no two different verdicts (undecided allowed)", str(result.kept), _share(result.kept / judged))
    table.add_row("  the same verdict in every run", str(result.same), _share(result.same / judged))
    table.add_row(
        "same verdict in every run, by the first window alone",
        str(result.one_window),
        _share(result.one_window / heads),
    )
    for head, verdicts in result.changing.items():
        table.add_row(f"{head}: {', '.join(f'{count} x {name}' for name, count in verdicts.items())}", "", "")
    return table


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"
