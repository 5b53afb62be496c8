"""attnorm evaluate: tasks before and after softmax is replaced."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from attnorm.cli import analysis_options as options
from attnorm.cli.output import Json, ProgressBar, failures, say, show, show_json, usage_errors

if TYPE_CHECKING:
    from attnorm.evaluation.result import Evaluation


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub name, folder, .gguf file, or bundled.")],
    normalizer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="Normalizer to evaluate beside the model as it is: name, name:key=value or recipe file; repeatable.",
        ),
    ] = None,
    tasks: Annotated[
        str,
        typer.Option(
            metavar="NAME,NAME,...",
            help="perplexity, pass-key, ruler (its six tasks without download), or tasks of lm-eval.",
        ),
    ] = "perplexity,pass-key",
    lengths: Annotated[
        str, typer.Option(metavar="N,N,...", help="Tokens per document of perplexity, pass-key and RULER.")
    ] = "1024",
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Documents per task and length.")] = 100,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text of perplexity and pass-key, plain or .xz (default: a built-in text)."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the results; the same command resumes there.")
    ] = None,
    tokenizer: options.Tokenizer = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    trust_remote_code: options.Trust = False,
    seed: Annotated[int, typer.Option(help="Random seed of the documents.")] = 0,
    threads: options.Threads = None,
    as_json: Json = False,
) -> None:
    """Evaluate a model before and after softmax is replaced, on the same documents.

    Scores have 95 % intervals. Changes are tested document by document, with Holm's correction. RULER and other tasks
    of lm-eval need the extra `eval`. DIR holds the score of every document and evaluation.html;
    attnorm compare reads it.

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

    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in (
        "task",
        "length",
        "normalizer",
        "documents",
        "score",
        "95 % interval",
        "change",
        "p (Holm)",
        "verdict",
    ):
        table.add_column(name, justify="right" if name in ("length", "documents", "score", "p (Holm)") else "left")
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
    table.caption = "perplexity: nats per token, lower is better; others: share of right answers, higher is better"
    table.caption_justify = "left"
    return table
