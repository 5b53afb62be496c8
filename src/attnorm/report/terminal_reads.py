"""Which tokens heads read, as a few lines of a terminal."""

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from attnorm.analysis.tables import HEAD_KEY
from attnorm.analysis.top_keys import TopKeys, quoted, top_keys
from attnorm.analysis.verdicts.rows import Row
from attnorm.report.selection import chosen_rows

HEADS, KEYS, LONGEST = 5, 4, 14  # of the table: heads, keys of each, characters of a token


def reads_table(analysis: Any, heads: Sequence[Row]) -> Table | None:
    """The keys that the sharpest heads read from their last chosen row, one head per layer; None where no row was kept.

    A head that spreads its weight over everything reads no token in particular.
    """
    sharpest: dict[tuple[str, int], Row] = {}
    for row in sorted(heads, key=_sharpness):
        sharpest.setdefault((row["kind"], row["layer"]), row)
    found: list[TopKeys] = []
    for row in list(sharpest.values())[:HEADS]:
        reads = chosen_rows(analysis.reads, {name: row[name] for name, _ in HEAD_KEY})
        if reads.num_rows:
            found.append(top_keys(reads, -1))
    if not found:
        return None
    title = "What some of the sharpest heads read (last row; position, token, weight)"
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("head", "row", "reads"):
        table.add_column(heading, no_wrap=heading != "reads")
    for one in sorted(found, key=lambda one: (one.layer, one.head)):
        read = ", ".join(f"{key.key} {quoted(key.token, LONGEST)} {key.weight:.2f}" for key in one.keys[:KEYS])
        here = f"{one.row} {quoted(one.token, LONGEST)}"
        table.add_row(Text(f"layer {one.layer} head {one.head}"), Text(here), Text(read))
    return table


def _sharpness(row: Row) -> float:
    ratio = row.get("entropy_ratio")
    parked = (row.get("sink_mass") or 0.0) > 0.5  # a head parked on the first key says little
    return (2.0 if ratio is None or ratio != ratio else float(ratio)) + (1.0 if parked else 0.0)
