"""Parameters are checked before anything runs, and identify a run: equal ones alike, different ones apart."""

import dataclasses
import inspect
import json
import math
from typing import Any

import pytest
import torch

import attnorm
from attnorm.analysis import manifest
from attnorm.analysis.analyze import analyze
from attnorm.analysis.manifest import readings, unreadable_notes
from attnorm.analysis.settings import (
    EPSILONS,
    GROUPS,
    AnalysisSettings,
    groups,
    named_normalizers,
    sampled_rows_at,
    settings_of,
    start_notes,
    started_at_length,
)
from attnorm.analysis.tables import SENSITIVITY
from attnorm.metrics.sampling import rows_to_measure
from attnorm.models.inputs import texts_from, tokens_of, window_inputs
from attnorm.models.load import load
from tests.analysis.tiny_models import gpt2, ids


def settings(**changes: Any) -> AnalysisSettings:
    asked: dict[str, Any] = {
        "normalizers": named_normalizers(("model",)),
        "top_n": (1, 5),
        "rows": "all",
        "vectors": "values",
        "vector_rows": 64,
        "metrics": "all",
        "temperatures": (1.0,),
        "seed": 0,
    }
    return settings_of(**asked | changes)


def test_two_normalizers_of_one_name_are_refused_because_their_rows_could_not_be_told_apart() -> None:
    with pytest.raises(ValueError, match=r"'entmax'.*attribute \.name"):
        named_normalizers((attnorm.get("entmax", alpha=1.2), attnorm.get("entmax", alpha=1.8)))
    imposter = attnorm.get("sparsemax")
    imposter.name = "model"
    with pytest.raises(ValueError, match=r"'model'.*attribute \.name"):
        named_normalizers((imposter,))


def test_one_normalizer_with_several_options_is_named_with_them() -> None:
    specs = ["entmax:alpha=1.2", "entmax:alpha=1.8", "ssmax:learned=false"]
    named = named_normalizers(specs)
    assert [one.name for one in named.values()] == [*named] == specs
    assert named["entmax:alpha=1.8"].map.alpha == 1.8


def test_a_length_rule_starts_at_the_measured_length_unless_its_options_name_another() -> None:
    specs = ("ssmax", "ssmax:learned=false", "ssmax:s=0.3", "ssmax:bias=true", "ssmax:train_length=512")
    named = named_normalizers(specs)
    started = started_at_length(named, specs, 64)
    plain, fixed, given, biased, stated = (float(one.rules[0].s.detach()) for one in started.values())
    assert plain == fixed == pytest.approx(64 / math.lgamma(65))
    assert given == pytest.approx(0.3)
    assert biased > 0  # what starts at s = 0 is not measured without its bias
    assert stated == pytest.approx(512 / math.lgamma(513))
    assert [one.name for one in started.values()] == [*specs]
    (note,) = start_notes(named, started, 64)
    assert note.startswith("ssmax, ssmax:learned=false start with train_length 64")
    assert start_notes(named, named, 64) == []


def test_one_name_alone_and_none_at_all() -> None:
    assert list(named_normalizers("ssmax")) == ["ssmax"]
    with pytest.raises(ValueError, match=r"normalizers: .*got none"):
        named_normalizers(())


def test_groups_have_one_order_and_always_the_core() -> None:
    assert groups("all") == GROUPS
    assert groups("core") == groups("gradient") == groups(()) == ("core", "gradient")
    assert groups(("coverage", "vectors")) == groups(["vectors", "core", "coverage"])
    assert groups(("coverage", "vectors")) == ("core", "gradient", "vectors", "coverage")


def test_settings_are_plain_and_complete() -> None:
    plain = settings(normalizers=named_normalizers(("model", "entmax15"))).as_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["normalizers"] == ["model", "entmax15"]
    assert {field.name for field in dataclasses.fields(AnalysisSettings)} <= set(plain)


def test_every_epsilon_has_its_column() -> None:
    assert [f"gain_{epsilon:g}" for epsilon in EPSILONS] == [name for name in SENSITIVITY.names if "gain" in name]


def key(model: dict[str, Any] | None = None, length: int | None = 64, text: str = "t", **changes: Any) -> str:
    model = {"name": "m", "revision": None, "fingerprint": "f", "dtype": "float32", "device": "cpu"} | (model or {})
    plain = {"lengths": [64], **settings(**changes).as_dict()}
    return manifest.part_key(model, {"name": text, "sha256": "s"}, length, plain)


def test_everything_that_decides_a_part_is_in_its_key() -> None:
    keys = [
        key(),
        key({"fingerprint": "g"}),
        key({"dtype": "bfloat16"}),
        key({"device": "cuda:0"}),
        key({"name": "n"}),
        key(length=128),
        key(length=None),
        key(text="u"),
        key(rows=5),
        key(rows="last"),
        key(seed=1),
        key(top_n=(1, 6)),
        key(vectors="inputs"),
        key(vector_rows=65),
        key(metrics="core"),
        key(temperatures=(2.0,)),
        key(normalizers=named_normalizers(("model", "entmax15"))),
        key(normalizers=named_normalizers((attnorm.get("entmax", alpha=1.2),))),
        key(normalizers=named_normalizers((attnorm.get("entmax", alpha=1.3),))),
        key(normalizers=named_normalizers((attnorm.get("topk", k=3),))),
        key(normalizers=named_normalizers((attnorm.get("topk", k=4),))),
    ]
    assert len(set(keys)) == len(keys)


def test_what_does_not_decide_a_part_is_not_in_its_key() -> None:
    assert key() == key()
    assert key({"device": "cuda:0"}) == key({"device": "cuda:1"})
    assert key(top_n=(5, 1, 5)) == key(top_n=(1, 5))
    assert key(metrics=("vectors", "core")) == key(metrics=("core", "vectors"))
    assert key(normalizers=named_normalizers(("entmax15",))) == key(normalizers=named_normalizers(("entmax15",)))


@pytest.mark.parametrize(
    ("rows", "n", "expected"),
    [(64, 18, 16), (64, 1024, 16), (64, 2048, 8), (64, 4096, 4), (64, 10**6, 4), (512, 4096, 32), ("all", 4096, 64)],
)
def test_separability_has_16_rows_up_to_a_thousand_keys(rows: int | str, n: int, expected: int) -> None:
    assert sampled_rows_at(settings(rows=rows, vector_rows=None), n) == expected
    assert sampled_rows_at(settings(rows=rows, vector_rows=7), n) == 7, "what was asked for"


def test_the_default_measures_what_verdicts_need_on_at_most_512_rows() -> None:
    defaults = {name: one.default for name, one in inspect.signature(analyze).parameters.items()}
    assert groups(defaults["metrics"]) == ("core", "gradient")
    assert defaults["rows"] == "auto"
    assert len(rows_to_measure("auto", 300, causal=True)) == 300
    assert len(rows_to_measure("auto", 4096, causal=True)) == 512
    assert int(rows_to_measure("auto", 4096, causal=True)[-1]) == 4095


def test_the_loss_is_that_of_the_model_itself() -> None:
    model, tokens = gpt2(), ids(100)
    found = analyze(model, tokens, metrics="core")
    batch = torch.as_tensor(tokens).reshape(1, -1)
    with torch.no_grad():
        expected = float(model(input_ids=batch, labels=batch).loss)
    assert found.manifest["parts"][0]["loss"] == pytest.approx(expected, rel=1e-5)
    assert found.manifest["reading"]["text"]["perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)
    assert "forward" not in vars(model.transformer), "the model is left as it was"


def test_a_loss_near_that_of_token_frequencies_is_a_warning() -> None:
    parts = [{"text": text, "loss": loss, "loss_tokens": 600} for text, loss in (("read", 3.0), ("unread", 5.5))]
    found = readings(parts, {"read": 6.0, "unread": 6.0})
    assert [one["readable"] for one in found.values()] == [True, False]
    (warning,) = unreadable_notes(found)
    assert "'unread'" in warning
    assert "5.50" in warning


def test_a_short_text_is_not_judged_by_its_own_token_frequencies() -> None:
    (few,) = readings([{"text": "book", "loss": 3.6, "loss_tokens": 127}], {"book": 4.4}).values()
    assert few["readable"] is None
    assert few["loss"] == pytest.approx(3.6)


def test_bos_is_added_and_removed_on_request() -> None:
    bundled = load("bundled")
    (text,) = texts_from("Well, Prince, so Genoa and Lucca are now just family estates of the Buonapartes.")
    plain, with_bos = tokens_of(text, bundled), tokens_of(text, bundled, True)
    assert plain.before == ()
    assert with_bos.before == (bundled.tokenizer.bos_token_id,)
    made = window_inputs(text, with_bos, bundled, 3, 8)["input_ids"]
    assert made.shape == (1, 8)
    assert made[0, 1:].tolist() == plain.ids[0, 3:10].tolist()
    assert tokens_of(text, bundled, False).before == ()
