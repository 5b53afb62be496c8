"""A run folder from elsewhere: a damaged or hostile manifest or table ends in an error that names the file."""

from pathlib import Path

import pytest

from attnorm.analysis.store import read_json, read_table


@pytest.mark.parametrize(
    "content", ["", "[]", "7", "{", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "\x00"], ids=range(6)
)
def test_a_hostile_manifest_is_named(content: str, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"manifest\.json"):
        read_json(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"PAR1", b"PAR1" + b"\xff" * 64 + b"PAR1", b"PAR1" + (2**31 - 1).to_bytes(4, "little") + b"PAR1"],
    ids=["empty", "short", "garbage", "a footer longer than the file"],
)
def test_a_hostile_table_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "heads.parquet"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"heads\.parquet"):
        read_table(path)
