"""The page that compares all items of a sweep: one HTML file with its style, script and data; it works offline.

The table, the failures and the counts are HTML. The script draws the chart and sorts the table. As in the report, a
Content-Security-Policy allows only this style and this script.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from attnorm.files import write_text
from attnorm.safe_text import policy_hash
from attnorm.sweep.folder import ItemState

HERE = Path(__file__).parent
STATES = ("finished", "pruned", "failed", "running", "waiting")
# What the chart shows first, if the table has it.
FIRST_NUMBERS = ("loss", "accuracy", "entropy_ratio", "loss at 1x")
FIRST_AXES = ("length", "learning_rate", "size", "seed")
ROW_DIMENSIONS = ("size",)  # integers that a run itself varies


def write_page(
    path: Path, states: Sequence[ItemState], rows: Sequence[Mapping[str, Any]], *, title: str = "Sweep"
) -> None:
    """Write the page atomically."""
    write_text(path, render(states, rows, path.parent, title=title))


def render(
    states: Sequence[ItemState], rows: Sequence[Mapping[str, Any]], folder: Path, *, title: str = "Sweep"
) -> str:
    style, script = (_asset(f"page.{suffix}") for suffix in ("css", "js"))
    varied = list(dict.fromkeys(name for item_state in states for name in item_state.item.varied))
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "item"]
    numbers = [name for name in names if _is_number_column(rows, name)]
    texts = [name for name in names if name not in numbers]
    dimensions = [*varied, *(name for name in (*texts, *ROW_DIMENSIONS) if name in names and name not in varied)]
    measured = [name for name in numbers if name not in dimensions]
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template.filters["cell"] = cell
    template.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":"), "ensure_ascii": False}
    counts = Counter(item_state.state for item_state in states)
    return template.from_string(_asset("page.html.j2")).render(
        policy=f"default-src 'none'; style-src {policy_hash(style)}; script-src {policy_hash(script)}; "
        "base-uri 'none'; form-action 'none'",
        style=Markup(style),
        script=Markup(script),
        title=title,
        command=states[0].item.command if states else "",
        counts={name: counts[name] for name in STATES if counts[name]},
        total=len(states),
        seconds=sum(item_state.seconds or 0 for item_state in states),
        names=names,
        numbers=set(numbers),
        rows=rows,
        links={item_state.item.id: _link(folder, item_state.item.id) for item_state in states},
        failures=[item_state for item_state in states if item_state.state == "failed"],
        data={
            "rows": [{name: row.get(name) for name in (*dimensions, *measured)} for row in rows],
            "numbers": sorted(measured, key=lambda name: _rank(name, FIRST_NUMBERS)),
            "dimensions": sorted(dimensions, key=lambda name: _rank(name, FIRST_AXES)),
        },
    )


def _rank(name: str, first: Sequence[str]) -> int:
    return first.index(name) if name in first else len(first)


def _is_number_column(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    values = [row[name] for row in rows if row.get(name) is not None]
    return bool(values) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _link(folder: Path, key: str) -> str:
    """The most readable file of a run folder; the folder itself if it has no page."""
    run = folder / "items" / key
    page = next((name for name in ("report.html", "index.html") if (run / name).is_file()), "")
    return f"items/{key}/{page}"


def cell(value: Any) -> str:
    """A value as text of a table."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1e4 else str(value)


@cache
def _asset(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")
