"""Figure 1: what the picture shows must be what is measured."""

from pathlib import Path

import numpy as np
import pytest
import torch

from attnorm.theory.geometry import separability
from attnorm.theory.selection import select
from attnorm_lab.experiments.experiment import ExperimentSubject, no_progress
from attnorm_lab.experiments.fig1 import EXPERIMENT, TOP_N, scene, toy, typical
from tests_lab.experiments.test_fig2 import synthetic


def test_the_toy_lies_on_a_circle_and_its_plane_is_the_picture() -> None:
    rows = toy(0)
    drawn = scene(rows, "toy")
    x, weights = rows.vectors[0].numpy(), rows.weights[0, 0].numpy()
    assert np.linalg.norm(x, axis=1) == pytest.approx(1.0)
    assert drawn.lengths == pytest.approx(weights)
    placed = np.stack([np.cos(drawn.directions), np.sin(drawn.directions)], -1)
    assert placed == pytest.approx(x)
    ends = drawn.context + drawn.distances[:, None] * np.stack(
        [np.cos(drawn.from_context), np.sin(drawn.from_context)], -1
    )
    assert ends == pytest.approx(weights[:, None] * x)


@pytest.mark.parametrize("dimension", [2, 3, 32])
def test_who_is_inside_the_drawn_ball_is_who_is_distinguishable(dimension: int) -> None:
    generator = torch.Generator().manual_seed(dimension)
    weights = torch.randn(1, 1, 30, generator=generator, dtype=torch.float64).softmax(-1)
    vectors = torch.randn(1, 30, dimension, generator=generator, dtype=torch.float64)
    rows = select(weights, vectors, TOP_N)
    drawn = scene(rows, "row")
    inside = (drawn.chosen > 0) & (drawn.distances <= drawn.radius)
    assert (inside == (drawn.inside > 0)).all()
    assert drawn.inside.sum() / TOP_N == pytest.approx(float(separability(rows)))
    assert drawn.distances[drawn.chosen == 0].min() == pytest.approx(drawn.radius)
    assert np.hypot(*drawn.context) == pytest.approx(float(torch.linalg.vector_norm(rows.context)))


def test_the_head_that_is_drawn_is_one_of_the_model_with_the_median_share() -> None:
    layers = synthetic(9, 40)
    layer, head, rows = typical(layers)
    shares = separability(layers[0].selected(TOP_N)).flatten().tolist()
    assert float(separability(rows)) == pytest.approx(np.median(shares))
    assert torch.equal(rows.weights[0, 0], layers[layer].weights.flatten(0, 1)[head])


def test_it_runs_on_the_bundled_model(tmp_path: Path) -> None:
    outcome = EXPERIMENT.run(ExperimentSubject(quick=True), no_progress, tmp_path / "parts")
    assert set(outcome.figures) == {"fig1"}
    assert outcome.tables["fig1"].num_rows == 24 + 48
    assert outcome.findings[0].verdict in ("reproduces", "partly")
    again = EXPERIMENT.run(ExperimentSubject(quick=True), no_progress, tmp_path / "parts")
    assert again.summary == outcome.summary
    assert not (tmp_path / "parts").exists()
