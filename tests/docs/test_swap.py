"""What is safe to swap in without training is measured once: the record, the declarations and two pages agree."""

import json
import re
from pathlib import Path
from typing import Any

from attnorm.arithmetic import student_interval
from attnorm.cli.normalizers import describe_all
from attnorm.normalizers.declaration import warm_start_of
from attnorm.normalizers.registry import BUILT_IN

DOCS = Path(__file__).resolve().parents[2] / "docs"
RECORD = json.loads((DOCS / "results" / "swap.json").read_text(encoding="utf-8"))
ROWS: dict[str, dict[str, Any]] = {row["side"]: row for row in RECORD["rows"]}
LIMIT = 0.01  # nats per token
SAFE = {side for side, row in ROWS.items() if row["change"] is not None and row["change"]["interval"][1] < LIMIT}


def test_the_record_has_16_windows_and_its_intervals_follow_from_them() -> None:
    losses = {part["side"]: part["scores"]["values"] for part in RECORD["parts"]}
    assert losses.keys() == ROWS.keys()
    for side, values in losses.items():
        assert len(values) == 16
        if side != "model":
            changes = [after - before for before, after in zip(losses["model"], values, strict=True)]
            assert tuple(ROWS[side]["change"]["interval"]) == student_interval(changes)


def test_a_normalizer_is_declared_safe_if_and_only_if_the_record_shows_it() -> None:
    declared = {name for name, entry in BUILT_IN.items() if warm_start_of(entry.factory()).safe}
    assert declared == SAFE & BUILT_IN.keys()
    assert BUILT_IN.keys() - ROWS.keys() == {"soft", "differential", "differential_v2", "tda"}, (
        "these cannot be swapped"
    )
    assert {one.name for one in describe_all() if one.safe_untrained} == declared


def test_the_page_has_the_numbers_of_the_record() -> None:
    page = (DOCS / "results" / "swap.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `([^`]+)` \|[^|]*\| ([^|]+) \|([^|]*)\|$", page, re.MULTILINE)
    shown = {name: (change, safe.strip()) for name, change, safe in table}
    assert shown.keys() == ROWS.keys() - {"model"}
    for name, cells in shown.items():
        change, (low, high) = ROWS[name]["change"]["mean"], ROWS[name]["change"]["interval"]
        assert cells == (
            f"{change:+z.3f} ({low:+z.3f} to {high:+z.3f})",
            "yes" if name in SAFE else "",
        )
    assert f"below {LIMIT} nats" in page


def test_the_guide_recommends_without_training_what_is_safe() -> None:
    guide = (DOCS / "normalizers.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^\*\*Safe without training:\*\*(.*?)\.\s", guide, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"`(\w+)`", listed)) == SAFE & BUILT_IN.keys()
    (recommended,) = re.findall(r"^\| [^|]*without training \| ([^|]*) \|", guide, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", recommended)) <= SAFE
