"""`measure_vectors`: distances and separability of the N heaviest keys among the vectors that attention mixes.

nested_sets.py and separability.py have the formulas. This file chooses the vectors (values or layer inputs), selects
the heaviest keys once for all N, divides heads among threads, and draws the null: the same weights, randomly permuted
among the visible keys.
`isotropy` checks assumptions of the papers about the vectors: do they point in all directions, are any two equal?
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnorm.engines.execution import in_threads, runs_asynchronously, sent_to
from attnorm.metrics.call import AttentionCall, LogitBlock, known_n, logit_blocks, padded_keys
from attnorm.metrics.nested_sets import NestedSets, distances, theorem2
from attnorm.metrics.normalized import Choice, resolve_normalizers, rows_block, weights_and_logs
from attnorm.metrics.sampling import Source, evenly_spaced, of_each_source, sources_of
from attnorm.metrics.separability import draw_permutations, keys_by_rank, separability_and_null
from attnorm.theory.selection import at_least_float32

# Number of vectors per head among which pairs are compared, so that no K x K array is needed.
PAIRED_VECTORS = 512
CHECKED_VECTORS = 8
Vectors = Literal["values", "inputs"]
# Number of rows for separability and its null: every permutation takes as long as all other metrics together.
NULL_ROWS = 16
# Number of weights to permute at a time: for one set of vectors on a CPU, for several on a GPU.
NULL_ELEMENTS = 2**20
GPU_NULL_ELEMENTS = 2**23
GPU_POINT_ELEMENTS = 2**26  # coordinates of the heaviest keys' vectors in all draws, at a time
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
COMPARED = NUMBERS[7:]  # with the null, on the same rows
NULLS = ("separability_null", "separability_null_low", "separability_null_high", "separability_sphere_null")


@torch.no_grad()
def measure_vectors(
    call: AttentionCall,
    normalizers: Sequence[Choice],
    rows: Tensor,
    top_n: Sequence[int],
    vectors: Vectors = "values",
    generator: torch.Generator | Sequence[Source] | None = None,
    *,
    permutations: int = 20,
) -> dict[str, dict[str, Tensor]]:
    """Return normalizer -> name (NUMBERS and NULLS) -> (B, H, R, len(top_n)); NaN if n <= N or the row is broken.

    Separability, its bounds and its null use the same rows, at most NULL_ROWS; they are NaN on the others. The null is
    a mean over permutations. Its low and high are the 5 % and 95 % quantiles of the permutations' means over these
    rows, so they are the same number in each row.

    generator: random generator, or what `permutations_ahead` has drawn; one per layer if the call has the heads of
    several layers (`stack_calls` of call.py).
    """
    if permutations < 1:
        raise ValueError(f"permutations must be at least 1, got {permutations}")
    if not top_n or min(top_n) < 1:
        raise ValueError(f"expected top_n as whole numbers of at least 1, got {tuple(top_n)}.")
    resolved = resolve_normalizers(call, normalizers)
    mixed = _mixed_vectors(call, vectors)
    sources = sources_of(generator)
    sizes = sorted(top_n)
    shape = (*call.query_BHQD.shape[:2], len(rows), len(sizes))
    results = {normalizer.name: mixed.new_full((len(NUMBERS), *shape), torch.nan) for normalizer in resolved}
    draws = {normalizer.name: mixed.new_full((*shape, 2, permutations), torch.nan) for normalizer in resolved}
    few = evenly_spaced(torch.arange(len(rows)), NULL_ROWS)
    on_device = runs_asynchronously(mixed)
    copies = 2 * len(sizes) if on_device else 1  # for every N, in float64
    for block in logit_blocks(call, rows, all_heads=True, copies=copies):
        local = few[(few >= block.rows.start) & (few < block.rows.stop)] - block.rows.start
        before = int((few < block.rows.start).sum())
        draw = partial(_targets, block, local, before, permutations, torch.int32 if on_device else torch.int64)
        drawn = torch.stack(of_each_source(draw, sources), 1).flatten(1, 2)
        used = slice(sum(block.logits.shape[-1] > N for N in sizes))
        if not sizes[used]:
            continue
        view, x, targets = rows_block(call, block), _vectors_of(block, mixed), sent_to(mixed.device, drawn)
        for normalizer in resolved:
            weights, logs = weights_and_logs(normalizer, call, block, view)
            numbers, null = _measure_block(weights, logs, block.visible, x, local, targets, sizes[used])
            results[normalizer.name][:, block.item, :, block.rows, used] = numbers
            if len(local):
                row_indices = (
                    block.rows if len(local) == numbers.shape[2] else sent_to(mixed.device, local + block.rows.start)
                )
                draws[normalizer.name][block.item, :, row_indices, used] = null.to(mixed.dtype)
    requested_order = [sizes.index(N) for N in top_n]
    return {
        name: {
            column: value if requested_order == sorted(requested_order) else value[..., requested_order]
            for column, value in (dict(zip(NUMBERS, numbers, strict=True)) | _null(draws[name])).items()
        }
        for name, numbers in results.items()
    }


def permutations_ahead(
    call: AttentionCall, rows: Tensor, generator: torch.Generator, *, permutations: int = 20
) -> list[Tensor]:
    """Draw the permutations that measure_vectors needs for a layer without a mask, one array per item of the batch."""
    n = known_n(call, rows[evenly_spaced(torch.arange(len(rows)), NULL_ROWS)])
    if n is None:
        raise ValueError(f"expected a call without a mask, got layer {call.layer} with one. Pass a generator.")
    visible = torch.arange(padded_keys(call.key_BGKD.shape[-2])) < n[:, None]
    items = range(call.query_BHQD.shape[0])
    return [draw_permutations(visible[None], permutations, generator, torch.int32) for _ in items]


def _targets(
    block: LogitBlock, local: Tensor, before: int, permutations: int, dtype: torch.dtype, source: Source
) -> Tensor:
    """Return the key to which the weight of each rank goes in the local rows, (d, 1 or h, l, w).

    before: number of drawn rows in earlier blocks.
    """
    if isinstance(source, list):
        return source[block.item][:, :, before : before + len(local), : block.logits.shape[-1]]
    visible = block.visible_on_cpu(local)
    targets = draw_permutations(visible, permutations, source, dtype)
    return targets if block.reach is not None else keys_by_rank(targets, visible)


def _mixed_vectors(call: AttentionCall, vectors: Vectors) -> Tensor:
    """Return the vectors (B, G, K, E), or (B, 1, K, C) if all heads share them."""
    if vectors == "values":
        return at_least_float32(call.value_BGKE)
    if vectors != "inputs":
        raise ValueError(f"vectors must be 'values' or 'inputs', got {vectors!r}")
    if call.inputs_BKC is None:
        raise ValueError("expected recorded layer inputs, got none. Observe the model with inputs=True.")
    return at_least_float32(call.inputs_BKC)[:, None]


def _vectors_of(block: LogitBlock, mixed: Tensor) -> Tensor:
    width = block.logits.shape[-1]
    x = mixed[block.item, :, block.first_key : block.first_key + width]
    return x if x.shape[-2] == width else pad(x, (0, 0, 0, width - x.shape[-2]))


def _measure_block(
    weights: Tensor,
    logs: Tensor | None,
    visible: Tensor,
    x: Tensor,
    local: Tensor,
    targets: Tensor,
    sizes: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Return NUMBERS (numbers, h, r, N), and separability in each draw, raw and on the sphere, (h, l, N, 2, d).

    weights and their logarithms (h, r, w), visible (1 or h, r, w), x (g, w, E). local (l,): the rows that are compared
    with the null. targets (d, s, l, w): the key to which the weight of each rank goes; h / s heads have the same ones.
    """
    per_group = len(weights) // len(x)
    visible = visible.expand(weights.shape)
    owner = torch.arange(len(weights), device=x.device).unflatten(0, (len(x), -1)) // (len(weights) // targets.shape[1])
    if targets.shape[1] < len(weights):  # the heads that mix the same vectors have the same
        owner = owner[:, :1]
    parts: dict[int, tuple[Tensor, Tensor]] = {}

    def measure(groups: range) -> None:
        heads = slice(groups.start * per_group, groups.stop * per_group)
        vectors = x[groups.start : groups.stop]
        head_logs = None if logs is None else logs[heads]
        parts[groups.start] = _measure_groups(
            weights[heads], head_logs, visible[heads], vectors, local, targets, owner[groups.start : groups.stop], sizes
        )

    in_threads(measure, len(x), x.device)
    if len(parts) == 1:
        return parts[0]
    numbers, null = zip(*(parts[start] for start in sorted(parts)), strict=True)
    return torch.cat(numbers, 1), torch.cat(null)


def _measure_groups(
    weights: Tensor,
    logs: Tensor | None,
    visible: Tensor,
    x: Tensor,
    local: Tensor,
    targets: Tensor,
    owner: Tensor,
    sizes: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Compute the same as `_measure_block` for heads that are divided evenly among the sets of vectors x."""
    heads, rows, keys = weights.shape
    dtype = torch.promote_types(weights.dtype, x.dtype)
    # Rows that mix the same vectors are grouped, as in theory.
    weights, visible = (t.reshape(len(x), -1, keys) for t in (weights.to(dtype), visible))
    # Hidden keys may hold NaN, and 0 times NaN is NaN.
    x = torch.where(visible.any(-2).unsqueeze(-1), x.to(dtype), 0.0)
    if logs is not None:
        logs = logs.to(dtype).reshape(weights.shape).masked_fill(~visible, -torch.inf)
    sets = NestedSets.of(weights, x, visible, sizes, logs)
    set_distances = distances(sets)
    nearest = set_distances["nearest"]
    compared = nearest.new_full((len(COMPARED), *nearest.shape), torch.nan)
    null = nearest.new_empty(heads, len(local), len(sizes), 2, len(targets))
    broken = ~weights.sum(-1).isfinite()
    if len(local):
        few_rows: Tensor | slice = slice(None)
        if len(local) < rows:
            few_in_head = sent_to(x.device, local)
            few_rows = (torch.arange(0, weights.shape[1], rows, device=x.device).unsqueeze(-1) + few_in_head).flatten()
        few = sets.select_rows(few_rows)
        shares = _separabilities(few, targets, owner)
        bounds = theorem2(few, nearest[:, few_rows])
        compared[:, :, few_rows] = torch.stack([*shares[:, 0].unbind(-2), *bounds]).to(nearest.dtype)
        null = shares[:, 1:].permute(0, 2, 4, 3, 1).reshape(null.shape)
    numbers = torch.cat([torch.stack([set_distances[name] for name in NUMBERS if name not in COMPARED]), compared])
    numbers = numbers.masked_fill(broken.unsqueeze(-1), torch.nan)
    return numbers.reshape(len(NUMBERS), heads, rows, len(sizes)), null


def _separabilities(rows: NestedSets, targets: Tensor, owner: Tensor) -> Tensor:
    """Return separability of rows (g, p l, w) and its null in d draws: (g, 1 + d, p l, 2, N), the row itself first.

    targets (d, s, l, w): the key to which the weight of each rank goes; owner (g, p or 1): which of the s a head has.
    """
    groups, count, keys = rows.weights.shape
    ranked, draws = rows.ranked_keys(), len(targets)
    key_by_rank = (
        targets.index_select(1, owner.flatten()).unflatten(1, owner.shape).transpose(0, 1)
    )  # (g, d, p or 1, l, w)
    sets_at_once, most = 1, NULL_ELEMENTS
    if runs_asynchronously(targets):
        of_set = count * (2 + draws) * (rows.sizes[-1] + 1) * rows.vectors.shape[-1]
        sets_at_once, most = max(1, GPU_POINT_ELEMENTS // of_set), GPU_NULL_ELEMENTS
    draws_at_once = min(max(1, most // (count * keys)), draws)
    at_once = (max(1, most // (count * keys * draws_at_once)), draws_at_once)
    parts = [
        separability_and_null(rows.select_vectors(batch), ranked[batch], key_by_rank[batch], at_once=at_once)
        for batch in (slice(start, start + sets_at_once) for start in range(0, groups, sets_at_once))
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _null(draws: Tensor) -> dict[str, Tensor]:
    """Return NULLS from the separability of the drawn rows, (B, H, R, N, 2, permutations); NaN for other rows."""
    raw, sphere = draws.nanmean(-1).unbind(-1)
    means = draws[..., 0, :].nanmean(2, keepdim=True)
    low, high = (torch.where(raw.isnan(), torch.nan, means.nanquantile(share, -1)) for share in (0.05, 0.95))
    return dict(zip(NULLS, (raw, low, high, sphere), strict=True))


@dataclass(frozen=True)
class Isotropy:
    """How isotropic the vectors of each key/value head are, (B, G); NaN with fewer than two visible vectors."""

    mean_cosine: Tensor  # between different vectors; 0 where they are isotropic
    effective_rank: Tensor  # (tr C)^2 / tr C^2 of the second moments C
    smallest_distance: Tensor  # between two of at most PAIRED_VECTORS vectors, over the mean norm of all


@torch.no_grad()
def isotropy(vectors: Tensor, visible: Tensor | None = None, *, seed: int = 0) -> Isotropy:
    """Measure the isotropy of vectors (B, G, K, E). visible: boolean, broadcastable to (B, G, K).

    Zero vectors are left out of the cosine.
    """
    vectors = at_least_float32(vectors)
    usable = torch.ones_like(vectors[..., 0], dtype=torch.bool)
    usable = usable if visible is None else usable & visible
    x = vectors if visible is None else torch.where(usable.unsqueeze(-1), vectors, 0.0)
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1)
    count = usable.sum(-1)
    enough = count > 1

    m = (norms > 0).sum(-1).to(x.dtype)
    sum_of_units = torch.where(norms > 0, 1 / norms, 0.0).unsqueeze(-2) @ x
    cosine = (sum_of_units.square().sum((-2, -1)) - m) / (m * (m - 1))
    moments = x.mT @ x
    trace = moments.diagonal(dim1=-2, dim2=-1).sum(-1)
    rank = trace.square() / moments.square().sum((-2, -1))
    mean_norm = norms.sum(-1) / count.clamp(min=1)
    smallest = _smallest_distance(x, usable, seed) / mean_norm
    cosine, rank, smallest = (torch.where(enough, value, torch.nan) for value in (cosine, rank, smallest))
    return Isotropy(torch.where(m > 1, cosine, torch.nan), rank, smallest)


def _smallest_distance(x: Tensor, usable: Tensor, seed: int) -> Tensor:
    keys = x.shape[-2]
    if keys > PAIRED_VECTORS:
        generator = torch.Generator().manual_seed(seed)
        sample = sent_to(x.device, torch.randperm(keys, generator=generator)[:PAIRED_VECTORS].sort().values)
        x, usable = x[..., sample, :], usable[..., sample]
    squares = x.square().sum(-1)
    squared = squares.unsqueeze(-1) + squares.unsqueeze(-2) - 2 * x @ x.mT
    pairs = usable.unsqueeze(-1) & usable.unsqueeze(-2)
    pairs = pairs & ~torch.eye(x.shape[-2], dtype=torch.bool, device=x.device)
    nearest = torch.where(pairs, squared, torch.inf).amin(-1)
    # Inner products lose the digits of a small distance: the closest pairs are computed again from their difference.
    closest = nearest.topk(min(CHECKED_VECTORS, nearest.shape[-1]), largest=False).indices
    closest_vectors = x.gather(-2, closest.unsqueeze(-1).expand(*closest.shape, x.shape[-1]))
    exact = torch.cdist(closest_vectors, x, compute_mode="donot_use_mm_for_euclid_dist")
    pairs = pairs.gather(-2, closest.unsqueeze(-1).expand(*closest.shape, x.shape[-2]))
    return torch.where(pairs, exact, torch.inf).amin((-2, -1))
