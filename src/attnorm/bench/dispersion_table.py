"""The result of `attnorm dispersion`, the weight that a clear winner keeps as the context grows, and its table.

Verdicts at the largest context: a winner that still holds more than half of its row *stays*, one that holds less than
the equal share 1/n *collapses*, and everything between *fades*. One half is also where the theory draws its line: the
horizon 1 + e^spread is the length beyond which softmax cannot give any key more.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Verdict = Literal["stays", "fades", "collapses"]

MEANING: dict[Verdict, str] = {
    "stays": "more than half of the row",
    "fades": "less than half of the row",
    "collapses": "less than an equal share 1/n",
}
STYLE: dict[Verdict, str] = {"stays": "bold green", "fades": "yellow", "collapses": "red"}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One normalizer: the part of the row that the winner keeps among `lengths` keys."""

    name: str
    label: str  # the name with the settings it was drawn with
    lengths: tuple[int, ...]
    kept: tuple[float, ...]

    @property
    def verdict(self) -> Verdict:
        if self.kept[-1] > 0.5:
            return "stays"
        return "fades" if self.kept[-1] >= 1 / self.lengths[-1] else "collapses"


@dataclass(frozen=True, kw_only=True)
class Dispersion:
    """The winner's score is `gap`; the others' scores are normal with mean 0 and this noise; medians over the draws."""

    gap: float
    noise: float
    draws: int
    seed: int
    curves: tuple[Curve, ...]
    left_out: dict[str, str]  # name -> why the question does not apply

    def groups(self) -> Iterator[tuple[Verdict, list[Curve]]]:
        """Yield the curves by verdict, each group from the most to the least weight kept."""
        for verdict in get_args(Verdict):
            members = [curve for curve in self.curves if curve.verdict == verdict]
            if members:
                yield verdict, sorted(members, key=lambda curve: curve.kept[::-1], reverse=True)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, with the verdict of each curve."""
        return {**asdict(self), "curves": [{**asdict(curve), "verdict": curve.verdict} for curve in self.curves]}

    @property
    def setting(self) -> str:
        """The experiment in one sentence."""
        others = f"the other scores are normal noise, N(0, {self.noise**2:g})" if self.noise else "all others score 0"
        return f"One key scores {self.gap:g}; {others}."


def dispersion_table(dispersion: Dispersion) -> RenderableType:
    """Return the terminal table, with five of the lengths."""
    lengths = dispersion.curves[0].lengths if dispersion.curves else ()
    columns = shown(lengths)
    table = Table(
        title=f"Weight a clear winner keeps among n keys\n{dispersion.setting}",
        caption=_caption(dispersion, lengths[-1] if lengths else 0),
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("normalizer", no_wrap=True)
    for column in columns:
        table.add_column(f"{lengths[column]:,}", justify="right", no_wrap=True)
    for verdict, curves in dispersion.groups():
        table.add_section()
        table.add_row(Text(verdict, style=STYLE[verdict]))
        for curve in curves:
            table.add_row(f"  {curve.label}", *(percent(curve.kept[column]) for column in columns))
    notes = [Text(f"left out: {name} - {reason}", style="dim") for name, reason in dispersion.left_out.items()]
    return Group(table, *notes)


def _caption(dispersion: Dispersion, longest: int) -> str:
    verdicts = "; ".join(f"{verdict}: {meaning}" for verdict, meaning in MEANING.items())
    draws = f"Median of {dispersion.draws} draws. " if dispersion.noise else ""
    return f"At {longest:,} keys - {verdicts}. {draws}Rows that sum to more than 1 are divided by their sum."


def shown(lengths: tuple[int, ...]) -> list[int]:
    """Return the indices of about five lengths to print, including the first and the last."""
    return sorted({round(i * (len(lengths) - 1) / 4) for i in range(5)}) if lengths else []


def percent(part: float) -> str:
    """Return a share as a percentage with two significant digits, for example 98 %, 4.1 %, 0.069 %."""
    value = 100 * part
    if value >= 99.5:
        return "100 %"
    if value < 0.001:
        return "0 %" if value == 0 else "< 0.001 %"
    digits = 0 if value >= 9.95 else 1 if value >= 0.995 else 2 if value >= 0.0995 else 3
    return f"{value:.{digits}f} %"
