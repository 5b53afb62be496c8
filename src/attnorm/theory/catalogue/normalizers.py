"""Claims that every normalizer makes about itself, built from its declarations: new ones are searched like the papers'.

- its Lipschitz constant, where it declares one, is never exceeded;
- where it is also shift invariant, permutation equivariant and sums to one, it obeys the frontier
  w <= 1/n + K g (n-1)/n: the weight w of a key whose logit is g above otherwise equal ones.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from attnorm.normalizers.contract import Mechanism, Normalizer
from attnorm.normalizers.registry import available, get
from attnorm.theory.catalogue.claim import Case, Claim, at_most

PROBES = 4  # steps of power iteration; every step gives a lower bound on the norm, so a violation is real


def normalizer_claims() -> Iterator[Claim]:
    for name in available():
        normalizer = get(name)
        if isinstance(normalizer, Mechanism):
            continue
        normalizer = normalizer.double()
        if normalizer.lipschitz(8) is None:
            continue
        yield _lipschitz_claim(name, normalizer)
        promised = normalizer.properties
        if promised.row_sum == "one" and promised.shift_invariant and promised.permutation_equivariant:
            yield _frontier_claim(name, normalizer)


def _constant(normalizer: Normalizer, keys: int) -> Tensor:
    constant = normalizer.lipschitz(keys)
    assert constant is not None
    return torch.tensor(constant, dtype=torch.float64)


def _lipschitz_claim(name: str, normalizer: Normalizer) -> Claim:
    def ratio(case: Case) -> Tensor:
        logits = (case.logits / case.temperature).detach()
        return at_most(_jacobian_norm(normalizer, logits), _constant(normalizer, case.keys))

    return Claim(
        id=f"lipschitz-{name}",
        family="normalizers",
        source=f"declared by {name}",
        form="added",
        statement=f"||J|| <= {name}.lipschitz(n)",
        domain=name,
        status="holds",
        proof="docs/normalizers.md",
        ratio=ratio,
        differentiable=False,
    )


def _frontier_claim(name: str, normalizer: Normalizer) -> Claim:
    def ratio(case: Case) -> Tensor:
        n = case.keys
        gap = case.dial
        logits = torch.where(torch.arange(n) == 0, gap[:, None], 0.0)
        weight = normalizer(logits)[:, 0]
        return at_most(weight, 1 / n + _constant(normalizer, n) * gap * (n - 1) / n)

    return Claim(
        id=f"frontier-{name}",
        family="frontier",
        source="added",
        form="added",
        statement=f"{name} keeps at most 1/n + K g (n-1)/n for a key with gap g",
        domain="shift invariant, permutation equivariant, row sum 1, Lipschitz constant K",
        status="holds",
        proof="docs/theory/frontier.md",
        ratio=ratio,
    )


def _jacobian_norm(normalizer: Normalizer, logits: Tensor) -> Tensor:
    """A lower bound on ||J|| of each row: exact for few keys, power iteration on J^T J for many."""
    rows, keys = logits.shape
    if keys <= 16:
        columns = []
        z = logits.clone().requires_grad_()
        weights = normalizer(z)
        for j in range(keys):
            columns.append(torch.autograd.grad(weights[:, j].sum(), z, retain_graph=True)[0])
        return torch.linalg.matrix_norm(torch.stack(columns, dim=1), ord=2)
    z = logits.clone().requires_grad_()
    weights = normalizer(z)
    direction = logits - logits.mean(-1, keepdim=True) + 1e-3 * torch.linspace(-1, 1, keys, dtype=logits.dtype)
    norm = torch.zeros(rows, dtype=logits.dtype)
    for _ in range(PROBES):
        left = direction / direction.norm(dim=-1, keepdim=True).clamp(min=1e-300)
        (direction,) = torch.autograd.grad(weights, z, left, retain_graph=True)  # J^T left
        norm = torch.maximum(norm, direction.norm(dim=-1))
    return norm
