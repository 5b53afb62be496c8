"""What a user may get wrong: the message names it and says what to do, and nothing is touched."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnorm.training.lm.run import train_lm
from tests.training.conftest import tiny, write_text

Train = Callable[..., dict[str, Any]]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"width": 50, "heads": 6}, "multiple of heads.*width 50 and 6 heads, try width 48"),
        ({"heads": 0}, "heads must be at least 1, got 0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"vocab": 200}, "between 257 and 65536, got 200"),
        ({"vocab": 70_000}, "between 257 and 65536, got 70000"),
        ({"learning_rate": 0.0}, "above 0, got 0.0"),
        ({"learning_rate": float("nan")}, "above 0, got nan"),
        ({"warmup": -1}, "must not be negative; got -1"),
        ({"dtype": "float8"}, "unknown dtype 'float8'; known are float32, bfloat16"),
        ({"architecture": "gpt5"}, "unknown architecture 'gpt5'; did you mean 'gpt2'"),
    ],
)
def test_settings_that_cannot_be(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(**changed)


def test_a_missing_file(texts: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no such text file: .*absent\.txt"):
        train_lm([tmp_path / "absent.txt"], texts[1], tmp_path / "run", tiny())
    with pytest.raises(ValueError, match=r"no such text file: .*absent\.txt"):
        train_lm([texts[0]], tmp_path / "absent.txt", tmp_path / "run", tiny())
    assert not (tmp_path / "run").exists()


def test_files_that_are_no_text(texts: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("Café".encode("latin-1") * 1000)
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 text"):
        train_lm([tmp_path / "latin.txt"], texts[1], tmp_path / "one", tiny(), data=tmp_path / "data")
    (tmp_path / "plain.txt.xz").write_text("not packed")
    with pytest.raises(ValueError, match=r"plain\.txt\.xz is no xz file"):
        train_lm([tmp_path / "plain.txt.xz"], texts[1], tmp_path / "two", tiny(), data=tmp_path / "data")
    assert not list((tmp_path / "data").iterdir())


@pytest.mark.parametrize("sentences", [0, 1])
def test_a_text_too_short_for_one_window(sentences: int, texts: tuple[Path, Path], tmp_path: Path) -> None:
    short = write_text(tmp_path / "short.txt", sentences, seed=0)
    with pytest.raises(ValueError, match=r"training text has \d+ tokens, too short for one window of 64"):
        train_lm([short], texts[1], tmp_path / "one", tiny(context=64))
    with pytest.raises(ValueError, match=r"validation text has \d+ tokens, too short for one window of 64"):
        train_lm([texts[0]], short, tmp_path / "two", tiny(context=64))


def test_a_validation_text_that_was_trained_on(texts: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train\.txt is also among the training texts"):
        train_lm([texts[0]], texts[0], tmp_path / "run", tiny())


def test_a_folder_that_holds_another_run(train: Train, tmp_path: Path) -> None:
    train(tmp_path / "run", steps=2)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    for resume in (True, False):
        with pytest.raises(ValueError, match=r"another run: batch is 4 here and 8 there; seed is 3 here and 0 there"):
            train(tmp_path / "run", steps=2, seed=3, batch=4, options={"resume": resume})
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_the_difference_is_told_in_words(train: Train, texts: tuple[Path, Path], tmp_path: Path) -> None:
    train(tmp_path / "run", steps=1)
    with pytest.raises(ValueError, match=r"another run: normalizer is ssmax here and softmax there\. Choose"):
        train(tmp_path / "run", steps=1, normalizer="ssmax")
    same_name = write_text(tmp_path / "train.txt", 10, seed=5)
    with pytest.raises(ValueError, match=r"run: train is train\.txt here and there, but with another content\. Choose"):
        train_lm([same_name], texts[1], tmp_path / "run", tiny(steps=1))
    two = [texts[0], write_text(tmp_path / "more.txt", 10, seed=6)]
    with pytest.raises(ValueError, match=r"run: train is train\.txt and more\.txt here and train\.txt there\."):
        train_lm(two, texts[1], tmp_path / "run", tiny(steps=1))


def test_a_run_that_failed_before_it_saved_anything_may_be_removed(texts: tuple[Path, Path], tmp_path: Path) -> None:
    short = write_text(tmp_path / "short.txt", 1, seed=0)
    with pytest.raises(ValueError, match="too short for one window"):
        train_lm([short], texts[1], tmp_path / "run", tiny(context=64))
    with pytest.raises(ValueError, match="has saved nothing yet: unless it is running now, remove the folder"):
        train_lm([texts[0]], texts[1], tmp_path / "run", tiny(context=64))


def test_a_folder_in_the_place_of_a_text(texts: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder; name the text files in it"):
        train_lm([tmp_path], texts[1], tmp_path / "run", tiny())


def test_a_folder_that_holds_something_else(train: Train, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("do not lose me")
    with pytest.raises(ValueError, match="holds files, but no training run"):
        train(tmp_path)
    with pytest.raises(ValueError, match="is a file; name a folder"):
        train(tmp_path / "thesis.tex")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_damaged_record_or_checkpoint(train: Train, tmp_path: Path) -> None:
    train(tmp_path / "run", options={"max_minutes": 0.0})
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"checkpoint {re.escape(str(checkpoint))} cannot be read"):
        train(tmp_path / "run")
    (tmp_path / "run" / "training.json").write_text("{")
    with pytest.raises(ValueError, match=r"training\.json is damaged"):
        train(tmp_path / "run")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evaluate_every": 0}, "evaluate_every must be at least 1, got 0"),
        ({"checkpoint_every": -5}, "checkpoint_every must be at least 1, got -5"),
        ({"sample_tokens": -1}, "sample tokens, got -1"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str, train: Train, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        train(tmp_path / "run", options=options)


def test_a_device_that_is_not_there(texts: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot use device 'abacus': expected cpu, cuda or, say, cuda:1; try cpu"):
        train_lm([texts[0]], texts[1], tmp_path / "run", tiny(), device="abacus")
    with pytest.raises(ValueError, match=r"cannot use device 'meta': .*; try cpu"):
        train_lm([texts[0]], texts[1], tmp_path / "run", tiny(), device="meta")
