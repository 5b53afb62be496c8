"""The terminal: everything can be read without color, nothing a model or a file is named can take it over."""

import io
import re
from functools import cache
from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console, RenderableType

import attnorm
from attnorm.analysis.compare import compare
from attnorm.analysis.result import Analysis
from attnorm.analysis.verdicts.thresholds import Thresholds
from attnorm.cli import doctor
from attnorm.cli.doctor import examine, health_tables
from attnorm.cli.normalizers import describe_all, normalizer_table
from attnorm.cli.output import ByWidth
from attnorm.report.page import payload
from attnorm.report.terminal import STYLE, analysis_summary, comparison_tables
from attnorm.report.views import VERDICTS
from tests.analysis.synthetic import CAST, EXPECTED, synthetic_manifest, synthetic_tables
from tests.analysis.tiny_models import vit


@cache
def made(cast: Any = CAST, name: str = "pretended/gpt", normalizers: tuple[str, ...] = ("model",)) -> Analysis:
    options: dict[str, Any] = {"cast": cast, "lengths": (256,), "normalizers": normalizers}
    return Analysis.of(synthetic_tables(**options), synthetic_manifest(**options, name=name), Thresholds())


def shown(what: RenderableType, width: int = 120, color: bool = False) -> str:
    console = Console(
        file=io.StringIO(), width=width, force_terminal=color, color_system="truecolor" if color else None
    )
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_every_head_has_its_letters_in_its_place() -> None:
    text = shown(analysis_summary(made().report_data))
    marks = {word.name: "." if word.name == "healthy" else word.mark for word in VERDICTS}
    for layer in range(len(CAST)):
        (line,) = (line for line in text.splitlines() if line.startswith(f"layer {layer} "))
        found = line.split()[2 : 2 + len(CAST[layer])]
        assert found == [marks[EXPECTED[layer, head]] for head in range(len(CAST[layer]))]
    for word in VERDICTS:
        count = list(EXPECTED.values()).count(word.name)
        assert (f"{count} {word.label}" in text) == (count > 0), "the legend"


def test_color_adds_to_the_letters_and_replaces_none() -> None:
    plain, colored = (
        shown(analysis_summary(made().report_data)),
        shown(analysis_summary(made().report_data), color=True),
    )
    assert "\x1b[" in colored
    assert "\x1b[" not in plain
    assert set(STYLE) >= {word.name for word in VERDICTS}
    assert len({STYLE[word.name] for word in VERDICTS}) == len(VERDICTS)


def test_the_summary_tells_verdict_ceiling_rate_heads_and_advice() -> None:
    text = " ".join(shown(analysis_summary(made().report_data)).split())
    for part in ("heads still select", "Is the ceiling binding", "Rate test", "Heads to look at", "What to try"):
        assert part in text
    assert "attnorm analyze pretended/gpt" in text, "the command that measures what is missing"


def test_a_head_over_an_image_reads_patches() -> None:
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    analysis = attnorm.analyze(  # 4 x 4 patches after the class token
        vit(), {"pixel_values": pixels}, metrics="core", normalizers=["softmax1"]
    )
    read = (
        shown(analysis_summary(analysis.report_data))
        .partition("head of some layers reads")[2]
        .partition("What to try")[0]
    )
    assert "weight with softmax1)" in read
    assert " 11 (row 3, column 3) " in read, "the row: the patch in the middle"
    assert "(no text)" not in read
    named = {
        int(key): (int(row), int(column)) for key, row, column in re.findall(r"(\d+) \(row (\d), column (\d)", read)
    }
    assert len(named) > 2
    assert named == {key: ((key - 1) // 4 + 1, (key - 1) % 4 + 1) for key in named}
    for picture in analysis.manifest["pictures"].values():
        picture["rows"] = 5  # as where attention is within windows: fewer keys than patches
    assert "column" not in shown(analysis_summary(analysis.report_data))
    analysis.manifest["pictures"].clear()  # as where stages merge patches
    without = shown(analysis_summary(analysis.report_data))
    assert "(no text)" not in without
    assert "per image" in without
    assert payload(analysis.report_data)["inputName"] == "Image"


def test_what_ifs_are_shown_where_they_were_measured() -> None:
    text = " ".join(shown(analysis_summary(made(normalizers=("model", "entmax15")).report_data)).split())
    assert "entmax15: entropy / log n" in text
    assert "dispersed heads 6 -> 0" in text


def test_cautions_stand_apart_and_nothing_that_stays_zero_is_told() -> None:
    text = " ".join(shown(analysis_summary(made(normalizers=("model", "ssmax", "entmax15")).report_data)).split())
    tried, expected = text.index("What to try"), text.index("What does not help")
    assert tried < text.index("sparse normalizer") < expected < text.index("A lower temperature does not help")
    assert " 0 -> 0" not in text


def test_a_horizon_is_shown_only_of_normalizers_that_have_one() -> None:
    several = made(normalizers=("model", "ssmax", "entmax15"))
    text = shown(comparison_tables(compare({"run": several})), width=160)
    (line,) = (line for line in text.splitlines() if line.strip().startswith("Horizon"))
    assert line.split()[-1] == "-"
    assert line.count(" to ") == 2


@pytest.mark.parametrize("width", [30, 60, 200])
def test_many_heads_are_folded_into_blocks_that_fit(width: int) -> None:
    text = shown(analysis_summary(made((("selects", "flat") * 20,)).report_data), width=width)
    rows = [line for line in text.splitlines() if line.startswith("layer 0 ")]
    assert sum(line.count("Df") + line.count(" .") for line in rows) == 40
    assert all(len(line) <= width for line in text.splitlines())


def test_names_are_shown_and_not_obeyed() -> None:
    text = shown(analysis_summary(made(name="[bold red]a[/] [link=http://x]b").report_data), width=200)
    assert "[bold red]a[/] [link=http://x]b" in text


def test_a_model_without_fault_has_no_table_of_bad_heads() -> None:
    text = shown(analysis_summary(made((("selects",) * 2,)).report_data))
    assert "Heads to look at" not in text
    assert "Nothing needs changing" in text


def test_sides_stand_side_by_side_with_the_changed_heads_below() -> None:
    changed = (CAST[0], ("flat", *CAST[1][1:]), *CAST[2:])
    text = shown(comparison_tables(compare({"before": made(), "after [1]": made(changed)})), width=160)
    assert "after [1] compared with before: 1 of 24 heads have another verdict" in text
    assert "layer 1 head 0" in text
    assert "healthy -> dispersed-forced" in text
    assert "-0.00" not in text
    unchanged = shown(comparison_tables(compare({"before": made(), "after": made()})))
    assert "0 of 24 heads have another verdict" in unchanged


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
