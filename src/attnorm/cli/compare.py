"""attnorm compare: models, checkpoints or normalizers side by side."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnorm.cli.measuring import (
    Device,
    Dtype,
    Judging,
    Lengths,
    Metrics,
    Rows,
    Seed,
    Texts,
    Threads,
    Trust,
    failures,
    groups_of,
    measure,
    numbers_of,
    rows_of,
    texts_of,
    use_threads,
)
from attnorm.cli.output import Json, show, show_json, usage_errors

if TYPE_CHECKING:
    from attnorm.analysis.result import Analysis


def compare(
    sides: Annotated[
        list[str], typer.Argument(metavar="DIR|MODEL...", help="Folders of analyze --out, or models to measure now.")
    ],
    text: Texts = None,
    lengths: Lengths = None,
    rows: Rows = "all",
    metrics: Metrics = "all",
    dtype: Dtype = None,
    device: Device = None,
    trust_remote_code: Trust = False,
    seed: Seed = 0,
    threads: Threads = None,
    threshold: Judging = None,
    as_json: Json = False,
) -> None:
    """Verdict counts, medians and the heads that changed most, against the first side.

    One DIR alone is compared with itself: the normalizers it was measured with. Options are for models measured now,
    --threshold is for all sides: folders are judged by their own thresholds otherwise.
    Exit code 0: compared; 1: the disk or memory gave out; 2: wrong usage or input; 130: interrupted.
    """
    from attnorm.analysis.compare import compare as side_by_side
    from attnorm.analysis.thresholds import Thresholds

    use_threads(threads)
    with usage_errors():
        if len(set(sides)) < len(sides):
            twice = next(name for name in sides if sides.count(name) > 1)
            raise ValueError(f"{twice} is named twice")
        options = {
            "inputs": texts_of(text),
            "lengths": numbers_of("--lengths", lengths),
            "rows": rows_of(rows),
            "metrics": groups_of(metrics),
        }
        Thresholds().changed(threshold or ())  # before anything is measured for nothing
    options |= {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code, "seed": seed}
    analyses = {name: _side(name, options) for name in sides}
    with usage_errors():
        if threshold:
            analyses = {name: run.judged(run.thresholds.changed(threshold)) for name, run in analyses.items()}
        comparison = side_by_side(analyses)
    if as_json:
        from attnorm.report.analysis_json import finite

        show_json(finite(comparison.as_dict()))
    else:
        from attnorm.report.terminal_compare import comparison_tables

        show(comparison_tables(comparison))


def _side(name: str, options: dict[str, Any]) -> "Analysis":
    from attnorm.analysis.result import Analysis

    folder = Path(name)
    is_model = not folder.is_dir() or (folder / "config.json").is_file()
    if is_model and not (folder / "manifest.json").is_file():
        return measure(name, **options)
    with failures():
        return Analysis.load(folder)
