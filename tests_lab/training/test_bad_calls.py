"""What a user may get wrong: the message names it and says what to do, and nothing is touched."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnorm_lab.training.lm.train import train_lm
from attnorm_lab.training.needle import NeedleTask
from attnorm_lab.training.retrieval.data import RetrievalRecipe, find_task
from attnorm_lab.training.retrieval.evaluate import Trials
from attnorm_lab.training.retrieval.model import normalizer_for
from attnorm_lab.training.vision.model import build_model
from tests_lab.training.conftest import tiny, write_text
from tests_lab.training.test_vision import CLASSES, SIDE, settings


def pyramid(**changed: Any) -> object:
    return build_model(settings(**changed), CLASSES, SIDE)


BAD_CALLS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: tiny(width=50, heads=6), ValueError, "width 50.*6 heads.*width 48"),
    (lambda: tiny(heads=0), ValueError, "heads.*got 0"),
    (lambda: tiny(steps=0), ValueError, "steps.*got 0"),
    (lambda: tiny(vocab=200), ValueError, "257.*65536.*got 200"),
    (lambda: tiny(vocab=70000), ValueError, "257.*65536.*got 70000"),
    (lambda: tiny(learning_rate=0.0), ValueError, "got 0.0"),
    (lambda: tiny(learning_rate=float("nan")), ValueError, "got nan"),
    (lambda: tiny(warmup=-1), ValueError, "got -1"),
    (lambda: tiny(dtype="float8"), ValueError, "'float8'.*float32, bfloat16"),
    (lambda: tiny(architecture="gpt5"), ValueError, "'gpt5'.*'gpt2'"),
    (lambda: tiny(normalizer="entmax:alpha=1.3", normalizer_options={"alpha": 1.5}), ValueError, "alpha once"),
    (lambda: NeedleTask(steps=0), ValueError, "steps.*got 0"),
    (lambda: NeedleTask(depths=(1.5,)), ValueError, "between 0"),
    (lambda: NeedleTask(longer=()), ValueError, "at least one test length"),
    (lambda: NeedleTask(keys=0), ValueError, "keys.*got 0"),
    (lambda: NeedleTask(nearest=0.0), ValueError, r"got 0\.0 and 0\.7"),
    (lambda: tiny(architecture="llama", width=30), ValueError, "width 30.*2 heads.*width 32"),
    (lambda: pyramid(architecture="cone"), ValueError, "'cone'"),
    (lambda: pyramid(landmarks="cubes", normalizer="soft"), ValueError, "'cubes'"),
    (lambda: pyramid(landmarks="squares"), ValueError, "soft.*softmax"),
    (lambda: pyramid(landmarks="squares", normalizer="soft", squares=7), ValueError, "squares and 7"),
    (lambda: pyramid(landmarks="squares", normalizer="soft", landmark_side=0), ValueError, "landmark_side.*0"),
    (lambda: pyramid(landmarks="squares", normalizer="soft", landmark_side=3), ValueError, "8.*3"),
    (lambda: pyramid(layers=2), ValueError, "3 layers.*got 2"),
    (lambda: pyramid(patch=8), ValueError, "2 patches"),
    (lambda: pyramid(width=30), ValueError, r"\[7, 15, 30\]"),
    (lambda: pyramid(patch=3), ValueError, "16.*3"),
    (lambda: Trials(sizes=(16, 1)), ValueError, "2 items.*1"),
    (lambda: Trials(sizes=()), ValueError, "at least one set size"),
    (lambda: Trials(sets=0), ValueError, "got 0"),
    (lambda: Trials(others=("differential",)), ValueError, "differential"),
    (lambda: RetrievalRecipe(dtype="bfloat16", squeezed=0.5), ValueError, "1/256"),
    (lambda: RetrievalRecipe(dtype="float8"), ValueError, "'float8'"),
    (lambda: RetrievalRecipe(dtype="bfloat16", leak_penalty=1.0), ValueError, "1/256"),
    (lambda: RetrievalRecipe(dtype="bfloat16", standardized=6.0), ValueError, "1/256"),
    (lambda: RetrievalRecipe(steps=0), ValueError, "steps.*got 0"),
    (lambda: RetrievalRecipe(batch=-1), ValueError, "batch.*got -1"),
    (lambda: RetrievalRecipe(width=0), ValueError, "width"),
    (lambda: RetrievalRecipe(smallest=1), ValueError, "at least 2 items"),
    (lambda: RetrievalRecipe(smallest=17), ValueError, "got 17 to 16"),
    (lambda: RetrievalRecipe(learning_rate=0.0), ValueError, "got 0.0"),
    (lambda: RetrievalRecipe(learning_rate=float("nan")), ValueError, "got nan"),
    (lambda: RetrievalRecipe(weight_decay=-1.0), ValueError, "weight decay"),
    (lambda: RetrievalRecipe(leak_penalty=float("inf")), ValueError, "leak penalty.*got inf"),
    (lambda: RetrievalRecipe(leak_from=1.0), ValueError, "got 1.0"),
    (lambda: RetrievalRecipe(squeezed=1.5), ValueError, "got 1.5"),
    (lambda: normalizer_for("linear", 2), ValueError, "'linear'"),
    (lambda: normalizer_for("sofmax", 2), ValueError, "'softmax'"),
    (lambda: find_task("recal"), ValueError, "'recall'"),
    (lambda: find_task("zzz"), ValueError, "'max', 'recall', 'majority'"),
    (lambda: normalizer_for("topk:k", 2), ValueError, "key=value|It accepts k|Remove 'heads=3'"),
    (lambda: normalizer_for("topk:k=", 2), ValueError, "key=value|It accepts k|Remove 'heads=3'"),
    (lambda: normalizer_for("topk:k=1:k=2", 2), ValueError, "key=value|It accepts k|Remove 'heads=3'"),
    (lambda: normalizer_for("ssmax:heads=3", 2), ValueError, "key=value|It accepts k|Remove 'heads=3'"),
    (lambda: normalizer_for("topk:width=3", 2), ValueError, "key=value|It accepts k|Remove 'heads=3'"),
    (lambda: pyramid(architecture="vit", normalizer="linear", squares=2), ValueError, "linear"),
    (lambda: pyramid(architecture="vit", patch=5), ValueError, "16, got 5"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD_CALLS)
def test_a_bad_call_is_named(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


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
