"""One row of a head: the keys that it reads, with their text."""

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from attnorm.analysis.visible import visible


@dataclass(frozen=True)
class ReadKey:
    """A key and the weight that the row gives to it."""

    rank: int  # 1 is the heaviest
    key: int  # position
    weight: float
    token: str | None  # None where a position is no token


@dataclass(frozen=True)
class TopKeys:
    """The heaviest keys of a row; printed as a few lines."""

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
        lines = [f"layer {self.layer} head {self.head}, row {self.row} {quoted(self.token)} reads"]
        lines += [f"{one.weight:8.3f}  {one.key:6d}  {quoted(one.token)}" for one in self.keys]
        return "\n".join(lines)


def top_keys(reads: pa.Table, row: int) -> TopKeys:
    """The keys of one row from a head's part of the table `reads`."""
    rows = sorted(set(reads["row"].to_pylist()))
    if not rows:
        raise ValueError(
            "expected a run that kept the keys of some rows, got one without. Measure again with read_keys=8 "
            "(--tokens 8); a head whose rows are all broken reads nothing."
        )
    if row not in rows and not -len(rows) <= row < 0:
        raise ValueError(
            f"expected one of the rows {', '.join(map(str, rows))}, got {row}. Measure again with read_rows=({row},) "
            f"(--token-rows {row}) to keep the keys of that row."
        )
    chosen = row if row in rows else rows[row]
    found = reads.filter(pc.equal(reads["row"], chosen)).sort_by("rank").to_pylist()
    keys = tuple(ReadKey(one["rank"], one["key"], one["weight"], one["key_token"]) for one in found)
    return TopKeys(found[0]["layer"], found[0]["head"], chosen, found[0]["row_token"], keys)


def quoted(token: str | None, longest: int = 24) -> str:
    """A token between quotation marks, on one line and without control characters."""
    return "(no text)" if token is None else f"‘{visible(token, longest)}’"
