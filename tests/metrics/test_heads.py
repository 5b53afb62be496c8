"""Isotropy of the vectors, sensitivity against temperature, coverage of the heads together, the heaviest keys."""

import math
from dataclasses import replace

import pytest
import torch

from attnorm.engines.execution import torch_threads
from attnorm.metrics import sensitivity, vectors
from attnorm.metrics.call import LogitBlock
from attnorm.metrics.normalized import rows_block
from attnorm.metrics.row_statistics import heaviest, masses
from attnorm.metrics.sensitivity import measure_sensitivity
from attnorm.metrics.vectors import PAIRED_VECTORS, isotropy, measure_vectors
from attnorm.normalizers import get
from attnorm.normalizers.contract import Normalizer
from attnorm.theory.gradient import finite_difference_gain
from tests.metrics import reference
from tests.metrics.calls import CALLS, HEADS, KEY_HEADS, make_call
from tests.metrics.layer_coverage import measure_coverage
from tests.metrics.test_rows import in_float64, one_row


def test_isotropy_of_an_orthonormal_set() -> None:
    found = isotropy(torch.eye(6)[None, None])
    torch.testing.assert_close(found.mean_cosine, torch.zeros(1, 1))
    torch.testing.assert_close(found.effective_rank, torch.full((1, 1), 6.0))
    torch.testing.assert_close(found.smallest_distance, torch.full((1, 1), math.sqrt(2)))


def test_isotropy_of_repeated_vectors() -> None:
    found = isotropy(torch.tensor([3.0, 4.0]).expand(1, 2, 9, 2))
    torch.testing.assert_close(found.mean_cosine, torch.ones(1, 2))
    torch.testing.assert_close(found.effective_rank, torch.ones(1, 2))
    assert (found.smallest_distance == 0).all()


def test_isotropy_counts_only_what_is_visible() -> None:
    x = torch.randn(2, 3, 40, 5, generator=torch.Generator().manual_seed(0))
    visible = torch.arange(40) < 25
    hidden = torch.where(visible[:, None], x, math.nan)
    expected, found = isotropy(x[:, :, :25]), isotropy(hidden, visible)
    for name in ("mean_cosine", "effective_rank", "smallest_distance"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))
    assert isotropy(x, torch.arange(40) < 1).mean_cosine.isnan().all()


def test_isotropy_against_all_pairs() -> None:
    x = torch.randn(1, 1, 60, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[0, 0, 17] = x[0, 0, 3] + 1e-9
    pairs = torch.ones(60, 60, dtype=torch.bool).triu(1)
    units = x[0, 0] / x[0, 0].norm(dim=-1, keepdim=True)
    C = x[0, 0].T @ x[0, 0]
    found = isotropy(x)
    torch.testing.assert_close(found.mean_cosine[0, 0], (units @ units.T)[pairs].mean())
    torch.testing.assert_close(found.effective_rank[0, 0], C.trace() ** 2 / (C @ C).trace())
    smallest = (x[0, 0, 17] - x[0, 0, 3]).norm() / x.norm(dim=-1).mean()
    torch.testing.assert_close(found.smallest_distance[0, 0], smallest, rtol=1e-6, atol=0.0)


def test_isotropy_of_many_vectors_samples_the_pairs_reproducibly() -> None:
    x = torch.randn(1, 2, 3 * PAIRED_VECTORS, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(isotropy(x).smallest_distance, isotropy(x).smallest_distance)
    assert (isotropy(x).smallest_distance > 0).all()


@pytest.mark.parametrize("choice", [None, "entmax15", "sigmoid", "softpick"])
def test_sensitivity_against_temperature(choice: str | None) -> None:
    call = in_float64(CALLS["sinks" if choice is None else "causal"])
    rows, temperatures = torch.tensor([0, 10, 32]), (0.5, 1.0, 3.0)
    normalizer = None if choice is None else get(choice)
    assert normalizer is None or isinstance(normalizer, Normalizer)
    (found,) = measure_sensitivity(call, [choice], rows, temperatures, (1e-3, 10.0)).values()
    assert set(found) == {"jacobian_norm", "bound", "gain_0.001", "gain_10"}
    for column, temperature in enumerate(temperatures):
        cooled = make_call(scale=call.scale / temperature, sinks_H=None if choice else CALLS["sinks"].sinks_H)
        expected = reference.jacobian_norm(in_float64(cooled), normalizer, 1, 2, 32) / temperature
        assert float(found["jacobian_norm"][1, 2, 2, column]) == pytest.approx(expected, rel=1e-5)
    norm, bound = found["jacobian_norm"], found["bound"]
    assert (norm <= bound * (1 + 1e-9))[~bound.isnan()].all()
    for eps in (1e-3, 10.0):
        gain = found[f"gain_{eps:g}"]
        assert gain.isfinite().all()
        if choice != "softpick":
            assert (gain <= bound.clamp(max=math.sqrt(2) / eps if choice != "sigmoid" else math.inf) + 1e-9).all()
    assert (found["gain_0.001"] <= norm * 1.05 + 1e-9)[~norm.isnan()].all()


@pytest.mark.parametrize("choice", [None, "entmax15"])
def test_small_steps_lose_no_digits_in_float32(choice: str | None) -> None:
    """Logits and temperatures that float32 holds exactly: each error left is one of the step, and has a bound.

    Up to 0.01 steps are taken in float64. What remains is a factor: the length of a float32 direction over 33 keys,
    and a few roundings after it. A larger step rounds the moved logits z, by d <= u max|z|; dividing by T is exact.
    Weights then err by J d / T, J d = s (d - mean d) with |s|^2 <= 1 for softmax (s = p) and entmax15 (s^2 = p), so by
    at most 2 max|d| / T, and by a few roundings of their own.
    """
    call = make_call(width=16)  # scale 1/4
    call = replace(call, query_BHQD=_sixteenths(call.query_BHQD), key_BGKD=_sixteenths(call.key_BGKD))
    rows, T, steps = torch.tensor([10, 32]), torch.tensor([0.125, 1.0]), (10.0, 1e-3, 0.1)
    found, expected = (
        measure_sensitivity(one, [choice], rows, T.tolist(), steps, torch.Generator().manual_seed(0))[choice or "model"]
        for one in (call, in_float64(call))
    )
    u = torch.finfo(torch.float32).eps / 2
    error = {eps: (found[f"gain_{eps:g}"].double() - expected[f"gain_{eps:g}"]).abs() for eps in steps}
    assert (error[1e-3] <= (33 + 4) * u * expected["gain_0.001"] + 1e-12).all()  # float64 itself: 1e-16 / 1e-3
    keys = call.key_BGKD.repeat_interleave(HEADS // KEY_HEADS, 1)
    largest = float((call.scale * call.query_BHQD[:, :, rows] @ keys.mT).abs().amax())
    for eps in (0.1, 10.0):
        assert (error[eps] <= 2 * u * ((largest + eps) / T + 4) / eps).all()


def _sixteenths(x: torch.Tensor) -> torch.Tensor:
    """So few digits that float32 adds products without rounding, in any order."""
    return (16 * x).round() / 16


def test_gains_are_the_finite_differences_in_the_direction_drawn_for_the_row() -> None:
    call = in_float64(make_call(7, 19, batch=1, causal=False, kind="cross"))
    rows, temperatures, epsilons = torch.tensor([1, 4]), (0.5, 2.0), (1e-3, 10.0)
    found = measure_sensitivity(call, [None], rows, temperatures, epsilons, torch.Generator().manual_seed(2))["model"]
    generator = torch.Generator().manual_seed(2)
    directions = torch.stack([torch.randn(HEADS, 19, generator=generator) for _ in rows], 1).double()
    logits = call.scale * call.query_BHQD[0, :, rows] @ call.key_BGKD[0].repeat_interleave(HEADS // KEY_HEADS, 0).mT
    for column, temperature in enumerate(temperatures):
        for eps in epsilons:
            expected = finite_difference_gain(
                lambda z: z.softmax(-1), logits, eps, temperature=temperature, directions=directions[None]
            )
            torch.testing.assert_close(found[f"gain_{eps:g}"][0, ..., column], expected[0], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("causal", "window")),
        "left padding",
        "mask per head",
    ],
)
def test_sensitivity_depends_on_neither_threads_nor_the_size_of_the_blocks(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, rows = in_float64(CALLS[kind]), torch.arange(2, 30, 3)

    def measure() -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(4)
        return measure_sensitivity(call, [None, "ssmax"], rows, (0.5, 1.0, 4.0), (0.1,), generator)["ssmax"]

    expected = measure()
    monkeypatch.setattr("attnorm.metrics.call.BLOCK_ELEMENTS", 50)
    with torch_threads(2):
        found = measure()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, equal_nan=True)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_blocks_are_smaller_where_more_arrays_like_the_logits_are_made(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sensitivity: one array for each step and one without; vectors on a GPU: two in float64 for every N."""
    asked: list[int] = []
    for module in (sensitivity, vectors):
        monkeypatch.setattr(module, "runs_asynchronously", lambda _: on_gpu)
        monkeypatch.setattr(module, "logit_blocks", lambda *_, copies, **__: asked.append(copies) or iter(()))
    call, rows = make_call(9, batch=1), torch.arange(9)
    measure_sensitivity(call, [None], rows, (0.5, 1.0), (0.1, 0.2, 0.4))
    measure_vectors(call, [None], rows, (1, 2, 3))
    assert asked == [4 if on_gpu else 8, 6 if on_gpu else 1]


def test_sensitivity_of_rows_that_see_nothing_or_are_broken_is_undefined() -> None:
    found = measure_sensitivity(CALLS["left padding"], [None], torch.tensor([0, 10]), (1.0,), (0.1,))["model"]
    assert all(value[0, :, 0].isnan().all() and value[0, :, 1].isfinite().all() for value in found.values())
    call = make_call(9, batch=1)
    call.key_BGKD[:, :, 4] = math.nan
    found = measure_sensitivity(call, [None], torch.tensor([3, 4]), (1.0,), (0.1,))["model"]
    assert all(value[..., 0, :].isfinite().all() and value[..., 1, :].isnan().all() for value in found.values())


def test_coverage_of_heads_that_select_the_same_and_of_heads_that_do_not() -> None:
    call = make_call(16, batch=1, causal=False, size=0.0)
    rows = torch.tensor([15])
    call.key_BGKD[:] = torch.eye(16, 8)[None, None]
    call.query_BHQD[:, :, 15] = 10 * torch.eye(8)[0]
    alike = measure_coverage(call, [None], rows, (1,))["model"]
    assert (float(alike.per_head), float(alike.union)) == pytest.approx((1 / 16, 1 / 16))
    assert float(alike.independent) == pytest.approx(1 - (15 / 16) ** HEADS)
    call.query_BHQD[:, :, 15] = 10 * torch.eye(8)[:HEADS]
    apart = measure_coverage(call, [None], rows, (1,))["model"]
    assert float(apart.union) == pytest.approx(HEADS / 16)
    assert apart.rows == 1
    decoding = measure_coverage(replace(call, query_BHQD=call.query_BHQD[:, :, 15:]), [None], torch.tensor([0]), (1,))
    assert float(decoding["model"].independent) == pytest.approx(1 - (15 / 16) ** HEADS)


def test_a_block_has_a_mask_unless_all_its_rows_see_all_its_keys() -> None:
    call, queries = make_call(3, batch=1), torch.arange(2)

    def mask(common: int, tail: list[list[bool]]) -> torch.Tensor | None:
        last = torch.tensor([tail]).reshape(1, 2, 3 - common)
        n = common + last.sum(-1)
        block = LogitBlock(torch.zeros(1, 2, 3), common, last, n, 0, slice(0, 1), slice(0, 2), queries, 0)
        return rows_block(call, block).mask

    assert mask(3, [[], []]) is None
    found = mask(2, [[True], [False]])  # two rows, and two keys that both see
    assert found is not None
    assert found[0, 0].tolist() == [[True, True, True], [True, True, False]]


def test_coverage_counts_no_key_without_weight() -> None:
    call = one_row([10.0, 0.0, 0.0, 0.0])
    found = measure_coverage(call, [None, "sparsemax"], torch.tensor([0]), (3, 100))
    assert found["sparsemax"].per_head.tolist() == pytest.approx([0.25, 0.25])
    assert found["model"].per_head.tolist() == pytest.approx([0.75, 1.0])


@pytest.mark.parametrize("count", [1, 5, 37, 100])
def test_the_heaviest_are_those_of_a_sort(count: int) -> None:
    rows = torch.randn(6, 37, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    before = rows.clone()
    assert torch.equal(heaviest(rows, count), rows.sort(-1, descending=True).values[:, :count])
    assert torch.equal(rows, before)


def test_masses_of_more_keys_than_there_are_is_the_whole() -> None:
    weights = torch.tensor([[0.1, 0.6, 0.3]])
    torch.testing.assert_close(masses(weights, (1, 2, 50)), torch.tensor([[0.6, 0.9, 1.0]]))
