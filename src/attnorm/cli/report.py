"""attnorm report: a saved analysis once more, as a page, as figures and in the terminal."""

from pathlib import Path
from typing import Annotated

import typer

from attnorm.cli.analysis_options import Judging, failures
from attnorm.cli.analyze import REPORT, show_analysis
from attnorm.cli.output import Json, say


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What analyze --out wrote.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The page; default: DIR/report.html.")] = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for SVG and PDF: verdicts, main metrics, worst head.")
    ] = None,
    threshold: Judging = None,
    as_json: Json = False,
) -> None:
    """Write the report of a saved analysis again, and figures for a paper; nothing is measured.

    With --threshold the saved numbers are judged again for this report, which says so; the tables in DIR stay.
    Exit code 0: written; 1: the disk gave out; 2: DIR holds no finished analysis.
    """
    from attnorm.analysis.result import Analysis

    with failures(writes_to=out or folder):
        analysis = Analysis.load(folder)
        if threshold:
            analysis = analysis.judged(analysis.thresholds.changed(threshold))
        page = analysis.save_html(out or folder / REPORT)
        drawn: list[Path] = []
        if figures is not None:
            from attnorm.report.head_figures import save_head_figures

            drawn = save_head_figures(analysis, figures)
    show_analysis(analysis, as_json, folder, page)
    if drawn:
        say(f"figures: {len(drawn)} files in {figures}")
