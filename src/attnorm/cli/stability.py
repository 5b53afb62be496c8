"""attnorm stability: do the verdicts of a model hold on other passages of a text?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnorm.cli.measuring import Budget, Judging, Threads, check_model, measure, thresholds_of, use_threads
from attnorm.cli.output import Json, show, show_json, usage_errors

if TYPE_CHECKING:
    from rich.console import RenderableType

    from attnorm.analysis.stability import Stability


def stability(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub name or folder.")] = "bundled",
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="A long text, such as a book.")] = None,
    passages: Annotated[int, typer.Option(min=2, help="Equal parts of the text, each measured as a text.")] = 3,
    budget: Budget = 8192,
    threads: Threads = None,
    threshold: Judging = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the runs; resumes there.")] = None,
    as_json: Json = False,
) -> None:
    """Measure a model on several passages of a text and count the heads that keep their verdict.

    Verdicts use no random numbers, so that other seeds cannot change them; only passages are varied.
    Example: attnorm stability bundled --text war-and-peace.txt
    """
    from attnorm.analysis.stability import passages as parts_of
    from attnorm.analysis.stability import stability as of_runs
    from attnorm.models.inputs import Text
    from attnorm.models.text_files import read_text

    with usage_errors():
        check_model(model)
        use_threads(threads)
        if text is None:
            raise ValueError("expected --text FILE, got none. Give a long text, such as a book.")
        judged_by = thresholds_of(threshold)
        parts = parts_of(read_text(text), passages)
    runs = {
        name: measure(
            model,
            inputs={name: Text(name, content)},
            metrics=("core",),
            budget=budget,
            thresholds=judged_by,
            out=None if out is None else out / str(place),
        )
        for place, (name, content) in enumerate(parts.items(), 1)
    }
    found = of_runs(runs)
    if as_json:
        show_json(found.as_dict())
    else:
        show(_table(found))


def _table(found: "Stability") -> "RenderableType":
    from rich.table import Table

    table = Table(title=f"{found.heads} heads, {found.runs} passages", title_justify="left", box=None)
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
