"""Claims that every normalizer makes about itself, built from its declarations: new ones are searched like the papers'.

- its Lipschitz constant, where it declares one, is never exceeded;
- where it is also shift invariant, permutation equivariant and sums to one, it obeys the frontier
  w <= 1/n + K g (n-1)/n: the weight w of a key whose logit is g above otherwise equal ones.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from attnorm.normalizers.contract import Mechanism, Normalizer
from attnorm.normalizers.registry import available, entries, get
from attnorm.theory.catalogue.claim import Case, Claim, at_most
from attnorm.theory.catalogue.jacobian import jacobian_norm


def with_lipschitz() -> Iterator[Normalizer]:
    """The row normalizers, at their defaults and in float64, that declare a Lipschitz constant."""
    for name in available():
        normalizer = get(name)
        if isinstance(normalizer, Normalizer) and normalizer.lipschitz(8) is not None:
            yield normalizer.double()


def on_frontier(normalizer: Normalizer | Mechanism) -> bool:
    """Whether the law of docs/theory/frontier.md speaks about it."""
    promised = normalizer.properties
    return promised.row_sum == "one" and promised.shift_invariant and promised.permutation_equivariant


def normalizer_claims() -> Iterator[Claim]:
    declared = list(with_lipschitz())
    yield from map(_lipschitz_claim, declared)
    yield from map(_frontier_claim, filter(on_frontier, declared))


def _constant(normalizer: Normalizer, keys: int) -> Tensor:
    constant = normalizer.lipschitz(keys)
    assert constant is not None
    return torch.tensor(constant, dtype=torch.float64)


def _lipschitz_claim(normalizer: Normalizer) -> Claim:
    def ratio(case: Case) -> Tensor:
        return at_most(jacobian_norm(normalizer, case.scaled), _constant(normalizer, case.keys))

    name = normalizer.name
    entry = entries()[name]
    built_in = entry.address.startswith("attnorm.")
    return Claim(
        id=f"lipschitz-{name}",
        family="normalizers",
        source=f"declared by {name}",
        form="added",
        statement=f"||J|| <= {name}.lipschitz(n)",
        domain=name,
        status="holds",
        proof="" if not built_in else entry.url if entry.url.startswith("docs/") else f"docs/normalizers.md#{name}",
        ratio=ratio,
        differentiable=False,
    )


def _frontier_claim(normalizer: Normalizer) -> Claim:
    def ratio(case: Case) -> Tensor:
        n, gap = case.keys, case.dial
        logits = torch.where(torch.arange(n) == 0, gap[:, None], 0.0)
        return at_most(normalizer(logits)[:, 0], 1 / n + _constant(normalizer, n) * gap * (n - 1) / n)

    return Claim(
        id=f"frontier-{normalizer.name}",
        family="frontier",
        source="added",
        form="added",
        statement=f"{normalizer.name} keeps at most 1/n + K g (n-1)/n for a key with gap g",
        domain="shift invariant, permutation equivariant, row sum 1, Lipschitz constant K",
        status="holds",
        proof="docs/theory/frontier.md#the-law",
        ratio=ratio,
    )
