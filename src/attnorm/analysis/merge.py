"""Several runs on one model become one set of tables: other texts, lengths or normalizers, each row once."""

from collections.abc import Sequence

import pyarrow as pa

from attnorm.analysis.tables import HEAD_KEY

_KEYS = {name for name, _ in HEAD_KEY} | {
    "n_low", "n_high", "top_n", "temperature", "window", "block", "row", "rank", "side", "position",
}  # fmt: skip


class NotMeasuredError(ValueError):
    """A row that is in several runs lacks a number in one of them."""


def merged_table(name: str, tables: Sequence[pa.Table]) -> pa.Table:
    """The tables one below the other; a row that is in several of them must be the same in all, and is kept once."""
    together = pa.concat_tables(tables)
    # In `heads` the bin belongs to the numbers: one head has one row.
    keys = [
        key
        for key in together.column_names
        if key in _KEYS and not (name in ("heads", "windows") and key in ("n_low", "n_high"))
    ]
    first: dict[tuple[object, ...], int] = {}
    repeated: list[tuple[int, int]] = []
    for index, key in enumerate(zip(*(together[key].to_pylist() for key in keys), strict=True)):
        if key in first:
            repeated.append((first[key], index))
        else:
            first[key] = index
    if not repeated:
        return together
    once = together.take(pa.array([a for a, _ in repeated]))
    again = together.take(pa.array([b for _, b in repeated]))
    for column in together.column_names:
        for at, (a, b) in enumerate(zip(once[column].to_pylist(), again[column].to_pylist(), strict=True)):
            if a != b and not (a != a and b != b):
                where = ", ".join(f"{key} {once[key][at].as_py()!r}" for key in keys)
                refusal = NotMeasuredError if (a != a) != (b != b) else ValueError
                raise refusal(
                    f"two runs disagree on {column} ({a} and {b}) of the same row of {name!r}: {where}; they measured "
                    "different things under one name: give the texts different names, or merge only one of the runs"
                )
    return together.take(pa.array(sorted(first.values())))
