"""attnorm analyze: measure and judge every attention head of a model; attnorm report: write its report again."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnorm.cli import analysis_options as options
from attnorm.cli.output import Json, failures, say, show, show_json, usage_errors
from attnorm.files import finite

if TYPE_CHECKING:
    from attnorm.analysis.result import Analysis

COUNTS = ("kv_head", "rows", "broken_rows", "n_low", "n_high")

REPORT = "report.html"


def analyze(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Model to measure: Hub name, folder or .gguf file (default: the small bundled model).",
            show_default=False,
        ),
    ] = "bundled",
    text: options.Texts = None,
    image: options.Images = None,
    audio: options.Audio = None,
    lengths: options.Lengths = None,
    windows: options.Windows = None,
    budget: options.Budget = None,
    bos: options.Bos = None,
    normalizers: Annotated[
        str,
        typer.Option(
            metavar="SPEC,SPEC,...",
            help="Normalizers to measure, as NAME or NAME:KEY=VALUE. model is the one that the model runs; "
            "others are applied to the same logits.",
        ),
    ] = "model",
    rows: options.Rows = None,
    metrics: options.Metrics = None,
    larger: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="With --metrics output: a larger model with the same tokenizer, which estimates the rank that "
            "the text needs.",
        ),
    ] = None,
    top_n: Annotated[
        str, typer.Option(metavar="N,N,...", help="Sizes N of the sets of the N heaviest keys.")
    ] = "1,5,10,20,100",
    vectors: Annotated[
        str,
        typer.Option(
            metavar="values|inputs",
            help="Vectors between which distances and separability are computed: value vectors or layer inputs.",
        ),
    ] = "values",
    tokens: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Number of heaviest keys to list per row, with their text; 0 stores no text in tables and report.",
        ),
    ] = 8,
    token_rows: Annotated[
        str | None,
        typer.Option(
            metavar="ROW,ROW,...",
            help="Rows whose heaviest keys are listed, for example -1,120 (default: 4 rows, spread over the text).",
        ),
    ] = None,
    tokenizer: options.Tokenizer = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    revision: Annotated[
        str | None, typer.Option(help="Commit, branch or tag of a model on the Hub (default: the main branch).")
    ] = None,
    trust_remote_code: options.Trust = False,
    seed: options.Seed = None,
    threads: options.Threads = None,
    threshold: options.Judging = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Output folder for tables, report and finished parts. The same command resumes an interrupted "
            "run from it.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Reuse finished parts in --out, or measure everything again.")
    ] = True,
    html: Annotated[
        bool | None,
        typer.Option(
            "--html/--no-html", help="Write the HTML report (default: yes; with --json only if --out is given)."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure every attention head of a model on a text and judge it. Without arguments: a bundled model, offline.

    Prints a summary to stdout and progress to stderr; writes the report to DIR/report.html, or to attnorm-MODEL.html in
    the current folder.

    Exit codes: 0 measured; 1 logits or weights are not finite, or no disk space or memory; 2 wrong usage or input; 130
    interrupted (run the same command again to resume from --out).

    Example: attnorm analyze bundled --normalizers model,ssmax,entmax15 --out run
    """
    from attnorm.analysis.settings import READ_ROWS

    with usage_errors():
        options.check_model(model)
        if larger is not None:
            options.check_model(larger)
        options.use_threads(threads)
        inputs = options.inputs_of(text, image, audio)
        settings = options.given_settings(inputs, lengths, windows, budget, bos, rows, metrics, seed)
        settings |= {
            "normalizers": _normalizers(normalizers),
            "top_n": options.numbers_of("--top-n", top_n),
            "thresholds": options.thresholds_of(threshold),
            "read_rows": options.numbers_of("--token-rows", token_rows) or READ_ROWS,
        }
    analysis = options.measure(
        model, out=out, resume=resume, larger=larger, vectors=vectors, read_keys=tokens, tokenizer=tokenizer,
        dtype=dtype, device=device, revision=revision, trust_remote_code=trust_remote_code, **settings,
    )  # fmt: skip
    report = None
    if html or (html is None and (out is not None or not as_json)):
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", analysis.manifest["model"]["name"]).strip(".-")
        page = Path(f"attnorm-{name}.html") if out is None else out / REPORT
        with failures(writes_to=page):
            report = analysis.save_html(page, evaluation=None if out is None else options.evaluation_of(out))
    show_analysis(analysis, as_json, out, report)
    if analysis.verdict.counts["broken"]:
        raise typer.Exit(1)


def show_analysis(analysis: "Analysis", as_json: bool, folder: Path | None, report: Path | None) -> None:
    """Print the summary, or JSON, to stdout, and where the files are to stderr."""
    if as_json:
        files = {"folder": None if folder is None else str(folder), "report": None if report is None else str(report)}
        show_json({**_as_dict(analysis), **files})
    else:
        from attnorm.report.terminal import analysis_summary

        show(analysis_summary(analysis.report_data))
    if folder is not None:
        say(f"tables: {folder}")
    if report is not None:
        say(f"report: {report}")


def _as_dict(analysis: "Analysis") -> dict[str, Any]:
    """Return the verdict and one object per head; quantiles and curves are in the Parquet files only."""
    from attnorm.analysis.tables import HEAD_KEY, VERDICT_COLUMNS
    from attnorm.metrics.catalogue import PER_HEAD, PER_ROW

    names = [*(name for name, _ in HEAD_KEY), *COUNTS, *PER_ROW, *PER_HEAD, *(name for name, _ in VERDICT_COLUMNS)]
    heads = analysis.heads.select(names).to_pylist()
    numbers: dict[str, Any] = finite(
        {"verdict": analysis.verdict.as_dict(), "manifest": analysis.manifest, "heads": heads}
    )
    return numbers


def _normalizers(value: str) -> list[str]:
    """Validate names before the model is loaded."""
    from attnorm.analysis.settings import named_normalizers

    names = options.names_of(value)
    try:
        named_normalizers(names)
    except TypeError as error:
        raise ValueError(str(error)) from None
    return names


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that attnorm analyze --out wrote.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="HTML file (default: DIR/report.html).")] = None,
    figures: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Also write SVG and PDF figures to this folder: verdicts, main metrics, worst head."
        ),
    ] = None,
    evaluation: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder that evaluate --out wrote, to show its scores (default: DIR/evaluation if any)."
        ),
    ] = None,
    threshold: options.Judging = None,
    as_json: Json = False,
) -> None:
    """Write the HTML report of a saved analysis again; nothing is measured.

    --threshold judges the saved numbers again for this report; the tables in DIR do not change.

    Exit codes: 0 written; 1 no disk space; 2 DIR contains no finished analysis.

    Example: attnorm report run --figures figures
    """
    from attnorm.analysis.result import Analysis

    with failures(writes_to=out or folder / REPORT):
        analysis = Analysis.load(folder)
        if threshold:
            analysis = analysis.judged(analysis.thresholds.changed(threshold))
        page = analysis.save_html(out or folder / REPORT, evaluation=options.evaluation_of(folder, evaluation))
    drawn: list[Path] = []
    if figures is not None:
        from attnorm.report.plots import save_figures

        with failures(writes_to=figures):
            drawn = save_figures(analysis.tables, figures)
    show_analysis(analysis, as_json, folder, page)
    if drawn:
        say(f"figures: {len(drawn)} files in {figures}")
