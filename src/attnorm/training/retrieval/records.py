"""Results as JSONL, written as they come: a line per normalizer, seed, size and normalizer at test time."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RECORDS = "records.jsonl"

Record = dict[str, Any]


def read_records(path: Path) -> list[Record]:
    """Whole lines only: one during which the program was killed is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def append_records(path: Path, records: Sequence[Record]) -> None:
    text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":  # half a line of a killed program
                text = "\n" + text
        file.write(text.encode())
