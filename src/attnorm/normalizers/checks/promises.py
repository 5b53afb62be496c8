"""Checks of what a normalizer declares in `properties` and `lipschitz`: sums, sign, zeros, symmetries, sensitivity."""

import torch
from torch import Tensor

from attnorm.normalizers.checks.subject import CheckedNormalizer, Complaints, exceeds, largest, seeded, some_mask

ROUNDING = 1e-10
LARGEST_CLIMB = 5  # keys; a search by random steps finds little in more dimensions
CLIMBERS, TRIALS, CLIMB_ROUNDS = 4, 6, 16


def _rows(subject: CheckedNormalizer) -> list[Tensor]:
    """Rows of several spreads, of either sign and of both."""
    spreads = [subject.logits(spread=spread, seed=seed) for seed, spread in enumerate((1e-3, 0.5, 3.0, 30.0))]
    return [*spreads, subject.logits().abs(), -subject.logits().abs()]


def row_sums(subject: CheckedNormalizer) -> Complaints:
    """Rows sum to 1, or to at most 1, if so declared."""
    declared = subject.normalizer.properties.row_sum
    for logits in _rows(subject):
        sums = subject(logits, some_mask(logits)).sum(-1)
        if not sums.isfinite().all():
            yield f"a row sums to {sums[~sums.isfinite()][0].item()} for logits up to {largest(logits):.3g}"
        elif declared == "one" and exceeds(largest(sums - 1), ROUNDING):
            yield f"row sums are declared to be 1, but one is {_farthest(sums, 1.0)!r}"
        elif declared == "at most one" and exceeds(sums.max().item(), 1 + ROUNDING):
            yield f"row sums are declared to be at most 1, but one is {sums.max().item()!r}"


def sign(subject: CheckedNormalizer) -> Complaints:
    """No weight is negative unless the normalizer is declared signed."""
    if subject.normalizer.properties.signed:
        return
    for logits in _rows(subject):
        lowest = subject(logits, some_mask(logits)).min().item()
        if exceeds(-lowest, 0):
            yield f"not declared signed, but a weight is {lowest!r}"


def exact_zeros(subject: CheckedNormalizer) -> Complaints:
    """Visible keys get exactly 0 in a long, widely spread row if so declared, and never in an even one if not."""
    declared = subject.normalizer.properties.exact_zeros
    wide = 40 * torch.arange(-260.0, 261.0, dtype=torch.float64).expand(1, subject.heads, 1, 521)
    even = subject.logits(spread=0.5)
    if declared and not (subject(wide) == 0).any():
        yield "exact zeros are declared, but 521 keys with logits from -10400 to 10400 all have weight"
    if not declared and (subject(even) == 0).any():
        yield f"no exact zeros are declared, but a key gets 0 among logits up to {largest(even):.3g}"


def permutation(subject: CheckedNormalizer) -> Complaints:
    """Permuting the keys permutes the weights, if so declared."""
    if not subject.normalizer.properties.permutation_equivariant:
        return
    logits = subject.logits(keys=11)
    mask, order = some_mask(logits), torch.randperm(11, generator=seeded(1))
    change = largest(subject(logits[..., order], mask[..., order]) - subject(logits, mask)[..., order])
    if exceeds(change, ROUNDING):
        yield f"declared permutation equivariant, but permuting the keys changes a weight by {change:.3g}"


def shift(subject: CheckedNormalizer) -> Complaints:
    """Adding a constant to a row changes nothing, if so declared, up to what the arithmetic must lose.

    The logits are multiples of 1/8, so the sum with the offset is exact. A rule then multiplies numbers as large as the
    offset, which costs digits of them; a map alone must keep them, in float32 too.
    """
    if not subject.normalizer.properties.shift_invariant:
        return
    for dtype in (torch.float64,) if subject.normalizer.rules else (torch.float64, torch.float32):
        low = subject.to(dtype)
        logits = (subject.logits() * 8).round().div(8).to(dtype)
        mask, weights = some_mask(logits), low(logits)
        for offset in (1.0, -37.5, 1e6, -1e6):
            largest_prepared = largest(low.prepared(logits + offset)) if low.normalizer.rules else 0.0
            allowed = 64 * torch.finfo(dtype).eps * (1 + largest_prepared)
            change = largest(low(logits + offset) - weights)
            change = max(change, largest(low(logits + offset, mask) - low(logits, mask)))
            if exceeds(change, allowed):
                change_text = f"changes a {dtype} weight by {change:.3g} > {allowed:.3g}"
                yield f"declared shift invariant, but adding {offset:g} {change_text}"


def lipschitz(subject: CheckedNormalizer) -> Complaints:
    """No Jacobian of a row of n visible keys, wherever they are, has a larger norm than lipschitz(n)."""
    for n in (1, 2, 5, 31):
        bound = subject.normalizer.lipschitz(n)
        if bound is None:
            return
        rows = _lifted(torch.cat([_random_rows(n), _two_level_rows(n)]))
        norms = _jacobian_norms(subject, rows, apart=1)
        largest_norm = max(norms.max().item(), _jacobian_norms(subject, rows, apart=3).max().item())
        if not exceeds(largest_norm, _allowed(bound)) and n <= LARGEST_CLIMB:
            largest_norm = max(largest_norm, _climb(subject, rows[norms.topk(CLIMBERS).indices], bound))
        if exceeds(largest_norm, _allowed(bound)):
            yield f"lipschitz({n}) is declared to be {bound:.6g}, but a Jacobian has norm {largest_norm:.6g}"


def _allowed(bound: float) -> float:
    return bound * (1 + 1e-5) + 1e-12


def _climb(subject: CheckedNormalizer, rows: Tensor, bound: float) -> float:
    """The largest norm on a random walk uphill from the rows, with steps from 1 to 1e-4; stops above the bound."""
    best, generator = _jacobian_norms(subject, rows, apart=1), seeded(6)
    for step in torch.logspace(0, -4, CLIMB_ROUNDS).tolist():
        tried = rows[:, None] + step * torch.randn(len(rows), TRIALS, rows.shape[-1], generator=generator).double()
        norms, best_trial = _jacobian_norms(subject, tried.flatten(0, 1), apart=1).unflatten(0, (-1, TRIALS)).max(1)
        better = norms > best
        rows = torch.where(better[:, None], tried[torch.arange(len(rows)), best_trial], rows)
        best = torch.where(better, norms, best)
        if exceeds(best.max().item(), _allowed(bound)):
            break
    return best.max().item()


def _lifted(rows: Tensor) -> Tensor:
    """The rows at several heights, for maps that are not shift invariant."""
    return (rows + torch.tensor([0.0, 0.5, 5.0], dtype=torch.float64)[:, None, None]).flatten(0, 1)


def _random_rows(n: int) -> Tensor:
    spreads = torch.logspace(-2, 2, 12, dtype=torch.float64)[:, None]
    return spreads * torch.randn(12, n, generator=seeded(5), dtype=torch.float64)


def _two_level_rows(n: int) -> Tensor:
    """k keys at the top, the rest a gap below: the shapes at which softmax, sparsemax and entmax are steepest."""
    tops = sorted({k for k in (1, 2, n // 2, n - 1, n) if 1 <= k <= n})
    gaps = torch.linspace(0, 12, 13, dtype=torch.float64)
    return torch.cat([torch.where(torch.arange(n) < k, 0.0, -gaps[:, None]) for k in tops])


def _jacobian_norms(subject: CheckedNormalizer, rows: Tensor, apart: int) -> Tensor:
    """The largest norm over the heads for each row, with `apart` - 1 hidden keys before each visible one."""
    logits = torch.zeros(len(rows), subject.heads, 1, rows.shape[-1] * apart, dtype=torch.float64)
    visible = torch.arange(apart - 1, logits.shape[-1], apart)
    logits[..., visible] = rows[:, None, None, :]
    mask = torch.zeros(logits.shape[-1], dtype=torch.bool).index_fill(0, visible, True)
    weights = subject(logits.requires_grad_(), mask)
    # Rows do not touch each other, so one backward pass per key gives a line of every row's Jacobian.
    lines = [torch.autograd.grad(weights[..., key].sum(), logits, retain_graph=True)[0] for key in visible]
    norms: Tensor = torch.linalg.matrix_norm(torch.stack(lines, dim=-2)[..., visible], ord=2)
    return norms.flatten(1).amax(1)


def _farthest(x: Tensor, target: float) -> float:
    return x.flatten()[(x - target).abs().argmax()].item()
