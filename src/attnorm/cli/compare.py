"""attnorm compare: models, checkpoints or normalizers; evaluate: tasks before and after a swap.

compare measures models with the settings and texts of the first finished run, so that sides can be compared.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from attnorm.cli import analysis_options as options
from attnorm.cli.output import Json, ProgressBar, failures, plain_table, say, show, show_json, usage_errors
from attnorm.files import finite

if TYPE_CHECKING:
    from attnorm.analysis.result import Analysis
    from attnorm.evaluation.result import Evaluation

SETTINGS = (
    "lengths", "windows", "budget", "bos", "rows", "top_n", "vectors", "vector_rows", "metrics", "seed", "read_keys",
    "read_rows",
)  # fmt: skip


def compare(
    sides: Annotated[
        list[str],
        typer.Argument(metavar="DIR|MODEL", help="Folders that attnorm analyze --out wrote, or models to measure."),
    ],
    text: options.Texts = None,
    lengths: options.Lengths = None,
    windows: options.Windows = None,
    budget: options.Budget = None,
    bos: options.Bos = None,
    rows: options.Rows = None,
    metrics: options.Metrics = None,
    tokenizer: options.Tokenizer = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    trust_remote_code: options.Trust = False,
    seed: options.Seed = None,
    threads: options.Threads = None,
    threshold: options.Judging = None,
    as_json: Json = False,
) -> None:
    """Compare analyses with the first one: heads per verdict, median metrics, and the heads that changed most.

    A single DIR is compared with itself: each normalizer that it was measured with is a side. Options apply to models
    that are measured now; options that are not given come from the first DIR. --threshold applies to all sides; without
    it, folders keep their own thresholds.

    Folders of attnorm evaluate are compared by their scores, on the documents that they share. So are evaluations in
    the folder DIR/evaluation of an analysis.

    Exit codes: 0 compared; 1 no disk space or memory; 2 wrong usage or input; 130 interrupted.

    Example: attnorm compare run bundled
    """
    from attnorm.analysis.compare import compare as side_by_side
    from attnorm.analysis.verdicts.thresholds import Thresholds

    options.use_threads(threads)
    with usage_errors():
        if len(set(sides)) < len(sides):
            twice = next(name for name in sides if sides.count(name) > 1)
            raise ValueError(f"expected different folders or models, got {twice} twice. Remove one.")
        Thresholds().changed(threshold or ())  # validate all options before anything is measured
        settings = options.given_settings(options.texts_of(text), lengths, windows, budget, bos, rows, metrics, seed)
        evaluations = _evaluations(sides)
    if evaluations:
        show_evaluation(evaluations, as_json=as_json)
        return
    with usage_errors():
        models = [name for name in sides if _is_model(name)]
        for name in models:
            options.check_model(name)
        if len(sides) == 1 and models:
            raise ValueError(
                f"expected two folders or models to compare, got only {sides[0]}. Give another model or folder "
                f"of a run, or measure it with several normalizers first: attnorm analyze {sides[0]} "
                "--normalizers model,ssmax --out DIR"
            )
    runs = {name: _load_run(name) for name in sides if name not in models}
    with usage_errors():
        if models and runs:
            first, run = next(iter(runs.items()))
            settings = settings_of_run(run.manifest) | settings
            if "inputs" not in settings:
                settings["inputs"] = options.as_texts(texts_of_run(run.manifest, first))
    settings |= {"tokenizer": tokenizer, "dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
    analyses = {name: runs[name] if name in runs else options.measure(name, **settings) for name in sides}
    with usage_errors():
        if threshold:
            analyses = {name: run.judged(run.thresholds.changed(threshold)) for name, run in analyses.items()}
        comparison = side_by_side(analyses)
        scores = _scores(runs)
    if as_json:
        result = comparison.as_dict() | ({} if scores is None else {"evaluation": scores.as_dict()})
        show_json(finite(result))
    else:
        from attnorm.report.terminal import comparison_tables

        show(comparison_tables(comparison))
        if scores is not None:
            show_evaluation(scores, as_json=False)


def _evaluations(sides: list[str]) -> "Evaluation | None":
    """Folders of `attnorm evaluate` side by side; None if there are none among the sides."""
    folders = [name for name in sides if (Path(name) / "evaluation.json").is_file()]
    if not folders:
        return None
    from attnorm.evaluation.result import Evaluation, side_by_side

    if len(folders) < len(sides):
        other = next(name for name in sides if name not in folders)
        raise ValueError(f"expected folders of attnorm evaluate only, beside {folders[0]}, got {other}")
    return side_by_side({name: Evaluation.load(name) for name in folders})


def _scores(runs: Iterable[str]) -> "Evaluation | None":
    """The evaluations inside folders of analyses, side by side."""
    evaluations = {name: evaluation for name in runs if (evaluation := options.evaluation_of(Path(name))) is not None}
    if not evaluations:
        return None
    from attnorm.evaluation.result import side_by_side

    return side_by_side(evaluations)


def _is_model(name: str) -> bool:
    folder = Path(name)
    holds_a_model = not folder.is_dir() or (folder / "config.json").is_file()
    return holds_a_model and not (folder / "manifest.json").is_file()


def _load_run(name: str) -> "Analysis":
    from attnorm.analysis.result import Analysis

    with failures():
        return Analysis.load(name)


def settings_of_run(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of analyze(), without those that differ between merged runs. bos=False and read_keys=0 stay."""
    settings = manifest["settings"]
    return {name: settings[name] for name in SETTINGS if settings.get(name) not in (None, [])}


def texts_of_run(manifest: Mapping[str, Any], folder: str) -> dict[str, str]:
    """Return name -> content; texts are read again, since a run stores only their names and hashes."""
    from attnorm.analysis.manifest import content_hash
    from attnorm.models.inputs import MEDIA_INPUTS

    texts: dict[str, str] = {}
    for text in manifest["texts"]:
        if any(name in text.get("size", "") for name in MEDIA_INPUTS):
            raise ValueError(
                f"{folder} was measured on {text['name']!r}, which is not a text. Measure each model by `attnorm "
                "analyze MODEL --image FILE --out DIR` (or --audio FILE), and compare the folders."
            )
        content = _content(text["name"])
        if content is None or content_hash(content) != text["sha256"]:
            what = "does not exist here" if content is None else "has changed"
            raise ValueError(
                f"the text {text['name']!r} that {folder} was measured on {what}. Give a text for the models with "
                "--text FILE."
            )
        texts[text["name"]] = content
    return texts


def _content(name: str) -> str | None:
    from attnorm.analysis.settings import PASSAGE, TOPICS, passage, topics
    from attnorm.files import read_text

    if name in (PASSAGE, TOPICS):
        return passage() if name == PASSAGE else topics()
    try:
        return read_text(Path(name))
    except ValueError:
        return None


if TYPE_CHECKING:
    from attnorm.evaluation.result import Evaluation


def evaluate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model to evaluate: Hub name, folder, .gguf file, or bundled.")
    ],
    normalizer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="Normalizer to compare with the model as loaded: NAME, NAME:KEY=VALUE or a recipe file; repeatable.",
        ),
    ] = None,
    tasks: Annotated[
        str,
        typer.Option(
            metavar="NAME,NAME,...",
            help="Tasks: perplexity, pass-key, ruler (the six RULER tasks that need no download), or tasks of lm-eval.",
        ),
    ] = "perplexity,pass-key",
    lengths: Annotated[
        str, typer.Option(metavar="N,N,...", help="Tokens per document of perplexity, pass-key and RULER.")
    ] = "1024",
    limit: Annotated[
        int, typer.Option(min=1, metavar="N", help="Maximum number of documents per task and length.")
    ] = 100,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text for perplexity and pass-key, plain or .xz (default: a built-in text)."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Output folder for the results. The same command resumes an interrupted run from it."
        ),
    ] = None,
    tokenizer: options.Tokenizer = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    trust_remote_code: options.Trust = False,
    seed: Annotated[int, typer.Option(help="Random seed for the documents of pass-key and RULER.")] = 0,
    threads: options.Threads = None,
    as_json: Json = False,
) -> None:
    """Evaluate a model before and after softmax is replaced, on the same documents.

    Scores have 95 % intervals. Changes are tested document by document, with Holm's correction. RULER and other tasks
    of lm-eval need the extra `eval`. Writes the score of every document and evaluation.html to DIR, which attnorm
    compare reads.

    Exit codes: 0 evaluated; 1 no disk space or memory; 2 wrong usage or input; 130 interrupted.

    Example: attnorm evaluate bundled --normalizer ssmax --tasks perplexity --lengths 256 --limit 4
    """
    options.use_threads(threads)
    with usage_errors():
        tokens = options.numbers_of("--lengths", lengths) or ()
        options.check_model(model)
    from attnorm.evaluation.run import evaluate as run

    bar = ProgressBar("loading the model")
    kept = f"; finished parts are kept in {out}, and the same command resumes" if out else "; nothing is kept"
    with failures(lambda: f"Interrupted{kept}.", writes_to=out, out_of_memory="Use shorter --lengths."), bar:
        evaluation = run(
            model, tokenizer, normalizers=normalizer or (), tasks=options.names_of(tasks), lengths=tokens, limit=limit,
            text=text, out=out, seed=seed, dtype=dtype, device=device, trust_remote_code=trust_remote_code,
            progress=lambda what, done, total: bar(what, done, total),
        )  # fmt: skip
    show_evaluation(evaluation, as_json=as_json)
    if out is not None:
        from attnorm.evaluation.result import PAGE

        say(f"saved in {out}; open {out / PAGE}")


def show_evaluation(evaluation: "Evaluation", *, as_json: bool) -> None:
    """Print the table of an evaluation, or its JSON."""
    if as_json:
        show_json(evaluation.as_dict())
    else:
        show(_table(evaluation))


def _table(evaluation: "Evaluation") -> Table:
    from attnorm.evaluation.result import number

    table = plain_table(
        "task", "length", "normalizer", "documents", "score", "95 % interval", "change", "p (Holm)", "verdict",
        right=("length", "documents", "score", "p (Holm)"),
        caption="perplexity: nats per token, lower is better; others: share of right answers, higher is better"
        + (f". {evaluation.note}" if evaluation.note else ""),
    )  # fmt: skip
    last: tuple[str, int | None] | None = None
    for row in evaluation.rows:
        metric, change, item = row.metric, row.change, (row.task, row.length)
        span = "" if row.interval is None else " to ".join(number(end, metric) for end in row.interval)
        moved = ""
        if change is not None:
            ends = change.interval
            moved = number(change.mean, metric) + (
                "" if ends is None else f" ({' to '.join(number(e, metric) for e in ends)})"
            )
        table.add_row(
            row.task if item != last else "", "" if row.length is None or item == last else str(row.length), row.side,
            str(row.documents), number(row.mean, metric), span, moved,
            "" if row.p_holm is None else f"{row.p_holm:.2g}", row.verdict,
        )  # fmt: skip
        last = item
    return table
