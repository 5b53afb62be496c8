"""evaluate(): both sides on the same documents, parts that are kept, and clear errors for bad input."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import attnorm
from attnorm.cli import app
from attnorm.evaluation import run as evaluation_run
from attnorm.evaluation.result import Evaluation, Scores, side_by_side
from attnorm.evaluation.windows import validation_windows
from attnorm.models.load import load
from attnorm_lab.training.lm.evaluate import validation_loss

runner = CliRunner()


@pytest.fixture(scope="module")
def bundled() -> Any:
    return load("bundled")


def small(model: Any, **options: Any) -> Evaluation:
    settings = {"normalizers": ["ssmax"], "tasks": ["perplexity", "pass-key"], "lengths": [64], "limit": 3}
    return attnorm.evaluate(model, **{**settings, **options})


def test_both_sides_see_the_same_documents_and_the_change_is_their_difference(bundled: Any) -> None:
    found = small(bundled, tasks=["perplexity"])
    before, after = found.rows
    assert (before.side, after.side) == ("model", "ssmax")
    assert found.parts[0].scores.documents == found.parts[1].scores.documents
    assert after.change is not None
    assert after.change.mean == pytest.approx(after.mean - before.mean)
    assert after.change.documents == 3
    assert before.interval is not None
    assert before.interval[0] < before.mean < before.interval[1]


def test_a_length_rule_is_compared_at_the_evaluated_length_unless_its_options_name_another(bundled: Any) -> None:
    specs = ["ssmax", "ssmax:train_length=64", "ssmax:train_length=1024", "log_scaled"]
    found = small(bundled, normalizers=specs, tasks=["perplexity"], limit=2)
    plain, same, models_own, exact = (row.change.mean for row in found.rows[1:] if row.change is not None)
    assert plain == pytest.approx(same, abs=1e-5)
    assert abs(plain) < abs(models_own)
    assert exact == pytest.approx(0, abs=1e-5)
    assert [part.train_length for part in found.parts] == [None, 64, None, None, 64]
    assert found.note.startswith("ssmax, log_scaled start with train_length 64")
    assert found.note in found.summary()


def test_every_length_has_its_own_start_also_in_a_recipe(bundled: Any, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[layers]\n"0-2" = "ssmax"\n"3" = "ssmax:train_length=512"\n')
    options = {"normalizer": recipe, "tasks": "perplexity", "lengths": "32,64", "limit": 2, "out": tmp_path / "out"}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    shown = runner.invoke(app, ["evaluate", "bundled", *words, "--json"])
    assert shown.exit_code == 0, shown.output
    assert "starts with train_length 32 and 64" in json.loads(shown.stdout)["note"]
    assert "starts with train_length 32 and 64" in (tmp_path / "out" / "evaluation.html").read_text()
    shown = runner.invoke(app, ["compare", str(tmp_path / "out")])
    assert "train_length 32 and 64" in " ".join(shown.output.split())


def test_perplexity_is_the_loss_that_training_reports(bundled: Any) -> None:
    from attnorm.analysis.settings import passage
    from attnorm.evaluation.tasks import score_perplexity, token_ids

    tokens = token_ids(bundled, passage())
    windows = [w for w in validation_windows(tokens, 64, 3) if len(w) == 65]
    expected = validation_loss(bundled.model, windows, torch.device("cpu"), torch.float32)
    scores = score_perplexity(bundled, tokens, 64, 3)
    assert sum(scores.values) / 3 == pytest.approx(expected, rel=1e-5)


def test_a_second_call_computes_only_what_is_new(bundled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = small(bundled, tasks=["perplexity"], out=tmp_path)
    computed: list[str] = []
    score = evaluation_run.score_perplexity
    monkeypatch.setattr(evaluation_run, "score_perplexity", lambda *a: computed.append("part") or score(*a))
    again = small(bundled, tasks=["perplexity"], out=tmp_path)
    assert computed == []
    assert again.rows == first.rows
    more = small(bundled, tasks=["perplexity"], normalizers=["softmax1"], out=tmp_path)
    assert computed == ["part"]
    assert more.sides == ["model", "ssmax", "softmax1"]
    page = (tmp_path / "evaluation.html").read_text()
    assert "softmax1" in page
    assert "bundled, float32; up to 3 documents per task and length" in page


def test_a_folder_of_another_run_is_not_mixed_in(bundled: Any, tmp_path: Path) -> None:
    small(bundled, tasks=["perplexity"], normalizers=[], out=tmp_path)
    with pytest.raises(ValueError, match="limit is 2 here and 3 there"):
        small(bundled, tasks=["perplexity"], normalizers=[], limit=2, out=tmp_path)
    text = tmp_path.with_suffix(".txt")
    text.write_text("Other words. " * 100)
    with pytest.raises(ValueError, match=f"text is {text} here and the bundled"):
        small(bundled, tasks=["perplexity"], normalizers=[], text=text, out=tmp_path)


def test_an_interrupted_run_keeps_finished_parts(bundled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> Scores:
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation_run, "score_pass_keys", stop)
    with pytest.raises(KeyboardInterrupt):
        small(bundled, out=tmp_path)
    assert {part.task for part in Evaluation.load(tmp_path).parts} == {"perplexity"}


def test_pass_keys_are_spread_over_depths_and_right_or_wrong(bundled: Any) -> None:
    (part,) = small(bundled, tasks=["pass-key"], normalizers=[], limit=7).parts
    assert len(set(part.scores.documents)) == 7
    assert set(part.scores.values) <= {0.0, 1.0}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tasks": ["perplexty"]}, r"did you mean 'perplexity'\? Other tasks"),
        ({"tasks": ["x"]}, r"'ruler_fwe'\. Other tasks"),
        ({"tasks": []}, "pass-key"),
        ({"tasks": ["vt"], "lengths": [512]}, "1024 for ruler_vt, got 512"),
        ({"normalizers": ["sofmax"]}, "softmax"),
        ({"normalizers": ["model"]}, "model"),
        ({"normalizers": ["tda"]}, "another architecture"),
        ({"normalizers": ["entmax:alpha=x"]}, "alpha must be a number, got 'x'"),
        ({"normalizers": ["forget:width=31"]}, "width=192.*width=31"),
        ({"normalizers": ["soft"]}, "no causal form"),
        ({"limit": 0}, "got 0"),
        ({"lengths": [100_000]}, "100000"),
        ({"lengths": [64, 8]}, "pass-key, got 8"),
    ],
)
def test_bad_input_is_named_before_anything_runs(
    bundled: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], named: str
) -> None:
    def too_late(*_: Any) -> Scores:
        raise AssertionError("a part ran")

    monkeypatch.setattr(evaluation_run, "all_tasks", lambda: ())
    monkeypatch.setattr(evaluation_run, "score_perplexity", too_late)
    with pytest.raises(ValueError, match=named):
        small(bundled, **options)


def test_a_normalizer_that_no_model_can_use_is_named_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(evaluation_run, "load")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[layers]\n"1" = "differential"\n')
    for normalizer in ("tda", recipe):
        with pytest.raises(ValueError, match="another architecture"):
            small("bundled", normalizers=[normalizer])


def test_a_text_that_is_too_short_is_named_before_shorter_lengths_run(
    bundled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(evaluation_run, "score_perplexity")
    text = tmp_path / "text.txt"
    for content, tokens in (("", "got 0"), ("word " * 100, r"got \d\d\d")):
        text.write_text(content)
        with pytest.raises(ValueError, match=f"at least 1002 tokens for perplexity at 1000, {tokens}"):
            small(bundled, tasks=["perplexity"], lengths=[1000, 64][:: 1 if content == "" else -1], text=text)


def test_one_normalizer_one_task_and_one_length_need_no_list(bundled: Any) -> None:
    found = small(bundled, normalizers="softmax1", tasks="perplexity", lengths=64, limit=1)
    assert [(row.side, row.task, row.length) for row in found.rows] == [
        ("model", "perplexity", 64), ("softmax1", "perplexity", 64),
    ]  # fmt: skip


def test_the_model_decides_how_many_heads_forget_has(bundled: Any) -> None:
    found = small(bundled, tasks=["perplexity"], normalizers=["forget:width=192"])
    assert found.rows[1].mean == pytest.approx(found.rows[0].mean, abs=0.01)  # it starts near softmax
    with pytest.raises(ValueError, match=r"forget:width=192:heads=6.*comes from the model.*Remove 'heads=6'"):
        small(bundled, normalizers=["forget:width=192:heads=6"])


def test_a_missing_lm_eval_names_the_extra(bundled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r"attnorm\[eval\]"):
        small(bundled, tasks=["niah_single_1"], lengths=[512])


def test_lengths_beyond_a_rotary_model_warn_with_its_limit(bundled: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from attnorm.evaluation.run import warn_of_lengths
    from attnorm.evaluation.tasks import Item
    from attnorm.models.load import LoadedModel

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=10, max_position_embeddings=32, **sizes))
    with pytest.warns(UserWarning, match="32 positions in its config, got lengths 64"):
        warn_of_lengths(LoadedModel(model, None, "tiny"), [Item("perplexity", 16), Item("perplexity", 64)])


def test_compare_reads_two_folders(bundled: Any, tmp_path: Path) -> None:
    for name, normalizers in (("a", []), ("b", ["ssmax"])):
        small(bundled, tasks=["perplexity"], normalizers=normalizers, out=tmp_path / name)
    both = side_by_side({name: Evaluation.load(tmp_path / name) for name in ("a", "b")})
    assert both.sides == ["a: model", "b: model", "b: ssmax"]
    assert [row.change and row.change.documents for row in both.rows] == [None, 3, 3]
    assert both.rows[1].change is not None
    assert both.rows[1].change.mean == 0
    found = runner.invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"])
    assert found.exit_code == 0, found.output
    assert [row["mean"] for row in json.loads(found.stdout)["rows"]] == [row.mean for row in both.rows]
    mixed = runner.invoke(app, ["compare", str(tmp_path / "a"), "bundled"])
    assert mixed.exit_code == 2


@pytest.mark.nightly
def test_ruler_runs_on_a_swapped_model_with_the_same_documents(bundled: Any) -> None:
    for package in ("lm_eval", "nltk", "wonderwords"):
        pytest.importorskip(package, reason="pip install attnorm[eval]")
    found = small(bundled, tasks=["niah_single_1"], lengths=[256], limit=2)
    before, after = found.parts
    assert before.scores.documents == after.scores.documents
    assert all(0 <= value <= 1 for value in (*before.scores.values, *after.scores.values))
    assert found.rows[1].change is not None
