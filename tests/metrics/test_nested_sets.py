"""Several numbers of selected keys at once against theory, which takes one at a time."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnorm.metrics import nested_sets
from attnorm.metrics.nested_sets import NestedSets, distances, theorem2
from attnorm.theory import distance, geometry
from attnorm.theory.selection import SelectedRows, select

SIZES = (1, 2, 5, 7)
FORMULAS: dict[str, Callable[[SelectedRows], Tensor]] = {
    "d_tilde": distance.d_tilde,
    "relative_distance": distance.relative_distance,
    "fixed_tight": distance.theorem1_fixed_tight,
    "random_printed": distance.theorem1_random_printed,
    "random_lower": lambda rows: distance.theorem1_random_bounds(rows).lower,
    "random_upper": lambda rows: distance.theorem1_random_bounds(rows).upper,
}


def rows(kind: str) -> NestedSets:
    """Two sets of twelve vectors with five rows each; hidden keys at the end of some rows."""
    generator = torch.Generator().manual_seed(1)
    vectors = torch.randn(2, 12, 3, generator=generator, dtype=torch.float64)
    visible = torch.arange(12) < torch.tensor([12, 11, 9, 7, 12])[:, None].expand(2, 5, 1)
    logits = 1.5 * torch.randn(2, 5, 12, generator=generator, dtype=torch.float64)
    weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
    if kind == "sums of 0.6":
        weights = 0.6 * weights
    if kind == "signed":
        weights = torch.where(torch.arange(12) % 3 == 0, -1.0, 1.0) * weights
    if kind == "one key":
        weights = torch.zeros_like(weights).scatter_(-1, weights.argmax(-1, keepdim=True), 1.0)
    if kind == "no weight at the top":
        weights = -weights.scatter(-1, weights.argmin(-1, keepdim=True), 0.0)
    return NestedSets.of(weights, vectors, visible, SIZES, None)


def by_theory(given: NestedSets, formula: Callable[[SelectedRows], Tensor]) -> Tensor:
    found = []
    for N in SIZES:
        selected = SelectedRows(given.weights, given.vectors, given.visible, given.order[..., :N], False, None)
        found.append(torch.where(given.n[..., 0] > N, formula(selected), torch.nan))
    return torch.stack(found, -1)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("kind", ["softmax", "sums of 0.6", "signed", "one key", "no weight at the top"])
def test_distances_and_bounds_are_those_of_theory(kind: str, on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nested_sets, "runs_asynchronously", lambda tensor: on_device)
    given = rows(kind)
    found = distances(given)
    for name, formula in FORMULAS.items():
        torch.testing.assert_close(
            found[name],
            by_theory(given, formula),
            rtol=1e-9,
            atol=1e-10,
            equal_nan=True,
            msg=lambda t, n=name: f"{n}: {t}",
        )
    if kind in ("softmax", "one key"):
        expected = by_theory(given, distance.theorem1_fixed_printed)
        torch.testing.assert_close(found["fixed_printed"], expected, rtol=1e-9, atol=1e-10, equal_nan=True)
    else:
        assert found["fixed_printed"].isnan().all()
    scaled = given.weights.unsqueeze(-1) * given.vectors.unsqueeze(1)
    for size, N in enumerate(SIZES):
        for g in range(2):
            for r in range(5):
                n, chosen = int(given.n[g, r]), given.order[g, r, :N]
                context = scaled[g, r, chosen].sum(0)
                others = [i for i in range(n) if i not in chosen]
                nearest = min(float((scaled[g, r, i] - context).norm()) for i in others) if n > N else torch.nan
                assert float(found["nearest"][g, r, size]) == pytest.approx(nearest, nan_ok=True)


def test_the_bounds_of_theorem_2_have_the_root_mean_square_as_length() -> None:
    given = rows("softmax")
    nearest = distances(given)["nearest"]
    squares = given.vectors.square().sum(-1)[:, None] * given.visible
    length = (squares.sum(-1) / given.n[..., 0]).sqrt()
    for factor in (0.5, 1.0, 2.0):
        lower, upper = theorem2(given, factor * nearest)
        for size, N in enumerate(SIZES):
            selected = SelectedRows(given.weights, given.vectors, given.visible, given.order[..., :N], False, None)
            radius = torch.where(nearest[..., size].isnan(), 1.0, factor * nearest[..., size])
            bounds = geometry.theorem2_bounds(selected, radius, length)
            seen = given.n[..., 0] > N
            for found, expected in ((lower, bounds.lower), (upper, bounds.upper)):
                torch.testing.assert_close(found[..., size][seen], expected[seen], rtol=1e-9, atol=1e-12)
                assert found[..., size][~seen].isnan().all()
        assert ((lower > 0) & (lower < 1)).any() or ((upper > 0) & (upper < 1)).any()


def test_ranks_sizes_and_rows_taken() -> None:
    given = rows("softmax")
    assert given.top_n.tolist() == list(SIZES)
    ordered = given.weights[1, 3].argsort(descending=True)[:8].tolist()
    assert given.order[1, 3, :7].tolist() == ordered[:7]
    expected = [ordered.index(i) if i in ordered[:7] else -1 for i in range(12)]
    assert given.rank[1, 3].tolist() == expected
    assert given.rank[0, 0].tolist() == [
        min(given.weights[0, 0].argsort(descending=True).tolist().index(i), 7) for i in range(12)
    ]
    few = given.select_rows(torch.tensor([3, 1]))
    assert torch.equal(few.order, given.order[:, [3, 1]])
    torch.testing.assert_close(distances(few)["d_tilde"], distances(given)["d_tilde"][:, [3, 1]], equal_nan=True)
    assert select(given.weights[0], given.vectors[0], 2).indices.tolist() == given.order[0, :, :2].tolist()
