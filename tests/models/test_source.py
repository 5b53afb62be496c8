"""Where a model is looked for: each condition of a name alone, and the address that is asked for a network."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from attnorm.models import source
from attnorm.models.source import CannotLoad, Source, can_only_be_a_folder, did_you_mean, find, unreachable


@pytest.mark.parametrize(
    ("name", "only"),
    [
        ("gpt2", False), ("someone/model", False), ("one/two/three", True), ("/models", True), ("./model", True),
        ("../model", True), ("~/model", True), ("", True), ("  ", True), (Path("model"), True),
    ],
)  # fmt: skip
def test_names_that_no_repository_can_have(name: str | Path, only: bool) -> None:
    assert can_only_be_a_folder(name) is only


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(source, "hub_answers", lambda: False)
    (tmp_path / "cache" / "models--someone--well-known-model").mkdir(parents=True)
    return tmp_path


def test_where_a_name_leads(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "folder").mkdir()
    (here / "file.gguf").touch()
    (here / "file.bin").touch()
    (here / "folder.gguf").mkdir()
    assert find("folder") == Source(Path("folder"), "folder", True)
    assert find("folder.gguf") == Source(Path("folder.gguf"), "folder.gguf", True)
    assert find("file.gguf") == Source(Path("file.gguf"), "file", True)
    assert find("someone/well-known-model") == ("someone/well-known-model", "someone/well-known-model", True)
    for refused in ("file.bin", "someone/other", "", " ", "missing.gguf"):
        with pytest.raises(CannotLoad):
            find(refused)
    monkeypatch.setattr(source, "hub_answers", lambda: True)
    assert find("someone/other") == ("someone/other", "someone/other", False)


def test_an_unreachable_name_is_answered_once(here: Path) -> None:
    assert unreachable("bundeld").endswith("cannot be reached; did you mean 'bundled'?")
    assert "give a folder, connect" in unreachable("xyz")


def test_names_that_are_close_enough_are_suggested(here: Path) -> None:
    for name in ("model-one", "model-two", "model-ten"):
        (here / name).mkdir()
        (here / name / "config.json").touch()
    assert did_you_mean("bundle") == "did you mean 'bundled'? "
    assert did_you_mean("someone/well-known-modle") == "did you mean 'someone/well-known-model'? "
    assert did_you_mean("model-on").startswith("did you mean 'model-one' or 'model-")
    assert did_you_mean("model-t").count("'model-") == 2  # no more than two
    assert did_you_mean("xyz") == ""
    assert did_you_mean("") == ""
    # 2 * 6 matching letters of 16 are three quarters, of 17 less.
    assert did_you_mean("bundle1xy") == "did you mean 'bundled'? "
    assert did_you_mean("bundle1xyz") == ""
