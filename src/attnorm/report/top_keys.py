"""The heaviest keys of a row, for people."""

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from attnorm.text import visible


@dataclass(frozen=True)
class ReadKey:
    """A key and the weight that a row gives it."""

    rank: int  # 1 is the heaviest
    key: int  # position
    weight: float
    token: str | None  # None: the position is not a token


@dataclass(frozen=True)
class TopKeys:
    """The heaviest keys of a row; str() gives a few lines."""

    layer: int
    head: int
    row: int
    token: str | None
    keys: tuple[ReadKey, ...]

    def __iter__(self) -> Iterator[ReadKey]:
        return iter(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def __str__(self) -> str:
        lines = [f"layer {self.layer} head {self.head}, row {self.row} {quote_token(self.token)} reads"]
        lines += [f"{key.weight:8.3f}  {key.key:6d}  {quote_token(key.token)}" for key in self.keys]
        return "\n".join(lines)


def top_keys(reads: pa.Table, row: int) -> TopKeys:
    """Return the keys of one row; reads: the rows of the table `reads` that belong to one head."""
    rows = sorted(set(reads["row"].to_pylist()))
    if not rows:
        raise ValueError(
            "expected a run that stored the keys of some rows, got one without. Measure again with read_keys=8 "
            "(--tokens 8). A head has none either if none of its rows is finite."
        )
    if row not in rows and not -len(rows) <= row < 0:
        raise ValueError(
            f"expected one of the rows {', '.join(map(str, rows))}, got {row}. Measure again with read_rows=({row},) "
            f"(--token-rows {row}) to store the keys of that row."
        )
    index = row if row in rows else rows[row]
    entries = reads.filter(pc.equal(reads["row"], index)).sort_by("rank").to_pylist()
    keys = tuple(ReadKey(entry["rank"], entry["key"], entry["weight"], entry["key_token"]) for entry in entries)
    return TopKeys(entries[0]["layer"], entries[0]["head"], index, entries[0]["row_token"], keys)


def quote_token(token: str | None, longest: int = 24) -> str:
    """Return a token in quotation marks, on one line and without control characters."""
    return "(no text)" if token is None else f"‘{visible(token, longest)}’"
