"""attnorm reproduce: the papers' figures and tables on any model, and what of them holds."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from attnorm.cli.command_line import command_line
from attnorm.cli.measuring import failures
from attnorm.cli.output import Json, show, show_json

if TYPE_CHECKING:
    from attnorm.experiments.experiment import Tell
    from attnorm.experiments.run import Written

_SAFE = "what is finished is kept, and the same command goes on"
_COLOURS = {"reproduces": "green", "partly": "yellow", "does not": "red", "not tested": "dim"}
_LOGGED = 4  # lines per experiment where stderr is no terminal


def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME...", help="Experiments, or all; without one they are listed.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="NAME|DIR",
            help="Hub name, folder, or bundled; default: gpt2 as in the paper, with --quick bundled. spread: several.",
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="Text to run on; default: one that is built in. The paper's: War and Peace. language-models: several.",
        ),
    ] = None,
    valid: Annotated[
        list[Path] | None,
        typer.Option("--valid", metavar="FILE", help="language-models: text that is not trained on; repeatable."),
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for figures, tables, verdicts and the index page.")
    ] = (Path("reproduction")),
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: seconds per experiment.")] = False,
    only: Annotated[
        str, typer.Option(metavar="NAME,NAME,...", help="retrieval, language-models: only these normalizers.")
    ] = "",
    longest: Annotated[
        int | None,
        typer.Option(
            min=1024, metavar="TOKENS", help="How far dispersion goes; default: 8192, and twice a limit up to that."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of every random draw.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; default: the GPU if there is one.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Also what is finished, from the start.")] = False,
    as_json: Json = False,
) -> None:
    """Redo figures, tables and guidelines of the papers on a model, with printed and corrected theory side by side.

    Verdicts go to stdout, pictures and tables to DIR/NAME, all of them on one page: DIR/index.html. What is finished is
    not run again; an option that one of the experiments does not take is refused. Exit code 0: done, whatever the
    verdicts; 1: the disk or memory gave out; 2: wrong usage or input; 130: interrupted.

    Example: attnorm reproduce fig2 fig3 --text war-and-peace.txt    # gpt2 on War and Peace, as in the paper
    """
    if not names:
        _list(as_json)
        return
    from attnorm.experiments.catalogue import MODEL, named
    from attnorm.experiments.index_page import INDEX
    from attnorm.experiments.refusals import refuse_unused
    from attnorm.experiments.run import reproduce as run
    from attnorm.experiments.subject import Subject

    first, *others = _models(model, names, quick)
    subject = Subject(
        model=first,
        others=tuple(others),
        texts=tuple(text or ()),
        valid=tuple(valid or ()),
        quick=quick,
        seed=seed,
        device=device,
        only=tuple(name.strip() for name in only.split(",") if name.strip()),
        longest=longest,
    )
    _tell_the_text(first, text)
    with (
        failures(lambda: f"Interrupted; {_SAFE}.", writes_to=out),
        _default_explained(first, asked=bool(model)),
        _short_of_memory(),
        _progress() as tell,
    ):
        refuse_unused([one.name for one in named(names)], {MODEL: model or ()})
        written = run(names, subject, out, fresh=fresh, tell=tell, command=command_line())
    if as_json:
        show_json({"index": str(out / INDEX), "experiments": [_told(one) for one in written]})
    else:
        show(Group(*(_table(one) for one in written)))
    typer.echo(f"index page: {out / INDEX}", err=True)


def _models(asked: list[str] | None, names: list[str], quick: bool) -> list[str]:
    from attnorm.experiments.catalogue import TRAINED
    from attnorm.experiments.paper_setting import default_model

    # What trains its own models asks for none, and must not look for one.
    return asked or [default_model(quick=quick or all(name in TRAINED for name in names))]


def _tell_the_text(model: str, texts: list[Path] | None) -> None:
    """The paper's model without the paper's text is easily taken for the paper's setting."""
    from attnorm.analysis.default_text import TOPICS
    from attnorm.experiments.paper_setting import MODEL, TEXT

    if model.rsplit("/", 1)[-1] == MODEL and not texts:
        typer.echo(
            f"{model} on {TOPICS}, Python's own help texts; the paper's text is {TEXT}: give it with --text FILE",
            err=True,
        )


@contextmanager
def _default_explained(model: str, *, asked: bool) -> Iterator[None]:
    """Who named no model learns why one is missing, and what needs no network."""
    try:
        yield
    except ValueError as error:
        if asked or not str(error).startswith(f"{model}: "):
            raise
        raise ValueError(
            f"{error}. Without --model it is {model}, as in the paper; --model bundled, --model FOLDER and --quick "
            "need no network"
        ) from None


def _list(as_json: bool) -> None:
    from attnorm.experiments.catalogue import EXPERIMENTS, PAPERS

    if as_json:
        show_json([{"name": name, "what": one.what, "in_all": name in PAPERS} for name, one in EXPERIMENTS.items()])
        return
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for name, one in EXPERIMENTS.items():
        table.add_row(name, one.what)
    table.add_row("all", ", ".join(PAPERS))
    show(table)


def _told(one: "Written") -> dict[str, Any]:
    record = one.record
    kept = {name: record[name] for name in ("name", "title", "source", "words", "findings", "parameters")}
    manifest = record["manifest"]
    same = {name: manifest[name] for name in ("paper_setting",) if name in manifest}
    return {**kept, **same, "folder": str(one.folder), "seconds": manifest["seconds"], "found_finished": one.found}


def _table(one: "Written") -> Group:
    record = one.record
    table = Table(box=None, padding=(0, 2, 1, 0), show_header=bool(one.findings))
    table.add_column("claim", ratio=4)
    table.add_column("ours", ratio=5)
    table.add_column("verdict", no_wrap=True)
    for finding in one.findings:
        colour = _COLOURS.get(finding["verdict"], "default")
        table.add_row(_plain(finding["claim"]), _plain(finding["ours"]), f"[{colour}]{finding['verdict']}[/]")
    again = " (found finished)" if one.found else ""
    same = record["manifest"].get("paper_setting", {}).get("told", "")
    return Group(
        f"[bold]{_plain(record['title'])}[/]{again}",
        _plain(record["words"]),
        *([f"[dim]{_plain(same)}[/]"] if same else []),
        "",
        table,
    )


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


@contextmanager
def _short_of_memory() -> Iterator[None]:
    import torch

    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        typer.echo(f"Error: out of memory. Take --quick, or --device cpu; {_SAFE}.", err=True)
        raise typer.Exit(1) from None


@contextmanager
def _progress() -> "Iterator[Tell]":
    """A bar on stderr; where that is no terminal, a few lines per experiment."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading", total=None)
        before: tuple[str, int] = ("", -1)

        def tell(what: str, done: int, total: int) -> None:
            nonlocal before
            bar.update(task, description=what, completed=done, total=total)
            at = (what, _LOGGED * done // max(total, 1))
            if not console.is_terminal and at != before:
                typer.echo(what if total <= 1 else f"{what}, {done} of {total}", err=True)
            before = at

        yield tell
