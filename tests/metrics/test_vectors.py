"""Distances, separability and their null, of the rows and vectors that a call really mixes."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from attnorm.engines.execution import torch_threads
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.nested_sets import NestedSets
from attnorm.metrics.separability import draw_permutations, keys_by_rank, separability_and_null
from attnorm.metrics.vectors import NULL_ROWS, NULLS, NUMBERS, measure_vectors
from attnorm.normalizers import get
from attnorm.normalizers.contract import Normalizer
from attnorm.theory.geometry import on_sphere, separability
from attnorm.theory.selection import select
from tests.metrics import reference
from tests.metrics.calls import CALLS, HEADS, KEY_HEADS, make_call
from tests.metrics.test_rows import in_float64

TOP_N = (1, 3, 8, 1000)


def check(call: AttentionCall, choice: str | None, vectors: Tensor, kind: str = "values") -> None:
    """vectors: (B, H, K, E), those of each head."""
    normalizer = None if choice is None else get(choice)
    assert normalizer is None or isinstance(normalizer, Normalizer)
    queries = call.query_BHQD.shape[-2]
    rows = torch.arange((queries - 1) % 6, queries, 6)[-NULL_ROWS:]  # more have no separability
    result = measure_vectors(call, [choice], rows, TOP_N, kind)["model" if choice is None else choice]
    weights, visible = reference.dense_weights(call, normalizer).detach(), reference.dense_visible(call)
    for item in range(weights.shape[0]):
        for head in range(0, HEADS, 3):
            for index, row in enumerate(rows.tolist()):
                keys = visible[item, head, row]
                for column, N in enumerate(TOP_N):
                    found = {name: float(result[name][item, head, index, column]) for name in NUMBERS}
                    if int(keys.sum()) <= N:
                        assert all(math.isnan(value) for value in found.values())
                        continue
                    w, x = weights[item, head, row][keys], vectors[item, head][keys]
                    expected = reference.vector_numbers(w, x, N)
                    sphere = reference.vector_numbers(w, on_sphere(x.double()), N)
                    expected["separability_sphere"] = sphere["separability"]
                    for name, value in expected.items():
                        if name == "fixed_printed" and abs(float(w.sum()) - 1) > 1e-4:
                            assert math.isnan(found[name])
                        else:
                            assert found[name] == pytest.approx(value, rel=1e-6, abs=1e-12), (name, N)


@pytest.mark.parametrize("kind", ["causal", "bidirectional", "cross", "cache", "left padding", "window", "sinks"])
@pytest.mark.every_second("kind", first=1)
def test_numbers_equal_the_dense_reference(kind: str) -> None:
    call = in_float64(CALLS[kind])
    check(call, None, call.value_BGKE.repeat_interleave(HEADS // KEY_HEADS, 1))


@pytest.mark.parametrize("choice", ["ssmax", "sigmoid", "sa_softmax", "stick_breaking"])
def test_other_normalizers(choice: str) -> None:
    call = in_float64(make_call(20, batch=1))
    check(call, choice, call.value_BGKE.repeat_interleave(HEADS // KEY_HEADS, 1))


def test_weights_that_float32_rounds_to_zero_keep_their_order() -> None:
    call = make_call(20, batch=1, bias=torch.full((1, 1, 20, 20), -115.0))  # sigmoid: weights of 1e-50
    rows = torch.arange(8, 20)
    found, expected = (
        measure_vectors(each, ["sigmoid"], rows, (1, 3))["sigmoid"]["separability"] for each in (call, in_float64(call))
    )
    torch.testing.assert_close(found.double(), expected.double())


def test_the_heaviest_key_is_the_closest_to_itself_however_close_the_others_are() -> None:
    call = make_call(33, size=1e-4)  # weights are equal to 4 digits
    value = call.value_BGKE
    value.copy_(value[:, :, :1] * (1 + 1e-4 * value))  # so float32 rounds away what is left of the distances
    found = measure_vectors(call, [None], torch.arange(8, 33), (1,))["model"]
    for name in ("separability", "separability_sphere"):
        assert found[name][~found[name].isnan()].min() > 0.999


def test_layer_inputs_in_the_place_of_values() -> None:
    states = torch.randn(2, 33, 12, generator=torch.Generator().manual_seed(5)).double()
    call = dataclasses.replace(in_float64(CALLS["causal"]), inputs_BKC=states)
    check(call, None, states[:, None].expand(-1, HEADS, -1, -1), "inputs")
    with pytest.raises(ValueError, match="inputs=True"):
        measure_vectors(CALLS["causal"], [None], torch.arange(3), TOP_N, "inputs")


def test_bounds_hold_in_the_order_that_theory_proves() -> None:
    result = measure_vectors(CALLS["long"], [None], torch.arange(20, 300, 20), (5, 10))["model"]
    slack = 1 + 1e-5
    assert (result["d_tilde"] <= result["fixed_tight"] * slack).all()
    assert (result["fixed_tight"] <= result["fixed_printed"] * slack).all()
    assert (result["random_lower"] <= result["random_upper"] * slack).all()
    assert (result["separability_lower"] <= result["separability_upper"]).all()


def test_the_null_is_drawn_on_a_few_rows_and_is_reproducible() -> None:
    call, rows = CALLS["causal"], torch.arange(33)
    first, again, other = (
        measure_vectors(call, [None], rows, (2, 5), generator=torch.Generator().manual_seed(seed))["model"]
        for seed in (0, 0, 1)
    )
    for name in NULLS:
        assert torch.equal(first[name].nan_to_num(-1.0), again[name].nan_to_num(-1.0))
        drawn = ~first[name][..., 0].isnan()
        assert drawn.sum(-1).max() <= NULL_ROWS
        assert drawn[..., -1].all()
    assert not torch.equal(first["separability_null"].nan_to_num(), other["separability_null"].nan_to_num())
    low, high = first["separability_null_low"], first["separability_null_high"]
    assert (low <= high)[~low.isnan()].all()


def test_the_null_of_vectors_that_are_all_alike_is_the_row_itself() -> None:
    call = make_call(40, batch=1)
    call.value_BGKE.copy_(torch.ones(1))
    result = measure_vectors(call, [None], torch.tensor([39]), (4,), permutations=3)["model"]
    for name in ("separability_null", "separability_null_low", "separability_null_high"):
        torch.testing.assert_close(result[name], result["separability"])


def test_one_product_for_all_n_and_draws_equals_theory_for_each() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 5, generator=generator, dtype=torch.float64)
    x[4] = 0
    visible = torch.rand(3, 30, generator=generator) < 0.8
    visible[2] = torch.arange(30) >= 20
    weights = torch.where(visible, torch.rand(3, 30, generator=generator, dtype=torch.float64), 0.0)
    weights[2, 23:] = 0  # as the hidden keys before them
    sets = NestedSets.of(weights[None], x[None], visible[None], (1, 4, 9), weights.log()[None])
    ranked = sets.ranked_keys()
    targets = keys_by_rank(draw_permutations(visible[None], 4, generator), visible[None])[:, 0]
    shares = separability_and_null(sets, ranked, targets[None, :, None])[0, 1:]
    for draw, target in enumerate(targets):
        dealt = torch.zeros_like(weights).scatter(-1, target, weights.gather(-1, ranked[0]))
        for column, N in enumerate((1, 4, 9)):
            for kind, vectors in enumerate((x, on_sphere(x))):
                rows = select(dealt, vectors, N, visible)
                torch.testing.assert_close(shares[draw, :, kind, column], separability(rows))


def test_dealing_keeps_hidden_keys_in_place_and_every_weight() -> None:
    visible = torch.rand(2, 5, 40, generator=torch.Generator().manual_seed(0)) < 0.5
    targets = draw_permutations(visible, 3, torch.Generator().manual_seed(1))
    keys = torch.arange(40).expand(3, 2, 5, 40)
    assert torch.equal(targets.sort(-1).values, keys)
    assert torch.equal(targets[:, ~visible], keys[:, ~visible])
    assert not torch.equal(targets, keys)
    assert not torch.equal(targets[0], targets[1])


@pytest.mark.parametrize(
    "kind",
    [*(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("causal", "cache")), "mask per head", "left padding"],
)
def test_neither_threads_nor_the_size_of_the_blocks_matter(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = in_float64(CALLS[kind])
    rows = torch.arange(call.query_BHQD.shape[-2])[-NULL_ROWS:]

    def measure() -> dict[str, Tensor]:
        return measure_vectors(call, [None], rows, (2, 5), generator=torch.Generator().manual_seed(3), permutations=3)[
            "model"
        ]

    expected = measure()
    monkeypatch.setattr("attnorm.metrics.call.BLOCK_ELEMENTS", 50)
    monkeypatch.setattr("attnorm.metrics.vectors.NULL_ELEMENTS", 300)
    with torch_threads(2):
        found = measure()
    for name in (*NUMBERS, *NULLS):
        torch.testing.assert_close(found[name], expected[name], equal_nan=True)


def test_broken_rows_have_no_numbers() -> None:
    call = make_call(20, batch=1)
    call.key_BGKD[:, 0, 7] = math.nan
    result = measure_vectors(call, [None], torch.arange(20), (2,))["model"]
    assert result["d_tilde"][:, :2, 7:].isnan().all()
    assert result["d_tilde"][:, 2:, 7:].isfinite().all()
    assert result["separability_null"][:, 2:, -1].isfinite().all()
