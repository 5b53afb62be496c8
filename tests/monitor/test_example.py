"""The script of docs/training.md, at a small size: patch, train, watch, save, load, generate, analyze."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from attnorm.models.load import load

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "examples" / "finetune.py"

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
    kept = json.loads((tmp_path / "model" / "attnorm.json").read_text())
    assert "ssmax" in json.dumps(kept)
    assert load(tmp_path / "model").tokenizer is not None
