"""What docs/training.md shows: its script at a small size, and its Python blocks one after another."""

import json
import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from attnorm.models.load import load

DOCS = Path(__file__).resolve().parents[2] / "docs"
SCRIPT = DOCS / "examples" / "finetune.py"

pytestmark = pytest.mark.filterwarnings("ignore::attnorm.monitor.alerts.AttentionAlert")


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--length", "32", "--steps", "4", "--batch", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *small])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().out
    losses = {words.strip(): float(value) for words, value in re.findall(r"^loss (.*): +([\d.]+)$", printed, re.M)}
    untrained, trained = losses["with ssmax, not trained yet"], losses["with ssmax, fine-tuned"]
    assert trained < untrained
    assert losses["after save and load"] == trained
    steps = re.findall(r"^step +(\d+): loss [\d.]+, entropy / log n 0\.\d+$", printed, re.M)
    assert steps == ["1", "2", "3", "4"]
    (numbers,) = re.findall(r"^effective_keys +([\d.]+) +([\d.]+) +([\d.]+)$", printed, re.M)
    assert len({*numbers}) == 3, "softmax, ssmax and what training made of it differ"
    kept = json.loads((tmp_path / "model" / "config.json").read_text())
    assert kept["attnorm"]["recipes"][0]["normalizer"] == "ssmax"
    assert load(tmp_path / "model").tokenizer is not None


def test_the_example_says_that_a_text_is_too_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Once upon a time")
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--text", str(short), "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"\d tokens.*256"):
        runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.mark.nightly  # 6 s; other tests attach monitors to the same trainers
def test_the_blocks_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "training.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, Any] = {}
    for block in blocks:
        if "lightning" not in block or find_spec("lightning"):
            shorter = block.replace("max_steps=8", "max_steps=4").replace("ids.split(128)", "ids.split(16)")
            exec(compile(shorter, "docs/training.md", "exec"), names)
    assert names["clip"].clips, "the example of QK-clip shows it acting"
    printed = re.findall(r"^\d\.\d+$", capsys.readouterr().out, re.MULTILINE)
    assert len(printed) == 3, "one entropy of the Trainer, and two of the loop"
    if find_spec("lightning"):
        assert "attn/layer_03/entropy_mean" in next(tmp_path.rglob("metrics.csv")).read_text()
