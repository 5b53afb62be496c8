"""Benchmark results: the records, terminal tables, and the same as Markdown for docs/results/benchmarks.md."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import groupby
from statistics import linear_regression
from typing import Any, ClassVar, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from attnorm.machine import Machine
from attnorm.text import markdown_table

SHORTEST_FITTED = 1024  # tokens


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Two ways to the same result, timed in alternation: medians in milliseconds, and the median of paired ratios."""

    topic: str
    what: str  # what we call
    against: str  # what one would use instead
    ours_ms: float
    theirs_ms: float
    speedup: float  # theirs / ours, pair by pair
    target: float | None = None  # least speedup that was promised
    error: float | None = None  # largest absolute error of ours against float64
    their_error: float | None = None

    @property
    def met(self) -> bool | None:
        return None if self.target is None else self.speedup >= self.target


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Peak resident memory of one call above that before the call, in MB (10^6 bytes)."""

    what: str
    setting: str
    forward_mb: float
    backward_mb: float | None  # forward and backward together; None where the call cannot be differentiated
    seconds: float
    dense_mb: float  # one dense map of weights
    target_mb: float | None = None

    @property
    def met(self) -> bool | None:
        if self.target_mb is None:
            return None
        return max(self.forward_mb, self.backward_mb or 0.0) <= self.target_mb


@dataclass(frozen=True, kw_only=True)
class Duration:
    """The time of one call alone."""

    what: str
    setting: str
    seconds: float
    most_seconds: float | None = None  # promised

    @property
    def met(self) -> bool | None:
        return None if self.most_seconds is None else self.seconds <= self.most_seconds


@dataclass(frozen=True, kw_only=True)
class ModelRun:
    """One pass over a model in a new process, with resident memory in MB (10^6 bytes)."""

    what: str
    setting: str
    seconds: float
    peak_mb: float  # of the whole process
    extra_mb: float | None = None  # of it, beyond what the process held before the pass
    times_plain: float | None = None  # peak over that of the plain pass
    most_times_plain: float | None = None  # promised
    most_seconds: float | None = None  # promised

    @property
    def met(self) -> bool | None:
        promised = [
            value <= most
            for value, most in ((self.times_plain, self.most_times_plain), (self.seconds, self.most_seconds))
            if value is not None and most is not None
        ]
        return all(promised) if promised else None


@dataclass(frozen=True, kw_only=True)
class GrowthPoint:
    length: int
    seconds: float
    plain_seconds: float
    extra_mb: float
    plain_extra_mb: float


@dataclass(frozen=True, kw_only=True)
class Growth:
    """The cost of a pass over a model as the context grows, next to the plain pass; each in a new process."""

    what: str
    setting: str
    points: tuple[GrowthPoint, ...]  # by length
    target: float | None = None  # largest power of the length that memory may grow with

    @property
    def exponent(self) -> float | None:
        """The power of the length with which memory grows, over the last step, where constants matter least."""
        if len(self.points) < 2:
            return None
        first, last = self.points[-2:]
        if min(first.extra_mb, last.extra_mb) <= 0:
            return None
        return math.log(last.extra_mb / first.extra_mb) / math.log(last.length / first.length)

    @property
    def met(self) -> bool | None:
        return None if self.target is None or self.exponent is None else self.exponent <= self.target


@dataclass(frozen=True, kw_only=True)
class CostPoint:
    length: int
    ms: float
    extra_mb: float | None  # peak of the call above the memory before it; on CUDA only


@dataclass(frozen=True, kw_only=True)
class CostCurve:
    """The time of one attention call as the number of tokens grows."""

    what: str
    setting: str
    points: tuple[CostPoint, ...]  # by length
    rival: bool = False  # the others are compared with it
    met: ClassVar[None] = None  # nothing is promised

    @property
    def exponent(self) -> float | None:
        """The slope of log time against log length, by least squares over the longer half of the lengths.

        None for short lengths, where what a call costs at any length takes most of the time.
        """
        upper = self.points[len(self.points) // 2 - (len(self.points) < 4) :]
        if len(upper) < 2 or upper[0].length < SHORTEST_FITTED:
            return None
        x, y = (
            [math.log(value) for value in values] for values in zip(*((p.length, p.ms) for p in upper), strict=True)
        )
        return linear_regression(x, y).slope

    def cheaper_from(self, rival: "CostCurve") -> int | None:
        """The length from which on this is faster than the rival wherever both were timed; None if nowhere."""
        theirs = {point.length: point.ms for point in rival.points}
        compared = [(point.length, point.ms < theirs[point.length]) for point in self.points if point.length in theirs]
        slower = [length for length, faster in compared if not faster]
        return next((length for length, _ in compared if not slower or length > slower[-1]), None)


@dataclass(frozen=True, kw_only=True)
class ApproximationError:
    """SOFT against the full Gaussian kernel: relative error of the output, and of Newton's inverse."""

    setting: str
    pooling: str  # what a landmark is the mean of: segments in reading order, or squares of the image
    landmarks: int
    newton_steps: int
    error: float
    inverse_error: float  # against the exact inverse
    met: ClassVar[None] = None  # nothing is promised

    @property
    def what(self) -> str:
        steps = f"{self.newton_steps} Newton step{'s' * (self.newton_steps != 1)}"
        return f"{self.landmarks} landmarks, means of {self.pooling}, {steps}"


@dataclass(frozen=True, kw_only=True)
class SweepCost:
    """A sweep beside its ideal, the seconds of its items inside the workers divided by the number of workers."""

    what: str
    items: int
    workers: int
    wall_seconds: float
    item_seconds: float  # of all items together, loading the model included
    models_loaded: int
    most_times_ideal: float | None = None  # promised
    most_overhead_seconds: float | None = None  # promised, per item

    @property
    def times_ideal(self) -> float:
        return self.wall_seconds * self.workers / self.item_seconds

    @property
    def overhead_seconds(self) -> float:
        """Worker seconds per item in which no item ran. The ideal contains the model's load, so this does not."""
        return (self.wall_seconds * self.workers - self.item_seconds) / self.items

    @property
    def met(self) -> bool | None:
        if self.most_times_ideal is None or self.most_overhead_seconds is None:
            return None
        return self.times_ideal <= self.most_times_ideal and self.overhead_seconds <= self.most_overhead_seconds


Result = Ratio | Footprint | Duration | ModelRun | Growth | CostCurve | ApproximationError | SweepCost


def summary(result: Result) -> str:
    """Return a line of progress: what was measured and, where it is one number, the number."""
    if isinstance(result, Ratio):
        return f"{result.what}: {result.speedup:.2f}x the speed of {result.against} ({result.topic})"
    return f"{result.what}: {result.seconds:.3g} s" if isinstance(result, Duration) else result.what


def record(result: Result) -> dict[str, Any]:
    """Return plain values for JSON, with the kind of the result and whether its promise is met (null: no promise)."""
    return {"kind": type(result).__name__, **asdict(result), "met": result.met}


# Keys of bench --json by the kind of the results, in the order of the tables; and properties beside the fields.
KINDS: dict[type[Result], str] = {
    Ratio: "ratios", Footprint: "footprints", Duration: "durations", ModelRun: "runs", Growth: "growth",
    CostCurve: "costs", ApproximationError: "errors", SweepCost: "sweeps",
}  # fmt: skip
DERIVED: dict[type[Result], tuple[str, ...]] = {
    CostCurve: ("exponent",),
    SweepCost: ("times_ideal", "overhead_seconds"),
}
Kind = TypeVar("Kind", bound=Result)


@dataclass(frozen=True, kw_only=True)
class Benchmarks:
    machine: Machine
    quick: bool = False
    results: tuple[Result, ...] = ()  # in the order of measurement
    notes: tuple[str, ...] = ()

    def of_kind(self, kind: type[Kind]) -> list[Kind]:
        return [result for result in self.results if isinstance(result, kind)]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, with whether each promise is met (null: no promise)."""
        by_kind = {name: [_plain(result) for result in self.of_kind(kind)] for kind, name in KINDS.items()}
        return {"machine": asdict(self.machine), "quick": self.quick, **by_kind, "notes": self.notes}

    @property
    def missed(self) -> list[Result]:
        return [result for result in self.results if result.met is False]


def _plain(result: Result) -> dict[str, Any]:
    derived = {name: getattr(result, name) for name in DERIVED.get(type(result), ())}
    return {**asdict(result), **derived, "met": result.met}


Rows = list[tuple[str, ...]]


def benchmark_tables(benchmarks: Benchmarks) -> RenderableType:
    """Return the terminal tables."""
    parts: list[RenderableType] = [Text(str(benchmarks.machine), style="bold")]
    if benchmarks.quick:
        parts.append(Text("quick run: sizes too small to judge by, targets not applied", style="yellow"))
    for title, header, rows in _tables(benchmarks):
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for position, name in enumerate(header):
            is_name = position < _count_name_columns(header)
            table.add_column(name, justify="left" if is_name else "right", no_wrap=not is_name)
        for row in rows:
            table.add_row(*row, style="red" if row[-1].endswith("missed") else None)
        parts.append(table)
    parts += [Text(f"note: {note}", style="dim") for note in benchmarks.notes]
    return Group(*parts)


def benchmark_markdown(benchmarks: Benchmarks) -> str:
    """Return the same tables in GitHub Markdown."""
    parts = [f"Machine: {benchmarks.machine}."]
    for title, header, rows in _tables(benchmarks):
        parts += [f"### {title}", markdown_table(header, rows, _count_name_columns(header))]
    parts += [f"Note: {note}" for note in benchmarks.notes]
    return "\n\n".join(parts)


def _count_name_columns(header: tuple[str, ...]) -> int:
    return 2 if "instead of" in header else 1


def _tables(benchmarks: Benchmarks) -> Iterable[tuple[str, tuple[str, ...], Rows]]:
    header: tuple[str, ...]
    for topic, group in groupby(benchmarks.of_kind(Ratio), key=lambda ratio: ratio.topic):
        ratios = list(group)
        errors = any(ratio.error is not None for ratio in ratios)
        accuracy = ("error", "their error") if errors else ()
        header = ("attnorm", "instead of", "ms", "their ms", "result", *accuracy, "promised")
        yield topic, header, [_ratio_row(ratio, errors) for ratio in ratios]
    for setting, footprints in groupby(benchmarks.of_kind(Footprint), key=lambda footprint: footprint.setting):
        members = list(footprints)
        header = ("attnorm", "forward, MB", "forward + backward, MB", "seconds", "promised")
        title = f"Peak extra memory, {setting} (one dense map of weights: {members[0].dense_mb:,.0f} MB)"
        yield title, header, [_footprint_row(footprint) for footprint in members]
    for setting, durations in groupby(benchmarks.of_kind(Duration), key=lambda duration: duration.setting):
        yield setting, ("call", "seconds", "promised"), [_duration_row(duration) for duration in durations]
    for setting, runs in groupby(benchmarks.of_kind(ModelRun), key=lambda run: run.setting):
        header = ("pass", "seconds", "process, MB", "of it the pass, MB", "against plain", "promised")
        yield f"Each in its own process, {setting}", header, [_run_row(run) for run in runs]
    for growth in benchmarks.of_kind(Growth):
        header = ("tokens", "plain, s", "s", "times", "plain, MB", "MB", "promised")
        yield f"Growth of {growth.what}, beside the plain pass, {growth.setting}", header, _growth_rows(growth)
    for setting, curves in groupby(benchmarks.of_kind(CostCurve), key=lambda curve: curve.setting):
        yield _cost_table(setting, list(curves))
    for setting, approximations in groupby(benchmarks.of_kind(ApproximationError), key=lambda error: error.setting):
        header = ("SOFT", "error of the output", "error of the inverse")
        rows: Rows = [
            (approximation.what, f"{approximation.error:.2g}", f"{approximation.inverse_error:.1e}")
            for approximation in approximations
        ]
        yield f"SOFT against the full Gaussian kernel, {setting}", header, rows
    for (items, workers), sweeps in groupby(benchmarks.of_kind(SweepCost), key=lambda cost: (cost.items, cost.workers)):
        header = ("sweep", "wall, s", "ideal, s", "wall / ideal", "overhead per item, s", "models loaded", "promised")
        yield f"A sweep of {items} items with {workers} workers", header, [_sweep_row(cost) for cost in sweeps]


def _cost_table(setting: str, curves: list[CostCurve]) -> tuple[str, tuple[str, ...], Rows]:
    lengths = sorted({point.length for curve in curves for point in curve.points})
    rivals = [curve for curve in curves if curve.rival]
    rows: Rows = []
    for curve in curves:
        ms = {point.length: _digits(point.ms) for point in curve.points}
        grown = "" if curve.exponent is None else f"L^{curve.exponent:.2f}"
        cheaper_length = None if curve.rival or not rivals else curve.cheaper_from(rivals[0])
        cheaper = f"{cheaper_length:,}" if cheaper_length is not None else "" if curve.rival else "nowhere"
        rows.append((curve.what, *(ms.get(length, "-") for length in lengths), grown, cheaper))
    header = ("ms at tokens", *(f"{length:,}" for length in lengths), "grows as", "faster than softmax from")
    return f"Cost against tokens, {setting}", header, rows


def _ratio_row(ratio: Ratio, errors: bool) -> tuple[str, ...]:
    cells = [ratio.what, ratio.against, _digits(ratio.ours_ms), _digits(ratio.theirs_ms), relative(ratio.speedup)]
    if errors:
        cells += ["" if error is None else f"{error:.1e}" for error in (ratio.error, ratio.their_error)]
    return (*cells, _format_promise(ratio.met, "" if ratio.target is None else relative(ratio.target)))


def _footprint_row(footprint: Footprint) -> tuple[str, ...]:
    backward = "-" if footprint.backward_mb is None else f"{footprint.backward_mb:,.0f}"
    promise = "" if footprint.target_mb is None else f"{footprint.target_mb:,.0f} MB"
    cells = (footprint.what, f"{footprint.forward_mb:,.0f}", backward, f"{footprint.seconds:.1f}")
    return (*cells, _format_promise(footprint.met, promise))


def _duration_row(duration: Duration) -> tuple[str, ...]:
    promise = "" if duration.most_seconds is None else f"at most {duration.most_seconds:.3g} s"
    return duration.what, f"{duration.seconds:.3g}", _format_promise(duration.met, promise)


def _run_row(run: ModelRun) -> tuple[str, ...]:
    promises = [
        *([] if run.most_times_plain is None else [f"{run.most_times_plain:g}x"]),
        *([] if run.most_seconds is None else [f"{run.most_seconds:g} s"]),
    ]
    extra = "" if run.extra_mb is None else f"{run.extra_mb:,.0f}"
    times = "" if run.times_plain is None else f"{run.times_plain:.2f}x"
    cells = (run.what, f"{run.seconds:.2f}", f"{run.peak_mb:,.0f}", extra, times)
    return (*cells, _format_promise(run.met, ", ".join(promises)))


def _sweep_row(cost: SweepCost) -> tuple[str, ...]:
    promise = "" if cost.met is None else f"{cost.most_times_ideal:g}x, {cost.most_overhead_seconds:g} s per item"
    ideal = cost.item_seconds / cost.workers
    cells = (cost.what, f"{cost.wall_seconds:.1f}", f"{ideal:.1f}", f"{cost.times_ideal:.2f}x")
    return (*cells, f"{cost.overhead_seconds:.2f}", str(cost.models_loaded), _format_promise(cost.met, promise))


def _growth_rows(growth: Growth) -> Rows:
    """Return one row per length; the promise covers all rows and is in the last."""
    rows: Rows = [
        (
            f"{point.length:,}", f"{point.plain_seconds:.2f}", f"{point.seconds:.2f}",
            f"{point.seconds / point.plain_seconds:.2f}x", f"{point.plain_extra_mb:,.0f}", f"{point.extra_mb:,.0f}", "",
        )
        for point in growth.points
    ]  # fmt: skip
    if rows and growth.exponent is not None:
        grown = f"memory as L^{growth.exponent:.2f}"
        promise = grown if growth.target is None else f"{grown}, at most L^{growth.target:g}"
        rows[-1] = (*rows[-1][:-1], _format_promise(growth.met, promise))
    return rows


def relative(speedup: float) -> str:
    """Return a speedup in words: '4.2x faster' or '1.08x the time'."""
    if speedup >= 1.05:
        return f"{speedup:.3g}x faster"
    return f"{1 / speedup:.2f}x the time"


def _format_promise(met: bool | None, promise: str) -> str:
    return promise if met is None else f"{promise}: {'met' if met else 'missed'}"


def _digits(milliseconds: float) -> str:
    return (
        f"{milliseconds:.0f}"
        if milliseconds >= 100
        else f"{milliseconds:.1f}"
        if milliseconds >= 1
        else f"{milliseconds:.2f}"
    )
