"""What a user may get wrong: the message names it and says what to do, and nothing is touched."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnorm_lab.training.lm.train import train_lm
from tests_lab.training.conftest import tiny, write_text

Train = Callable[..., dict[str, Any]]


def test_options_behind_the_name_are_the_same_settings() -> None:
    assert tiny(normalizer="entmax:alpha=1.3") == tiny(normalizer="entmax", normalizer_options={"alpha": 1.3})
    assert tiny(normalizer="kneemax:share=1").normalizer_options == {"share": 1}


def test_a_missing_file(texts: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.txt"):
        train_lm([tmp_path / "absent.txt"], texts[1], tmp_path / "run", tiny())
    with pytest.raises(ValueError, match=r"absent\.txt"):
        train_lm([texts[0]], tmp_path / "absent.txt", tmp_path / "run", tiny())
    assert not (tmp_path / "run").exists()


def test_files_that_are_no_text(texts: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("Café".encode("latin-1") * 1000)
    with pytest.raises(ValueError, match=r"latin\.txt.*UTF-8"):
        train_lm([tmp_path / "latin.txt"], texts[1], tmp_path / "one", tiny(), data=tmp_path / "data")
    (tmp_path / "plain.txt.xz").write_text("not packed")
    with pytest.raises(ValueError, match=r"plain\.txt\.xz"):
        train_lm([tmp_path / "plain.txt.xz"], texts[1], tmp_path / "two", tiny(), data=tmp_path / "data")
    assert not list((tmp_path / "data").iterdir())


@pytest.mark.parametrize("sentences", [0, 1, 2])
def test_a_text_too_short_for_one_window(sentences: int, texts: tuple[Path, Path], tmp_path: Path) -> None:
    short = write_text(tmp_path / "short.txt", sentences, seed=0)
    with pytest.raises(ValueError, match=r"training text.*\d+ tokens.*64"):
        train_lm([short], texts[1], tmp_path / "one", tiny(context=64))
    with pytest.raises(ValueError, match=r"validation text.*\d+ tokens.*64"):
        train_lm([texts[0]], short, tmp_path / "two", tiny(context=64))
    assert (tmp_path / "two").exists() == (short.stat().st_size >= 64)  # fewer bytes are too few for any tokenizer


def test_a_validation_text_that_was_trained_on(texts: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train\.txt"):
        train_lm([texts[0]], texts[0], tmp_path / "run", tiny())


def times(folder: Path) -> dict[Path, int]:
    """When each file was written; some versions of filelock empty the lock file anew."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock"}


def test_a_folder_that_holds_another_run(train: Train, tmp_path: Path) -> None:
    train(tmp_path / "run", steps=2)
    before = times(tmp_path / "run")
    for resume in (True, False):
        with pytest.raises(ValueError, match=r"batch.*4.*8.*seed.*3.*0"):
            train(tmp_path / "run", steps=2, seed=3, batch=4, options={"resume": resume})
    assert times(tmp_path / "run") == before


def test_the_difference_is_told_in_words(train: Train, texts: tuple[Path, Path], tmp_path: Path) -> None:
    train(tmp_path / "run", steps=1)
    with pytest.raises(ValueError, match=r"normalizer.*ssmax.*softmax"):
        train(tmp_path / "run", steps=1, normalizer="ssmax")
    same_name = write_text(tmp_path / "train.txt", 10, seed=5)
    with pytest.raises(ValueError, match=r"train\.txt.*content"):
        train_lm([same_name], texts[1], tmp_path / "run", tiny(steps=1))
    two = [texts[0], write_text(tmp_path / "more.txt", 10, seed=6)]
    with pytest.raises(ValueError, match=r"train\.txt.*more\.txt.*train\.txt"):
        train_lm(two, texts[1], tmp_path / "run", tiny(steps=1))


def test_a_run_that_failed_before_it_saved_anything_may_be_removed(texts: tuple[Path, Path], tmp_path: Path) -> None:
    short = write_text(tmp_path / "short.txt", 2, seed=0)
    with pytest.raises(ValueError, match="fewer than one window"):
        train_lm([short], texts[1], tmp_path / "run", tiny(context=64))
    with pytest.raises(ValueError, match="remove the folder"):
        train_lm([texts[0]], texts[1], tmp_path / "run", tiny(context=64))


def test_a_folder_in_the_place_of_a_text(texts: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got the folder"):
        train_lm([tmp_path], texts[1], tmp_path / "run", tiny())


def test_a_folder_that_holds_something_else(train: Train, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("do not lose me")
    with pytest.raises(ValueError, match=str(tmp_path)):
        train(tmp_path)
    with pytest.raises(ValueError, match="got the file"):
        train(tmp_path / "thesis.tex")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_damaged_record_or_checkpoint(train: Train, tmp_path: Path) -> None:
    train(tmp_path / "run", options={"max_minutes": 0.0})
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=re.escape(str(checkpoint))):
        train(tmp_path / "run")
    (tmp_path / "run" / "training.json").write_text("{")
    with pytest.raises(ValueError, match=r"training\.json"):
        train(tmp_path / "run")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evaluate_every": 0}, "evaluate_every.*got 0"),
        ({"checkpoint_every": -5}, "checkpoint_every.*got -5"),
        ({"sample_tokens": -1}, "sample tokens, got -1"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str, train: Train, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        train(tmp_path / "run", options=options)


def test_a_device_that_is_not_there(texts: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'abacus'.*cpu, cuda"):
        train_lm([texts[0]], texts[1], tmp_path / "run", tiny(), device="abacus")
    with pytest.raises(ValueError, match=r"'meta'.*cpu"):
        train_lm([texts[0]], texts[1], tmp_path / "run", tiny(), device="meta")
