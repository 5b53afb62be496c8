"""Numerical checks: each dtype against float64, derivatives against finite differences, compiled against eager.

The reference is the normalizer in float64, on the logits as rounded to the dtype. Nothing can do better than
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

from attnorm.normalizers.checks.subject import (
    CheckedNormalizer,
    Complaints,
    by_definition,
    exceeds,
    largest,
    seeded,
    some_mask,
)

HALF = (torch.float16, torch.bfloat16)


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
