"""Derivatives: what autograd returns is the derivative, twice, and compiling changes nothing."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.func import functional_call

from attnorm.normalizers.checks.subject import CheckedNormalizer, Complaints, exceeds, largest, some_mask


def first_derivative(subject: CheckedNormalizer) -> Complaints:
    """Gradients for logits and parameters agree with finite differences in float64."""
    yield from _against_differences(subject, torch.autograd.gradcheck)


def second_derivative(subject: CheckedNormalizer) -> Complaints:
    """So do the gradients of these gradients, in random directions."""
    yield from _against_differences(subject, partial(torch.autograd.gradgradcheck, fast_mode=True))


def compiled(subject: CheckedNormalizer) -> Complaints:
    """torch.compile gives the same weights and gradients in float32, up to rounding."""
    eager, fast = subject.to(torch.float32), subject.to(torch.float32)
    torch.compiler.reset()
    fast.normalizer.compile(fullgraph=True)  # or what cannot be compiled would be compared with itself
    logits = subject.logits(5, 131).float()
    mask = some_mask(logits)
    expected, found = eager.gradients(logits, mask), fast.gradients(logits, mask)
    for kind, a, b in (("weight", found[0], expected[0]), ("gradient", found[1], expected[1])):
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
            found: Tensor = functional_call(subject.normalizer, named, (logits, mask), {"hidden_states": hidden})
            return found

        inputs = [x.detach().clone().requires_grad_() for x in (logits, *learned.values())]
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                check(weights, inputs)
        except RuntimeError as error:
            yield f"for logits up to {largest(logits):.3g}: " + " ".join(str(error).split())[:500]
