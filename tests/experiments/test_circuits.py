"""The circuits experiment on a model whose circuit was built by hand."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from attnorm.experiments.circuits import EXPERIMENT, NamedHead, judge_claims, lengths_of, summary
from attnorm.experiments.experiment import ExperimentSubject, Outcome
from tests.analysis.planted import planted


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> ExperimentSubject:
    folder = tmp_path_factory.mktemp("planted")
    planted(4.3).save_pretrained(folder)
    return ExperimentSubject(model=str(folder), quick=True)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parts")


@pytest.fixture(scope="module")
def outcome(subject: ExperimentSubject, parts: Path) -> Outcome:
    return EXPERIMENT.run(subject, lambda *_: None, parts)


def test_a_planted_head_loses_its_key_with_the_length_and_hard_attention_keeps_it(outcome: Outcome) -> None:
    heads = {(row["layer"], row["head"]): row for row in outcome.tables["heads"].to_pylist()}
    assert set(heads) == {(0, 0), (1, 1)}
    assert heads[1, 1]["circuit"] == "induction"
    assert heads[1, 1]["sharp_to_keys"] == pytest.approx(74.7, rel=0.05)
    assert heads[1, 1]["gap_slope"] == pytest.approx(0, abs=1e-3)  # the planted logit is a constant
    assert heads[1, 1]["weight_model_longest"] < 0.5 < heads[1, 1]["weight_model_shortest"]
    assert heads[1, 1]["weight_hard_longest"] == 1
    # log n / log 64 times the planted logit 4.3, in the mean of rows with 97 to 128 keys.
    n = np.arange(97, 129)
    gap = 4.3 * np.log(n) / np.log(64)
    expected = (1 / (1 + (n - 1) * np.exp(-gap))).mean()
    assert heads[1, 1]["weight_log_scaled_longest"] == pytest.approx(expected, rel=1e-3)
    verdicts = {finding.claim.split(" (")[0]: finding.verdict for finding in outcome.findings}
    assert verdicts["Language models contain induction heads, fed by previous-token heads"] == "reproduces"
    assert verdicts["Sharp circuits lose their focus as the input grows"] == "partly"  # L0H0 keeps its key
    assert verdicts["What if: hard on the same logits keeps the key"] == "reproduces"
    assert "L1H1" in outcome.summary


def test_finished_lengths_are_not_measured_again(
    subject: ExperimentSubject, parts: Path, outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnorm.experiments.circuits.measure_circuits", None)
    again = EXPERIMENT.run(subject, lambda *_: None, parts)
    assert again.tables["curves"].equals(outcome.tables["curves"])


def test_lengths_end_at_the_limit_of_the_positions(subject: ExperimentSubject) -> None:
    assert lengths_of(replace(subject, quick=False)) == [64, 128]


def test_claims_are_judged_by_the_share_of_heads_that_lose_their_key() -> None:
    n = np.array([60.0, 120.0])

    def head(first: float, last: float) -> NamedHead:
        return NamedHead(0, 0, "retrieval", 60, n, np.array([5.0, 5.0]), {"model": np.array([first, last])})

    def verdict(heads: list[NamedHead]) -> str:
        return judge_claims([replace(one, weights={**_all(one)}) for one in heads], 100)[2].verdict

    def _all(one: NamedHead) -> dict[str, np.ndarray]:
        return dict.fromkeys(("model", "ssmax", "log_scaled", "entmax15", "hard"), one.weights["model"])

    assert verdict([head(0.9, 0.1), head(0.9, 0.2)]) == "reproduces"
    assert verdict([head(0.9, 0.1), head(0.9, 0.8)]) == "partly"
    assert verdict([head(0.9, 0.8)]) == "does not"
    assert verdict([head(0.4, 0.3)]) == "not tested"
    assert "None of the 36 heads" in summary([], 36, [64, 128])
