"""The check of every kernel that the tests on a GPU compile finds reductions over scattered lanes, and no others."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.miscompiled_reductions import lane_and_warp_bases, refuse_scattered, scattered_reductions

KERNEL = """\
#blocked = #ttg.blocked<{sizePerThread = [1, 4], threadsPerWarp = [2, 16], warpsPerCTA = [4, 1], order = [1, 0]}>
#linear = #ttg.linear<{register = [[4, 0, 0]], lane = [[0, 1, 0], [0, 0, 1], [0, 0, 2], [0, 2, 0], [0, 4, 0]], warp = [[1, 0, 0], [2, 0, 0]], block = []}>
#linear1 = #ttg.linear<{register = [[0, 2]], lane = [[1, 0], [2, 0], [4, 0], [8, 0], [0, 1]], warp = [[0, 4], [16, 0], [0, 8]], block = []}>
#linear2 = #ttg.linear<{register = [], lane = [[1, 0], [0, 1], [0, 2], [2, 0], [4, 0]], warp = [[0, 4]], block = []}>
#mma = #ttg.nvidia_mma<{versionMajor = 3, versionMinor = 0, warpsPerCTA = [4, 1], instrShape = [16, 64, 16]}>
#loc = loc("/here/kernels/sums.py":92:0)
#loc2 = loc("/usr/lib/triton/language/standard.py":293:36)
#loc3 = loc("/here/kernels/sums.py":247:12)
#loc4 = loc(callsite(#loc2 at #loc3))
#loc5 = loc("sums"(#loc4))
    %sums = "tt.reduce"(%x) <{axis = AXIS : i32}> ({
    ^bb0(%a: f32 loc(callsite(#loc2 at #loc5)), %b: f32 loc(callsite(#loc2 at #loc5))):
      %c = arith.addf %a, %b : f32 loc(#loc4)
      tt.reduce.return %c : f32 loc(#loc5)
    }) : (SOURCE) -> tensor<4xf32> loc(#loc5)
"""  # noqa: E501

CASES = {  # source, axis, whether Triton 3.6 reduces other numbers
    "lanes 0, 3 and 4": ("tensor<8x8x4xf32, #linear>", 1, True),
    "lanes 1 and 2": ("tensor<8x8x4xf32, #linear>", 2, False),
    "of these, 3 and 4 hold the same": ("tensor<8x2x4xf32, #linear>", 1, False),
    "lanes 1 and 2, of which a part of the first writes": ("tensor<8x8xf32, #linear2>", 1, True),
    "lanes 1 and 2 of one warp": ("tensor<8x4xf32, #linear2>", 1, False),
    "warps 0 and 2": ("tensor<32x16xf32, #linear1>", 1, True),
    "warp 1": ("tensor<32x16xf32, #linear1>", 0, True),
    "warp 0, 2 holds the same": ("tensor<32x8xf32, #linear1>", 1, False),
    "lanes 2 to 4": ("tensor<64x64xf32, #mma>", 0, False),
    "lanes 2 to 4 of a slice": ("tensor<64xf32, #ttg.slice<{dim = 1, parent = #mma}>>", 0, False),
    "two sources": ("tensor<8x64xf32, #blocked>, tensor<8x64xi32, #blocked>", 1, False),
}


def kernel(source: str, axis: int) -> str:
    return KERNEL.replace("AXIS", str(axis)).replace("SOURCE", source)


@pytest.mark.parametrize("case", CASES)
def test_reductions_over_scattered_bits_are_found(case: str) -> None:
    source, axis, scattered = CASES[case]
    assert len(scattered_reductions(kernel(source, axis))) == scattered


def test_an_error_names_the_kernel_and_its_line(tmp_path: Path) -> None:
    path = tmp_path / "map_sums.ttgir"
    path.write_text(kernel("tensor<8x8x4xf32, #linear>", 2))
    files, source = {path.name: str(path), "map_sums.json": ""}, SimpleNamespace(name="map_sums")
    refuse_scattered(src=source, metadata_group=files, cache_hit=True)
    path.write_text(kernel("tensor<8x8x4xf32, #linear>", 1))
    with pytest.raises(AssertionError, match=r"map_sums.*/here/kernels/sums\.py:247"):
        refuse_scattered(src=source, metadata_group=files, cache_hit=True)


def test_lanes_of_nested_slices() -> None:
    """As Triton computes them: its own numbers for this layout."""
    mma = {"kind": "nvidia_mma", "versionMajor": 2, "warpsPerCTA": [2, 2], "instrShape": [16, 8]}
    lanes, warps = lane_and_warp_bases({"kind": "slice", "dim": 0, "parent": mma}, [16])
    assert (lanes, warps) == ([[2], [4], [0], [0], [0]], [[8], [0]])
    blocked = {"kind": "blocked", "sizePerThread": [1, 2], "threadsPerWarp": [8, 4], "warpsPerCTA": [4, 1]}
    for order, expected in (([1, 0], [[0], [0], [1], [2], [0]]), ([0, 1], [[1], [2], [0], [0], [0]])):
        found, _ = lane_and_warp_bases({"kind": "slice", "dim": 1, "parent": {**blocked, "order": order}}, [4])
        assert found == expected
