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

    from attnorm.analysis.stability import Stability


def stability(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub name or folder.")] = "bundled",
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="A long text, such as a book.")] = None,
    passages: Annotated[int, typer.Option(min=2, help="Equal parts of the text, each measured as a text.")] = 3,
    seeds: Annotated[
        str, typer.Option(metavar="N,N,...", help="Random seeds; every passage is measured with each of them.")
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

    Verdicts use no random numbers. --seeds 0,1,2 checks that, at the cost of one run for each passage and seed.
    Example: attnorm stability bundled --text war-and-peace.txt
    """
    from attnorm.analysis.stability import passages as parts_of
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
        }
        chosen = tuple(dict.fromkeys(numbers_of("--seeds", seeds) or (0,)))
        parts = parts_of(read_text(text), passages)
    runs = {
        f"{name}, seed {seed}": measure(
            model,
            inputs={name: Text(name, content)},
            metrics=("core",),
            read_keys=0,
            seed=seed,
            out=None if out is None else out / _folder(place, seed, chosen),
            **options,
        )
        for seed in chosen
        for place, (name, content) in enumerate(parts.items(), 1)
    }
    found = of_runs(runs)
    if as_json:
        show_json({**found.as_dict(), "passages": passages, "seeds": list(chosen)})
    else:
        show(_table(found, f"{passages} passages" + (f" x {len(chosen)} seeds" if len(chosen) > 1 else "")))


def _folder(place: int, seed: int, seeds: tuple[int, ...]) -> str:
    return str(place) if len(seeds) == 1 else f"{place}-seed-{seed}"


def _table(found: "Stability", measured: str) -> "RenderableType":
    from rich.table import Table

    table = Table(title=f"{found.heads} heads, {measured}", title_justify="left", box=None)
    table.add_column("")
    table.add_column("heads", justify="right")
    table.add_column("share", justify="right")
    judged = max(found.judged, 1)
    table.add_row("judged on at least one passage", str(found.judged), f"{found.judged / max(found.heads, 1):.1%}")
    table.add_row("... contradicted by no passage", str(found.kept), f"{found.kept / judged:.1%}")
    table.add_row("... the same on every passage", str(found.same), f"{found.same / judged:.1%}")
    table.add_row("judged again alike, pairs of passages", "", f"{found.again:.1%}")
    table.add_row("undecided, per passage", f"{found.undecided:.1f}", f"{found.undecided / max(found.heads, 1):.1%}")
    table.add_row("the same by the first window alone", str(found.one_window), f"{found.one_window / found.heads:.1%}")
    for head, verdicts in found.changing.items():
        table.add_row(f"{head}: {', '.join(f'{count} x {name}' for name, count in verdicts.items())}", "", "")
    return table
