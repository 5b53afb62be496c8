"""Where adaptive temperature acts on the rows of real heads."""

from pathlib import Path

import numpy as np
import pytest
import torch

from attnorm.experiments.adaptive import EXPERIMENT, Adaptive, acting, judged, measure, versions
from attnorm.experiments.experiment import Subject
from attnorm.experiments.losses import losses, windows_of
from attnorm.experiments.sampled_rows import SampledRows, sample_rows
from attnorm.normalizers.adaptive_temperature import EntropyRule
from attnorm.normalizers.registry import get

QUICK = Subject(quick=True)


def silent(what: str, done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def found() -> Adaptive:
    return measure(QUICK, silent, 256, 10, (64, 1))


def test_the_printed_polynomial_acts_between_0849_and_5945_nats() -> None:
    ((low, high),) = acting(EntropyRule())
    assert (low, high) == (pytest.approx(0.849, abs=2e-3), pytest.approx(5.945, abs=2e-3))
    ((_, reach),) = acting(EntropyRule(monotone=True))
    assert reach == 12.0


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
    shifted = Adaptive(
        n=np.full(len(found.n), 1000.0), entropy=np.full(len(found.n), 6.2), largest=found.largest, after=found.after,
        rules=found.rules, losses=found.losses,
    )  # fmt: skip
    first, second = judged(shifted)[:2]
    assert first.verdict == "does not"
    assert "100% of the rows of more than 381 keys" in second.ours


def test_the_loss_is_the_models_own_and_softmax_in_its_place_changes_nothing() -> None:
    windows = windows_of(QUICK, 64, 2)
    assert windows.shape == (2, 64)
    model = QUICK.loaded().model
    measured = losses(
        QUICK, silent, {"own": None, "same": get("softmax"), "flat": get("softmax", temperature=10.0)}, windows
    )
    with torch.no_grad():
        logits = model(windows).logits[:, 32:-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 33:].flatten())
    assert measured["own"] == pytest.approx(float(expected), rel=1e-5)
    assert measured["same"] == pytest.approx(measured["own"], rel=1e-4)
    assert measured["flat"] > measured["own"] + 0.1


def test_sampled_rows_are_the_models_logits() -> None:
    rows = sample_rows(QUICK, silent, 40, 6)
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


def test_the_outcome_is_complete(tmp_path: Path) -> None:
    outcome = EXPERIMENT.run(QUICK, silent, tmp_path)
    assert outcome.tables["versions"].num_rows == 4
    assert set(outcome.parameters["coefficients"]) == set(outcome.tables["versions"]["version"].to_pylist())
    assert set(outcome.figures) == {"adaptive"}
