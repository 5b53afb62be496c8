"""The map in CONTRIBUTING names files that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAP = re.search(r"^## Find your way\n(.*?)(?=^## )", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S)[1]


@pytest.mark.parametrize("path", sorted({*re.findall(r"`([\w./-]+(?:/|\.py|\.yml|\.md))`", MAP)}))
def test_a_path_of_the_map_exists(path: str) -> None:
    folders = (ROOT / "src" / "attnorm", ROOT / "src" / "attnorm_lab", ROOT)
    assert any((folder / path).exists() for folder in folders) or "NAME" in path, path
