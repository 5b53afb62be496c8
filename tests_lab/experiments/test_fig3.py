"""Figure 3: separability of heads with known answers, its nulls, and Theorem 2."""

import math

import numpy as np
import pytest
import torch

from attnorm_lab.experiments.experiment import no_progress
from attnorm_lab.experiments.fig3 import Separabilities, findings, measure, summary
from attnorm_lab.experiments.model_runs import LastRows
from tests_lab.experiments.test_fig2 import synthetic

TOP_N = (2, 8, 16)


def measured(layers: list[LastRows], draws: int = 30) -> Separabilities:
    return measure(layers, TOP_N, draws, torch.Generator().manual_seed(0), no_progress, "")


def orthonormal(keys: int = 24) -> LastRows:
    """Equal weights for the first 16 keys, less for the others, all vectors orthonormal: all are distinguishable."""
    weights = torch.where(torch.arange(keys) < 16, 1.0, 0.5).double()
    visible = torch.ones(1, 1, keys, dtype=torch.bool)
    return LastRows(0, (weights / weights.sum())[None, None], torch.eye(keys, dtype=torch.float64)[None], visible)


@pytest.fixture(scope="module")
def isotropic() -> Separabilities:
    """Assumption 1 itself: uniform directions, weights that know nothing of them."""
    layers = synthetic(40, 64, dimension=16)
    centered = [
        LastRows(one.layer, one.weights, torch.randn_like(one.vectors), one.visible).on_sphere() for one in layers
    ]
    return measured(centered)


def test_eighty_per_cent_is_no_limit() -> None:
    found = measured([orthonormal()])
    assert found.measured.tolist() == [[1.0, 1.0, 1.0]]
    by_claim = {finding.claim: finding for finding in findings(found, found)}
    limit = next(finding for claim, finding in by_claim.items() if "hard limit" in claim)
    assert limit.verdict == "does not"
    assert "100% of the heads separate more than 80 %" in limit.ours


def test_under_assumption_1_head_and_both_nulls_agree(isotropic: Separabilities) -> None:
    for null in (isotropic.permuted, isotropic.isotropic):
        difference = (isotropic.measured - null).mean(0)
        error = (isotropic.measured - null).std(0) / math.sqrt(len(null))
        assert (np.abs(difference) < 4 * error + 0.01).all()


def test_bounds_hold_for_a_fixed_radius(
    isotropic: Separabilities,
) -> None:
    drawn, slack = isotropic.isotropic_fixed, isotropic.slack
    assert (drawn >= isotropic.lower - slack).all()
    assert (drawn <= isotropic.upper + slack).all()
    assert (isotropic.printed_lower <= drawn + slack).all()


def test_the_corrected_bounds_also_hold_for_vectors_of_unequal_length() -> None:
    (layer,) = synthetic(20, 64)
    (uneven,) = [LastRows(0, layer.weights, layer.vectors * torch.linspace(0.05, 5, 64)[:, None], layer.visible)]
    found = measured([uneven])
    assert (found.isotropic_fixed >= found.lower - found.slack).all()
    assert (found.isotropic_fixed <= found.upper + found.slack).all()


def test_the_printed_upper_bound_is_false_where_all_keys_must_be_inside() -> None:
    found = measured([orthonormal()])
    assert (found.certain[:, 0] == 1).all()  # N = 2: each is as far from s as the other is long
    assert (found.measured[found.certain > 0] == 1).all()
    assert (found.printed_upper[found.certain > 0] < 1).all()
    finding = next(one for one in findings(found, found) if "upper bound" in one.claim)
    assert finding.verdict == "does not"


def test_the_slack_covers_draws_that_all_agree(isotropic: Separabilities) -> None:
    agreed = isotropic.fixed_error == 0
    assert agreed.any()
    assert (isotropic.slack[agreed] > 0).all()


def test_lengths_of_the_vectors_matter_only_off_the_sphere() -> None:
    layers = synthetic(5, 64)
    longer = [LastRows(o.layer, o.weights, o.vectors * torch.linspace(0.1, 5, 64)[:, None], o.visible) for o in layers]
    one, other = (measured([layer.on_sphere() for layer in some], draws=2) for some in (layers, longer))
    assert (one.measured == other.measured).all()
    assert (measured(layers, draws=2).measured != measured(longer, draws=2).measured).any()


def test_verdicts_follow_the_numbers(isotropic: Separabilities) -> None:
    def with_measured(values: list[float]) -> dict[str, str]:
        filled = np.tile(values, (10, 1)) + np.linspace(-0.01, 0.01, 10)[:, None]
        numbers = {name: value[:10] for name, value in vars(isotropic).items() if isinstance(value, np.ndarray)}
        found = Separabilities(TOP_N, 30, **{**numbers, "measured": filled, "permuted": filled})
        return {finding.claim[:13]: finding.verdict for finding in findings(found, found)}

    as_printed = with_measured([0.95, 0.8, 0.77])
    assert as_printed["N_s / N decli"] == "reproduces"
    assert as_printed["It saturates "] == "reproduces"
    assert as_printed["No more than "] == "reproduces"
    flat = with_measured([0.5, 0.5, 0.5])
    assert flat["N_s / N decli"] == "does not"
    assert flat["It saturates "] == "does not"


def test_words_and_table_hold_every_head_and_n(isotropic: Separabilities) -> None:
    table = isotropic.table("on the sphere")
    assert table.num_rows == 40 * 3
    row = table.to_pylist()[4]
    assert (row["head"], row["top_n"]) == (1, 8)
    assert row["measured"] == isotropic.measured[1, 1]
    assert "own null" in summary(isotropic, isotropic)
