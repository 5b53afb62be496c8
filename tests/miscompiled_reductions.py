"""Find reductions that Triton up to 3.6 compiles wrongly, in the TTGIR of a compiled kernel.

A reduction exchanges numbers between lanes of a warp. Up to 3.6 these are consecutive bits of the number of a lane,
from the first that moves along the axis, also where the layout has bits of another dimension between them, as after a
reshape and permute. If warps share the axis, each finds its place by dividing the numbers of lane and warp by the sizes
of the dimensions, which is as wrong. 3.7 reads the layout itself: https://github.com/triton-lang/triton/pull/9219
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Bases = list[list[int]]  # for each bit of the number of a lane, or of a warp, how far it moves along each dimension

_REDUCTION = re.compile(
    r'"tt\.(reduce|scan)"\([^)]*\) <\{axis = (\d+).*?^\s*\}\) : \((.*?)\) -> [^\n]*?loc\(([^\n]*)\)$',
    re.DOTALL | re.MULTILINE,
)
_ALIAS = re.compile(r"^(#\w+) = (#ttg\..*)$", re.MULTILINE)
_PLACE = re.compile(r"^(#loc\d*) = loc\((.*)\)$", re.MULTILINE)


class Reduction(NamedTuple):
    operation: str  # reduce or scan
    axis: int
    source: str  # shape, dtype and layout of the tensor
    line: str  # file:line, the innermost that is not Triton's own


def refuse_scattered(*, src: Any, metadata_group: Mapping[str, str], **_: object) -> None:
    """Raise an error for such a kernel. A listener of Triton, which calls it also for kernels from its cache."""
    for name, path in metadata_group.items():
        found = scattered_reductions(Path(path).read_text()) if name.endswith(".ttgir") else []
        assert not found, f"{src.name} reduces over scattered lanes, which Triton up to 3.6 gets wrong: {set(found)}"


def scattered_reductions(ttgir: str) -> list[Reduction]:
    """Return the reductions and scans over lanes, or over warps, that are not consecutive bits."""
    layouts = dict(_ALIAS.findall(ttgir))
    places = dict(_PLACE.findall(ttgir))
    found = []
    for operation, axis, sources, place in _REDUCTION.findall(ttgir):
        source = f"{sources}, tensor<".split(">, tensor<")[0].removeprefix("tensor<")  # all have the same layout
        sizes, encoding = source.split(", ", 1)
        layout, shape = _parsed(encoding, layouts), [int(size) for size in sizes.split("x")[:-1]]
        if _is_scattered(layout, shape, int(axis)):
            found.append(Reduction(operation, int(axis), source, _line(place, places)))
    return found


def _is_scattered(layout: dict[str, Any], shape: Sequence[int], axis: int) -> bool:
    lanes, warps = lane_and_warp_bases(layout, shape)
    bits = [bit for bit, basis in enumerate(lanes) if basis[axis]]
    apart = bool(bits) and bits[-1] - bits[0] >= len(bits)
    over_warps = any(basis[axis] for basis in warps)
    return apart or (over_warps and not (_divides(lanes, axis) and _divides(warps, axis)))


def _divides(bases: Bases, axis: int) -> bool:
    """Whether divisions of the number by the sizes of the dimensions, in order of their first bits, give the axis."""
    dims = [basis.index(max(basis)) for basis in bases if any(basis)]
    return [dim == axis for dim in dims] == [dim == axis for dim in sorted(dims, key=dims.index)]


def lane_and_warp_bases(layout: dict[str, Any], shape: Sequence[int]) -> tuple[Bases, Bases]:
    kind, rank = layout["kind"], len(shape)
    if kind == "slice":
        dim = layout["dim"]
        lanes, warps = lane_and_warp_bases(layout["parent"], [*shape[:dim], 1, *shape[dim:]])
        return _without(lanes, dim), _without(warps, dim)
    if kind == "linear":
        lanes, warps = layout["lane"], layout["warp"]
    elif kind == "blocked":
        size, threads = layout["sizePerThread"], layout["threadsPerWarp"]
        lanes = _bases(size, threads, layout["order"])
        warps = _bases([s * t for s, t in zip(size, threads, strict=True)], layout["warpsPerCTA"], layout["order"])
    elif kind == "nvidia_mma" and layout["versionMajor"] in (2, 3):
        # Of 16 rows and 8 columns, 4 neighboring lanes hold 2 columns each, 8 such groups the rows.
        hopper, before = layout["versionMajor"] == 3, [1] * (rank - 2)
        columns = layout["instrShape"][1] if hopper else layout["instrShape"][-1]
        lanes = _bases([*before, 1, 2], [*before, 8, 4], range(rank)[::-1])
        warps = _bases([*before, 16, columns], layout["warpsPerCTA"], range(rank) if hopper else range(rank)[::-1])
    elif kind == "dot_op" and layout["parent"]["kind"] == "nvidia_mma":
        # Lanes hold neighbors along the summed dimension, and all warps along it the same.
        first, parent, width = layout["opIdx"] == 0, layout["parent"], layout["kWidth"]
        summed, other = (rank - 1, rank - 2) if first else (rank - 2, rank - 1)
        size, threads = [1] * rank, [1] * rank
        size[summed], threads[summed], threads[other] = width, 4, 8
        lanes = _bases(size, threads, [summed, other, *range(rank - 2)])
        _, warps = lane_and_warp_bases(parent, [1 if dim == summed else length for dim, length in enumerate(shape)])
    else:
        raise ValueError(f"which lanes hold what is not known of {layout}")
    return _inside(lanes, shape), _inside(warps, shape)


def _bases(start: Sequence[int], counts: Sequence[int], order: Sequence[int]) -> Bases:
    bases = []
    for dim in order:
        step = start[dim]
        while step < start[dim] * counts[dim]:
            bases.append([step if other == dim else 0 for other in range(len(start))])
            step *= 2
    return bases


def _inside(bases: Bases, shape: Sequence[int]) -> Bases:
    """A bit that would leave the tensor moves nowhere: both its values hold the same."""
    return [[step if step < length else 0 for step, length in zip(basis, shape, strict=True)] for basis in bases]


def _without(bases: Bases, dim: int) -> Bases:
    return [[*basis[:dim], *basis[dim + 1 :]] for basis in bases]


def _parsed(encoding: str, layouts: dict[str, str]) -> dict[str, Any]:
    """#ttg.slice<{dim = 1, parent = #mma}> as {"kind": "slice", "dim": 1, "parent": {...}}."""
    text = re.sub(r"#(?!ttg\.)\w+", lambda alias: layouts[alias[0]], encoding)
    text = re.sub(r"(\w+) = ", r'"\1": ', re.sub(r"#ttg\.(\w+)<\{", r'{kind = "\1", ', text).replace("}>", "}"))
    parsed: dict[str, Any] = json.loads(text)
    return parsed


def _line(place: str, places: dict[str, str]) -> str:
    files = list(_files(place, places))
    ours = [f"{file}:{line}" for file, line in files if "/triton/language/" not in file]
    return (ours or ["unknown"])[0]


def _files(place: str, places: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The files and lines of a place: of a call inside a call, first the inner one."""
    for file, line, alias in re.findall(r'"([^"]*)":(\d+):\d+|(#loc\d*)', place):
        if alias:
            yield from _files(places.get(alias, ""), places)
        else:
            yield file, line
