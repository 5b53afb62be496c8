"""Means and quantiles over the rows of a bin, per head."""

import math

import numpy as np
import pytest
import torch

from attnorm.engines.execution import HAS_TRITON, arrival
from attnorm.metrics import sampling
from attnorm.metrics.sampling import QUANTILES, _summarize_on_device, summarize, summarize_all

BINS = [(5, 8), (1, 4), (100, 200)]


def _rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 3, 8, generator=generator)
    n = torch.arange(1, 9).expand(2, 3, 8)
    return values, n, torch.zeros(2, 3, 8, dtype=torch.bool)


def test_mean_and_quantiles_are_those_of_numpy() -> None:
    values, n, broken = _rows()
    found = summarize(values, n, BINS, broken)
    for head in range(3):
        inside = values[:, head, 4:].flatten().double().numpy()
        assert np.isclose(found.mean[head, 0], inside.mean())
        assert np.allclose(found.quantiles[head, 0], np.quantile(inside, [0.05, 0.25, 0.5, 0.75, 0.95]))
    assert (found.rows == [8, 8, 0]).all()
    assert np.isnan(found.mean[:, 2]).all()
    assert np.isnan(found.quantiles[:, 2]).all()


def test_undefined_and_broken_rows_are_left_out() -> None:
    values, n, broken = _rows()
    clean = summarize(values[..., :6], n[..., :6], BINS, broken[..., :6])
    values[0, 1, 6] = values[1, :, 6:] = values[0, :, 7] = math.nan
    values[0, [0, 2], 6] = 1e9
    broken[0, :, 6] = True
    found = summarize(values, n, BINS, broken)
    assert np.allclose(found.mean[:, 0], clean.mean[:, 0])
    assert np.allclose(found.quantiles[:, 0], clean.quantiles[:, 0])
    assert (found.rows[:, 0] == 7).all()


def test_infinite_values_stay_infinite_and_do_not_turn_into_nan() -> None:
    values = torch.tensor([[[1.0, 2.0, math.inf, math.inf]]])
    found = summarize(values, torch.full((1, 1, 4), 3), [(1, 4)], torch.zeros(1, 1, 4, dtype=torch.bool))
    assert found.mean[0, 0] == math.inf
    assert found.quantiles[0, 0, 0] < 2
    assert found.quantiles[0, 0, -1] == math.inf
    assert not np.isnan(found.quantiles).any()


def test_many_at_once_equal_one_at_a_time() -> None:
    values, n, broken = _rows()
    broken[1, 2, 5] = True
    together = summarize_all({"a": values, "b": -values}, n, BINS, broken)
    for name, sign in (("a", 1), ("b", -1)):
        alone = summarize(sign * values, n, BINS, broken)
        np.testing.assert_array_equal(together[name].mean, alone.mean)
        np.testing.assert_array_equal(together[name].quantiles, alone.quantiles)
        np.testing.assert_array_equal(together[name].rows, alone.rows)


@pytest.mark.parametrize(
    ("dtype", "kernel"),
    [
        (torch.float32, True),
        (torch.float64, False),
        pytest.param(torch.float64, True, marks=pytest.mark.nightly),
        pytest.param(torch.float32, False, marks=pytest.mark.nightly),
    ],
)
def test_the_device_form_gives_the_same_numbers(
    dtype: torch.dtype, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel and not HAS_TRITON:
        pytest.skip("needs Triton, which runs on Linux alone")
    monkeypatch.setattr(sampling, "runs_triton", lambda device: kernel)
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(2, 3, 50, generator=generator, dtype=dtype)
    values[values > 1.5] = math.nan
    values[0, 1, 40:43] = math.inf
    values[1, 0, 37:41] = values[1, 0, 36]  # ties
    values[0, 0, 12] = -0.0
    values[:, 2, 30:] = math.nan  # a bin without numbers
    n = torch.arange(1, 51).expand(2, 3, 50)
    broken = torch.rand(2, 3, 50, generator=generator) < 0.1
    bins = [(36, 50), (26, 35), (9, 25), (60, 70)]
    given = {"a": values, "b": -values}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    there = {name: value.to(device) for name, value in given.items()}
    for quantiles in (QUANTILES, ()):
        expected = summarize_all(given, n, bins, broken, quantiles=quantiles)
        found = _summarize_on_device(there, n.to(device), bins, broken.to(device), quantiles)
        arrival(device)()
        for name in given:
            np.testing.assert_array_equal(found[name].rows, expected[name].rows)
            np.testing.assert_allclose(found[name].quantiles, expected[name].quantiles, rtol=1e-12)
            np.testing.assert_allclose(found[name].mean, expected[name].mean, rtol=1e-12)


@pytest.mark.filterwarnings("ignore:invalid value encountered in reduce:RuntimeWarning")
@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton, which runs on Linux alone")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kernel_finds_the_numbers_beside_a_quantile_exactly(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "KEPT", ((16, 1), (32, 1)))
    monkeypatch.setattr(sampling, "KEPT_OF_LONGER", (16, 1))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    extents, shares = (16, 17, 32, 33, 50, 1, 0), (0.3, 1.0)
    ids = torch.repeat_interleave(torch.arange(len(extents)), torch.tensor(extents)).int()[None]
    generator = torch.Generator().manual_seed(2)
    random = torch.randn(ids.shape[1], generator=generator, dtype=dtype)
    infinite = torch.where(random > 0.5, math.inf, random)
    missing = torch.where(random.abs() < 0.4, math.nan, infinite)
    missing[:4] = -math.inf
    zeros = torch.where(random > 0, 0.0, -0.0).to(dtype)
    close = 1 + (random * 20).round() * torch.finfo(dtype).eps  # in float64 they agree in their upper 32 bits
    numbers = torch.stack([missing, zeros, close, (random > 0).to(dtype), torch.full_like(random, -3.0)])
    _mean, below, above, count, _members = sampling._by_kernel(numbers.to(device), ids.to(device), len(extents), shares)
    assert count[0].tolist() == [int((~missing[ids[0] == index].isnan()).sum()) for index in range(len(extents))]
    for row, index in np.ndindex(len(numbers), len(extents)):
        inside = numbers[row, ids[0] == index]
        ordered = sorted(inside[~inside.isnan()].tolist(), key=lambda number: (number, math.copysign(1.0, number)))
        for place, share in enumerate(shares if ordered else ()):
            rank = int(share * (len(ordered) - 1))
            expected = [ordered[rank], ordered[min(rank + 1, len(ordered) - 1)]]
            found = [float(below[row, index, place]), float(above[row, index, place])]
            assert str(found) == str(expected)  # -0.0 is not 0.0 here
