"""Claims on normalizers: properties of attnorm's own, the law of the frontier, and the declarations of every one.

Ours are kneemax (the weight that it keeps, how fast it moves, its zeros) and nearmax (how far it looks). The frontier
says which map attains the law, and what gap each map needs for a weight. The claims about a registered normalizer are
built from its declarations, so new ones are searched like the papers':

- where Lemma 1 covers it, its weights obey the lemma's constants for the function F that it declares;
- its Lipschitz constant, where it declares one, is never exceeded;
- where it is also shift invariant, permutation equivariant and sums to one, it obeys the frontier
  w <= 1/n + K g (n-1)/n: the weight w of a key whose logit is g above otherwise equal ones.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.entmax import entmax_rows
from attnorm.normalizers.kneemax import DEFAULT_KNEE, kneemax
from attnorm.normalizers.registry import available, entries, get
from attnorm.theory.dispersion import Bounds, lemma1_constants_of, not_covered
from attnorm.theory.gradient import jacobian_norm
from attnorm_lab.errata import frontier
from attnorm_lab.errata.catalogue.claim import (
    EXACTLY,
    NEARLY,
    CaseSizes,
    Claim,
    ClaimCase,
    at_least,
    at_most,
    between,
    equals,
)
from attnorm_lab.errata.catalogue.dispersion import weights_between
from attnorm_lab.errata.frontier import outside_the_law

DOC = "docs/theory/kneemax.md"
GRADIENT, KEPT, ZEROS, FIXED, DISTANCE = (
    f"{DOC}#theorem-{name}"
    for name in ("2-gradient", "3-weight-kept", "4-zeros", "5-a-fixed-knee", "6-a-penalty-on-the-distance")
)

kneemax_claim = partial(
    Claim, family="kneemax", source="attnorm", form="added", domain="kneemax, share 1", status="holds"
)

ROUNDING = 1e-9  # of weights
KNEE = DEFAULT_KNEE  # that of nearmax too


def _for_each(values: Tensor, formula: Callable[..., float], *arguments: int) -> Tensor:
    return torch.tensor([formula(value, *arguments) for value in values.tolist()], dtype=torch.float64)


def _spread(logits: Tensor) -> Tensor:
    return logits.amax(-1) - logits.amin(-1)


def _rows_with_a_leader(keys: int, gaps: Tensor) -> Tensor:
    """Rows whose first key leads equal ones by the gap."""
    return torch.where(torch.arange(keys) == 0, gaps[:, None], 0.0)


def _weights(case: ClaimCase, logits: Tensor, knee: float | None = None) -> Tensor:
    """Weights of kneemax with this knee, or with share 1."""
    # The temperature is divided out in float64: a parameter would hold it in float32.
    weights: Tensor = kneemax(None if knee else 1.0, knee=knee)(logits / case.temperature)
    return weights


def _leader(case: ClaimCase) -> tuple[Tensor, Tensor]:
    """Gap in units of T, and the weight kept by a key that leads n-1 equal ones by it."""
    gap = case.dial * 2
    return gap, _weights(case, _rows_with_a_leader(case.keys, gap * case.temperature))[:, 0]


def _formula(gaps: Tensor, keys: int) -> Tensor:
    return _for_each(gaps, frontier.kneemax_weight, keys)


def _kept(case: ClaimCase) -> Tensor:
    gap, weight = _leader(case)
    return (weight - (gap / 2).clamp(max=1)).abs() * case.keys


def _kept_exactly(case: ClaimCase) -> Tensor:
    gap, weight = _leader(case)
    return equals(weight, _formula(gap, case.keys), ROUNDING)


def _kept_among_any(case: ClaimCase) -> Tensor:
    top = case.scaled.topk(2, dim=-1).values
    least = _formula((top[:, 0] - top[:, 1]).clamp(min=0), case.keys)
    return at_least(_weights(case, case.logits).amax(-1), least - ROUNDING)


def _near_the_law(case: ClaimCase) -> Tensor:
    gap, weight = _leader(case)
    allowed = _for_each(gap, lambda gap: frontier.frontier_weight(case.keys, gap / 2))
    return at_most(allowed - weight, (2 - (gap / 2).clamp(max=1)) / case.keys)


def _norm(case: ClaimCase) -> Tensor:
    weights = _weights(case, case.logits)
    norm = jacobian_norm(lambda z: _weights(case, z), case.logits) * 2 * case.temperature
    return between(norm, (1 - weights.amax(-1)).clamp(min=0).sqrt() - 1e-6, torch.ones_like(norm))


def _kept_with_knee(case: ClaimCase) -> Tensor:
    """On half of the rows one key leads equal ones by less, often little less, than what gives it all of the weight."""
    lead = 2 * (1 + KNEE) * (1 - (case.dial / (1 + case.dial)) ** 8)
    leads = _rows_with_a_leader(case.keys, lead * case.temperature)
    logits = torch.where((case.pick % 2 == 0)[:, None], leads, case.logits)
    top = (logits / case.temperature).topk(2, dim=-1).values
    half = (top[:, 0] - top[:, 1]) / 2
    least = torch.where(half <= 2 * KNEE, half.square() / (4 * KNEE), half - KNEE).clamp(max=1)
    return at_least(_weights(case, logits, KNEE).amax(-1), least - ROUNDING)


def _certain_zero(case: ClaimCase, knee: float | None = None) -> Tensor:
    """The deepest key that still has weight, against the depth from which on none has any."""
    depth = case.logits.amax(-1, keepdim=True) - case.logits
    deepest = torch.where(_weights(case, case.logits, knee) > 0, depth, 0.0).amax(-1)
    return at_most(deepest, torch.full_like(deepest, 2 * case.temperature * (1 + (knee or 1 / case.keys))))


def _no_zero(case: ClaimCase, knee: float | None = None) -> Tensor:
    """Where a key has no weight: the spread below which that cannot be, against the spread of the row."""
    n = case.keys
    reach = 1 / n + 1 / (n - 1) if knee is None else 2 * math.sqrt(knee / (n - 1))
    least = torch.full_like(case.dial, 2 * case.temperature * reach)
    # On some rows one key lies as far below equal ones as makes the first zero, up to 0.1 %.
    depth = least * (1 + 1e-3 * case.dial.log().clamp(-1, 1))
    last = torch.where(torch.arange(n) < n - 1, depth[:, None], 0.0)
    logits = torch.where((case.pick % 4 == 0)[:, None], last, case.logits)
    has_zero = (_weights(case, logits, knee) == 0).any(-1)
    return torch.where(has_zero, at_least(_spread(logits), least), torch.nan)


def _distances(case: ClaimCase) -> Tensor:
    """Of the keys from the query, which is the last one."""
    return torch.arange(case.keys - 1, -1, -1, dtype=torch.float64)


def _penalized(case: ClaimCase) -> tuple[Tensor, Tensor, Tensor]:
    """Logits without and with a penalty on the distance, and its slope (rows, 1).

    On some rows the farthest key stands as high as the bound allows, and the penalty parts all other keys.
    """
    distance = _distances(case)
    part = 2 * case.temperature * (1 + KNEE)
    slope = part * case.dial[:, None]
    steep = slope.clamp(min=part)
    far = torch.where(distance == case.keys - 1, (steep * (case.keys - 1) - 0.999 * part).clamp(min=0), 0.0)
    built = (case.pick % 4 == 0)[:, None]
    logits, slope = torch.where(built, far, case.logits), torch.where(built, steep, slope)
    return logits, logits - slope * distance, slope


def _farthest(case: ClaimCase) -> Tensor:
    """The largest distance with weight, against the reach."""
    logits, penalized, slope = _penalized(case)
    weights: Tensor = kneemax(knee=KNEE)(penalized / case.temperature)
    reach = (_spread(logits) + 2 * case.temperature * (1 + KNEE)) / slope[:, 0]
    return at_most(torch.where(weights > 0, _distances(case), 0.0).amax(-1), reach)


def _beyond(case: ClaimCase) -> Tensor:
    """Softmax's mass at a distance of at least top_n, against the geometric series."""
    logits, penalized, slope = _penalized(case)
    weights = torch.softmax(penalized / case.temperature, -1)
    ratio = torch.exp(-slope[:, 0] / case.temperature)
    bound = torch.exp(_spread(logits) / case.temperature - case.top_n * slope[:, 0] / case.temperature) / (1 - ratio)
    return at_most(weights[:, : max(0, case.keys - case.top_n)].sum(-1), bound)


KNEEMAX_CLAIMS = [
    kneemax_claim(
        id="kneemax-weight",
        proof=KEPT,
        statement="a key whose logit is g above n-1 equal ones has weight min(1, g/2T) up to 1/n, for every n",
        ratio=_kept,
        attained=(NEARLY,),
    ),
    kneemax_claim(
        id="kneemax-weight-exact",
        proof=KEPT,
        statement="that weight is w_n(g) = 1 - (sqrt(b^2 + 1 + 1/n - g/2T) - b)^2, b^2 = 1/(n(n-1))",
        ratio=_kept_exactly,
        differentiable=False,
    ),
    kneemax_claim(
        id="kneemax-weight-any-row",
        proof=KEPT,
        statement="a key whose logit is g above all others, which may differ, has at least the weight w_n(g)",
        ratio=_kept_among_any,
        differentiable=False,
        attained=(EXACTLY,),
    ),
    kneemax_claim(
        id="kneemax-near-frontier",
        proof=KEPT,
        statement="no map with its Lipschitz constant can keep more than (2 - min(1, g/2T))/n beyond it",
        ratio=_near_the_law,
        differentiable=False,
    ),
    kneemax_claim(
        id="kneemax-jacobian",
        proof=GRADIENT,
        statement="sqrt(1 - max p)/(2T) <= ||J|| <= 1/(2T), for every row of every length",
        ratio=_norm,
        differentiable=False,
        sizes=CaseSizes(most_keys=16),
        attained=(None, EXACTLY),
    ),
    kneemax_claim(
        id="kneemax-zeros-certain",
        proof=ZEROS,
        statement="a key 2T(1 + 1/n) below the largest logit has weight exactly 0",
        ratio=_certain_zero,
        differentiable=False,
        attained=(NEARLY,),
    ),
    kneemax_claim(
        id="kneemax-zeros-none",
        proof=ZEROS,
        statement="no key has weight 0 while the spread is below 2T(1/n + 1/(n-1))",
        ratio=_no_zero,
        differentiable=False,
        attained=(NEARLY,),
    ),
    kneemax_claim(
        id="kneemax-fixed-weight",
        proof=FIXED,
        domain="kneemax with its default knee 1/4",
        statement="a key whose logit is g above all others has at least the weight min(1, phi(g/2T)), for every n",
        ratio=_kept_with_knee,
        differentiable=False,
    ),
    kneemax_claim(
        id="kneemax-fixed-zeros-certain",
        proof=FIXED,
        domain="kneemax with its default knee k = 1/4",
        statement="a key 2T(1 + k) below the largest logit has weight exactly 0",
        ratio=partial(_certain_zero, knee=KNEE),
        differentiable=False,
        attained=(NEARLY,),
    ),
    kneemax_claim(
        id="kneemax-fixed-zeros-none",
        proof=FIXED,
        domain="kneemax with its default knee k = 1/4, n >= 5",
        statement="no key has weight 0 while the spread is below 4T sqrt(k/(n-1))",
        ratio=partial(_no_zero, knee=KNEE),
        differentiable=False,
        sizes=CaseSizes(least_keys=6),
        attained=(NEARLY,),
    ),
    kneemax_claim(
        id="nearmax-reach",
        proof=DISTANCE,
        domain="nearmax; logits minus m times the distance, the query itself visible",
        statement="keys farther than (D + 2T(1 + k))/m have weight exactly 0, for every n; D: spread of the logits",
        ratio=_farthest,
        differentiable=False,
        attained=(NEARLY,),
    ),
    kneemax_claim(
        id="alibi-mass",
        proof=DISTANCE,
        domain="softmax; logits minus m times the distance, the query itself visible",
        statement="keys at distances from d on have at most the weight e^((D - m d)/T) / (1 - e^(-m/T)), for every n",
        ratio=_beyond,
    ),
]

law_claim = partial(
    Claim, family="law", source="added", form="added", status="holds", proof="docs/theory/frontier.md#the-law",
    differentiable=False,
)  # fmt: skip

MAX_GAP = 30.0  # beyond it 1 - w has too few digits for the gap to be recovered
MIN_SMALL = 1e-6  # of 1 - w, for the same reason


def _attained(case: ClaimCase) -> Tensor:
    """Sparsemax has K = 1: its weight against the law, and the effort of that weight against the gap."""
    gaps, n = case.dial, case.keys
    kept = entmax_rows(_rows_with_a_leader(n, gaps), 2.0)[:, 0]
    weight = _for_each(gaps, lambda gap: frontier.frontier_weight(n, gap))
    effort = _for_each(kept, lambda weight: frontier.frontier_effort(n, min(weight, 1.0)))
    return torch.stack([equals(kept, weight, ROUNDING), equals(effort, gaps.clamp(max=1.0), ROUNDING)], -1)


def _gaps(case: ClaimCase) -> Tensor:
    """The gap that a formula states for the weight that the map itself gives at this gap."""
    n, gaps = case.keys, case.dial.clamp(max=MAX_GAP)
    logits = _rows_with_a_leader(n, gaps)
    maps: list[tuple[Tensor, frontier.GapForWeight]] = [
        (torch.softmax(logits, -1), frontier.softmax_gap),
        (entmax_rows(logits, 1.5), partial(frontier.entmax_gap, alpha=1.5)),
        (kneemax(share=1.0)(logits), frontier.kneemax_gap),
    ]
    ratios = []
    for weights, gap_for in maps:
        kept = weights[:, 0]
        stated = _for_each(kept.clamp(1 / n, 1.0), gap_for, n)
        applies = (1 - kept > MIN_SMALL) & (weights[:, 1:].amin(-1) > MIN_SMALL / n)
        ratios.append(torch.where(applies, equals(stated, gaps, 1e-6), torch.nan))
    return case.picked(ratios)


LAW_CLAIMS = [
    law_claim(
        id="law-attained",
        statement="sparsemax keeps exactly min(1, 1/n + g (n-1)/n), and (n w - 1)/(n - 1) is the effort of weight w",
        domain="sparsemax, K = 1; a key that leads n-1 equal ones by g",
        ratio=_attained,
    ),
    law_claim(
        id="gap-for-weight",
        statement="softmax needs logit(w) + log(n-1), entmax and kneemax phi^-1(w) - phi^-1((1-w)/(n-1))",
        domain="softmax, entmax15, kneemax with share 1; searched where the other weights are positive",
        ratio=_gaps,
    ),
]

CLAIMS = KNEEMAX_CLAIMS + LAW_CLAIMS

FEW_ROWS = 4
FAR = 20.0
MAX_LOGIT = 50.0  # e^50 is still an ordinary number


declared_claim = partial(Claim, family="normalizers", form="added", status="holds", differentiable=False)


def normalizer_claims() -> Iterator[Claim]:
    yield from map(_lemma1_claim, covered_by_lemma1())
    declared = list(with_lipschitz())
    yield from map(_lipschitz_claim, declared)
    yield from (_frontier_claim(normalizer) for normalizer in declared if outside_the_law(normalizer) is None)


def covered_by_lemma1() -> Iterator[Normalizer]:
    return (normalizer for normalizer in _row_normalizers() if not_covered(normalizer) is None)


def with_lipschitz() -> Iterator[Normalizer]:
    """Return the row normalizers that declare a Lipschitz constant."""
    return (normalizer for normalizer in _row_normalizers() if normalizer.lipschitz(8) is not None)


def _row_normalizers() -> Iterator[Normalizer]:
    """Yield the registered row normalizers, at their defaults and in float64."""
    for normalizer in map(get, available()):
        if isinstance(normalizer, Normalizer):
            yield normalizer.double()


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
    return declared_claim(
        id=f"lemma-1-{name}",
        source=f"declared by {name}",
        statement=f"C1/n <= a_i <= C2/n with the C1 and C2 of {name}'s own F on the interval of the logits",
        domain=f"{name}, bounded logits",
        proof="docs/theory/dispersion.md#lemma-1",
        ratio=ratio,
        attained=(EXACTLY, EXACTLY),
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
    return declared_claim(
        id=f"lipschitz-{name}",
        source=f"declared by {name}",
        statement=f"||J|| <= {name}.lipschitz(n)",
        domain=name,
        proof="" if not built_in else entry.url if entry.url.startswith("docs/") else f"docs/normalizers.md#{name}",
        ratio=ratio,
        attained=(NEARLY,) if built_in else (),  # others may declare a constant that they only know to be enough
    )


def _frontier_claim(normalizer: Normalizer) -> Claim:
    def ratio(case: ClaimCase) -> Tensor:
        n, gap = case.keys, case.dial
        weight = normalizer(_rows_with_a_leader(n, gap))[:, 0]
        return at_most(weight, 1 / n + _constant(normalizer, n) * gap * (n - 1) / n)

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
