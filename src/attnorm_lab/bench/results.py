"""Benchmark results: one record for everything that is measured, and its tables."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from attnorm.machine import Machine
from attnorm.text import markdown_table

Numbers = Mapping[str, float | None]
AT_LEAST = ("speedup", "tflops")  # what is promised of any other number is the most it may be


@dataclass(frozen=True, kw_only=True)
class Result:
    """A row of a table: one call, alone or beside another way to the same result."""

    table: str  # what all rows of the table have in common
    what: str  # what we call
    against: str = ""  # what one would use instead
    numbers: Numbers  # None: a comparison that has no answer
    promised: Mapping[str, float] = field(default_factory=dict)  # by the name of a number

    @property
    def met(self) -> bool | None:
        """Whether all promises are met; None if nothing was promised."""
        return all(self._keeps(name, limit) for name, limit in self.promised.items()) if self.promised else None

    def _keeps(self, name: str, limit: float) -> bool:
        value = self.numbers[name]
        return value is not None and (value >= limit if name in AT_LEAST else value <= limit)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, with whether the promises are met (null: none was made)."""
        return {**asdict(self), "met": self.met}

    def __str__(self) -> str:
        speedup = self.numbers.get("speedup")
        return self.what if speedup is None else f"{self.what}: {speedup:.2f}x the speed of {self.against}"


@dataclass(frozen=True, kw_only=True)
class Benchmarks:
    machine: Machine
    quick: bool = False
    results: tuple[Result, ...] = ()  # in the order of measurement
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "results": [result.as_dict() for result in self.results]}

    @property
    def missed(self) -> list[Result]:
        return [result for result in self.results if result.met is False]


def benchmark_markdown(benchmarks: Benchmarks) -> str:
    """Return a table for each setting, in GitHub Markdown."""
    parts = [f"Machine: {benchmarks.machine}."]
    if benchmarks.quick:
        parts.append("Quick run: sizes too small to judge by, promises not applied.")
    for title in dict.fromkeys(result.table for result in benchmarks.results):
        members = [result for result in benchmarks.results if result.table == title]
        columns = list(dict.fromkeys(name for result in members for name in result.numbers))
        names = 2 if any(result.against for result in members) else 1
        header = [*("attnorm", "instead of")[:names], *(_column(name)[0] for name in columns), "promised"]
        rows = [
            [
                *(result.what, result.against)[:names],
                *(_cell(name, result.numbers[name]) if name in result.numbers else "" for name in columns),
                _judged(result),
            ]
            for result in members
        ]
        parts += [f"### {title}", markdown_table(header, rows, names)]
    return "\n\n".join([*parts, *(f"Note: {note}" for note in benchmarks.notes)])


def _judged(result: Result) -> str:
    limits = [
        _cell(name, limit)
        if name == "speedup"
        else f"{_column(name)[0]} at {'least' if name in AT_LEAST else 'most'} {_cell(name, limit)}"
        for name, limit in result.promised.items()
    ]
    return f"{'; '.join(limits)}: {'met' if result.met else 'missed'}" if limits else ""


def relative(speedup: float) -> str:
    """Return a speedup in words: '4.2x faster' or '1.08x the time'."""
    return f"{speedup:.3g}x faster" if speedup >= 1.05 else f"{1 / speedup:.2f}x the time"


def _digits(value: float) -> str:
    return f"{value:.{0 if value >= 100 else 1 if value >= 1 else 2}f}"


# Headings and formats; numbers that are not here have their own name as the heading.
COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "ours_ms": ("ms", _digits),
    "theirs_ms": ("their ms", _digits),
    "speedup": ("result", relative),
    "error": ("error", "{:.1e}".format),
    "their_error": ("their error", "{:.1e}".format),
    "inverse_error": ("error of the inverse", "{:.1e}".format),
    "seconds": ("seconds", "{:.3g}".format),
    "plain_seconds": ("plain, seconds", "{:.3g}".format),
    "tflops": ("TFLOP/s", "{:.0f}".format),
    "forward_mb": ("forward MB", "{:,.0f}".format),
    "backward_mb": ("forward + backward MB", "{:,.0f}".format),
    "peak_mb": ("process MB", "{:,.0f}".format),
    "gpu_mb": ("MB on the GPU", "{:,.0f}".format),
    "extra_mb": ("MB of the pass", "{:,.0f}".format),
    "plain_mb": ("MB of the plain pass", "{:,.0f}".format),
    "times_plain": ("against plain", "{:.2f}x".format),
    "times": ("of the plain time", "{:.2f}x".format),
    "power": ("grows as", "L^{:.2f}".format),
    "faster_from": ("faster than softmax from", "{:,.0f}".format),
    "times_ideal": ("wall / ideal", "{:.2f}x".format),
}


def _column(name: str) -> tuple[str, Callable[[float], str]]:
    return COLUMNS.get(name, (name.replace("_", " "), _digits))


def _cell(name: str, value: float | None) -> str:
    return "-" if value is None else _column(name)[1](value)
