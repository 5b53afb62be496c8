"""Where output goes: results to stdout, everything else to stderr.

Everything that the command prints passes through this file. Names, tokens and messages come from files of other people,
and a terminal obeys the escape sequences in them; here they become ordinary characters.
"""

import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from typer.core import TyperGroup

from attnorm.analysis.visible import escaped_json, visible_lines

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]

NARROWEST = 150  # columns of a table where no terminal says how wide it is
WIDE = 140  # columns that the widest table needs


class SafeConsole(Console):
    """A console whose only escape sequences are its own styles; strings hold no markup."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible_lines(segment.text))


@dataclass(frozen=True)
class ByWidth:
    """A table for wide terminals, and one for narrow terminals."""

    wide: RenderableType
    narrow: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield self.wide if options.max_width >= WIDE else self.narrow


class SafeGroup(TyperGroup):
    """The command: error messages and warnings are printed with control and format characters spelled out."""

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
        if hasattr(error, "format_message"):  # errors of usage, of typer's own click or of the package
            error.message = visible_lines(str(getattr(error, "message", "")))  # type: ignore[attr-defined]
        raise
    finally:
        warnings.showwarning = shown


def _safe_warnings(shown: Callable[..., None]) -> Callable[..., None]:
    def show_warning(message: Warning | str, *others: Any, **named: Any) -> None:
        shown(visible_lines(str(message)), *others, **named)

    return show_warning


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
        console = SafeConsole(width=max(console.width, NARROWEST))
    console.print(renderable)


def show_json(value: list[dict[str, Any]] | dict[str, Any]) -> None:
    """Print JSON to stdout; NaN and infinities, which are not JSON, raise ValueError."""
    typer.echo(escaped_json(json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False)))


@contextmanager
def status(what: str) -> Iterator[Any]:
    """A line on stderr that says what is being done; `.update(text)` changes it. Silent where stderr is no terminal."""
    with SafeConsole(stderr=True).status(what) as line:
        yield line


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn a ValueError and a missing library into an error of usage: print the message and leave with exit code 2."""
    try:
        yield
    except (ValueError, ImportError) as error:
        raise typer.BadParameter(visible_lines(str(error))) from None


def show_version(asked: bool) -> bool:
    if asked:
        from attnorm import __version__

        say_result(f"attnorm {__version__}")
        raise typer.Exit
    return asked
