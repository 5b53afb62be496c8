"""Where output goes: results to stdout, everything else to stderr."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]

NARROWEST = 150  # columns of a table where no terminal says how wide it is


def show(renderable: RenderableType) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, NARROWEST))
    console.print(renderable)


def show_json(value: list[dict[str, Any]] | dict[str, Any]) -> None:
    """NaN and infinities are refused: they are not JSON."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False))


@contextmanager
def status(what: str) -> Iterator[Any]:
    """A line on stderr that says what is being done; `.update(text)` changes it. Silent where stderr is no terminal."""
    with Console(stderr=True).status(what) as line:
        yield line


@contextmanager
def usage_errors() -> Iterator[None]:
    """A ValueError is the caller's, and so is a missing library: print what it says and leave with exit code 2."""
    try:
        yield
    except (ValueError, ImportError) as error:
        raise typer.BadParameter(printable(str(error))) from None


def printable(text: str) -> str:
    """The text with control characters written out: a file name must not send escape sequences to the terminal."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else f"\\x{ord(character):02x}"
        for character in text
    )


def show_version(asked: bool) -> bool:
    if asked:
        from attnorm import __version__

        typer.echo(f"attnorm {__version__}")
        raise typer.Exit
    return asked
