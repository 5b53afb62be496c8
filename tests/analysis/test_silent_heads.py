"""Silent heads from end to end: a patched model, tensors, and the report."""

import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from rich.console import Console

import attnorm
from attnorm.analysis.compare import compare
from attnorm.models.load import load
from attnorm.report.terminal import analysis_summary


def analysis_with_bias(bias: float) -> attnorm.Analysis:
    """Return the analysis of the bundled model with sigmoid; a low bias takes the weight of most heads."""
    loaded = load("bundled")
    attnorm.patch(loaded.model, "sigmoid", warm_start=False, bias=bias)
    return attnorm.analyze(loaded.model, tokenizer=loaded.tokenizer, lengths=256, windows=2, rows=64)


@pytest.fixture(scope="module")
def zeros() -> attnorm.Analysis:
    return analysis_with_bias(-200.0)


@pytest.fixture(scope="module")
def tiny() -> attnorm.Analysis:
    return analysis_with_bias(-20.0)


def test_heads_without_any_weight_are_silent(zeros: attnorm.Analysis) -> None:
    rows = [row for row in zeros.heads.to_pylist() if row["row_sum"] == 0]
    assert len(rows) > 30
    for row in rows:
        assert (row["verdict"], row["leaning"], row["flags"]) == ("silent", "silent", ["silent"])
        assert (row["confidence"], row["agreement"]) == (1.0, 1.0)
        assert math.isnan(row["entropy_ratio"])
        assert row["evidence"].startswith("The weights of its median row sum to 0, below 0.01")
    assert "Not judged" not in " ".join(zeros.heads["evidence"].to_pylist())
    assert f"{len(rows)} silent" in zeros.verdict.headline


def test_heads_with_tiny_weights_are_silent_and_the_others_are_judged(tiny: attnorm.Analysis) -> None:
    counts = Counter(tiny.heads["verdict"].to_pylist())
    assert counts["silent"] > 15
    assert counts["dispersed"] > 0
    for row in tiny.heads.to_pylist():
        assert (row["leaning"] == "silent") == (max(row["row_sum"], row["row_sum_mean"]) < 0.01)


def test_terminal_comparison_and_report_name_them(tiny: attnorm.Analysis, tmp_path: Path) -> None:
    console = Console(width=160, record=True, file=(tmp_path / "terminal").open("w"))
    console.print(analysis_summary(tiny.report_data))
    text = console.export_text()
    assert "The weights sum to almost 0, so the head reads no key." in text
    assert "Prune silent heads" in text
    listed = text.partition("What the sharpest head of some layers reads")[2].partition("What to try")[0]
    silent = {(row["layer"], row["head"]) for row in tiny.heads.to_pylist() if row["verdict"] == "silent"}
    assert "layer 2 head" in listed
    assert not [head for head in silent if f"layer {head[0]} head {head[1]} " in listed]
    page = tiny.save_html(tmp_path / "report.html").read_text(encoding="utf-8")
    assert 'class="mark v-silent"' in page
    assert "Prune silent heads" in page
    assert compare({"one": tiny, "other": tiny}).sides[1].counts["silent"] == len(silent)


@pytest.mark.parametrize(("empty", "expected"), [(1.0, "silent"), (0.9, "judged"), (0.6, "judged"), (0.4, "judged")])
def test_a_head_that_reads_in_some_rows_is_judged_by_them(empty: float, expected: str) -> None:
    """Softpick gives no key weight in rows whose logits are all negative."""
    chance = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 128, 16, generator=chance).abs() for _ in range(2))
    q[:, :, torch.rand(128, generator=chance) < empty] *= -1
    analysis = attnorm.measure(q, k, k, normalizers=("softpick",), metrics="core")
    (row,) = analysis.heads.to_pylist()
    assert (row["row_sum"] == 0) == (empty > 0.5)
    assert (row["leaning"] == "silent") == (expected == "silent")
