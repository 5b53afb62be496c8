"""Calls that cannot be answered raise an error that names what is wrong."""

from collections.abc import Callable

import pytest

from attnorm_lab.training.needle import NeedleTask
from attnorm_lab.training.retrieval.data import RetrievalRecipe, find_task
from attnorm_lab.training.retrieval.evaluate import Trials
from attnorm_lab.training.retrieval.model import normalizer_for
from attnorm_lab.training.vision.model import VisionSettings, build_model
from tests_lab.training.conftest import tiny
from tests_lab.training.test_pyramid import CLASSES, SIDE, settings

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
    (lambda: build_model(settings(architecture="cone"), CLASSES, SIDE), ValueError, "'cone'"),
    (lambda: build_model(settings(landmarks="cubes", normalizer="soft"), CLASSES, SIDE), ValueError, "'cubes'"),
    (lambda: build_model(settings(landmarks="squares"), CLASSES, SIDE), ValueError, "soft.*softmax"),
    (
        lambda: build_model(settings(landmarks="squares", normalizer="soft", squares=7), CLASSES, SIDE),
        ValueError,
        "squares and 7",
    ),
    (
        lambda: build_model(settings(landmarks="squares", normalizer="soft", landmark_side=0), CLASSES, SIDE),
        ValueError,
        "landmark_side.*0",
    ),
    (
        lambda: build_model(settings(landmarks="squares", normalizer="soft", landmark_side=3), CLASSES, SIDE),
        ValueError,
        "8.*3",
    ),
    (lambda: build_model(settings(layers=2), CLASSES, SIDE), ValueError, "3 layers.*got 2"),
    (lambda: build_model(settings(patch=8), CLASSES, SIDE), ValueError, "2 patches"),
    (lambda: build_model(settings(width=30), CLASSES, SIDE), ValueError, r"\[7, 15, 30\]"),
    (lambda: build_model(settings(patch=3), CLASSES, SIDE), ValueError, "16.*3"),
    (lambda: Trials(sizes=(16, 1)), ValueError, "2 items.*1"),
    (lambda: Trials(sizes=()), ValueError, "at least one set size"),
    (lambda: Trials(sets=0), ValueError, "got 0"),
    (lambda: Trials(others=("differential",)), ValueError, "differential"),
    (lambda: RetrievalRecipe(dtype="bfloat16", squeezed=0.5), ValueError, "1/256"),
    (lambda: RetrievalRecipe(dtype="float8"), ValueError, "'float8'"),
    (lambda: RetrievalRecipe(dtype="bfloat16", leak_penalty=1.0), ValueError, "1/256"),
    (lambda: RetrievalRecipe(dtype="float8"), ValueError, "'float8'"),
    (lambda: RetrievalRecipe(dtype="bfloat16", standardized=6.0), ValueError, "1/256"),
    (lambda: RetrievalRecipe(dtype="float8"), ValueError, "'float8'"),
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
    (
        lambda: build_model(VisionSettings(normalizer="linear", squares=2, layers=1, heads=2, width=8), ("a", "b"), 16),
        ValueError,
        "linear",
    ),
    (lambda: build_model(VisionSettings(patch=5), ("a", "b"), 16), ValueError, "16, got 5"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD_CALLS)
def test_a_bad_call_is_named(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
