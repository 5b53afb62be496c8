"""attnorm compare: models, checkpoints or normalizers side by side."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnorm.cli.analysis_options import (
    Bos,
    Device,
    Dtype,
    Judging,
    Lengths,
    Texts,
    Threads,
    Tokenizer,
    Trust,
    check_model,
    failures,
    files_read,
    groups_of,
    measure,
    numbers_of,
    rows_of,
    texts_of,
    use_threads,
    windows_of,
)
from attnorm.cli.output import Json, show, show_json, usage_errors
from attnorm.cli.rerun_settings import settings_of_run, texts_of_run

if TYPE_CHECKING:
    from attnorm.analysis.result import Analysis


def compare(
    sides: Annotated[
        list[str], typer.Argument(metavar="DIR|MODEL...", help="Folders of analyze --out, or models to measure now.")
    ],
    text: Texts = None,
    lengths: Lengths = None,
    windows: Annotated[
        str | None,
        typer.Option(metavar="auto|K", help="Disjoint windows of each text to judge heads over; auto: up to 8."),
    ] = None,
    budget: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of each text, over all its windows (default: 8192).")
    ] = None,
    bos: Bos = None,
    rows: Annotated[str | None, typer.Option(metavar="auto|all|last|K", help="Query rows to measure.")] = None,
    metrics: Annotated[
        str | None, typer.Option(metavar="GROUPS", help="core, or all, or of vectors, sensitivity, coverage.")
    ] = None,
    tokenizer: Tokenizer = None,
    dtype: Dtype = None,
    device: Device = None,
    trust_remote_code: Trust = False,
    seed: Annotated[int | None, typer.Option(help="Random seed of sampled rows and permutations.")] = None,
    threads: Threads = None,
    threshold: Judging = None,
    as_json: Json = False,
) -> None:
    """Verdict counts, medians and the heads that changed most, against the first side.

    One DIR alone is compared with itself: the normalizers it was measured with. Options are for models measured now;
    what is not given is taken from the first DIR: its text, lengths, windows, budget, BOS, rows, metrics and seed.
    --threshold is for all sides: folders are judged by their own thresholds otherwise.
    Exit code 0: compared; 1: the disk or memory gave out; 2: wrong usage or input; 130: interrupted.
    """
    from attnorm.analysis.compare import compare as side_by_side
    from attnorm.analysis.verdicts.thresholds import Thresholds

    use_threads(threads)
    with usage_errors():
        if len(set(sides)) < len(sides):
            twice = next(name for name in sides if sides.count(name) > 1)
            raise ValueError(f"{twice} is named twice")
        Thresholds().changed(threshold or ())  # all of this before anything is measured for nothing
        given: dict[str, Any] = {
            "inputs": texts_of(text),
            "lengths": numbers_of("--lengths", lengths),
            "windows": None if windows is None else windows_of(windows),
            "budget": budget,
            "bos": bos,
            "rows": None if rows is None else rows_of(rows),
            "metrics": None if metrics is None else groups_of(metrics),
            "seed": seed,
        }
        models = [name for name in sides if _is_model(name)]
        for name in models:
            check_model(name)
        if len(sides) == 1 and models:
            raise ValueError(
                f"{sides[0]} is the only side; name another model or the folder of an earlier run beside it, or "
                f"measure it with several normalizers first: attnorm analyze {sides[0]} --normalizers model,ssmax "
                "--out DIR"
            )
    runs = {name: _run(name) for name in sides if name not in models}
    with usage_errors():
        options = {name: value for name, value in given.items() if value is not None}
        if models and runs:
            first, run = next(iter(runs.items()))
            options = settings_of_run(run.manifest) | options
            if "inputs" not in options:
                options["inputs"] = files_read(texts_of_run(run.manifest, first))
    options |= {"tokenizer": tokenizer, "dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
    analyses = {name: runs[name] if name in runs else measure(name, **options) for name in sides}
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


def _is_model(name: str) -> bool:
    folder = Path(name)
    holds_a_model = not folder.is_dir() or (folder / "config.json").is_file()
    return holds_a_model and not (folder / "manifest.json").is_file()


def _run(name: str) -> "Analysis":
    from attnorm.analysis.result import Analysis

    with failures():
        return Analysis.load(name)
