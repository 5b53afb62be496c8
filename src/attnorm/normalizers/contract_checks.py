"""The checks of the normalizer contract, by name (`CHECKS`): functions that yield a complaint for each broken promise.

What a normalizer promises, in exact arithmetic. Declared in `properties` and `lipschitz`: sums, sign, zeros,
symmetries, sensitivity. For every normalizer: a row depends on its visible logits alone, not on hidden keys, other
rows, shapes or strides.

Numerics: each dtype against float64, derivatives against finite differences, compiled against eager. The reference is
the normalizer in float64, on the logits as rounded to the dtype. Nothing can do better than
- float16, bfloat16: the reference rounded once to the dtype (so half-precision logits must be computed in float32);
- float32: the reference on logits off by one unit in the last place of 1 + |z| + log n, times 1 + log n such units.
  Any formula commits such errors: these are the numbers that a weight and its logarithm are added up from.
That is the plain version. As in FlashAttention's tests, its largest error, doubled, is the tolerance: no magic numbers.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.func import functional_call

from attnorm.normalizers.block import Block, Positions
from attnorm.normalizers.checked_normalizer import (
    CheckedNormalizer,
    CheckFunction,
    Complaints,
    by_definition,
    exceeds,
    largest,
    seeded,
    some_mask,
)

ROUNDING = 1e-10
HALF = (torch.float16, torch.bfloat16)
LARGEST_CLIMB = 5  # keys; a search by random steps finds little in more dimensions
CLIMBERS, TRIALS, CLIMB_ROUNDS = 4, 6, 16


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


def _rows(subject: CheckedNormalizer) -> list[Tensor]:
    """Rows of several spreads, of either sign and of both."""
    spreads = [subject.logits(spread=spread, seed=seed) for seed, spread in enumerate((1e-3, 0.5, 3.0, 30.0))]
    return [*spreads, subject.logits().abs(), -subject.logits().abs()]


def _farthest(x: Tensor, target: float) -> float:
    return x.flatten()[(x - target).abs().argmax()].item()


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


def hidden_keys(subject: CheckedNormalizer) -> Complaints:
    """A hidden key gets exactly 0, as weight and as gradient."""
    logits = subject.logits()
    hidden = ~some_mask(logits).expand(logits.shape)
    weights, gradient, _ = subject.gradients(logits, ~hidden)
    if exceeds(largest(weights[hidden]), 0):
        yield f"a hidden key gets weight {largest(weights[hidden])!r} instead of 0"
    if exceeds(largest(gradient[hidden]), 0):
        yield f"a hidden key gets gradient {largest(gradient[hidden])!r} instead of 0"


def hidden_values(subject: CheckedNormalizer) -> Complaints:
    """The value of a hidden logit, NaN and infinity included, affects neither weights nor gradients."""
    logits = subject.logits()
    mask = some_mask(logits)
    weights, gradient, parameters = subject.gradients(logits, mask)
    for value in (math.nan, math.inf, -math.inf, 1e30, torch.finfo(torch.float64).min):
        new_weights, new_gradient, new_parameters = subject.gradients(torch.where(mask, logits, value), mask)
        if not torch.equal(new_weights, weights):
            yield f"{value} in hidden logits changes a weight by {largest(new_weights - weights):.3g}"
        if not torch.equal(new_gradient, gradient):
            yield f"{value} in hidden logits changes a gradient by {largest(new_gradient - gradient):.3g}"
        for name, new_parameter_gradient in new_parameters.items():
            if not torch.equal(new_parameter_gradient, parameters[name]):
                yield f"{value} in hidden logits changes the gradient of {name} to {new_parameter_gradient.tolist()}"


def visible_nan(subject: CheckedNormalizer) -> Complaints:
    """A NaN in a visible logit makes its row NaN, and no other row: a broken model must not look healthy."""
    logits = subject.logits()
    mask = some_mask(logits)
    visible = _by_position(subject, logits, mask).expand(logits.shape)
    queries, keys = logits.shape[-2:]
    # Stick-breaking may skip a query's own key.
    is_own_key = torch.arange(keys) == torch.arange(keys - queries, keys)[:, None]
    for key in range(keys):
        broken = logits.clone()
        broken[..., key] = math.nan
        broken_rows = subject(broken, mask).isnan().any(-1)
        if not broken_rows[(visible & ~is_own_key)[..., key]].all():
            yield f"a NaN in the visible logit of key {key} gives a row of weights without NaN"
        if broken_rows[~mask.expand(logits.shape)[..., key]].any():
            yield f"a NaN in the hidden logit of key {key} gives a NaN weight"


def _by_position(subject: CheckedNormalizer, logits: Tensor, mask: Tensor) -> Tensor:
    """The mask without the keys that a selection hides because of their position, whatever their logits."""
    block = Block.of(logits, mask)
    for selection in subject.normalizer.selections:
        if not selection.permutation_equivariant:
            mask = mask & selection(block)
    return mask


def empty_rows(subject: CheckedNormalizer) -> Complaints:
    """A row that sees no key is all zeros, has gradient 0, disturbs no other row and no parameter's gradient."""
    logits = subject.logits()
    mask = some_mask(logits).clone()
    before, _, _ = subject.gradients(logits, mask)
    mask[0, :, 1] = False
    mask[1] = False
    empty = ~mask.any(-1).expand(logits.shape[:-1])
    weights, gradient, parameters = subject.gradients(logits, mask)
    for quantity, values in (("weight", weights), ("gradient", gradient)):
        if exceeds(largest(values[empty]), 0):
            yield f"a row without visible keys has a {quantity} of {largest(values[empty])!r} instead of 0"
    if exceeds(largest((weights - before)[~empty]), ROUNDING):
        yield f"an empty row changes another row's weight by {largest((weights - before)[~empty]):.3g}"
    for name, parameter_gradient in parameters.items():
        if not parameter_gradient.isfinite().all():
            yield f"with an empty row the gradient of {name} is {parameter_gradient.tolist()}"
    for name, parameter_gradient in subject.gradients(logits, torch.zeros_like(mask))[2].items():
        if exceeds(largest(parameter_gradient), 0):
            yield f"with empty rows only the gradient of {name} is {parameter_gradient.tolist()} instead of 0"


def padding(subject: CheckedNormalizer) -> Complaints:
    """Hidden keys before, behind or between the others change no weight, tokens keeping their positions."""
    queries, keys = 5, 7
    logits = subject.logits(queries, keys)
    mask = some_mask(logits)
    query = torch.arange(keys - queries, keys)
    expected = subject(logits, mask, positions=Positions(query, torch.arange(keys)))
    real = torch.arange(keys)
    columns = {"left": (real + 6, 13), "right": (real, 13), "both": (real + 3, 13), "between": (2 * real + 1, 15)}
    for padding_side, (key_columns, width) in columns.items():
        key = torch.full((width,), -1).scatter(0, key_columns, real)
        wide = torch.full((*logits.shape[:-1], width), 3.0, dtype=logits.dtype)
        wide[..., key_columns] = logits
        padded_mask = torch.zeros(*mask.shape[:-1], width, dtype=torch.bool)
        padded_mask[..., key_columns] = mask
        weights = subject(wide, padded_mask, positions=Positions(query, key))
        if exceeds(largest(weights[..., key_columns] - expected), ROUNDING):
            yield f"padding ({padding_side}) changes a weight by {largest(weights[..., key_columns] - expected):.3g}"
    counted = subject(torch.cat([logits, logits], -1), torch.cat([torch.zeros_like(mask), mask], -1))
    change = largest(counted[..., keys:] - subject(logits, mask))
    if exceeds(change, ROUNDING):
        yield f"padding (left), positions counted by default, changes a weight by {change:.3g}"


def mask_shapes(subject: CheckedNormalizer) -> Complaints:
    """A mask that broadcasts gives what the same mask gives when expanded."""
    logits = subject.logits()
    full = some_mask(logits)
    per_head = (torch.arange(subject.heads) % 2 == 0)[:, None, None] | full[0]
    views = (full[0, 0, 0], full[0, 0], full[:1], full[:, :, :1], full[:, :, :, -1:])
    for mask in (torch.tensor(True), *views, per_head, full):
        change = largest(subject(logits, mask) - subject(logits, mask.expand(logits.shape).contiguous()))
        if exceeds(change, ROUNDING):
            yield f"a mask of shape {tuple(mask.shape)} differs from the same one expanded by {change:.3g}"
    change = largest(subject(logits) - subject(logits, torch.ones_like(logits, dtype=torch.bool)))
    if exceeds(change, ROUNDING):
        yield f"no mask differs from a mask that hides nothing by {change:.3g}"


def runs(subject: CheckedNormalizer) -> Complaints:
    """Weights have the logits' shape and dtype, whatever that of the parameters, and the inputs stay as they were."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        logits = subject.logits().to(dtype)
        kept = logits.clone()
        for mask in (None, some_mask(logits)):
            weights = subject(logits, mask)
            if weights.shape != logits.shape or weights.dtype != dtype:
                yield f"logits {tuple(logits.shape)} {dtype} give weights {tuple(weights.shape)} {weights.dtype}"
        if not torch.equal(logits, kept):
            yield f"the {dtype} logits passed in were written to"


def single_key(subject: CheckedNormalizer) -> Complaints:
    """One key, or one visible key among others, is a row like any other: finite, and 1 if rows sum to 1."""
    alone, among, long = subject.logits(1, 1), subject.logits(5, 5), subject.logits(7, 263)
    own_key = torch.arange(263) == torch.arange(256, 263)[:, None]
    others_see_all = own_key | (torch.arange(7) % 3 > 0)[:, None]
    cases = ((alone, None), (alone, torch.ones(1, 1)), (among, torch.eye(5)), (long, own_key), (long, others_see_all))
    for logits, mask in cases:
        weights, gradient, _ = subject.gradients(logits, None if mask is None else mask.bool())
        sums = weights.sum(-1)
        if not (weights.isfinite().all() and gradient.isfinite().all()):
            yield f"one visible key of {logits.shape[-1]} gives a weight or gradient that is not finite"
        elif subject.normalizer.properties.row_sum == "one" and exceeds(largest(sums - 1), ROUNDING):
            yield f"one visible key of {logits.shape[-1]} should get weight 1, got {sums.flatten()[0].item()!r}"


def rows_alone(subject: CheckedNormalizer) -> Complaints:
    """A row gives the same weights alone as among others, at prime sizes too: what decoding with a cache relies on."""
    for queries, keys in ((3, 5), (7, 13), (2, 131), (1, 257)):
        logits = subject.logits(queries, keys, batch=3)
        mask, hidden = some_mask(logits), subject.hidden_states(3, queries)
        positions = torch.arange(keys - queries, keys), torch.arange(keys)
        together = subject(logits, mask, positions=Positions(*positions))
        for i in range(queries):
            row_positions = Positions(positions[0][i : i + 1], positions[1])
            row, row_mask = logits[:, :, i : i + 1], mask[:, :, i : i + 1]
            row_states = None if hidden is None else hidden[:, i : i + 1]
            alone = subject(row, row_mask, positions=row_positions, hidden_states=row_states)
            change = largest(alone - together[:, :, i : i + 1])
            if exceeds(change, ROUNDING):
                yield f"row {i} of {queries} x {keys} alone differs from the same row among others by {change:.3g}"


def strided(subject: CheckedNormalizer) -> Complaints:
    """Views - transposed, every second key, expanded - give what their contiguous copies give, gradients too."""
    logits = subject.logits(6, 14)
    views = {
        "transposed": subject.logits(7, 5).transpose(-1, -2),
        "strided": logits[..., ::2, ::2],
        "expanded": logits[:1].expand(3, -1, -1, -1),
    }
    for name, view in views.items():
        for mask in (None, some_mask(view.transpose(-1, -2)).transpose(-1, -2)):
            expected, actual = subject.gradients(view.contiguous(), mask), subject.gradients(view, mask)
            change = max(largest(actual[0] - expected[0]), largest(actual[1] - expected[1]))
            if exceeds(change, ROUNDING):
                yield f"{name} logits differ from their contiguous copy by {change:.3g}"


def empty_batch(subject: CheckedNormalizer) -> Complaints:
    """No batch entries, or no queries, give empty weights and gradients, not an error."""
    for logits in (subject.logits(batch=0), subject.logits(queries=0)):
        for mask in (None, torch.ones(logits.shape[-2:], dtype=torch.bool)):
            weights, gradient, _ = subject.gradients(logits, mask)
            if weights.shape != logits.shape or gradient.shape != logits.shape:
                yield f"logits of shape {tuple(logits.shape)} give weights of shape {tuple(weights.shape)}"


def reference(subject: CheckedNormalizer) -> Complaints:
    """float64 weights equal the declared reference."""
    if subject.reference is None:
        return
    for spread in (0.1, 2.0, 20.0):
        logits = subject.logits(spread=spread)
        mask, state = some_mask(logits), subject.normalizer.state_dict()
        expected = by_definition(subject.reference, logits, mask, learned=state)
        error = largest(subject(logits, mask) - expected)
        if exceeds(error, 1e-10 * max(1.0, spread, largest(expected))):
            yield f"weights of logits of about {spread:g} differ from the reference by {error:.3g}"


def half_precision(subject: CheckedNormalizer) -> Complaints:
    """float16 and bfloat16 logits are computed in float32 and rounded once, whatever the dtype of the parameters."""
    for dtype in HALF:
        yield from _compare(subject, subject.to(torch.float32), dtype)
        low = subject.to(dtype)
        yield from _compare(low.to(torch.float64), low, dtype)


def single_precision(subject: CheckedNormalizer) -> Complaints:
    """float32 weights err at most twice as much as the plain version's."""
    yield from _compare(subject, subject.to(torch.float32), torch.float32)


def large_logits(subject: CheckedNormalizer) -> Complaints:
    """Logits of 1e4, of either sign or both, give finite weights and gradients."""
    for size, logits in _large_logits(subject).items():
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            weights, gradient, _ = subject.to(dtype).gradients(logits.to(dtype), some_mask(logits))
            for kind, values in (("weight", weights), ("gradient", gradient)):
                if not values.isfinite().all():
                    yield f"{dtype} logits around {size} give a {kind} of {values[~values.isfinite()][0].item()}"


def large_precision(subject: CheckedNormalizer) -> Complaints:
    """Logits of 1e4 keep their digits in float32 too."""
    yield from _compare(subject, subject.to(torch.float32), torch.float32, list(_large_logits(subject).values()))


def _large_logits(subject: CheckedNormalizer) -> dict[str, Tensor]:
    near = subject.logits(5, 67)
    return {"+-1e4": near.sign() * 1e4, "1e4": near + 1e4, "-1e4": near - 1e4}


def _compare(
    reference: CheckedNormalizer, subject: CheckedNormalizer, dtype: torch.dtype, cases: list[Tensor] | None = None
) -> Iterator[str]:
    for logits in cases or [reference.logits(7, 257, spread=spread) for spread in (1e-3, 0.3, 1.0, 10.0)]:
        low, mask = logits.to(dtype), some_mask(logits)
        exact = reference(low.double(), mask)
        allowed = 2 * largest(_plain(reference, low, mask, exact).double() - exact)
        error = largest(subject(low, mask).double() - exact)
        if exceeds(error, allowed):
            yield f"{dtype} weights err by {error:.3g} for logits up to {largest(low):.3g}; plain allows {allowed:.3g}"


def _plain(reference: CheckedNormalizer, low: Tensor, mask: Tensor, exact: Tensor) -> Tensor:
    if low.dtype in HALF:
        return exact.to(low.dtype)
    eps, log_n = torch.finfo(low.dtype).eps, math.log(low.shape[-1])
    sign, other_sign = (torch.randn(low.shape, generator=seeded(seed)).double().sign() for seed in (11, 12))
    off = eps * (1 + low.double().abs() + log_n) * sign
    return (reference(low.double() + off, mask) * (1 + eps * (1 + log_n) * other_sign)).to(low.dtype)


def first_derivative(subject: CheckedNormalizer) -> Complaints:
    """Gradients for logits and parameters agree with finite differences in float64."""
    yield from _against_differences(subject, torch.autograd.gradcheck)


def second_derivative(subject: CheckedNormalizer) -> Complaints:
    """Second derivatives agree with finite differences too, in random directions."""
    yield from _against_differences(subject, partial(torch.autograd.gradgradcheck, fast_mode=True))


def _against_differences(subject: CheckedNormalizer, check: Callable[..., bool]) -> Complaints:
    learned = subject.parameters()
    for spread in (0.3, 3.0):
        logits = subject.logits(2, 5, batch=1, spread=spread)
        mask, hidden = some_mask(logits), subject.hidden_states(1, 2)
        mask[..., 0] = True

        def weights(logits: Tensor, *parameters: Tensor, mask: Tensor = mask, hidden: Tensor | None = hidden) -> Tensor:
            named = dict(zip(learned, parameters, strict=True))
            outputs: Tensor = functional_call(subject.normalizer, named, (logits, mask), {"hidden_states": hidden})
            return outputs

        inputs = [x.detach().clone().requires_grad_() for x in (logits, *learned.values())]
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                check(weights, inputs)
        except RuntimeError as error:
            yield f"for logits up to {largest(logits):.3g}: " + " ".join(str(error).split())[:500]


def compiled(subject: CheckedNormalizer) -> Complaints:
    """torch.compile gives the same weights and gradients in float32, up to rounding."""
    eager, fast = subject.to(torch.float32), subject.to(torch.float32)
    torch.compiler.reset()
    fast.normalizer.compile(fullgraph=True)  # or what cannot be compiled would be compared with itself
    logits = subject.logits(5, 131).float()
    mask = some_mask(logits)
    expected, actual = eager.gradients(logits, mask), fast.gradients(logits, mask)
    for kind, a, b in (("weight", actual[0], expected[0]), ("gradient", actual[1], expected[1])):
        allowed = 1e-5 * max(1.0, largest(b))
        if exceeds(largest(a - b), allowed):
            yield f"compiled, a {kind} differs by {largest(a - b):.3g} > {allowed:.3g}"


CHECKS: dict[str, CheckFunction] = {
    check.__name__: check
    for check in (
        runs, reference, row_sums, sign, exact_zeros, permutation, shift, lipschitz, hidden_keys, hidden_values,
        visible_nan, empty_rows, padding, mask_shapes, single_key, rows_alone, strided, empty_batch, half_precision,
        single_precision, large_logits, large_precision, first_derivative, second_derivative, compiled,
    )
}  # fmt: skip
