"""Claims that every normalizer makes about itself, built from its declarations: new ones are searched like the papers'.

- where Lemma 1 covers it, its weights obey the lemma's constants for the function F that it declares;
- its Lipschitz constant, where it declares one, is never exceeded;
- where it is also shift invariant, permutation equivariant and sums to one, it obeys the frontier
  w <= 1/n + K g (n-1)/n: the weight w of a key whose logit is g above otherwise equal ones.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.registry import available, entries, get
from attnorm.theory.catalogue.claim import EXACTLY, NEARLY, CaseSizes, Claim, ClaimCase, at_most
from attnorm.theory.catalogue.dispersion import weights_between
from attnorm.theory.dispersion import Bounds, lemma1_constants_of, not_covered
from attnorm.theory.frontier import outside_the_law
from attnorm.theory.gradient import jacobian_norm

FEW_ROWS = 4
FAR = 20.0
MAX_LOGIT = 50.0  # e^50 is still an ordinary number


def with_lipschitz() -> Iterator[Normalizer]:
    """The row normalizers, at their defaults and in float64, that declare a Lipschitz constant."""
    for name in available():
        normalizer = get(name)
        if isinstance(normalizer, Normalizer) and normalizer.lipschitz(8) is not None:
            yield normalizer.double()


def covered_by_lemma1() -> Iterator[Normalizer]:
    for name in available():
        normalizer = get(name)
        if isinstance(normalizer, Normalizer) and not_covered(normalizer) is None:
            yield normalizer.double()


def normalizer_claims() -> Iterator[Claim]:
    yield from map(_lemma1_claim, covered_by_lemma1())
    declared = list(with_lipschitz())
    yield from map(_lipschitz_claim, declared)
    yield from (_frontier_claim(normalizer) for normalizer in declared if outside_the_law(normalizer) is None)


def _constant(normalizer: Normalizer, keys: int) -> Tensor:
    constant = normalizer.lipschitz(keys)
    assert constant is not None
    return torch.tensor(constant, dtype=torch.float64)


def _lemma1_claim(normalizer: Normalizer) -> Claim:
    def ratio(case: ClaimCase) -> Tensor:
        """A few rows: the range of F on each row's interval is searched for, not taken from the row."""
        logits = case.logits[:FEW_ROWS].clamp(-MAX_LOGIT, MAX_LOGIT)
        ends = zip(logits.amin(-1).tolist(), logits.amax(-1).tolist(), strict=True)
        lower, upper = zip(*(lemma1_constants_of(normalizer, low, high) for low, high in ends), strict=True)
        bounds = Bounds(torch.stack(lower) / case.keys, torch.stack(upper) / case.keys)
        return case.padded(weights_between(normalizer(logits), bounds))

    name = normalizer.name
    return Claim(
        id=f"lemma-1-{name}",
        family="normalizers",
        source=f"declared by {name}",
        form="added",
        statement=f"C1/n <= a_i <= C2/n with the C1 and C2 of {name}'s own F on the interval of the logits",
        domain=f"{name}, bounded logits",
        status="holds",
        proof="docs/theory/dispersion.md#lemma-1",
        ratio=ratio,
        attained=(EXACTLY, EXACTLY),
        differentiable=False,
        sizes=CaseSizes(most_keys=16),
    )


def _lipschitz_claim(normalizer: Normalizer) -> Claim:
    def ratio(case: ClaimCase) -> Tensor:
        """Some rows have two equal leaders far above the rest and above 0: the worst of softmax, with a sink too."""
        leaders = torch.where(torch.arange(case.keys) < 2, FAR, -FAR)
        logits = torch.where((case.pick % 6 == 0)[:, None], leaders, case.scaled)
        return at_most(jacobian_norm(normalizer, logits), _constant(normalizer, case.keys))

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
        attained=(NEARLY,) if built_in else (),  # others may declare a constant that they only know to be enough
        differentiable=False,
    )


def _frontier_claim(normalizer: Normalizer) -> Claim:
    def ratio(case: ClaimCase) -> Tensor:
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
