"""Output and exit codes of all commands: results go to stdout, everything else to stderr.

All output passes through this file. Names, tokens and messages may contain escape sequences, which a terminal would
obey; here they become visible characters.
"""

import errno
import inspect
import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from typer.core import TyperGroup

from attnorm.safe_text import escaped_json, visible_lines

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]

FILE_WIDTH = 150  # columns of a table if the output is not a terminal
WIDE = 140  # columns that the widest table needs


class SafeConsole(Console):
    """A console that prints no escape sequences except its own styles, and reads no markup in strings."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible_lines(segment.text))


@dataclass(frozen=True)
class ByWidth:
    """A table for terminals of at least WIDE columns, and one for others."""

    wide: RenderableType
    narrow: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield self.wide if options.max_width >= WIDE else self.narrow


class SafeGroup(TyperGroup):
    """A group of commands whose errors and warnings show control and format characters as visible ones."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _safe_messages():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with _safe_messages():
            return super().invoke(ctx)


@contextmanager
def _safe_messages() -> Iterator[None]:
    shown = warnings.showwarning
    warnings.showwarning = _safe_warnings(shown)
    try:
        yield
    except Exception as error:
        if hasattr(error, "format_message"):  # a usage error of click, or of the copy of click in typer
            error.message = visible_lines(str(getattr(error, "message", "")))  # type: ignore[attr-defined]
        raise
    finally:
        warnings.showwarning = shown


def _safe_warnings(shown: Callable[..., None]) -> Callable[..., None]:
    def show_warning(message: Warning | str, *others: Any, **named: Any) -> None:
        shown(visible_lines(str(message)), *others, **named)

    return show_warning


def add_command(app: typer.Typer, function: Callable[..., None]) -> None:
    """Add a command. Its docstring ends with "Example: ...", which the help shows after the options."""
    text, _, example = (inspect.getdoc(function) or "").rpartition("Example: ")
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))  # lines wrap at the terminal's width
    app.command(help="\n\n".join(paragraphs).strip(), epilog=f"Example: {example}")(function)


def say(text: str) -> None:
    """Print a line to stderr."""
    typer.echo(visible_lines(text), err=True)


def say_result(text: str) -> None:
    """Print text to stdout."""
    typer.echo(visible_lines(text))


def show(renderable: RenderableType) -> None:
    """Print a table or another renderable of rich to stdout."""
    console = SafeConsole()
    if not console.is_terminal:
        console = SafeConsole(width=max(console.width, FILE_WIDTH))
    console.print(renderable)


def show_json(value: list[dict[str, Any]] | dict[str, Any]) -> None:
    """Print JSON to stdout; NaN and infinities, which are not JSON, raise ValueError."""
    typer.echo(escaped_json(json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False)))


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn ValueError and ImportError into a usage error: print the message and exit with code 2."""
    try:
        yield
    except (ValueError, ImportError) as error:
        raise typer.BadParameter(visible_lines(str(error))) from None


@contextmanager
def failures(
    when_interrupted: Callable[[], str] = lambda: "Interrupted.",
    writes_to: Path | None = None,
    out_of_memory: str = "Use shorter --lengths, fewer --rows, --metrics core, or --dtype bfloat16.",
) -> Iterator[None]:
    """Turn errors into a message and an exit code: 2 wrong input; 1 disk, network or memory; 130 Ctrl-C."""
    import torch

    try:
        with usage_errors():
            yield
    except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
        raise typer.BadParameter(_message(error)) from None
    except KeyboardInterrupt as stopped:
        say(str(stopped) or when_interrupted())
        raise typer.Exit(130) from None
    except (MemoryError, torch.OutOfMemoryError):
        say(f"Error: out of memory. {out_of_memory}")
        raise typer.Exit(1) from None
    except OSError as error:
        say(f"Error: {_message(error, writes_to)}")
        raise typer.Exit(1) from None


def _message(error: OSError, writes_to: Path | None = None) -> str:
    """Return the message without "[Errno 28]" and with the file or folder that it is about."""
    if not error.strerror:
        return str(error)
    where = error.filename if error.filename is not None else writes_to
    message = error.strerror if where is None else f"{error.strerror}: {where}"
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"{message}. Free some space, or choose a folder on another disk with --out" if full else message


def show_version(asked: bool) -> bool:
    if asked:
        from attnorm import __version__

        say_result(f"attnorm {__version__}")
        raise typer.Exit
    return asked
