"""The logit spread beside the printed table and Proposition 3.1."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from attnorm.metrics.call import AttentionCall
from attnorm.models.observe import observe
from attnorm_lab.experiments.experiment import ExperimentSubject, no_progress
from attnorm_lab.experiments.spread import (
    EXPERIMENT,
    Spreads,
    common_keys,
    figure,
    heads_table,
    judge_claims,
    lengths_up_to,
    measure,
    spread_table,
    summary,
)


@pytest.fixture(scope="module")
def found() -> Spreads:
    return measure(ExperimentSubject(quick=True), no_progress, 96, 8)


def test_the_last_rows_spread_is_the_range_of_its_logits(found: Spreads) -> None:
    subject = ExperimentSubject(quick=True)
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
    wrong = replace(found, model="wrong", bound=found.last / 2)
    unknown = replace(found, model="unknown", bound=found.bound * math.nan)
    assert judge_claims([found])[1].verdict == "reproduces"
    assert judge_claims([wrong])[1].verdict == "does not"
    assert judge_claims([unknown])[1].verdict == "not tested"
    assert judge_claims([found, wrong])[1].verdict == "does not"  # one counterexample is enough
    assert judge_claims([unknown, found])[1].verdict == "reproduces"
    assert "unknown: not applicable" in judge_claims([unknown, found])[1].ours


def test_the_table_has_the_papers_models_and_ours(found: Spreads, tmp_path: Path) -> None:
    rows = spread_table([found]).to_pylist()
    assert [(row["model"], row["mean"]) for row in rows[:2]] == [("Gemma 2B", 5.69), ("Gemma 7B", 5.82)]
    assert [row["model"] for row in rows[2:]] == ["bundled"]
    assert rows[0]["horizon_of_mean"] == pytest.approx(1 + math.exp(5.69))
    assert rows[0]["proposition31_holds"] is None
    assert rows[2]["mean"] == pytest.approx(float(found.last.mean()))
    assert (rows[2]["keys"], rows[2]["heads"], rows[2]["proposition31_holds"]) == (96, 36, 36)
    outcome = EXPERIMENT.run(ExperimentSubject(quick=True), no_progress, tmp_path)
    assert outcome.tables["heads"].num_rows == 36
    assert set(outcome.figures) == {"spread"}


def longer(found: Spreads, name: str, factor: float) -> Spreads:
    """A model of its own whose contexts reach further and whose spreads are a multiple."""
    n = lengths_up_to(192).astype(np.float64)
    against_n = np.concatenate([found.against_n[:, :-1], np.tile(found.last[:, None], len(n) - len(found.n) + 1)], 1)
    readings = {reading: values * factor for reading, values in found.readings.items()}
    return replace(found, model=name, n=n, against_n=against_n * factor, readings=readings, text="other.txt")


def test_several_models_share_one_table_one_figure_and_one_verdict(found: Spreads) -> None:
    small = longer(found, "owner/small", 5.7 / float(found.last.mean()))
    large = longer(found, "large", 100.0)
    rows = spread_table([found, small, large]).to_pylist()
    assert [row["model"] for row in rows] == ["Gemma 2B", "Gemma 7B", "bundled", "owner/small", "large"]
    assert [row["keys"] for row in rows[2:]] == [96, 192, 192]
    assert {row["common_keys"] for row in rows[2:]} == {common_keys([found, small, large])} == {91}
    assert rows[4]["mean_at_common_keys"] == pytest.approx(100 * found.at(91).mean())
    assert judge_claims([small])[0].verdict == "reproduces"
    assert judge_claims([large])[0].verdict == "does not"
    assert judge_claims([small, large])[0].verdict == "partly"
    assert "owner/small: 5.70 ±" in judge_claims([small, large])[0].ours
    assert "At 91 keys, the most that all have: owner/small 5." in summary([small, found])
    assert "the most that all have" not in summary([found])
    heads = heads_table([found, small]).to_pylist()
    assert len(heads) == 72
    assert heads[0]["spread_at_181"] is None
    assert heads[-1]["spread_at_181"] is not None
    left, middle, right = figure([found, small, large]).axes
    assert [label.get_text() for label in left.get_yticklabels()][:2] == [
        "large:\n192 keys, 36 heads",
        "small:\n192 keys, 36 heads",
    ]
    for axes in (middle, right):
        shown = {text.get_text() for text in axes.get_legend().get_texts()}
        assert {"bundled", "small", "large"} <= shown


def test_lengths_of_all_models_are_half_an_octave_apart() -> None:
    assert lengths_up_to(64).tolist() == [16, 23, 32, 45, 64]
    assert set(lengths_up_to(1024)) < set(lengths_up_to(2048))
    assert lengths_up_to(100).tolist() == [16, 23, 32, 45, 64, 91, 100]
    assert lengths_up_to(16).tolist() == [16]
