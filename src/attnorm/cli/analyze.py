"""attnorm analyze: which heads of a model still select, which do not, and what to try."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnorm.cli.analysis_options import (
    Audio,
    Bos,
    Budget,
    Device,
    Dtype,
    Images,
    Judging,
    Lengths,
    Metrics,
    Rows,
    Seed,
    Texts,
    Threads,
    Tokenizer,
    Trust,
    Windows,
    check_model,
    failures,
    groups_of,
    inputs_of,
    measure,
    numbers_of,
    rows_of,
    thresholds_of,
    use_threads,
    windows_of,
)
from attnorm.cli.output import Json, say, show, show_json, usage_errors

if TYPE_CHECKING:
    from attnorm.analysis.result import Analysis

REPORT = "report.html"


def analyze(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Hub name, folder or .gguf file; default: the small bundled model."),
    ] = "bundled",
    text: Texts = None,
    image: Images = None,
    audio: Audio = None,
    lengths: Lengths = None,
    windows: Windows = "auto",
    budget: Budget = 8192,
    bos: Bos = None,
    normalizers: Annotated[
        str, typer.Option(metavar="NAMES", help="model is what it runs; others: what if, on the same logits.")
    ] = "model",
    rows: Rows = "auto",
    metrics: Metrics = "core",
    top_n: Annotated[str, typer.Option(metavar="N,N,...", help="Sizes of the top-N sets.")] = "1,5,10,20,100",
    vectors: Annotated[str, typer.Option(metavar="values|inputs", help="Vectors x_i that distances are about.")] = (
        "values"
    ),
    tokens: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Keys listed for each chosen row, with their text; 0: the report holds no text (default: 8).",
        ),
    ] = 8,
    token_rows: Annotated[
        str | None,
        typer.Option(metavar="ROW,ROW,...", help="Rows whose keys are listed, e.g. -1,120 (default: 4, spread)."),
    ] = None,
    tokenizer: Tokenizer = None,
    dtype: Dtype = None,
    device: Device = None,
    revision: Annotated[str | None, typer.Option(help="Commit, branch or tag on the hub.")] = None,
    trust_remote_code: Trust = False,
    seed: Seed = 0,
    threads: Threads = None,
    threshold: Judging = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for tables, report and finished parts; resumes there.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume/--no-resume", help="Use parts that are finished in --out.")] = True,
    html: Annotated[
        bool | None, typer.Option("--html/--no-html", help="Write the report; default: yes, with --json only to --out.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure every attention head of a model on a text and judge it; without arguments offline, on a bundled model.

    The summary goes to stdout, progress to stderr, the report to DIR/report.html or attnorm-MODEL.html here.
    Exit code 0: measured; 1: heads with logits or weights that are not finite, or the disk or memory gave out;
    2: wrong usage or input; 130: interrupted - run the same command again and finished parts in --out are kept.

    Example: attnorm analyze gpt2 --text book.txt --lengths 256,1024 --normalizers model,ssmax,entmax15 --out run
    """
    from attnorm.analysis.settings import READ_ROWS

    with usage_errors():
        check_model(model)
        use_threads(threads)
        options = {
            "inputs": inputs_of(text, image, audio),
            "lengths": numbers_of("--lengths", lengths),
            "windows": windows_of(windows),
            "budget": budget,
            "bos": bos,
            "normalizers": _normalizers(normalizers),
            "rows": rows_of(rows),
            "metrics": groups_of(metrics),
            "top_n": numbers_of("--top-n", top_n),
            "thresholds": thresholds_of(threshold),
            "read_keys": tokens,
            "read_rows": numbers_of("--token-rows", token_rows) or READ_ROWS,
        }
    analysis = measure(
        model,
        out=out,
        resume=resume,
        vectors=vectors,
        tokenizer=tokenizer,
        dtype=dtype,
        device=device,
        revision=revision,
        trust_remote_code=trust_remote_code,
        seed=seed,
        **options,
    )
    report = None
    if html or (html is None and (out is not None or not as_json)):
        with failures():
            report = analysis.save_html(_report_path(analysis, out))
    show_analysis(analysis, as_json, out, report)
    if analysis.verdict.counts["broken"]:
        raise typer.Exit(1)


def show_analysis(analysis: "Analysis", as_json: bool, folder: Path | None, report: Path | None) -> None:
    """The summary, or JSON, on stdout; where files are, on stderr."""
    if as_json:
        from attnorm.report.analysis_json import analysis_as_dict

        files = {"folder": None if folder is None else str(folder), "report": None if report is None else str(report)}
        show_json({**analysis_as_dict(analysis), **files})
    else:
        from attnorm.report.terminal_heads import analysis_summary

        show(analysis_summary(analysis))
    if folder is not None:
        say(f"tables: {folder}")
    if report is not None:
        say(f"report: {report}")


def _normalizers(value: str) -> tuple[str, ...]:
    """Checked before a model is loaded for nothing."""
    from attnorm.analysis.settings import named_normalizers

    names = tuple(name.strip() for name in value.split(",") if name.strip())
    try:
        named_normalizers(names)
    except TypeError as error:
        raise ValueError(str(error)) from None
    return names


def _report_path(analysis: "Analysis", out: Path | None) -> Path:
    if out is not None:
        return out / REPORT
    return Path(f"attnorm-{re.sub(r'[^A-Za-z0-9._-]+', '-', analysis.manifest['model']['name']).strip('.-')}.html")
