"""Numbers: written as people write them, the same by Python and by the page's script; packed columns come back."""

import json
import math

import numpy as np
import pytest
from playwright.sync_api import Page

from attnorm.report import page as report
from attnorm.report.page import packed
from attnorm.report.page_text import plain
from attnorm.text import format_number, format_percent

SCRIPTS = report.HERE / "script"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1024, "1,024"), (131_072, "131,072"), (0.0031, "0.00310"), (0.5, "0.500"), (12.345, "12.3"), (0, "0"),
        (-2.5, "−2.50"), (999.96, "1,000"), (9.999, "10.0"), (338_907.4, "339,000"), (27_234_567.8, "27.2 million"),
        (3.2e9, "3.20 billion"), (3.52e12, "3.5 × 10¹²"), (2e-5, "2 × 10⁻⁵"), (-1.5e-7, "−1.5 × 10⁻⁷"),
        (None, "–"), (math.nan, "–"), (math.inf, "–"), (999_999_999.9, "1.00 billion"), (0.00009999, "0.000100"),
    ],
)  # fmt: skip
def test_numbers(value: float | None, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.12, "12 %"), (0.123, "12 %"), (0.0314, "3.1 %"), (0.03, "3 %"), (1, "100 %"), (0, "0 %"), (1e-6, "<0.1 %"),
     (0.0996, "10 %"), (None, "–"), (math.nan, "–"), (-0.2, "−20 %")],
)  # fmt: skip
def test_shares(value: float | None, text: str) -> None:
    assert format_percent(value) == text


def test_values_of_a_manifest() -> None:
    assert plain([1, 2048, None]) == "1, 2,048, –"
    assert [plain(True), plain(None), plain([]), plain(0.25), plain("as it is")] == [
        "yes", "–", "–", "0.250", "as it is",
    ]  # fmt: skip


def test_the_script_writes_numbers_as_python_does(empty_page: Page) -> None:
    draw = np.random.default_rng(0)
    values = [
        *(draw.choice([-1, 1], 3000) * 10 ** draw.uniform(-9, 15, 3000)).tolist(),
        *range(0, 3_000_000, 99_991),
        0.5,
        1e-4,
    ]
    script = (SCRIPTS / "format.js").read_text(encoding="utf-8")
    found = empty_page.evaluate(
        f"(values) => {{ {script}\n return values.map((v) => [number(v), share(v / 1e6)]); }}", values
    )
    wrong = [
        (value, texts, format_number(value), format_percent(value / 1e6))
        for value, texts in zip(values, found, strict=True)
        if texts != [format_number(value), format_percent(value / 1e6)]
    ]
    assert wrong == []


@pytest.mark.parametrize("logarithmic", [False, True])
def test_packed_columns_come_back_to_three_digits(empty_page: Page, logarithmic: bool) -> None:
    draw = np.random.default_rng(1)
    columns = [
        np.concatenate([draw.normal(size=2000), [np.nan, np.inf, -np.inf, 0.0]]),
        10 ** draw.uniform(-6, 12, 900),
        np.concatenate([draw.uniform(1e-4, 1, 500), [np.nan]]),
        np.array([3.25] * 7),
        np.full(5, np.nan),
        np.array([1.0, np.nan, 100_000.0, 1.0]),
        np.array([]),
    ]
    if logarithmic:
        columns = [np.abs(column) for column in columns]
    empty = {"heads": {"count": 0}, "metrics": [], "choices": {}, "verdicts": []}
    script = (SCRIPTS / "data.js").read_text(encoding="utf-8")
    empty_page.set_content(f'<script type="application/json" id="data">{json.dumps(empty)}</script>')
    for column in columns:
        sent = json.loads(json.dumps(packed(column, logarithmic=logarithmic), allow_nan=False))
        back = empty_page.evaluate(
            f"([column, count]) => {{ {script}\n return unpack(column, count).map((v) => isNaN(v) ? null : v); }}",
            [sent, len(column)],
        )
        assert len(back) == len(column)
        for value, got in zip(column.tolist(), back, strict=True):
            if not math.isfinite(value) or (logarithmic and value <= 0):
                assert got is None
            else:
                scale = np.abs(column[np.isfinite(column)]).max()
                assert got == pytest.approx(value, rel=0.015 if logarithmic else 1e-3, abs=1e-11 * scale)


def test_a_column_of_one_value_or_few_is_short() -> None:
    assert packed(np.full(10_000, 0.5)) == {"all": 0.5}
    few = packed(np.tile([1.0, 2.0, np.nan], 1000))
    assert few["levels"] == [1.0, 2.0, None]
    assert len(few["bytes"]) == 4000
