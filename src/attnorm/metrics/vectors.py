"""What the weights do with the vectors they mix: distances and separability of the N heaviest keys, and their bounds.

The formulas are theory's (distance.py, random_set.py, geometry.py). Here: which vectors, one selection of the heaviest
keys for all N, heads divided among threads, and the null, in which the same weights are permuted among the visible
keys at random.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnorm.engines.threads import in_threads
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.logits import LogitBlock, logit_blocks
from attnorm.metrics.normalized import Choice, resolve_normalizers, rows_block, weights_and_logs
from attnorm.metrics.null import draw_permutations, separabilities
from attnorm.metrics.sampling import spread
from attnorm.theory.distance import (
    d_tilde,
    largest_gaps,
    relative_distance,
    theorem1_fixed_printed,
    theorem1_fixed_tight,
)
from attnorm.theory.geometry import nearest_outsider, theorem2_bounds
from attnorm.theory.random_set import theorem1_random_bounds, theorem1_random_printed
from attnorm.theory.selection import SelectedRows, at_least_float32, sum_where, top_n_indices

Vectors = Literal["values", "inputs"]

# Separability and its null are compared on the same rows, so many of them: every permutation costs as much as all the
# rest.
NULL_ROWS = 16
# Weights of one set of vectors that are permuted at a time.
NULL_ELEMENTS = 2**19

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

    Separability, its bounds and its null use the same rows, at most NULL_ROWS of them, NaN on the others. The null
    is a mean over permutations; its low and high are the 5 % and 95 % quantiles of the permutations' means over these
    rows, the same number in each of them.
    """
    if permutations < 1:
        raise ValueError(f"permutations must be at least 1, got {permutations}")
    if not top_n or min(top_n) < 1:
        raise ValueError(f"expected top_n as whole numbers of at least 1, got {tuple(top_n)}.")
    chosen = resolve_normalizers(call, normalizers)
    mixed = _mixed_vectors(call, vectors)
    shape = (*call.query_BHQD.shape[:2], len(rows), len(top_n))
    results = {one.name: {name: mixed.new_full(shape, torch.nan) for name in NUMBERS} for one in chosen}
    for numbers in results.values():
        numbers["draws"] = mixed.new_full((*shape, 2, permutations), torch.nan)
    few = spread(torch.arange(len(rows)), NULL_ROWS)
    for block in logit_blocks(call, rows, all_heads=True):
        local = few[(few >= block.rows.start) & (few < block.rows.stop)] - block.rows.start
        targets = draw_permutations(block.visible[:, local], permutations, generator)
        columns = [column for column, N in enumerate(top_n) if int(block.n.max()) > N]
        if not columns:
            continue
        view, x, sizes = rows_block(call, block), _vectors_of(block, mixed), [top_n[column] for column in columns]
        for one in chosen:
            weights, logs = weights_and_logs(one, call, block, view)
            for name, value in _in_block(weights, logs, block.visible, x, local, targets, sizes).items():
                results[one.name][name][block.item, :, block.rows][:, :, columns] = value.to(mixed.dtype)
    return {name: numbers | _null(numbers.pop("draws")) for name, numbers in results.items()}


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
    return x if x.shape[-2] == width else pad(x, (0, 0, 0, width - x.shape[-2]))


def _in_block(
    weights: Tensor,
    logs: Tensor | None,
    visible: Tensor,
    x: Tensor,
    local: Tensor,
    targets: Tensor,
    top_n: Sequence[int],
) -> dict[str, Tensor]:
    """By name, NUMBERS (h, r, N), and "draws" (h, r, N, 2, d): separability, raw and on the sphere, in each draw.

    weights and their logarithms (h, r, w), visible (1 or h, r, w), x (g, w, E). local (l,): the rows that are compared
    with the null. targets (d, 1 or h, l, w): the new key of every key.
    """
    per_group = len(weights) // len(x)
    visible, targets = visible.expand(weights.shape), targets.expand(-1, len(weights), -1, -1)
    parts: dict[int, dict[str, Tensor]] = {}

    def measure(groups: range) -> None:
        heads = slice(groups.start * per_group, groups.stop * per_group)
        vectors = x[groups.start : groups.stop]
        known = None if logs is None else logs[heads]
        parts[groups.start] = _of_groups(
            weights[heads], known, visible[heads], vectors, local, targets[:, heads], top_n
        )

    in_threads(measure, len(x), x.device)
    in_order = [parts[start] for start in sorted(parts)]
    return {name: torch.cat([part[name] for part in in_order]) for name in in_order[0]}


def _of_groups(
    weights: Tensor,
    logs: Tensor | None,
    visible: Tensor,
    x: Tensor,
    local: Tensor,
    targets: Tensor,
    top_n: Sequence[int],
) -> dict[str, Tensor]:
    heads, rows, keys = weights.shape
    dtype = torch.promote_types(weights.dtype, x.dtype)
    # Rows that mix the same vectors are grouped, as in theory.
    weights, visible = (t.reshape(len(x), -1, keys) for t in (weights.to(dtype), visible))
    # Keys that no row sees may hold NaN, and 0 times NaN is NaN.
    x = torch.where(visible.any(-2).unsqueeze(-1), x.to(dtype), 0.0)
    if logs is not None:
        logs = logs.to(dtype).reshape(weights.shape).masked_fill(~visible, -torch.inf)
    heaviest = top_n_indices(weights if logs is None else logs, max(top_n), visible)
    selected = SelectedRows(weights, x, visible, heaviest, False, logs)
    found = _distances(selected, top_n)
    if len(local):
        which = (torch.arange(0, weights.shape[1], rows).unsqueeze(-1) + local).flatten().to(x.device)
        targets = targets.reshape(len(targets), len(x), -1, keys)
        few = replace(
            selected,
            weights=weights[:, which],
            visible=visible[:, which],
            indices=heaviest[:, which],
            log_weights=None if logs is None else logs[:, which],
        )
        for name, value in _compared(few, targets, top_n).items():
            found[name] = value.new_full((*weights.shape[:2], *value.shape[2:]), torch.nan)
            found[name][:, which] = value
    broken = ~weights.sum(-1).isfinite()
    for value in found.values():
        value[broken] = torch.nan
    return {name: value.reshape(heads, rows, *value.shape[2:]) for name, value in found.items()}


def _distances(rows: SelectedRows, top_n: Sequence[int]) -> dict[str, Tensor]:
    """The distances of every row and their bounds, (..., N)."""
    proper = bool((((rows.weights.sum(-1) - 1).abs() < 1e-4) & (rows.weights.amin(-1) >= 0)).any())
    gaps = largest_gaps(rows, top_n) if proper else None
    _ = rows.squares, rows.along_output  # kept for all N
    found: dict[str, list[Tensor]] = {}
    for index, N in enumerate(top_n):
        heaviest = rows.with_indices(rows.indices[..., :N])
        lower, upper = theorem1_random_bounds(heaviest)
        numbers = {
            "d_tilde": d_tilde(heaviest),
            "relative_distance": relative_distance(heaviest),
            "fixed_tight": theorem1_fixed_tight(heaviest),
            "random_printed": theorem1_random_printed(heaviest),
            "random_lower": lower,
            "random_upper": upper,
        }
        if gaps is not None:
            numbers["fixed_printed"] = theorem1_fixed_printed(heaviest, gaps[..., index])
        for name, value in numbers.items():
            found.setdefault(name, []).append(value)
    return {name: torch.stack(values, -1) for name, values in found.items()}


def _compared(rows: SelectedRows, targets: Tensor, top_n: Sequence[int]) -> dict[str, Tensor]:
    """Separability of rows (g, r, w) and its bounds, (g, r, N), and its null in d draws: (g, r, N, 2, d).

    targets (d, g, r, w): the new key of every key.
    """
    itself = torch.arange(targets.shape[-1], device=targets.device).expand(targets[:1].shape)
    targets = torch.cat([itself, targets])
    at_once = max(1, NULL_ELEMENTS // rows.weights[0].numel())
    found = []
    for group, dealt in enumerate(targets.unbind(1)):
        alone = SelectedRows(
            rows.weights[group],
            rows.vectors[group],
            rows.visible[group],
            rows.indices[group],
            one_row_per_set=False,
            log_weights=None if rows.log_weights is None else rows.log_weights[group],
        )
        found.append(torch.cat([separabilities(alone, some, top_n) for some in dealt.split(at_once)]))
    shares = torch.stack(found, 1)  # (d, g, r, 2, N)
    applies = rows.n.unsqueeze(-1) > torch.tensor(top_n, device=rows.n.device)
    shares = torch.where(applies.unsqueeze(-2), shares, torch.nan)
    mean_square = sum_where(rows.squares.unsqueeze(-2).expand(rows.weights.shape), rows.visible) / rows.n.clamp(min=1)
    sets = [rows.with_indices(rows.indices[..., :N]) for N in top_n]
    bounds = [theorem2_bounds(one, nearest_outsider(one), mean_square.sqrt()) for one in sets]
    return {
        "separability": shares[0, ..., 0, :],
        "separability_sphere": shares[0, ..., 1, :],
        "separability_lower": torch.stack([lower for lower, _ in bounds], -1),
        "separability_upper": torch.stack([upper for _, upper in bounds], -1),
        "draws": shares[1:].permute(1, 2, 4, 3, 0),
    }


def _null(draws: Tensor) -> dict[str, Tensor]:
    """From separability (B, H, R, N, 2, permutations) of the drawn rows, NaN in the others."""
    raw, sphere = draws.nanmean(-1).unbind(-1)
    means = draws[..., 0, :].nanmean(2, keepdim=True)
    low, high = (torch.where(raw.isnan(), torch.nan, means.nanquantile(share, -1)) for share in (0.05, 0.95))
    return dict(zip(NULLS, (raw, low, high, sphere), strict=True))
