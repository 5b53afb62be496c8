"""The logit spread beside the printed table and Proposition 3.1."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from attnorm.experiments.experiment import Subject
from attnorm.experiments.spread import EXPERIMENT, Spreads, judged, measure, summary
from attnorm.metrics.call import AttentionCall
from attnorm.models.observe import observe
from attnorm.models.projections import projections
from tests.models.tiny import tiny


def silent(what: str, done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def found() -> Spreads:
    return measure(Subject(quick=True), silent, 96, 8)


def test_the_last_rows_spread_is_the_range_of_its_logits(found: Spreads) -> None:
    subject = Subject(quick=True)
    expected = []

    def look(call: AttentionCall) -> None:
        q, k = call.query_BHQD[0, :, -1].double(), call.key_BGKD[0].double()
        logits = torch.einsum("hd,hkd->hk", q, k) * call.scale
        expected.append((logits.amax(-1) - logits.amin(-1)).numpy())

    with observe(subject.loaded().model, look), torch.no_grad():
        subject.loaded().model.base_model(**subject.model_inputs(96))
    np.testing.assert_allclose(found.readings["last"], np.concatenate(expected), rtol=1e-4)
    np.testing.assert_allclose(found.against_n[:, -1], found.readings["last"])
    assert (found.readings["last_without_sink"] <= found.readings["last"] + 1e-6).all()


def test_proposition_31_holds_in_every_head(found: Spreads) -> None:
    assert np.isfinite(found.bound).all()
    assert (found.bound >= found.readings["last"]).all()


def test_a_bound_below_the_spread_would_be_reported(found: Spreads) -> None:
    wrong = Spreads(found.layer, found.head, found.readings, found.readings["last"] / 2, found.n, found.against_n)
    assert judged(found)[1].verdict == "reproduces"
    assert judged(wrong)[1].verdict == "does not"
    unknown = Spreads(found.layer, found.head, found.readings, found.bound * math.nan, found.n, found.against_n)
    assert judged(unknown)[1].verdict == "not tested"


def test_the_table_has_the_papers_models_and_ours(found: Spreads, tmp_path: Path) -> None:
    rows = summary(found, "ours").to_pylist()
    assert [(row["model"], row["mean"]) for row in rows[:2]] == [("Gemma 2B", 5.69), ("Gemma 7B", 5.82)]
    assert len(rows) == 5
    assert rows[0]["horizon_of_mean"] == pytest.approx(1 + math.exp(5.69))
    outcome = EXPERIMENT.run(Subject(quick=True), silent, tmp_path)
    assert outcome.tables["heads"].num_rows == 36
    assert set(outcome.figures) == {"spread"}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_projections_make_the_queries_and_keys(family: str) -> None:
    model = tiny(family)
    calls: list[AttentionCall] = []
    with torch.no_grad(), observe(model, calls.append, inputs=True):
        model(torch.arange(3, 23)[None])
    layer = model.model.layers[0].self_attn if family == "llama" else model.transformer.h[0].attn
    made = projections(layer, calls[0])
    assert made is not None
    x = calls[0].inputs_BKC[0, 0]  # the first token is not rotated
    q = torch.einsum("hed,d->he", made.query_weight, x)
    k = torch.einsum("hed,d->he", made.key_weight, x)
    q, k = (q, k) if made.query_bias is None else (q + made.query_bias, k + made.key_bias)
    torch.testing.assert_close(q, calls[0].query_BHQD[0, :, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(k, calls[0].key_BGKD[0, :, 0], rtol=1e-4, atol=1e-5)


def test_normalised_queries_are_not_taken_for_plain_ones() -> None:
    model = tiny("gemma3")  # normalises q and k after the projection
    calls: list[AttentionCall] = []
    with torch.no_grad(), observe(model, calls.append, inputs=True):
        model(torch.arange(3, 23)[None])
    assert projections(model.model.layers[0].self_attn, calls[0]) is None
