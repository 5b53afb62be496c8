"""attnorm train retrieval: train models that pick from sets on few items, and test them on many."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from attnorm.cli.output import Json, SafeConsole, say, show, show_json, usage_errors
from attnorm.cli.retrieval_time import TimeLeft
from attnorm.provenance import recorded_command

if TYPE_CHECKING:
    from attnorm.training.retrieval.run import RetrievalProgress

_SAFE = "finished work is kept, and the same command continues"
_LOGGED = 4  # lines per training if stderr is not a terminal

# Defaults with --quick.
_QUICK: dict[str, Any] = {
    "seeds": 3, "steps": 400, "batch": 64, "width": 32, "learning_rate": 3e-3, "sizes": "16,64,256,1024", "sets": 256,
}  # fmt: skip
_FULL: dict[str, Any] = {
    "seeds": 10, "steps": 20_000, "batch": 128, "width": 128, "learning_rate": 1e-3,
    "sizes": "16,64,256,1024,4096,16384", "sets": 128,
}  # fmt: skip


def retrieval(
    out: Annotated[Path, typer.Option(help="Folder for records, weights and manifest; finished parts are kept.")],
    normalizers: Annotated[
        str, typer.Option(help="Comma-separated normalizers; options as in topk:k=4.")
    ] = "softmax,ssmax,entmax15",
    task: Annotated[str, typer.Option(help="max, recall or majority.")] = "max",
    seeds: Annotated[int | None, typer.Option(help="Models per normalizer.", show_default="10")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.", show_default="20000")] = None,
    sizes: Annotated[
        str | None,
        typer.Option(help="Set sizes of the tests, comma-separated.", show_default="16,64,256,1024,4096,16384"),
    ] = None,
    sets: Annotated[
        int | None,
        typer.Option(
            "--sets",
            "--test-sets",
            help="Test sets per size; fewer of very large ones. `reproduce retrieval` tests on 1,024.",
            show_default="128",
        ),
    ] = None,
    test_with: Annotated[
        str, typer.Option(help="Normalizers that replace the trained one in further tests; may be empty.")
    ] = "hard",
    batch: Annotated[int | None, typer.Option(help="Sets per step and model.", show_default="128")] = None,
    width: Annotated[int | None, typer.Option(help="Width of the models.", show_default="128")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.", show_default="0.001")] = None,
    weight_decay: Annotated[float, typer.Option(help="Weight decay of AdamW.")] = 1e-3,
    cosine: Annotated[bool, typer.Option(help="Use a cosine learning rate schedule to 0.")] = False,
    smallest: Annotated[int, typer.Option(help="Fewest items per set in training.")] = 5,
    largest: Annotated[int, typer.Option(help="Most items per set in training.")] = 16,
    leak_penalty: Annotated[
        float, typer.Option(help="Penalty on the share of the logits' variance that comes from the class.")
    ] = 0.0,
    leak_from: Annotated[float, typer.Option(help="Share of the steps before the leak penalty starts.")] = 0.25,
    squeezed: Annotated[
        float, typer.Option(help="Share of the training sets whose priorities are squeezed toward 1 (task max).")
    ] = 0.0,
    standardized: Annotated[
        float, typer.Option(help="Scale the logits of each training set to this standard deviation (0: off).")
    ] = 0.0,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: a minute on a CPU.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1.", show_default="cuda if there is one")] = None,
    compiled: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="torch.compile the step.", show_default="on CUDA")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="float32, or bfloat16 for the matrix products in training; tests are in float32.")
    ] = "float32",
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 2000,
    as_json: Json = False,
) -> None:
    """Train models that pick from sets of items, and test them on sets far larger than in training.

    Every seed is one model; all seeds train together, on the same data for every normalizer. Errors are split into
    wrong logits and dispersed weights. Finished work is not repeated. stderr shows progress and an estimate of the time
    left for all normalizers. Exit code 130: interrupted.

    Example: attnorm train retrieval --normalizers softmax,ssmax --quick --out sets
    """
    with usage_errors():
        from attnorm.training.retrieval.evaluate import Trials
        from attnorm.training.retrieval.recipe import RetrievalRecipe
        from attnorm.training.retrieval.records import summarise
        from attnorm.training.retrieval.run import train_retrieval

        usual = _QUICK if quick else _FULL
        given = {"seeds": seeds, "steps": steps, "batch": batch, "width": width, "learning_rate": lr, "sets": sets}
        chosen = usual | {name: value for name, value in given.items() if value is not None}
        recipe = RetrievalRecipe(
            **{name: chosen[name] for name in ("steps", "batch", "width", "learning_rate")},
            smallest=smallest, largest=largest, weight_decay=weight_decay, leak_penalty=leak_penalty,
            leak_from=leak_from, squeezed=squeezed, standardized=standardized, cosine=cosine, dtype=dtype,
        )  # fmt: skip
        trials = Trials(sizes=_sizes(sizes or usual["sizes"]), sets=chosen["sets"], others=tuple(_names(test_with)))
        try:
            with _progress(TimeLeft(trials.sizes, trials.sets)) as report:
                results = train_retrieval(
                    _names(normalizers), out, task=task, seeds=range(chosen["seeds"]), recipe=recipe, trials=trials,
                    device=device, compiled=compiled, checkpoint_every=checkpoint_every,
                    command=recorded_command(), report=report,
                )  # fmt: skip
        except KeyboardInterrupt as stopped:
            say(f"interrupted; {_SAFE}" if not str(stopped) else str(stopped))
            raise typer.Exit(130) from None
        except OSError as error:
            say(f"cannot write {error.filename or out}: {error.strerror}; {_SAFE}")
            raise typer.Exit(1) from None
    rows = summarise(results.records)
    if as_json:
        show_json([{"task": task, **row.as_dict()} for row in rows])
        return
    from attnorm.training.retrieval.table import tables

    show(tables(task, rows))
    say(f"wrote {out}")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(word) for word in _names(text)}))
    except ValueError:
        raise ValueError(f"--sizes expects comma-separated whole numbers, got {text!r}") from None


@contextmanager
def _progress(time_left: TimeLeft) -> "Iterator[Callable[[RetrievalProgress], None]]":
    """Show a bar and the time left on stderr, or a few lines per normalizer if stderr is not a terminal."""
    console = SafeConsole(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(bar_width=10), MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}", markup=False), TextColumn("{task.fields[left]}", markup=False),
    )  # fmt: skip
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None, loss="", left="")
        before = ("", "", -1)

        def report(now: "RetrievalProgress") -> None:
            nonlocal before
            time_left.see(now)
            left = time_left.words
            loss = "" if now.loss is None else f"loss {now.loss:.4f}"
            bar.update(task, description=_where(now), completed=now.done, total=now.total, loss=loss, left=left)
            at = (now.normalizer, now.stage, _LOGGED * now.done // now.total)
            if not console.is_terminal and at != before:
                what = "step" if now.stage == "training" else "size"
                counted = f", {what} {now.done:,} of {now.total:,}" if now.done else ""
                say(f"{_where(now)}{counted}{', ' if loss else ''}{loss}{'; ' if left else ''}{left}")
            before = at

        yield report


def _where(now: "RetrievalProgress") -> str:
    return f"{now.normalizer} ({now.number} of {now.of}): {now.stage}"
