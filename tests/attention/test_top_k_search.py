"""The search of the k-th largest logit, on a GPU or in the interpreter: it separates the k largest from the others."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnorm.engines import one_pass_operators
from attnorm.kernels import extremes
from attnorm.normalizers.topk import TopK
from tests.attention.kernel_calls import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")

BY_PASSES = 10**6  # a bound on k beyond which kernels/extremes.py searches alone
AT_NIGHT = [(1, BY_PASSES), (64, 64), (250, BY_PASSES)]


def found_above_cutoff(
    z: Tensor, k: Tensor | int, most: int, visible: Tensor | None = None, factor: Tensor | None = None, **options: Any
) -> Tensor:
    """Which logits z (rows, keys) exceed or equal what the search finds for each row."""
    rows = z.shape[0]
    q, keys = torch.eye(rows, dtype=z.dtype, device=DEVICE)[None, None], z.T[None, None].contiguous().to(DEVICE)
    wanted = torch.as_tensor(k, dtype=torch.int32, device=DEVICE).expand(1, 1, rows)
    mask = None if visible is None else visible[None, None].to(DEVICE)
    numbers = None if factor is None else factor[None, None].to(DEVICE)
    cutoff: Tensor = one_pass_operators.top_k_cutoff(
        q, keys, mask, numbers, wanted, most, options.get("softcap"), options.get("causal", False),
        options.get("window"), 1 / math.log2(math.e),  # so that logits in bits are those given
    )  # fmt: skip
    logits = z if factor is None else z * factor[:, None]
    return (logits >= cutoff[0, 0, :, None].cpu()) & logits.isfinite()


def kept(z: Tensor, k: Tensor | int, visible: Tensor) -> Tensor:
    """The k largest visible logits of each row, and those equal to the smallest of them."""
    count = torch.as_tensor(k).expand(z.shape[0]).minimum(visible.sum(-1)).clamp(min=1)
    kth = torch.where(visible, z, -math.inf).sort(descending=True).values.gather(-1, count[:, None] - 1)
    return visible & (z >= kth)


def hard_rows(keys: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(keys, generator=generator)
    normal = torch.randn(keys, generator=generator)
    index = torch.arange(keys)
    small = 1e-39 if DEVICE == "cpu" else 1e-30  # a GPU adds products of parts, and bfloat16 has none below 1e-40
    return torch.stack([
        normal, torch.zeros(keys), (5 * uniform).floor(), 2.0**20 * index, -(2.0**20) * index,
        torch.exp(40 * uniform - 20), -torch.exp(20 * uniform), 1 / (uniform - 0.5), 1e4 + uniform,
        normal + 100.0 * (index % 32 == 5), normal + 100.0 * (index >= keys - 150), 1e30 * normal, small * normal,
        torch.full((keys,), -3e38), 1.0 * (uniform > 0.5), (1e3 * uniform).round(),
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("k", "most"),
    [(1, 64), (33, 64), (33, BY_PASSES), *(pytest.param(*both, marks=pytest.mark.nightly) for both in AT_NIGHT)],
)
def test_the_top_k_are_found_in_rows_that_are_hard_to_search(k: int, most: int) -> None:
    """Equal logits, logits far from 0, outliers, exponents far apart, all large ones in one lane, fewer than k keys."""
    for keys in (700, 20):
        z = hard_rows(keys)
        assert torch.equal(found_above_cutoff(z, k, most), kept(z, k, torch.ones_like(z, dtype=torch.bool)))


@pytest.mark.parametrize("most", [64, BY_PASSES])
def test_the_top_k_of_the_visible_keys_are_found(most: int) -> None:
    z = hard_rows(530)
    rows, keys = z.shape
    i, j = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)
    some = torch.rand(rows, keys, generator=torch.Generator().manual_seed(1)) > 0.5
    some[9], some[3] = j % 32 == 5, False  # row 9 sees one lane, row 3 nothing
    causal = (j <= i).expand(rows, keys)
    for window in (None, 100, 5):
        visible = causal if window is None else causal & (j > i - window)
        assert torch.equal(found_above_cutoff(z, 7, most, causal=True, window=window) & visible, kept(z, 7, visible))
    assert torch.equal(found_above_cutoff(z, 20, most, some) & some, kept(z, 20, some))


def test_a_factor_and_a_count_of_each_row() -> None:
    z = hard_rows(300)
    z = z[z.abs().amax(-1) < 1e20]
    factor = torch.linspace(-2, 2, len(z))
    factor[1] = 0.0
    k = torch.arange(1, len(z) + 1, dtype=torch.int32)
    expected = kept(z * factor[:, None], k, torch.ones_like(z, dtype=torch.bool))
    assert torch.equal(found_above_cutoff(z, k, 64, None, factor), expected)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 64), st.integers(1, 600), st.sampled_from([1.0, 3.0, 300.0, 1e9]))
def test_the_top_k_of_any_rows(seed: int, k: int, keys: int, digits: float) -> None:
    """Rows of rounded numbers, which have more or fewer equal ones, some of them gathered in a few lanes."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(16, keys, generator=generator)
    z += 9.0 * (torch.rand(16, 1, generator=generator) > 0.5) * (torch.arange(keys) % 32 < 2)
    z = (z * digits).round() / digits
    visible = torch.rand(16, keys, generator=generator) < torch.rand(16, 1, generator=generator)
    assert torch.equal(found_above_cutoff(z, k, 64, visible) & visible, kept(z, k, visible))


def test_rows_of_normal_logits_are_found_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """`kth_of_lost_rows` has to search the others: rows where one lane has many of the largest logits."""
    left: list[Tensor] = []
    launch = extremes.search

    def launch_and_look(kernel: Any, *arguments: Any, **constants: Any) -> None:
        launch(kernel, *arguments, **constants)
        if "FAST" in constants:
            left.append(~arguments[1][2].isnan()[0, 0].cpu())

    monkeypatch.setattr(extremes, "search", launch_and_look)
    monkeypatch.setattr(extremes, "lists_tile", lambda q: (64, 128, 4, 2))
    z = torch.randn(16, 1500, generator=torch.Generator().manual_seed(0))
    z[3] += 100.0 * (torch.arange(1500) % 32 == 5)
    z[7] = 1.0
    found_above_cutoff(z, 32, 64)
    assert left[0].nonzero()[:, 0].tolist() == [3, 7]


IN_THE_INTERPRETER = pytest.mark.skipif(DEVICE == "cuda", reason="a GPU gets the other tile")


@pytest.mark.parametrize("tile", [(64, 128, 4, 3), pytest.param((64, 256, 8, 2), marks=IN_THE_INTERPRETER)])
def test_many_rows_with_their_largest_logits_in_one_lane(
    tile: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than a program searches at once, between others."""
    monkeypatch.setattr(extremes, "lists_tile", lambda q: tile)
    rows, keys = torch.arange(120)[:, None], torch.arange(520)
    z = torch.randn(120, 520, generator=torch.Generator().manual_seed(0))
    z += 100.0 * ((keys % 32 == rows % 32) & (rows % 3 != 0))
    z = z.half()  # float32 needs more shared memory than a GPU has
    for options, visible in (({}, keys < 520), ({"causal": True}, keys <= rows + 400)):
        expected = kept(z, 20, visible.expand(120, 520))
        assert torch.equal(found_above_cutoff(z, 20, 64, **options) & visible, expected)


def test_a_bound_on_k_chooses_the_kernel() -> None:
    assert TopK(7).most(10_000) == 7
    for rule, keys in (("log", 2**30), ("sqrt", 4096)):
        visible = torch.tensor([keys])
        assert TopK(rule).counts(visible) <= TopK(rule).most(keys) <= extremes.MOST_LISTED
    assert TopK("sqrt").most(4097) == TopK(lambda n: n / 2).most(4097) == 4097
