"""What a running analysis shows on stderr: a live line in a terminal; in a log a line for each finished part, and one
every LOG_SECONDS within a part."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from attnorm.cli.output import SafeConsole, say

if TYPE_CHECKING:
    from attnorm.analysis.parts import AnalysisProgress


LOG_SECONDS = 30.0


class Watch:
    """Turns states of a run into words; keeps when it began and how much of it was found finished."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._began = now()
        self._resumed = 0.0  # tokens that cost no time
        self._before = 0
        self.last: AnalysisProgress | None = None

    def see(self, state: "AnalysisProgress") -> None:
        if state.resumed:
            self._resumed += state.tokens_done - self._before
        self._before = state.tokens_done
        self.last = state

    @property
    def share(self) -> float:
        """Of all tokens, counting finished layers of the part in flight; a part of length n takes n tokens."""
        return 0.0 if self.last is None else min(self._tokens() / max(self.last.tokens_total, 1), 1.0)

    @property
    def words(self) -> str:
        state = self.last
        if state is None:
            return "loading the model"
        length = "" if state.length is None else f", {state.length:,} tokens"
        part = min(state.parts_done + 1, state.parts_total)
        return f"part {part} of {state.parts_total}{length}, layer {state.layers_done}/{state.layers_total}"

    @property
    def pace(self) -> str:
        """Tokens per second, time left by that pace, memory in use."""
        memory = memory_words()
        measured, seconds = self._tokens() - self._resumed - self._found(), self._now() - self._began
        if self.last is None or measured <= 0 or seconds <= 0:
            return memory
        left = (self.last.tokens_total - self._tokens()) * seconds / measured
        remaining = f", {duration(left)} left" if self.last.parts_done < self.last.parts_total else ""
        return f"{measured / seconds:,.0f} tokens/s{remaining}, {memory}"

    def _tokens(self) -> float:
        state = self.last
        if state is None:
            return 0.0
        running = 0.0
        if state.parts_done < state.parts_total:
            running = (state.length or 0) * state.layers_done / max(state.layers_total, 1)
        return state.tokens_done + running

    def _found(self) -> float:
        """Tokens of the part in flight that cost no measuring: its layers were finished on the disk."""
        state = self.last
        if state is None or state.parts_done >= state.parts_total:
            return 0.0
        return (state.length or 0) * state.layers_found / max(state.layers_total, 1)


@contextmanager
def shown(watch: Watch) -> Iterator[Callable[["AnalysisProgress"], None]]:
    """What to hand to analyze() as `progress`."""
    console = SafeConsole(stderr=True)
    if not console.is_terminal:
        log = _Log(watch)
        yield log.see
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=10),
        TextColumn("{task.fields[pace]}", markup=False),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(watch.words, total=1.0, pace="")

        def update(state: "AnalysisProgress") -> None:
            watch.see(state)
            bar.update(task, completed=watch.share, description=watch.words, pace=watch.pace)

        yield update


class _Log:
    """Plain lines for an output that is no terminal."""

    def __init__(self, watch: Watch, now: Callable[[], float] = time.perf_counter) -> None:
        self._watch, self._now = watch, now
        self._last = now()

    def see(self, state: "AnalysisProgress") -> None:
        watch = self._watch
        finished = watch.last is not None and state.parts_done > watch.last.parts_done
        watch.see(state)
        if finished:
            length = "" if state.length is None else f" at {state.length:,} tokens"
            how = "found finished" if state.resumed else "measured"
            self._write(f"part {state.parts_done} of {state.parts_total}, {state.text}{length}: {how}; {watch.pace}")
        elif state.layers_done and self._now() - self._last >= LOG_SECONDS:
            self._write(f"{watch.words}; {watch.pace}")

    def _write(self, line: str) -> None:
        self._last = self._now()
        say(line)


def duration(seconds: float) -> str:
    """42 s, 3 min, 2.5 h"""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def memory_words() -> str:
    """Memory of this process and of its GPU, without another library."""
    words = []
    statm = Path("/proc/self/statm")
    if statm.is_file():
        import resource

        words.append(f"{int(statm.read_text().split()[1]) * resource.getpagesize() / 1e9:.1f} GB")
    elif sys.platform != "win32":
        import resource

        kilobyte = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
        words.append(f"at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobyte / 1e9:.1f} GB")
    torch = sys.modules.get("torch")  # not imported for this
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        words.append(f"{torch.cuda.memory_allocated() / 1e9:.1f} GB on the GPU")
    return ", ".join(words)
