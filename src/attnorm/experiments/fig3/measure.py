"""Measure Figure 3: the share N_s / N of distinguishable keys of every head, its nulls, and the bounds of Theorem 2."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from attnorm.engines.threads import one_thread
from attnorm.experiments.attention_rows import LastRows
from attnorm.experiments.experiment import Floats
from attnorm.experiments.subject import ProgressCallback
from attnorm.theory.geometry import (
    minimum_separation,
    nearest_outsider,
    on_sphere,
    separability,
    theorem2_bounds,
    theorem2_printed,
    xi,
)
from attnorm.theory.selection import SelectedRows


@dataclass(frozen=True)
class Separabilities:
    """Every head, (heads, len(top_n)): the measured share, its nulls, and Theorem 2."""

    top_n: tuple[int, ...]
    draws: int  # of each null
    measured: Floats
    permuted: Floats  # the weights permuted over the keys, r computed again
    isotropic: Floats  # random directions (Assumption 1), r computed again
    isotropic_fixed: Floats  # the same with r fixed at the measured one: what Theorem 2 is about
    fixed_error: Floats  # its standard error
    lower: Floats  # corrected bounds for that r
    upper: Floats
    printed_lower: Floats
    printed_upper: Floats
    certain: Floats  # 1 where r >= max xi: all N keys are inside, as they are for all vectors so far apart

    @property
    def slack(self) -> Floats:
        """Return the tolerance of the mean of the draws with r fixed; if all agree, by the rule of three."""
        return np.asarray(4 * self.fixed_error + 3 / (self.draws * np.array(self.top_n)))

    def table(self, vectors: str) -> pa.Table:
        heads, columns = self.measured.shape
        numbers = {name: value.ravel() for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return pa.table(
            {
                "vectors": [vectors] * (heads * columns),
                "head": np.repeat(np.arange(heads), columns),
                "top_n": np.tile(self.top_n, heads),
                **numbers,
            }
        )


@one_thread()
def measure(
    layers: Sequence[LastRows],
    top_n: tuple[int, ...],
    draws: int,
    generator: torch.Generator,
    progress: ProgressCallback,
    what: str,
) -> Separabilities:
    """Measure all layers; progress is called after each."""
    found: dict[str, list[Floats]] = {}
    for index, layer in enumerate(layers):
        every = layer.selected(max(top_n))
        radii = _at_each(every, top_n, nearest_outsider)
        numbers = {
            "measured": _at_each(every, top_n, separability),
            **_theorem2(layer, every, top_n),
            **_nulls(layer, top_n, radii, draws, generator),
        }
        for name, value in numbers.items():
            found.setdefault(name, []).append(np.asarray(value.flatten(0, -2).numpy(), dtype=np.float64))
        progress(f"separability of vectors {what}", index + 1, len(layers))
    return Separabilities(top_n, draws, **{name: np.concatenate(values) for name, values in found.items()})


def _theorem2(layer: LastRows, every: SelectedRows, top_n: tuple[int, ...]) -> dict[str, Tensor]:
    """Return both forms of the bounds, with the radius of each row treated as fixed in advance.

    They hold for a_i x_i with x_i on the unit sphere, so the length of a vector is moved into its weight.
    """
    unit, lengths = on_sphere(layer.vectors), torch.linalg.vector_norm(layer.vectors, dim=-1)
    every = SelectedRows(every.weights * lengths.unsqueeze(-2), unit, every.visible, every.indices, False)
    delta = minimum_separation(unit).unsqueeze(-1).expand(every.weights.shape[:-1])
    columns = []
    for N in top_n:
        rows = every.with_indices(every.indices[..., :N])
        r = nearest_outsider(rows)
        certain = (r >= xi(rows, 1.0, delta).amax(-1)).double()
        columns.append(torch.stack([*theorem2_bounds(rows, r, 1.0), *theorem2_printed(rows, r, 1.0, delta), certain]))
    return dict(
        zip(("lower", "upper", "printed_lower", "printed_upper", "certain"), torch.stack(columns, -1), strict=True)
    )


def _at_each(every: SelectedRows, top_n: Sequence[int], number: Callable[[SelectedRows], Tensor]) -> Tensor:
    """Return a number of every row for each N, in the last dimension."""
    return torch.stack([number(every.with_indices(every.indices[..., :N])) for N in top_n], -1)


def _nulls(
    layer: LastRows, top_n: tuple[int, ...], radii: Tensor, draws: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return the nulls of theory.geometry.separability_null, with one draw for all N and both radii."""
    lengths = torch.linalg.vector_norm(layer.vectors, dim=-1, keepdim=True)
    permuted, isotropic, fixed = [], [], []
    for _ in range(draws):
        shuffled = layer.permuted(generator).selected(max(top_n))
        permuted.append(_at_each(shuffled, top_n, separability))
        normal = torch.randn(layer.vectors.shape, generator=generator, dtype=torch.float64)
        drawn = replace(layer, vectors=on_sphere(normal) * lengths).selected(max(top_n))
        chosen = [drawn.with_indices(drawn.indices[..., :N]) for N in top_n]
        isotropic.append(torch.stack([separability(rows) for rows in chosen], -1))
        fixed.append(torch.stack([separability(rows, radii[..., index]) for index, rows in enumerate(chosen)], -1))
    with_fixed = torch.stack(fixed)
    return {
        "permuted": torch.stack(permuted).mean(0),
        "isotropic": torch.stack(isotropic).mean(0),
        "isotropic_fixed": with_fixed.mean(0),
        "fixed_error": with_fixed.std(0) / math.sqrt(draws),
    }
