"""The loss of a text, from the hidden states of the measured pass: that of the model, in chunks, padding left out."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from attnorm.models import forward_pass
from attnorm.models.load import LoadedModel
from tests.models.tiny import VOCABULARY, tiny, tokens


def read(model: Any, ids: Tensor, mask: Tensor | None = None) -> forward_pass.Reading:
    inputs = {"input_ids": ids} if mask is None else {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        output = model.base_model(**inputs)
    return forward_pass.reading(LoadedModel(model, None, "tiny"), inputs, output)


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])  # gemma2 caps its logits
@pytest.mark.parametrize("at_once", [forward_pass.LOGITS_AT_ONCE, 3 * 2 * VOCABULARY])
def test_the_loss_is_the_mean_over_real_tokens(family: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_pass, "LOGITS_AT_ONCE", at_once)
    model, ids = tiny(family), tokens(batch=2, length=12)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits.double()
    every = cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    found = read(model, ids, mask)
    assert found.loss_tokens == 11 + 6
    assert found.loss == pytest.approx(float((every[0].sum() + every[1, :6].sum()) / 17), rel=2e-6)
    assert read(model, ids).loss_tokens == 22


def test_models_that_do_not_predict_the_next_token_have_no_loss() -> None:
    assert read(tiny("bert"), tokens()) == forward_pass.Reading(None, None, 0)
    assert not forward_pass.predicts_next_token(LoadedModel(tiny("t5"), None, "tiny"))
    without_head = tiny("gpt2")
    assert forward_pass.predicts_next_token(LoadedModel(without_head, None, "tiny"))
    without_head.get_output_embeddings = lambda: None
    assert not forward_pass.predicts_next_token(LoadedModel(without_head, None, "tiny"))


def test_a_loss_that_is_not_finite_is_none() -> None:
    model = tiny("gpt2")
    torch.nn.init.constant_(model.transformer.ln_f.weight, float("nan"))
    assert read(model, tokens()) == forward_pass.Reading(None, None, 0)


@pytest.mark.parametrize(
    ("encoder_decoder", "generates", "has_head", "named", "predicts"),
    [
        (False, True, True, True, True),
        (True, True, True, True, False),
        (False, False, True, True, False),
        (False, True, False, True, False),
        (False, True, True, False, False),
    ],
)
def test_each_condition_of_a_loss_alone(
    encoder_decoder: bool, generates: bool, has_head: bool, named: bool, predicts: bool
) -> None:
    base, head = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    model = SimpleNamespace(
        config=SimpleNamespace(is_encoder_decoder=encoder_decoder),
        can_generate=lambda: generates,
        base_model=base,
        base_model_prefix="model",
        named_children=lambda: [("other", head), ("model" if named else "body", base)],
        get_output_embeddings=lambda: head,
    )
    if not has_head:
        model.base_model = model
    loaded: Any = SimpleNamespace(model=model)
    assert forward_pass.predicts_next_token(loaded) is predicts
