"""Claims on our own normalizers: what weight kneemax keeps, how fast it moves, its zeros; how far nearmax looks."""

from functools import partial

import torch
from torch import Tensor

from attnorm.normalizers.kneemax import kneemax
from attnorm.theory import frontier
from attnorm.theory.catalogue.claim import (
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
from attnorm.theory.linearization import jacobian_norm

DOC = "docs/theory/kneemax.md"
GRADIENT, KEPT, ZEROS, DISTANCE = (
    f"{DOC}#theorem-{name}" for name in ("2-gradient", "3-weight-kept", "4-zeros", "6-a-penalty-on-the-distance")
)

claim = partial(Claim, family="kneemax", source="attnorm", form="added", domain="kneemax, share 1", status="holds")

ROUNDING = 1e-9  # of a weight found by Newton's method


def _weights(case: ClaimCase, logits: Tensor) -> Tensor:
    # The temperature is divided out in float64: a parameter would hold it in float32.
    weights: Tensor = kneemax(share=1.0)(logits / case.temperature)
    return weights


def _leader(case: ClaimCase) -> tuple[Tensor, Tensor]:
    """Gap in units of T, and the weight kept by a key that leads n-1 equal ones by it."""
    gap = case.dial * 2
    logits = torch.where(torch.arange(case.keys) == 0, (gap * case.temperature)[:, None], 0.0)
    return gap, _weights(case, logits)[:, 0]


def _formula(gaps: Tensor, keys: int) -> Tensor:
    return torch.tensor([frontier.kneemax_weight(gap, keys) for gap in gaps.tolist()], dtype=torch.float64)


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
    allowed = torch.tensor([frontier.frontier_weight(case.keys, g / 2) for g in gap.tolist()], dtype=torch.float64)
    return at_most(allowed - weight, (2 - (gap / 2).clamp(max=1)) / case.keys)


def _norm(case: ClaimCase) -> Tensor:
    weights = _weights(case, case.logits)
    norm = jacobian_norm(lambda z: _weights(case, z), case.logits) * 2 * case.temperature
    return between(norm, (1 - weights.amax(-1)).clamp(min=0).sqrt() - 1e-6, torch.ones_like(norm))


def _certain_zero(case: ClaimCase) -> Tensor:
    """The deepest key that still has weight, against the depth from which on none has any."""
    depth = case.logits.amax(-1, keepdim=True) - case.logits
    deepest = torch.where(_weights(case, case.logits) > 0, depth, 0.0).amax(-1)
    return at_most(deepest, torch.full_like(deepest, 2 * case.temperature * (1 + 1 / case.keys)))


def _no_zero(case: ClaimCase) -> Tensor:
    """Where a key has no weight: the spread below which that cannot be, against the spread of the row."""
    n = case.keys
    least = torch.full_like(case.dial, 2 * case.temperature * (1 / n + 1 / (n - 1)))
    # On some rows one key lies as far below equal ones as makes the first zero, up to 0.1 %.
    depth = least * (1 + 1e-3 * case.dial.log().clamp(-1, 1))
    last = torch.where(torch.arange(n) < n - 1, depth[:, None], 0.0)
    logits = torch.where((case.pick % 4 == 0)[:, None], last, case.logits)
    has_zero = (_weights(case, logits) == 0).any(-1)
    return torch.where(has_zero, at_least(logits.amax(-1) - logits.amin(-1), least), torch.nan)


KNEE = 0.25  # of nearmax


def _distances(case: ClaimCase) -> Tensor:
    """Of the keys from the query, which is the last one."""
    return torch.arange(case.keys - 1, -1, -1, dtype=torch.float64)


def _penalised(case: ClaimCase) -> tuple[Tensor, Tensor, Tensor]:
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
    logits, penalised, slope = _penalised(case)
    weights: Tensor = kneemax(knee=KNEE)(penalised / case.temperature)
    reach = (logits.amax(-1) - logits.amin(-1) + 2 * case.temperature * (1 + KNEE)) / slope[:, 0]
    return at_most(torch.where(weights > 0, _distances(case), 0.0).amax(-1), reach)


def _beyond(case: ClaimCase) -> Tensor:
    """Softmax's mass at a distance of at least top_n, against the geometric series."""
    logits, penalised, slope = _penalised(case)
    weights = torch.softmax(penalised / case.temperature, -1)
    ratio = torch.exp(-slope[:, 0] / case.temperature)
    spread = (logits.amax(-1) - logits.amin(-1)) / case.temperature
    bound = torch.exp(spread - case.top_n * slope[:, 0] / case.temperature) / (1 - ratio)
    return at_most(weights[:, : max(0, case.keys - case.top_n)].sum(-1), bound)


CLAIMS = [
    claim(
        id="kneemax-weight",
        proof=KEPT,
        statement="a key that leads n-1 equal ones by g keeps min(1, g/2T) up to 1/n, for every n",
        ratio=_kept,
        attained=(NEARLY,),
    ),
    claim(
        id="kneemax-weight-exact",
        proof=KEPT,
        statement="that weight is w_n(g) = 1 - (sqrt(b^2 + 1 + 1/n - g/2T) - b)^2, b^2 = 1/(n(n-1))",
        ratio=_kept_exactly,
        differentiable=False,
    ),
    claim(
        id="kneemax-weight-any-row",
        proof=KEPT,
        statement="among unequal keys a leader by g keeps at least w_n(g)",
        ratio=_kept_among_any,
        differentiable=False,
        attained=(EXACTLY,),
    ),
    claim(
        id="kneemax-near-frontier",
        proof=KEPT,
        statement="no map with its Lipschitz constant can keep more than (2 - min(1, g/2T))/n beyond it",
        ratio=_near_the_law,
        differentiable=False,
    ),
    claim(
        id="kneemax-jacobian",
        proof=GRADIENT,
        statement="sqrt(1 - max p)/(2T) <= ||J|| <= 1/(2T), for every row of every length",
        ratio=_norm,
        differentiable=False,
        sizes=CaseSizes(most_keys=16),
        attained=(None, EXACTLY),
    ),
    claim(
        id="kneemax-zeros-certain",
        proof=ZEROS,
        statement="a key 2T(1 + 1/n) below the largest logit has weight exactly 0",
        ratio=_certain_zero,
        differentiable=False,
        attained=(NEARLY,),
    ),
    claim(
        id="kneemax-zeros-none",
        proof=ZEROS,
        statement="no key has weight 0 while the spread is below 2T(1/n + 1/(n-1))",
        ratio=_no_zero,
        differentiable=False,
        attained=(NEARLY,),
    ),
    claim(
        id="nearmax-reach",
        proof=DISTANCE,
        domain="nearmax; logits minus m times the distance, the query itself visible",
        statement="keys farther than (D + 2T(1 + k))/m have weight exactly 0, for every n; D: spread of the logits",
        ratio=_farthest,
        differentiable=False,
        attained=(NEARLY,),
    ),
    claim(
        id="alibi-mass",
        proof=DISTANCE,
        domain="softmax; logits minus m times the distance, the query itself visible",
        statement="keys at distances from d on have at most the weight e^((D - m d)/T) / (1 - e^(-m/T)), for every n",
        ratio=_beyond,
    ),
]
