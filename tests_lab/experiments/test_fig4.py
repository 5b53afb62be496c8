"""Figure 4: the largest sensitivity of the heads against temperature, in the paper's units."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from attnorm.metrics.call import AttentionCall
from attnorm.metrics.rows import measure_rows
from attnorm.theory.gradient import finite_difference_corrected
from attnorm_lab.experiments.experiment import ExperimentSubject, no_progress
from attnorm_lab.experiments.fig4 import EPSILONS, EXPERIMENT, Sensitivity, judge_claims, measure, table
from attnorm_lab.experiments.model_runs import longest_rows, run_forward_pass

QUICK = ExperimentSubject(quick=True)


@pytest.fixture(scope="module")
def found() -> Sensitivity:
    temperatures = np.array([1e-3, 1e-2, 0.1, 1.0, 32**0.5, 30.0])
    return measure(QUICK, no_progress, 128, 4, temperatures)


def test_at_the_trained_temperature_the_norm_is_that_of_the_model_as_it_runs(found: Sensitivity) -> None:
    """In raw logits the same weights move by `scale` times as much: T = 1/scale is the model as trained."""
    assert found.trained_temperature == pytest.approx(32**0.5)
    expected: list[torch.Tensor] = []

    def look(call: AttentionCall) -> None:
        rows = longest_rows(call, 4)
        norm = measure_rows(call, [None], rows, (1,))["model"].values["jacobian_norm"]
        expected.append(norm.amax((0, 2)) * call.scale)

    run_forward_pass(QUICK, 128, look, no_progress, "")
    np.testing.assert_allclose(found.norm[:, 4], torch.cat(expected).numpy(), rtol=1e-4)


def test_no_head_exceeds_the_corrected_bounds(found: Sensitivity) -> None:
    T = torch.from_numpy(found.temperatures)
    assert (found.norm <= (1 / (2 * T)).numpy() * (1 + 1e-9)).all()
    for eps, gain in zip(EPSILONS, found.gain, strict=True):
        assert (gain <= finite_difference_corrected(eps, T).numpy() * (1 + 1e-9)).all()
        assert (gain > 0).any()


def test_a_step_of_ten_cannot_move_weights_further_than_the_simplex_is_wide(found: Sensitivity) -> None:
    assert found.gain[2, :, 0].max() == pytest.approx(2**0.5 / 10, rel=1e-3)


def test_heads_above_a_quarter_refute_the_printed_bound_and_heads_below_do_not() -> None:
    T = np.logspace(-3, 1.5, 10)

    def with_norm(share: float) -> Sensitivity:
        norm = (share / (2 * T))[None]
        small = np.minimum(norm, 0.01)
        return Sensitivity((0,), (0,), T, np.minimum(norm, 1.0), np.stack([small] * 3), 8.0)

    assert judge_claims(with_norm(0.9))[1].verdict == "does not"
    assert judge_claims(with_norm(0.4))[1].verdict == "reproduces"


def test_a_flat_curve_has_a_slope_without_a_sign_of_minus(found: Sensitivity) -> None:
    flat = np.broadcast_to(0.1 - 1e-7 * found.temperatures, found.gain.shape)
    assert "-0.00" not in " ".join(finding.ours for finding in judge_claims(replace(found, gain=flat)))


def test_the_outcome_is_complete(tmp_path: Path, found: Sensitivity, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnorm_lab.experiments.fig4.QUICK_LENGTH", 64)
    outcome = EXPERIMENT.run(QUICK, no_progress, tmp_path)
    assert set(outcome.figures) == set(outcome.tables) == {"fig4"}
    assert len(outcome.findings) == 4
    assert outcome.tables["fig4"].num_rows == 36 * len(outcome.parameters["temperatures"])
    assert table(found).num_rows == 36 * 6
