"""Output, progress and exit codes of all commands: results go to stdout, everything else to stderr.

All output passes through this file. Names, tokens and messages may contain escape sequences, which a terminal would
obey; here they become visible characters. Progress is a live bar in a terminal. A log gets a line when a stage starts,
when it ends, when the caller asks for one, and every LOG_SECONDS; both show the time left.
"""

import difflib
import errno
import inspect
import json
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Column, Table
from typer.core import TyperGroup

from attnorm.text import escaped_json, visible_lines

if TYPE_CHECKING:
    from attnorm.analysis.analyze import AnalysisProgress


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
            message = _with_closest_choice(str(getattr(error, "message", "")))
            error.message = visible_lines(message)  # type: ignore[attr-defined]
        raise
    finally:
        warnings.showwarning = shown


def _with_closest_choice(message: str) -> str:
    """Add the closest of the choices to click's message "'x' is not one of 'a', 'b'."."""
    given, *choices = re.findall("'([^']*)'", message) if " is not one of " in message else [""]
    close = difflib.get_close_matches(given, choices, n=1)
    return f"{message} Did you mean {close[0]!r}?" if close else message


def _safe_warnings(shown: Callable[..., None]) -> Callable[..., None]:
    def show_warning(message: Warning | str, *others: Any, **named: Any) -> None:
        shown(visible_lines(str(message)), *others, **named)

    return show_warning


def add_command(app: typer.Typer, function: Callable[..., None]) -> None:
    """Add a command. Its docstring ends with "Example: ...", which the help shows after the options."""
    text, _, example = (inspect.getdoc(function) or "").rpartition("Example: ")
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))  # lines wrap at the terminal's width
    app.command(help="\n\n".join(paragraphs).strip(), epilog=f"Example: {' '.join(example.split())}")(function)


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


def plain_table(*headings: str, right: Container[str] = (), **options: Any) -> Table:
    """Return a table without lines. right: columns that are aligned to the right. options: of rich's Table."""
    columns = (Column(name, justify="right" if name in right else "left") for name in headings)
    aligned: dict[str, Any] = {"title_justify": "left", "caption_justify": "left"}
    return Table(*columns, **aligned, **{"box": None, "padding": (0, 2, 0, 0), **options})


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
    from attnorm.engines.execution import is_out_of_memory

    try:
        with usage_errors():
            yield
    except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
        raise typer.BadParameter(_message(error, writes_to)) from None
    except KeyboardInterrupt as stopped:
        say(str(stopped) or when_interrupted())
        raise typer.Exit(130) from None
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
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
    if writes_to is not None and str(where).endswith(".tmp"):  # of an atomic write
        where = writes_to
    message = error.strerror if where is None else f"{error.strerror}: {where}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{message}. Free some space, or choose a folder on another disk with --out"
    if writes_to is not None and Path(os.fsdecode(where or writes_to)).is_relative_to(writes_to):
        return f"cannot write into {writes_to}: {error.strerror}. Choose another folder with --out"
    return f"{message}. Check the path"


def show_version(requested: bool) -> bool:
    if requested:
        from attnorm import __version__

        say_result(f"attnorm {__version__}")
        raise typer.Exit
    return requested


LOG_SECONDS = 30.0


class ProgressBar:
    """Shows progress. Use it as a context manager and call it with the stage and the amount of work done."""

    def __init__(self, stage: str = "starting", now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._stage = self._line = ""
        self._started = self._logged = now()
        self._first = 0.0  # work done before this process measured the stage
        console = SafeConsole(stderr=True)
        columns = (
            TextColumn("{task.description}", markup=False), BarColumn(bar_width=10),
            TextColumn("{task.fields[words]}", markup=False), TimeElapsedColumn(),
        )  # fmt: skip
        self._live = console.is_terminal
        self._bar = Progress(*columns, console=console, transient=True, disable=not self._live)
        self._task = self._bar.add_task(stage, total=None, words="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(
        self,
        stage: str,
        done: float = 0,
        total: float | None = None,
        *,
        detail: str = "",
        skipped: float = 0,
        left: str | None = None,
        unit: str = "",
        log: bool = False,
    ) -> None:
        """Show progress.

        done, total: amount of work in the stage; a total of type int is shown as a count, float as a percentage.
        detail: more words to show. skipped: the part of `done` that an earlier run did, which took no time now.
        left: words about the time left (default: an estimate). unit: show the speed in this unit per second.
        log: write a line to a log now.
        """
        changed = stage != self._stage
        if changed:
            self._stage, self._started, self._first = stage, self._now(), done - skipped
        pace = self._pace(done - skipped)
        if left is None:
            left = f"{duration((total - done) / pace)} left" if pace and total and done < total else ""
        speed = f"{pace:,.0f} {unit}/s" if pace and unit else ""
        words = ", ".join(filter(None, (_count(done, total), detail, speed, left)))
        self._bar.update(self._task, description=stage, completed=done, total=total, words=words)
        finished = total is not None and total > 1 and done >= total
        if not self._live and (changed or log or finished or self._now() - self._logged >= LOG_SECONDS):
            line = f"{stage}: {words}" if words else stage
            if line != self._line:
                say(line)
            self._line, self._logged = line, self._now()

    def _pace(self, done: float) -> float:
        seconds = self._now() - self._started
        return max(done - self._first, 0.0) / seconds if seconds > 0 else 0.0


class AnalysisBar:
    """Shows the states of analyze() on a ProgressBar; pass it as `progress`."""

    def __init__(self, bar: ProgressBar) -> None:
        self._bar = bar
        self._resumed = 0  # tokens of parts that were finished before
        self.last: AnalysisProgress | None = None

    def __call__(self, state: "AnalysisProgress") -> None:
        before = self.last
        if state.resumed:
            self._resumed += state.tokens_done - (0 if before is None else before.tokens_done)
        self.last = state
        part_finished = before is not None and state.parts_done > before.parts_done
        running = state.parts_done < state.parts_total and not part_finished
        per_layer = (state.length or 0) / max(state.layers_total, 1) if running else 0.0
        part = state.parts_done + (not part_finished)
        length = "" if state.length is None else f", {state.length:,} tokens"
        detail = f"part {min(part, state.parts_total)} of {state.parts_total}{length}"
        if part_finished:
            detail += f", {state.text}, {'found finished' if state.resumed else 'measured'}"
        else:
            detail += f", layer {state.layers_done}/{state.layers_total}"
        self._bar(
            "measuring",
            state.tokens_done + per_layer * state.layers_done,
            float(state.tokens_total),
            detail=f"{detail}, {memory_words()}",
            skipped=self._resumed + per_layer * state.layers_found,
            unit="tokens",
            log=part_finished,
        )


def duration(seconds: float) -> str:
    """42 s, 3 min, 2.5 h"""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def memory_words() -> str:
    """Return the memory of this process and of its GPU, for example "1.2 GB"."""
    words = []
    statm = Path("/proc/self/statm")
    if statm.is_file():
        import resource

        words.append(f"{int(statm.read_text().split()[1]) * resource.getpagesize() / 1e9:.1f} GB")
    elif sys.platform != "win32":
        import resource

        kilobyte = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
        words.append(f"at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobyte / 1e9:.1f} GB")
    torch = sys.modules.get("torch")  # do not import it for this
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        words.append(f"{torch.cuda.memory_allocated() / 1e9:.1f} GB on the GPU")
    return ", ".join(words)


def _count(done: float, total: float | None) -> str:
    if total is None or (total <= 1 and isinstance(total, int)):
        return ""
    return f"{done:,} of {total:,}" if isinstance(total, int) else f"{done / max(total, 1e-12):.0%}"
