"""The circuits experiment on a model whose circuit was built by hand."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from attnorm_lab.experiments.circuits import (
    EXPERIMENT,
    ModelLimit,
    NamedHead,
    figure,
    heads_table,
    judge_claims,
    lengths_of,
    summary,
)
from attnorm_lab.experiments.experiment import ExperimentSubject, Outcome
from tests.analysis.planted import planted
from tests.analysis.tiny_models import llama


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
    monkeypatch.setattr("attnorm_lab.experiments.circuits.measure_circuits", None)
    again = EXPERIMENT.run(subject, lambda *_: None, parts)
    assert again.tables["curves"].equals(outcome.tables["curves"])


def test_lengths_end_at_the_limit_of_learned_positions_and_go_beyond_that_of_rotary_ones(
    subject: ExperimentSubject, tmp_path: Path
) -> None:
    learned = replace(subject, quick=False)
    assert lengths_of(learned) == [64, 128]
    with pytest.raises(ValueError, match=r"128.*1024"):
        lengths_of(replace(learned, longest=1024))
    llama().save_pretrained(tmp_path)  # made for 256 tokens
    rotary = ExperimentSubject(model=str(tmp_path))
    assert lengths_of(rotary)[-1] == 512
    assert lengths_of(replace(rotary, longest=2048)) == [64, 128, 256, 512, 1024, 2048]


WHAT_IFS = ("model", "ssmax", "log_scaled", "entmax15", "hard")


def head(*weights: float) -> NamedHead:
    n = 60.0 * 2 ** np.arange(len(weights))
    return NamedHead(0, 0, "retrieval", 60, n, np.full(len(n), 5.0), dict.fromkeys(WHAT_IFS, np.array(weights)))


def test_heads_that_are_sharp_at_the_models_limit_are_counted_beyond_it() -> None:
    heads = [head(0.9, 0.8, 0.1), head(0.9, 0.7, 0.6), head(0.9, 0.2, 0.1)]
    limit = ModelLimit(150, False, [64, 128, 256])
    assert limit.index == 1
    beyond = judge_claims(heads, 100, limit)[3]
    assert beyond.verdict == "does not"  # one of two
    assert "of 2 heads" in beyond.ours
    assert ", 1 have it at 256 tokens" in beyond.ours
    assert heads_table(heads, limit)["weight_model_at_limit"].to_pylist() == [0.8, 0.7, 0.2]
    assert judge_claims([heads[1]], 100, limit)[3].verdict == "reproduces"
    assert judge_claims([heads[2]], 100, limit)[3].verdict == "not decided"
    within = ModelLimit(256, False, [64, 128, 256])
    assert within.index is None
    assert judge_claims(heads, 100, within)[3].verdict == "not tested"
    assert "weight_model_at_limit" not in heads_table(heads, within).column_names
    assert ModelLimit(None, False, [64, 128, 256]).index is None
    steep = replace(heads[0], gap=np.array([1.0, 1.0 + np.log(2), -9.0]))  # on log n, to twice as many keys each
    assert heads_table([steep], limit)["gap_slope"].to_pylist() == pytest.approx([1.0])
    assert steep.slope() < 0


@pytest.mark.parametrize(("tokens", "marked"), [(256, True), (300, False)])
def test_the_figure_marks_the_models_limit(tokens: int, marked: bool) -> None:
    drawing = figure([head(0.9, 0.8, 0.1)], "", ModelLimit(tokens, False, [64, 128, 256]))
    for axes in drawing.axes[:3]:
        assert any(list(line.get_xdata()) == [tokens, tokens] for line in axes.lines) is marked


def test_claims_are_judged_by_the_share_of_heads_that_lose_their_key() -> None:
    limit = ModelLimit(128, True, [64, 128])

    def verdict(heads: list[NamedHead]) -> str:
        return judge_claims(heads, 100, limit)[2].verdict

    assert verdict([head(0.9, 0.1), head(0.9, 0.2)]) == "reproduces"
    assert verdict([head(0.9, 0.1), head(0.9, 0.8)]) == "partly"
    assert verdict([head(0.9, 0.8)]) == "does not"
    assert verdict([head(0.4, 0.3)]) == "not decided"
    assert "None of the 36 heads" in summary([], 36, limit)


def test_another_normalizer_keeps_the_key_if_half_of_the_heads_are_sharp_with_it() -> None:
    limit = ModelLimit(128, True, [64, 128])
    lost = head(0.9, 0.1)
    sharp = replace(lost, weights={**lost.weights, "hard": np.array([1.0, 1.0])})

    def hard(heads: list[NamedHead]) -> tuple[str, bool]:
        finding = judge_claims(heads, 100, limit)[-1]
        return finding.verdict, bool(finding.why)

    assert hard([sharp, lost]) == ("reproduces", True)
    assert hard([sharp, lost, lost]) == ("partly", False)
    assert hard([lost]) == ("does not", False)
