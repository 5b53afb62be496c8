"""What the page needs to show which tokens a head reads: keys and weights by head, and the text of each sequence once.

Tokens come from a file that anybody may have written: control characters are spelled out here, and the script puts
them into the page as text, never as markup.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from attnorm.analysis.reading import INPUT, SIDES
from attnorm.analysis.visible import visible
from attnorm.report.html.column_encoding import packed, packed_whole
from attnorm.report.selection import column

LONGEST = 40  # characters of a token on the page
MOST = 4_000  # keys on the page, about 25 kB; a large model gets fewer for each row, the table has all of them


def reads_payload(
    reads: pa.Table | None, index: Mapping[tuple[Any, ...], int], key_names: Sequence[str]
) -> dict[str, Any]:
    """Rows of the table sorted by head, row and rank; those of head i are starts[i] to starts[i + 1].

    left_out: how many keys of a row are in the table and not on the page.
    """
    nothing: dict[str, Any] = {"starts": [0] * (len(index) + 1), "columns": {}, "left_out": 0}
    reads = None if reads is None else _first_window(reads)
    if reads is None or not reads.num_rows:
        return nothing
    most = int(pc.max(reads["rank"]).as_py())
    shown = _ranks_that_fit(reads)
    reads = reads.filter(pc.less_equal(reads["rank"], shown))
    keys = zip(*(reads.column(name).to_pylist() for name in key_names), strict=True)
    owner = np.array([index.get(key, -1) for key in keys])
    order = np.lexsort((column(reads, "rank"), column(reads, "row"), owner))
    order = order[owner[order] >= 0]
    starts = np.searchsorted(owner[order], np.arange(len(index) + 1))
    whole = {name: packed_whole(reads.column(name).to_numpy()[order]) for name in ("row", "key")}
    columns = {**whole, "weight": packed(column(reads, "weight")[order])}
    return {"starts": starts.tolist(), "columns": columns, "left_out": most - shown}


def tokens_payload(tokens: pa.Table | None, choices: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """The tokens of each text, length and side, by position."""
    tokens = None if tokens is None else _first_window(tokens)
    if tokens is None:
        return []
    found: dict[tuple[int, int, str], list[str]] = {}
    for row in tokens.sort_by("position").to_pylist():
        if row["text"] in choices["text"] and row["length"] in choices["length"]:
            where = (choices["text"].index(row["text"]), choices["length"].index(row["length"]), row["side"])
            found.setdefault(where, []).append(visible(row["token"] or "", LONGEST))
    return [
        {"text": text, "length": length, "side": side, "tokens": own} for (text, length, side), own in found.items()
    ]


def sides_payload() -> dict[str, Any]:
    """By kind of attention, the sides of queries and keys; `input` is that of a model with one stack."""
    return {"input": INPUT, "kinds": {kind: list(pair) for kind, pair in SIDES.items()}}


def _ranks_that_fit(reads: pa.Table) -> int:
    """The largest rank up to which all keys fit on the page; at least 1."""
    counts = np.bincount(reads.column("rank").to_numpy())
    return max(1, int(np.searchsorted(np.cumsum(counts), MOST, side="right")) - 1)


def _first_window(table: pa.Table) -> pa.Table:
    """One window of each text is shown: a page that held all of them would be large."""
    return table.filter(pc.equal(table["window"], pc.min(table["window"]))) if table.num_rows else table
