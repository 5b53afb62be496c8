"""What the weights do with the vectors they mix: distances and separability of the N heaviest keys, and their bounds.

The formulas are theory's (distance.py, random_set.py, geometry.py). Here: which vectors, one sort of the weights for
all N, and the null, in which the same weights are dealt out to the visible keys at random.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnorm.metrics.call import AttentionCall
from attnorm.metrics.logits import LogitBlock, logit_blocks
from attnorm.metrics.normalized import Choice, as_normalizer, measured, rows_block
from attnorm.metrics.null import deal, separabilities
from attnorm.metrics.sampling import spread
from attnorm.theory.distance import d_tilde, relative_distance, theorem1_fixed_printed, theorem1_fixed_tight
from attnorm.theory.geometry import nearest_outsider, on_sphere, separability, theorem2_bounds
from attnorm.theory.random_set import theorem1_random_bounds, theorem1_random_printed
from attnorm.theory.selection import SelectedRows, at_least_float32, top_n_indices

Vectors = Literal["values", "inputs"]

# Separability and its null are compared on the same rows, so many of them: every permutation costs as much as all the
# rest.
NULL_ROWS = 16
# Distances of the null that are computed at a time: one draw alone would read the vectors too often.
NULL_ELEMENTS = 2**22

NUMBERS = (
    "d_tilde",
    "relative_distance",
    "fixed_printed",
    "fixed_tight",
    "random_printed",
    "random_lower",
    "random_upper",
    "separability",
    "separability_sphere",
    "separability_lower",
    "separability_upper",
)
COMPARED = ("separability", "separability_sphere", "separability_lower", "separability_upper")
NULLS = ("separability_null", "separability_null_low", "separability_null_high", "separability_sphere_null")


@torch.no_grad()
def measure_vectors(
    call: AttentionCall,
    normalizers: Sequence[Choice],
    rows: Tensor,
    top_n: Sequence[int],
    vectors: Vectors = "values",
    generator: torch.Generator | None = None,
    *,
    permutations: int = 20,
) -> dict[str, dict[str, Tensor]]:
    """By normalizer and name (NUMBERS and NULLS): (B, H, R, len(top_n)); NaN where n <= N or the row is broken.

    Separability, its bounds and its null stand on the same rows, at most NULL_ROWS of them, NaN on the others. The null
    is a mean over permutations; its low and high are the 5 % and 95 % quantiles of the permutations' means over these
    rows, the same number in each of them.
    """
    if permutations < 1:
        raise ValueError(f"permutations must be at least 1, got {permutations}")
    if not top_n or min(top_n) < 1:
        raise ValueError(f"top_n must be whole numbers from 1 up, got {tuple(top_n)}")
    chosen = measured(call, normalizers)
    mixed = _mixed_vectors(call, vectors)
    shape = (*call.query_BHQD.shape[:2], len(rows), len(top_n))
    results = {one.name: {name: mixed.new_full(shape, torch.nan) for name in NUMBERS} for one in chosen}
    draws = {one.name: mixed.new_full((2, permutations, *shape), torch.nan) for one in chosen}
    few = spread(torch.arange(len(rows)), NULL_ROWS)
    for block in logit_blocks(call, rows.to(mixed.device), all_heads=True):
        view = rows_block(call, block)
        place = (block.item, block.heads, block.rows)
        drawn = few[(few >= block.rows.start) & (few < block.rows.stop)]
        local = drawn - block.rows.start
        dealt = deal(block.visible[:, local].expand(permutations, -1, -1, -1), generator)
        for one in chosen:
            weights = as_normalizer(one, call).weights(view)[0]
            rows_of = _Rows(weights, block.visible, _vectors_of(block, mixed), max(top_n))
            for column, N in enumerate(top_n):
                for name, value in rows_of.numbers(N).items():
                    results[one.name][name][(*place, column)] = value
            if len(drawn):
                some = _Rows(weights[:, local], block.visible[:, local], rows_of.x, max(top_n))
                at_once = max(1, NULL_ELEMENTS // (weights[:, local].numel() * len(top_n)))
                for start in range(0, permutations, at_once):
                    part = slice(start, start + at_once)
                    draws[one.name][:, part, block.item, :, drawn] = some.permuted(dealt[part], top_n)
    left_out = torch.ones(len(rows), dtype=torch.bool, device=mixed.device)
    left_out[few] = False
    for numbers in results.values():
        for name in COMPARED:
            numbers[name][:, :, left_out] = torch.nan
    return {name: numbers | _null(draws[name]) for name, numbers in results.items()}


def _mixed_vectors(call: AttentionCall, vectors: Vectors) -> Tensor:
    """(B, G, K, E), or (B, 1, K, C) where all heads share them."""
    if vectors == "values":
        return at_least_float32(call.value_BGKE)
    if vectors != "inputs":
        raise ValueError(f"vectors must be 'values' or 'inputs', got {vectors!r}")
    if call.inputs_BKC is None:
        raise ValueError("the layer inputs were not recorded; observe the model with inputs=True")
    return at_least_float32(call.inputs_BKC)[:, None]


def _vectors_of(block: LogitBlock, mixed: Tensor) -> Tensor:
    width = block.logits.shape[-1]
    x = mixed[block.item, :, block.first_key : block.first_key + width]
    return pad(x, (0, 0, 0, width - x.shape[-2]))


class _Rows:
    """Rows (h, r, w) of weights, put together as theory has them: all that mix the same vectors (g, w, E)."""

    def __init__(self, weights: Tensor, visible: Tensor, x: Tensor, most: int) -> None:
        self.heads = weights.shape[:2]
        groups, keys = x.shape[:2]
        visible = visible.expand(weights.shape)
        dtype = torch.promote_types(weights.dtype, x.dtype)
        self.weights, self.visible = weights.to(dtype).reshape(groups, -1, keys), visible.reshape(groups, -1, keys)
        # What no row sees may be anything, and 0 times NaN is NaN.
        self.x = torch.where(self.visible.any(-2).unsqueeze(-1), x.to(dtype), 0.0)
        self.unit = on_sphere(self.x)
        self.indices = top_n_indices(self.weights, most, self.visible)
        self.n = self.visible.sum(-1)
        self.sound = self.weights.isfinite().all(-1)
        total = self.weights.sum(-1)
        self.proper = bool((((total - 1).abs() < 1e-4) & (self.weights >= 0).all(-1)).any())
        self.raw, self.sphere = (
            SelectedRows(self.weights, vectors, self.visible, self.indices, False) for vectors in (self.x, self.unit)
        )
        squared = torch.where(self.visible, self.raw.squares.unsqueeze(-2), 0.0).sum(-1)
        self.radius = (squared / self.n.clamp(min=1)).sqrt()
        _ = self.raw.norms, self.raw.output, self.sphere.squares  # kept for all N

    def numbers(self, top_n: int) -> dict[str, Tensor]:
        """NUMBERS of every row, (h, r)."""
        if not bool((self.n > top_n).any()):
            return {}
        indices = self.indices[..., :top_n]
        rows = self.raw.with_indices(indices)
        lower, upper = theorem1_random_bounds(rows)
        fewest, most = theorem2_bounds(rows, nearest_outsider(rows).nan_to_num(0.0), self.radius)
        unknown = torch.full_like(self.radius, torch.nan)
        numbers = {
            "d_tilde": d_tilde(rows),
            "relative_distance": relative_distance(rows),
            "fixed_printed": theorem1_fixed_printed(rows) if self.proper else unknown,
            "fixed_tight": theorem1_fixed_tight(rows),
            "random_printed": theorem1_random_printed(rows),
            "random_lower": lower,
            "random_upper": upper,
            "separability": separability(rows),
            "separability_sphere": separability(self.sphere.with_indices(indices)),
            "separability_lower": fewest,
            "separability_upper": most,
        }
        return {name: torch.where(self.sound, value, torch.nan).reshape(self.heads) for name, value in numbers.items()}

    def permuted(self, targets: Tensor, top_n: Sequence[int]) -> Tensor:
        """Separability, raw and on the sphere, with the weight of each key given to another: (2, d, h, r, len(top_n)).

        targets (d, 1 or h, r, w): the new key of every key, for d draws.
        """
        heads, rows = self.heads
        draws, keys = targets.shape[0], targets.shape[-1]
        targets = targets.expand(draws, heads, rows, keys).transpose(0, 1).reshape(len(self.x), -1, keys)

        def repeated(values: Tensor) -> Tensor:
            width = values.shape[-1]
            return values.reshape(heads, 1, rows, width).expand(-1, draws, -1, -1).reshape(len(self.x), -1, width)

        weights = torch.zeros_like(targets, dtype=self.weights.dtype).scatter_(-1, targets, repeated(self.weights))
        heaviest, visible = targets.gather(-1, repeated(self.indices)), repeated(self.visible)
        found = [
            separabilities(weights, selected.vectors, selected.squares, visible, heaviest, top_n)
            for selected in (self.raw, self.sphere)
        ]
        by_draw = torch.stack(found).reshape(2, heads, draws, rows, -1).transpose(1, 2)
        applies = self.sound.unsqueeze(-1) & (self.n.unsqueeze(-1) > torch.tensor(top_n, device=self.n.device))
        return torch.where(applies.reshape(heads, rows, -1), by_draw, torch.nan)


def _null(draws: Tensor) -> dict[str, Tensor]:
    """From separability (2, permutations, B, H, R, N) of the drawn rows, NaN in the others."""
    raw, sphere = draws.nanmean(1)
    means = draws[0].nanmean(-2, keepdim=True)
    low, high = (torch.where(raw.isnan(), torch.nan, means.nanquantile(share, 0)) for share in (0.05, 0.95))
    return dict(zip(NULLS, (raw, low, high, sphere), strict=True))
