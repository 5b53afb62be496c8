"""Where adaptive temperature acts on the rows of real heads."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from attnorm.normalizers.adaptive_temperature import EntropyRule
from attnorm.normalizers.registry import get
from attnorm_lab.experiments.adaptive import (
    AS_IT_RUNS,
    EXPERIMENT,
    MAX_KEYS,
    PRINTED,
    REACH,
    REFIT,
    Adaptive,
    acting_intervals,
    judge_claims,
    measure,
    versions,
)
from attnorm_lab.experiments.experiment import ExperimentSubject, no_progress
from attnorm_lab.experiments.model_runs import SampledRows, losses, mean, sample_rows, windows_of

QUICK = ExperimentSubject(quick=True)


@pytest.fixture(scope="module")
def found() -> Adaptive:
    return measure(QUICK, no_progress, 256, 10, (64, 3))


def test_the_printed_polynomial_acts_between_0849_and_5945_nats() -> None:
    ((low, high),) = acting_intervals(EntropyRule())
    assert (low, high) == (pytest.approx(0.849, abs=2e-3), pytest.approx(5.945, abs=2e-3))
    assert (low, high) == REACH
    assert MAX_KEYS == 381
    ((_, end),) = acting_intervals(EntropyRule(monotone=True))
    assert end == math.inf  # not where the search for it stopped


def test_no_version_raises_the_entropy_of_a_row(found: Adaptive) -> None:
    for name, (entropy, largest) in found.after.items():
        assert (entropy <= found.entropy + 1e-4).all(), name
        assert (largest >= found.largest - 1e-5).all(), name
    untouched = (found.entropy < 0.84) | (found.entropy > 5.95)
    np.testing.assert_allclose(found.after["printed"][0][untouched], found.entropy[untouched], atol=1e-5)


def test_a_refit_gives_most_winners_half_of_the_weight_on_rows_like_those_it_was_made_on() -> None:
    generator = torch.Generator().manual_seed(0)
    scale = torch.linspace(0.3, 3, 400)[:, None]
    logits = torch.randn(400, 64, generator=generator) * scale
    rows = SampledRows(logits, torch.ones_like(logits, dtype=torch.bool), torch.zeros(400), torch.zeros(400))
    rule = versions(rows, 0)["re-fit"]
    plain = torch.softmax(logits, -1)
    entropy = -(plain * plain.log()).sum(-1)
    after = torch.softmax(logits * rule.beta(entropy)[:, None], -1).amax(-1)
    assert plain.amax(-1).median() < 0.3
    assert 0.45 < after.median() < 0.75


def test_flat_rows_that_stay_flat_are_counted(found: Adaptive) -> None:
    shifted = replace(found, n=np.full(len(found.n), 1000.0), entropy=np.full(len(found.n), 6.2))
    first, second = judge_claims(shifted)[:2]
    assert first.verdict == "does not"
    assert "100% of the rows of more than 381 keys" in second.ours
    short = judge_claims(replace(found, n=np.full(len(found.n), 100.0)))[1]
    assert "no row has more than 381 keys" in short.ours


def test_a_polynomial_that_goes_on_rising_acts_from_somewhere_on(found: Adaptive) -> None:
    rising = replace(found, rules={**found.rules, REFIT: EntropyRule((1.0, 0.0))})  # beta = H
    assert "acts from 1.00 nats on;" in judge_claims(rising)[2].ours
    falling = replace(found, rules={**found.rules, REFIT: EntropyRule()})
    assert "acts for 0.85 to 5.95 nats;" in judge_claims(falling)[2].ours


@pytest.mark.parametrize(
    ("changes", "verdict", "crossed"),
    [
        ([0.004, 0.005, 0.006, 0.005], "reproduces", ""),
        ([0.2, 0.21, 0.19, 0.2], "does not", ""),
        ([0.05, 0.06, 0.055, 0.05], "partly", ""),
        ([0.12, 0.11, 0.08, 0.13], "partly", "across our line at 0.1"),
        ([-0.01, 0.03, 0.0, 0.01], "partly", "across our line at 0.01"),
    ],
)
def test_a_loss_is_judged_by_its_interval_and_one_across_a_line_is_partly(
    found: Adaptive, changes: list[float], verdict: str, crossed: str
) -> None:
    before = np.array([2.0, 5.0, 3.0, 4.0])  # windows differ by far more than what is asked
    finding = judge_claims(replace(found, losses={**dict.fromkeys(found.rules, before), AS_IT_RUNS: before,
                                         PRINTED: before + np.array(changes)}))[3]  # fmt: skip
    assert finding.verdict == verdict
    assert (crossed or "± ") in finding.ours
    assert bool(crossed) == ("across our line" in finding.ours)


def test_the_interval_of_a_mean_is_students() -> None:
    values = np.array([0.1, 0.3, 0.2, 0.25, 0.15])
    expected = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert mean(values).interval == pytest.approx((expected.low, expected.high))


def test_a_text_too_short_for_two_windows_has_two_shorter_ones(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("It was the best of times, it was the worst of times. " * 8)
    subject = ExperimentSubject(texts=(tmp_path / "t.txt",))
    tokens = subject.tokens(10_000)
    windows = windows_of(subject, tokens - 10, 8)
    assert windows.shape == (2, tokens // 2)
    assert windows_of(subject, tokens // 3, 8).shape == (3, tokens // 3)


def test_the_loss_is_the_models_own_and_softmax_in_its_place_changes_nothing() -> None:
    windows = windows_of(QUICK, 64, 2)
    assert windows.shape == (2, 64)
    model = QUICK.loaded().model
    measured = losses(
        QUICK, no_progress, {"own": None, "same": get("softmax"), "flat": get("softmax", temperature=10.0)}, windows
    )
    with torch.no_grad():
        logits = model(windows).logits[:, 32:-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 33:].flatten())
    assert measured["own"].shape == (2,)
    assert measured["own"].mean() == pytest.approx(float(expected), rel=1e-5)
    assert measured["same"] == pytest.approx(measured["own"], rel=1e-4)
    assert (measured["flat"] > measured["own"] + 0.1).all()


def test_sampled_rows_are_the_models_logits() -> None:
    rows = sample_rows(QUICK, no_progress, 40, 6)
    assert rows.n.max() == 40
    assert len(rows.n) == 36 * 6
    model = QUICK.loaded().model
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            weights = model.base_model(**QUICK.model_inputs(40), output_attentions=True).attentions
    finally:
        model.set_attn_implementation("sdpa")
    last = rows.where(rows.n == 40)
    mine = torch.softmax(torch.where(last.visible, last.logits, -torch.inf), -1)
    dense = torch.cat([layer[0, :, -1] for layer in weights])
    torch.testing.assert_close(mine, dense, atol=1e-4, rtol=1e-3)


def test_the_outcome_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnorm_lab.experiments.adaptive.QUICK_LENGTH", 128)
    monkeypatch.setattr("attnorm_lab.experiments.adaptive.QUICK_WINDOWS", 2)
    outcome = EXPERIMENT.run(QUICK, no_progress, tmp_path)
    assert outcome.tables["versions"].num_rows == 4
    assert set(outcome.parameters["coefficients"]) == set(outcome.tables["versions"]["version"].to_pylist())
