"""attnorm report: write the report of a saved analysis again, and figures for a paper."""

from pathlib import Path
from typing import Annotated

import typer

from attnorm.cli.analysis_options import Judging
from attnorm.cli.analyze import REPORT, show_analysis
from attnorm.cli.output import Json, failures, say


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that analyze --out wrote.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="HTML file (default: DIR/report.html).")] = None,
    figures: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for SVG and PDF figures: verdicts, main metrics, worst head."),
    ] = None,
    threshold: Judging = None,
    as_json: Json = False,
) -> None:
    """Write the HTML report of a saved analysis again; nothing is measured.

    --threshold judges the saved numbers again for this report; the tables in DIR do not change.

    Exit codes: 0 written; 1 no disk space; 2 DIR holds no finished analysis.

    Example: attnorm report run --figures figures
    """
    from attnorm.analysis.result import Analysis

    with failures(writes_to=out or folder / REPORT):
        analysis = Analysis.load(folder)
        if threshold:
            analysis = analysis.judged(analysis.thresholds.changed(threshold))
        page = analysis.save_html(out or folder / REPORT)
    drawn: list[Path] = []
    if figures is not None:
        from attnorm.report.plots import save_figures

        with failures(writes_to=figures):
            drawn = save_figures(analysis, figures)
    show_analysis(analysis, as_json, folder, page)
    if drawn:
        say(f"figures: {len(drawn)} files in {figures}")
