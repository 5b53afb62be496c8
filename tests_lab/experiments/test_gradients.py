"""The toy of section 2.3, exactly, and the same move on rows of real heads."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from attnorm_lab.experiments.experiment import ExperimentSubject, no_progress
from attnorm_lab.experiments.gradients import EXPERIMENT, TEMPERATURES, judge_claims, measure, toy
from attnorm_lab.experiments.model_runs import SampledRows

OWN = TEMPERATURES.index(1.0)


def rows(*logits: list[float]) -> SampledRows:
    values = torch.tensor(logits)
    return SampledRows(
        values, torch.ones_like(values, dtype=torch.bool), torch.zeros(len(values)), torch.zeros(len(values))
    )


def test_the_toys_constant_is_three_quarters_of_the_printed_one_and_saturates() -> None:
    table = {(row["a_over_T"], row["eps_over_T"]): row for row in toy().to_pylist()}
    small, large = table[16.0, 1e-3], table[16.0, 10.0]
    assert small["per_step"] == pytest.approx(0.75 * math.sqrt(2), rel=1e-2)
    assert small["printed_per_step"] == pytest.approx(math.sqrt(2))
    assert large["weight_distance"] == pytest.approx(math.sqrt(2), rel=1e-3)
    assert table[0.0, 1e-3]["per_step"] < 0.01  # among 1,024 equal keys nothing moves much


def test_tied_winners_are_the_worst_case_and_a_decided_row_does_not_move() -> None:
    found = measure(rows([20.0, 20.0, 0.0, 0.0], [40.0, 0.0, 0.0, 0.0]))
    assert found.norm == pytest.approx([0.5, 0.0], abs=1e-6)
    assert found.move[:, OWN] == pytest.approx([0.75 * math.sqrt(2), 0.0], rel=1e-3, abs=1e-6)
    assert found.norms[0] == pytest.approx([1 / (2 * T) for T in TEMPERATURES], rel=1e-2)


def test_hidden_keys_change_nothing() -> None:
    plain = measure(rows([1.0, 0.5, -1.0]))
    padded = SampledRows(
        torch.tensor([[1.0, 0.5, -1.0, 99.0]]),
        torch.tensor([[True, True, True, False]]),
        torch.zeros(1),
        torch.zeros(1),
    )
    hidden = measure(padded)
    for name in ("norm", "printed", "corrected", "move", "norms", "n"):
        np.testing.assert_allclose(getattr(hidden, name), getattr(plain, name), rtol=1e-9)


def test_a_row_above_a_quarter_refutes_corollary_3() -> None:
    high = measure(rows([20.0, 20.0, 0.0, 0.0]))
    low = measure(rows([0.0] * 64, [0.1] * 32 + [0.0] * 32))
    assert judge_claims(high, toy())[3].verdict == "does not"
    assert judge_claims(low, toy())[3].verdict == "reproduces"


def test_on_the_bundled_model_nothing_exceeds_the_corrected_bounds(tmp_path: Path) -> None:
    outcome = EXPERIMENT.run(ExperimentSubject(quick=True), no_progress, tmp_path)
    table = outcome.tables["rows"].to_pydict()
    norm = np.array(table["jacobian_norm"])
    assert len(norm) == 36 * outcome.parameters["rows_per_head"]
    assert norm.max() <= 0.5
    assert (norm <= np.array(table["lemma2_corrected"]) * (1 + 1e-6)).all()
    assert np.array(table["move_T_1"]).max() <= 5**0.5 / 2  # the step's length times 1/(2T)
    np.testing.assert_allclose(table["norm_T_1"], norm)
