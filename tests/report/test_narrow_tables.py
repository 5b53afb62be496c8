"""Terminal tables stay readable at 80 columns: no line is longer, no number and no name is cut."""

from io import StringIO

import pytest
from rich.console import Console, RenderableType

import attnorm
from attnorm.analysis.compare import compare
from attnorm.cli import doctor
from attnorm.cli.doctor import examine, health_tables
from attnorm.cli.normalizers import describe_all, normalizer_table
from attnorm.cli.output import ByWidth
from attnorm.report.terminal import analysis_summary, comparison_tables


def rendered(what: RenderableType) -> str:
    console = Console(file=StringIO(), width=80, force_terminal=False)
    console.print(what)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 80
    return text


@pytest.fixture(scope="module")
def analysis() -> attnorm.Analysis:
    return attnorm.analyze("bundled", lengths=64, rows=8, windows=2, normalizers=("model", "ssmax"))


def test_normalizers() -> None:
    descriptions = describe_all()
    text = rendered(ByWidth(normalizer_table(descriptions), normalizer_table(descriptions, narrow=True)))
    assert "\u2026" not in text
    assert all(name in text for name in attnorm.available())


def test_an_analysis_and_a_comparison(analysis: attnorm.Analysis) -> None:
    for tables in (analysis_summary(analysis.report_data), comparison_tables(compare({"run": analysis}))):
        assert "\u2026" not in rendered(tables)


def test_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = dict.fromkeys(doctor.PROMISES, lambda: (True, "largest error 1.19e-07, and the same bits twice"))
    monkeypatch.setattr(doctor, "PROMISES", quick)  # tests/cli makes the real checks
    assert "\u2026" not in rendered(health_tables(examine()))
