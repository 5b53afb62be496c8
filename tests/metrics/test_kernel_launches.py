"""What the kernels of metrics are launched with: a kernel that only keeps its arguments takes their place."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import attnorm
from attnorm.engines.execution import HAS_TRITON
from attnorm.metrics import fused_maps, fused_rows, sampling
from attnorm.metrics import rows as rows_module
from attnorm.metrics.call import AttentionCall, Visibility, logit_blocks
from attnorm.metrics.fused_rows import _BLOCK, RowsLaunch, _counted, _run_on_rows, _tile
from attnorm.metrics.normalized import resolve_normalizers

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton, which runs on Linux alone")


class Kept:
    """A kernel that runs nothing."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            numbers = [*grid, *(one for one in constants.values() if not isinstance(one, str))]
            assert all(isinstance(one, int) for one in numbers), "Triton takes whole numbers"
            self.launches.append((grid, arguments, constants))

        return launch


def call_of(
    queries: int, keys: int, width: int = 16, *, dtype: torch.dtype = torch.float32, **options: Any
) -> AttentionCall:
    query = torch.zeros(2, 6, queries, width, dtype=dtype)
    key = torch.zeros(2, 3, keys, width, dtype=dtype)
    return AttentionCall(0, "decoder", query, key, key, 0.25, **{"causal": True, **options})


@pytest.mark.parametrize(
    ("dtype", "width", "tile"),
    [
        (torch.float32, 16, (64, 64, 4, 2)),
        (torch.float32, 64, (64, 64, 4, 2)),
        (torch.float32, 128, (32, 64, 4, 2)),
        (torch.bfloat16, 64, (64, 128, 4, 3)),
        (torch.float16, 128, (64, 128, 4, 3)),
        (torch.float16, 256, (64, 64, 4, 2)),
    ],
)
def test_tiles_by_dtype_and_width(dtype: torch.dtype, width: int, tile: tuple[int, ...]) -> None:
    assert _tile(dtype, width) == tile


@pytest.mark.parametrize(("rows", "programs"), [(1, 1), (64, 3), (65, 4)])
def test_a_thread_per_row_behind_the_sums(rows: int, programs: int) -> None:
    assert _BLOCK == 128
    kernel, sums, factor, output = Kept(), torch.zeros(5, 2, 3, rows), torch.ones(1), torch.ones(2)
    _run_on_rows(kernel, sums, factor, None, None, None, output, MORE=True)
    ((grid, arguments, constants),) = kernel.launches
    assert grid == (programs,) == (math.ceil(6 * rows / 128),)
    assert [one is sums for one in arguments[:5]] == [True, False, True, True, True]
    assert arguments[1] is factor
    assert arguments[5] is output
    assert arguments[6:] == (rows, 3, 6 * rows)
    assert constants == {
        "FACTORED": True, "SINK": False, "IMPROVE": False, "BLOCK": 128, "num_warps": 4, "MORE": True,
    }  # fmt: skip


def test_which_arguments_the_kernels_behind_the_sums_read() -> None:
    kernel, (sums, factor, sink, roots, poles) = Kept(), (torch.zeros(5, 2, 3, 4) for _ in range(5))
    _run_on_rows(kernel, sums, None, sink, roots, poles)
    _run_on_rows(kernel, sums, factor, None, roots, None)
    flags = [[constants[name] for name in ("FACTORED", "SINK", "IMPROVE")] for _, _, constants in kernel.launches]
    assert flags == [[False, True, True], [True, False, False]]
    assert kernel.launches[0][1][4] is poles


@pytest.mark.parametrize("more", [False, True])
def test_the_arrays_that_the_statistics_are_written_into(more: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnorm.kernels import statistics_from_sums
    from attnorm.kernels.statistics_from_sums import MORE_NUMBERS, NUMBERS, WIDE_NUMBERS

    kernel, sums = Kept(), torch.zeros(5, 2, 6, 4)
    monkeypatch.setattr(statistics_from_sums, "softmax_statistics", kernel)
    monkeypatch.setattr(RowsLaunch, "softmax_sums", lambda _: sums)
    monkeypatch.setitem(fused_rows.EXTRA_PASSES, torch.float32, 0)
    names = [NUMBERS[0], MORE_NUMBERS[0]] if more else [NUMBERS[0]]
    found = fused_rows.fused_rows(call_of(4, 4), torch.arange(4), names)
    assert list(found.values) == names
    ((_, arguments, constants),) = kernel.launches
    numbers, others, wide, n, broken = arguments[5:10]
    lengths = [len(NUMBERS), len(MORE_NUMBERS) if more else 0, len(WIDE_NUMBERS) if more else 0]
    assert [one.shape for one in (numbers, others, wide)] == [(length, 2, 6, 4) for length in lengths]
    assert [one.dtype for one in (others, wide, n, broken)] == [torch.float32, torch.float64, torch.int64, torch.uint8]
    assert n.shape == broken.shape == (2, 6, 4)
    assert constants["MORE"] is more


def test_a_metric_that_is_not_computed_is_named_with_the_place_to_add_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnorm.kernels import statistics_from_sums

    sums, call, rows = torch.zeros(9, 2, 6, 4), call_of(4, 4), torch.arange(4)
    for kernel in ("softmax_statistics", "weight_statistics", "softmax_root"):
        monkeypatch.setattr(statistics_from_sums, kernel, Kept())
    monkeypatch.setitem(fused_rows.EXTRA_PASSES, torch.float32, 0)
    with pytest.raises(NotImplementedError, match="'forgotten' in MORE_NUMBERS"):
        fused_rows.rows_of_sums(RowsLaunch.of(call, rows, None), sums, ["forgotten"], None)
    with pytest.raises(NotImplementedError, match="'forgotten' in MORE_WEIGHT_NUMBERS"):
        fused_maps._statistics_of_sums(call, rows, ["forgotten"], fused_maps.RowMap("relu"), sums)
    with pytest.raises(NotImplementedError, match="'forgotten' in _finish_statistics"):
        rows_module.measure_rows(call, [None], rows, (), names=["forgotten"])


def test_no_rows_launch_nothing() -> None:
    kernel = Kept()
    for shape in ((5, 0, 3, 4), (5, 2, 0, 4), (5, 2, 3, 0)):
        _run_on_rows(kernel, torch.zeros(shape), None, None, None, None)
    launch = RowsLaunch.of(call_of(4, 4), torch.zeros(0, dtype=torch.long), None)
    assert launch._run(kernel, 7).shape == (7, 2, 6, 0)
    mask = torch.ones(2, 1, 4, 4, dtype=torch.bool)
    assert _counted(mask, Visibility(mask, False, 4, 4), torch.zeros(0, dtype=torch.int32)).shape == (2, 1, 0)
    assert not kernel.launches


@pytest.mark.parametrize(
    ("dtype", "width", "padded", "tile"),
    [(torch.float32, 5, 16, (64, 64)), (torch.float32, 65, 128, (32, 64)), (torch.float16, 128, 128, (64, 128))],
)
def test_the_kernel_of_the_sums(dtype: torch.dtype, width: int, padded: int, tile: tuple[int, int]) -> None:
    kernel, call = Kept(), call_of(130, 137, width, dtype=dtype)
    out = RowsLaunch.of(call, torch.arange(130), None)._run(kernel, 3, in_levels=True)
    assert out.shape == (3, 2, 6, 130)
    assert out.dtype == torch.float32
    ((grid, arguments, constants),) = kernel.launches
    rows, keys = tile
    assert grid == (math.ceil(130 / rows) * 12,)
    q, key, mask, factor, numbers, target, *sizes = arguments
    assert q is call.query_BHQD is mask is factor
    assert key is call.key_BGKD
    assert numbers.tolist() == list(range(130))
    assert target is out
    strides = [6 * 130 * width, 130 * width, width, 3 * 137 * width, 137 * width, width, 0, 0, 0, 0]
    log2e = math.log2(math.e)
    assert sizes == [*strides, 6, 2, 130, 130, 137, 7, width, pytest.approx(log2e / 4), pytest.approx(log2e)]
    shared = {"CAUSAL": True, "MASKED": False, "CAPPED": False, "FACTORED": False, "ROWS": rows, "KEYS": keys}
    assert shared.items() <= constants.items()
    assert (constants["WIDTH"], constants["FULL"]) == (padded, width == padded)
    assert constants["LEVELS"] == round(math.log2(keys)) - 3
    assert constants["PRECISION"] in ("bf16x6", "ieee", "tf32")


def test_the_kernel_of_the_sums_of_some_rows_with_everything() -> None:
    mask = torch.ones(2, 1, 5, 7, dtype=torch.bool)
    call, factor = call_of(5, 7, softcap=30.0, mask=mask, causal=False), torch.full((2, 1, 1, 1), 3.0)
    kernel, rows = Kept(), torch.tensor([1, 4])
    launch = RowsLaunch.of(call, rows, factor)
    launch._run(kernel, 2, torch.zeros(1))
    ((grid, arguments, constants),) = kernel.launches
    assert grid == (12,)
    q, _, seen, scaled, numbers, _, _, *sizes = arguments
    assert torch.equal(q, call.query_BHQD[:, :, rows])
    assert seen.shape == (2, 6, 5, 7)
    assert scaled.tolist() == torch.full((2, 6, 2, 1), 3.0).tolist()
    assert numbers.tolist() == [1, 4]
    assert sizes[6:10] == [35, 0, 7, 1]
    assert sizes[10:17] == [6, 2, 2, 5, 7, 2, 16]
    assert sizes[18] == pytest.approx(30 * math.log2(math.e))
    flags = {"CAUSAL": False, "MASKED": True, "CAPPED": True, "FACTORED": True}
    assert flags.items() <= constants.items()
    assert "LEVELS" not in constants


@pytest.mark.parametrize(("rows", "programs"), [(1, 1), (16, 1), (17, 2)])
def test_the_kernel_that_counts_a_mask(rows: int, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnorm.kernels import statistics_from_sums

    kernel = Kept()
    monkeypatch.setattr(statistics_from_sums, "visible_keys", kernel)
    mask = torch.ones(2, 3, 1, 23, dtype=torch.bool)
    n = _counted(mask, Visibility(mask, True, 20, 23), torch.arange(rows, dtype=torch.int32))
    assert n.shape == (2, 3, rows)
    ((grid, arguments, constants),) = kernel.launches
    assert grid == (6 * programs,)
    assert arguments[3:] == (69, 23, 0, 1, 3, rows, 23, 3)
    assert constants == {"CAUSAL": True, "ROWS": 16, "KEYS": 256}


def visible(queries: int, keys: int, rows: list[int], causal: bool = True) -> Tensor:
    return fused_rows.visible_keys(call_of(queries, keys, causal=causal), torch.tensor(rows))


def test_visible_keys_without_a_mask() -> None:
    assert visible(5, 7, [0, 2, 4])[1, 5].tolist() == [3, 5, 7]
    assert visible(7, 5, [0, 1, 2, 6])[0, 0].tolist() == [0, 0, 1, 5]
    assert visible(5, 7, [0, 4], causal=False)[0, 0].tolist() == [7, 7]
    assert visible(5, 7, [0, 1, 2, 3, 4]).shape == (2, 6, 5)


@pytest.mark.parametrize("shares", [(), (0.1, 0.5, 0.9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kernels_of_the_quantiles(
    shares: tuple[float, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnorm.kernels import bin_quantiles

    ranges, statistics = Kept(), Kept()
    monkeypatch.setattr(bin_quantiles, "bin_ranges", ranges)
    monkeypatch.setattr(bin_quantiles, "bin_quantiles", statistics)
    numbers, ids = torch.zeros(6, 40, dtype=dtype), torch.zeros(2, 40, dtype=torch.int32)
    means, below, above, counts, members = sampling._by_kernel(numbers, ids, 3, shares)
    ((grid, arguments, constants),) = ranges.launches
    assert grid == (6,)
    assert arguments[0] is ids
    assert [t.shape for t in arguments[1:3]] == [(2, 3), (2, 3)]
    assert arguments[3:] == (40, 3)
    assert constants == {"BLOCK": sampling.RANGE_BLOCK}
    begin, end = arguments[1:3]
    ((grid, arguments, constants),) = statistics.launches
    assert grid == (18,)
    assert [one is other for one, other in zip(arguments, (numbers, ids, begin, end), strict=False)] == [True] * 4
    assert arguments[4].tolist() == [*shares]
    assert [one is other for one, other in zip(arguments[5:8], (members, counts, means), strict=True)] == [True] * 3
    assert arguments[10:] == (40, 3, 2, len(shares))
    assert constants == {
        "BITS": 32 if dtype == torch.float32 else 64, "OVER": -1, "SIZE": 1024, "LONG": False, "num_warps": 1,
    }  # fmt: skip
    assert (means.shape, means.dtype) == ((6, 3), torch.float64)
    assert counts.shape == members.shape == (6, 3)
    assert below.shape == above.shape == (6, 3, len(shares))
    assert below.dtype == above.dtype == torch.float64


@pytest.mark.parametrize("length", [1, 1024, 1025, 16384, 16385, 131072])
def test_each_bin_is_summarized_by_one_launch(length: int) -> None:
    launches = list(sampling._launches(length))
    for extent in (0, 1, 1024, 1025, 4096, 4097, 8192, 8193, 16384, 16385, length):
        taken = [longer or extent <= size for over, size, longer, _warps in launches if extent > over]
        assert sum(taken) == 1 or extent > length


def test_triton_takes_powers_of_two() -> None:
    sizes = (*itertools.chain(*sampling.KEPT, sampling.KEPT_OF_LONGER), sampling.RANGE_BLOCK)
    for size in (*sizes, fused_rows._BLOCK, *fused_rows._MASK_TILE):
        assert size.bit_count() == 1


@pytest.mark.parametrize(
    ("logits", "mass_rows", "measured"),
    [
        (2**23, None, 20),
        (2**23, 256, 10),
        (2**23, 4, 4),
        (115, 256, 5),
        (23 * 5 - 1, 256, 4),
        (23, 3, 1),
        (22, 3, 1),
    ],
)
def test_of_how_many_rows_the_heaviest_keys_are_summed(
    logits: int, mass_rows: int | None, measured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (fused_rows.MASS_ROWS, fused_rows.MASS_LOGITS) == (256, 256 * 32_768)
    monkeypatch.setattr(fused_rows, "MASS_LOGITS", logits)
    n = torch.full((2, 6, 20), 23)
    numbers = fused_rows.FusedRows(n, {}, torch.zeros(2, 6, 20), torch.zeros(2, 6, 20, dtype=torch.bool))
    monkeypatch.setattr(fused_rows, "fused_rows", lambda *_: numbers)
    seen: list[Tensor] = []

    def masses(call: AttentionCall, rows: Tensor, some: Tensor, *_: Any) -> list[Tensor]:
        seen.append(some)
        return [torch.zeros(2, 6, 20, 1)]

    monkeypatch.setattr(rows_module, "_top_masses", masses)
    call = call_of(20, 23)
    rows_module.measure_by_kernel(call, resolve_normalizers(call, [None]), torch.arange(20), (1,), (), mass_rows)
    (some,) = seen
    assert len(some) == measured
    assert some[-1] == 19
    assert mass_rows is None or some[0] >= 10


@pytest.mark.parametrize("heads", [1, 2, 6])
@pytest.mark.parametrize("per_head", [False, True])
def test_factors_are_made_from_the_keys_that_each_head_sees(heads: int, per_head: bool) -> None:
    mask = torch.ones(2, heads if per_head else 1, 5, 7, dtype=torch.bool)
    query, key = torch.zeros(2, heads, 5, 16), torch.zeros(2, 1, 7, 16)
    call = AttentionCall(0, "decoder", query, key, key, 0.25, causal=False, mask=mask)
    blocks: list[Any] = []

    class Counts:
        def factor(self, call: AttentionCall, block: Any) -> Tensor:
            blocks.append(block)
            return block.n[..., None].double() * torch.ones(heads, 1, 1)

    n = torch.arange(2 * heads * 3).reshape(2, heads, 3)
    rows = torch.tensor([0, 2, 4])
    found = fused_rows.factors(Counts(), call, rows, n)  # type: ignore[arg-type]
    own = per_head and heads > 1
    expected = n if own else n[:, :1].expand(2, heads, 3)
    assert found.shape == (2, heads, 3, 1)
    assert torch.equal(found[..., 0], expected.double())
    for item, block in enumerate(blocks):
        assert block.n.shape == (heads if own else 1, 3)
        assert (block.item, block.heads, block.rows, block.first_key) == (item, slice(0, heads), slice(0, 3), 0)
        assert block.queries.tolist() == [0, 2, 4]
        assert block.logits.shape == (heads, 3, 0)


def test_a_normalizer_without_rules_has_no_factor() -> None:
    call = call_of(5, 7)
    (block, *_) = logit_blocks(call, torch.arange(5))
    for name, has in (("softmax", False), ("ssmax", True), ("sink", False)):
        (one,) = resolve_normalizers(call, [name])
        assert (one.factor(call, block) is not None) is has
    (model,) = resolve_normalizers(call, [None])
    assert model.factor(call, block) is None


def test_a_normalizer_of_the_user_is_copied_to_the_device_of_the_call_and_stays_where_it_is() -> None:
    own, there = attnorm.get("ssmax", heads=6), torch.device("meta")
    call = replace(call_of(5, 7), query_BHQD=torch.empty(2, 6, 5, 8, device=there))
    for choice, running in ((own, None), (None, own)):
        (one,) = resolve_normalizers(replace(call, normalizer=running), [choice])
        assert {tensor.device for tensor in one.normalizer.parameters()} == {there}
    assert {tensor.device.type for tensor in own.parameters()} == {"cpu"}
    (here,) = resolve_normalizers(call_of(5, 7), [own])
    assert here.normalizer is own


def test_without_sizes_no_masses_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    n = torch.full((2, 6, 5), 7)
    numbers = fused_rows.FusedRows(n, {}, torch.zeros(2, 6, 5), torch.zeros(2, 6, 5, dtype=torch.bool))
    monkeypatch.setattr(fused_rows, "fused_rows", lambda *_: numbers)
    call = call_of(5, 7)
    (found,) = rows_module.measure_by_kernel(call, resolve_normalizers(call, [None]), torch.arange(5), ()).values()
    assert found.top_mass.shape == (2, 6, 5, 0)
