"""Is the input right? Loss beside every run, a warning for texts that a model cannot read, and folders of version 2."""

import math

import pytest
import torch

from attnorm.analysis.analyze import analyze
from attnorm.analysis.manifest import readings, unreadable_notes
from attnorm.models.inputs import texts_from, tokens_of, window_inputs
from attnorm.models.load import load
from tests.analysis.tiny_models import gpt2, ids


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
