"""Claims on how small weights must become: Lemma 1, Corollary 1, Lemma 2.1, entropy, horizon, Proposition 3.1."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from attnorm.normalizers.kernel import FUNCTIONS
from attnorm.theory import dispersion
from attnorm_lab.errata.catalogue.claim import EXACTLY, NEARLY, Claim, ClaimCase, at_least, at_most, equals

ROUNDING = 1e-12  # of an entropy in nats

SMALL = 1e-4

DOC = "docs/theory/dispersion.md"

claim = partial(Claim, family="dispersion")
added = partial(claim, form="added", status="holds")
corrected = partial(claim, form="corrected", status="holds")


def _lemma1(case: ClaimCase) -> Tensor:
    """One of three positive functions on each row; F stays a positive number in float64."""
    ratios = []
    for name in ("exp", "softplus", "elu+1"):
        values = FUNCTIONS[name].value(case.scaled.clamp(-50, 50))
        weights = values / values.sum(-1, keepdim=True)
        ratios.append(
            weights_between(weights, dispersion.lemma1_bounds(*dispersion.observed_range(values), float(case.keys)))
        )
    return case.picked(ratios)


def weights_between(weights: Tensor, bounds: dispersion.Bounds) -> Tensor:
    return torch.stack([at_least(weights.amin(-1), bounds.lower), at_most(weights.amax(-1), bounds.upper)], -1)


def _corollary1(case: ClaimCase) -> Tensor:
    """Some queries are so small that the bounds are attained: e^(2D) = 1 up to rounding there."""
    query = torch.where((case.pick % 6 == 0)[:, None], SMALL, 1.0) * case.vectors[:, 0]
    keys = case.vectors
    weights = torch.softmax((keys @ query[..., None])[..., 0] / case.temperature, dim=-1)
    largest = torch.linalg.vector_norm(keys, dim=-1).amax(-1)
    size = torch.linalg.vector_norm(query, dim=-1)
    return weights_between(weights, dispersion.corollary1_bounds(size, largest, float(case.keys), case.temperature))


def _lemma21(case: ClaimCase) -> Tensor:
    return weights_between(case.weights, dispersion.lemma21_bounds(case.spread, float(case.keys), case.temperature))


def _lemma21_sharp(case: ClaimCase) -> Tensor:
    return weights_between(
        case.weights, dispersion.sharp_weight_bounds(case.spread, float(case.keys), case.temperature)
    )


def _entropy_floor(case: ClaimCase) -> Tensor:
    floor = dispersion.entropy_floor(case.spread, float(case.keys), case.temperature)
    return at_least(dispersion.entropy_nats(case.weights), floor, ROUNDING)


def _entropy_deficit(case: ClaimCase) -> Tensor:
    deficit = math.log(case.keys) - dispersion.entropy_nats(case.weights)
    return at_most(deficit, dispersion.entropy_floor_deficit(case.spread, case.temperature), ROUNDING)


def _horizon(case: ClaimCase) -> Tensor:
    """On some rows one key leads by the spread at which the horizon is n, up to 0.1 %: there it is attained."""
    n, leads = case.keys, (case.pick % 4 == 0) & (case.keys > 2)
    nearly = math.log(n - 1) + 1e-3 * case.dial.log().clamp(-1, 1)
    leader = torch.where(torch.arange(n) == 0, case.temperature * nearly[:, None], 0.0)
    logits = torch.where(leads[:, None], leader, case.logits)
    beyond = n > dispersion.horizon(logits.amax(-1) - logits.amin(-1), case.temperature)
    return torch.where(beyond, torch.softmax(logits / case.temperature, -1).amax(-1) / 0.5, torch.nan)


def _uniform_limit(case: ClaimCase) -> Tensor:
    """The row with every key eight times: as dispersed as eight times the length allows, and as far from uniform."""
    longer = torch.softmax(case.scaled.repeat_interleave(8, -1), dim=-1)
    before, after = ((weights - 1 / weights.shape[-1]).abs().sum(-1) / 2 for weights in (case.weights, longer))
    return torch.where(before > ROUNDING, after / (before / 2), torch.nan)


def _effective_gap(case: ClaimCase) -> Tensor:
    """Its two bounds, and that weights and logits give the same gap where every weight has all its digits."""
    gap = dispersion.effective_gap_from_logits(case.logits, temperature=case.temperature)
    same = equals(dispersion.effective_gap(case.weights), gap, 1e-9 * (1 + gap.abs()))
    same = torch.where(case.weights.amin(-1) > 1e-250, same, torch.nan)
    return torch.stack([-gap / ROUNDING, at_most(gap, case.spread / case.temperature, ROUNDING), same], -1)


def _proposition31(case: ClaimCase, bound: Callable[..., Tensor]) -> Tensor:
    query_weight, key_weight = case.matrices[:, :1], case.matrices[:, 1:]
    queries = case.vectors[:, :1]
    q, k = queries.unsqueeze(1) @ query_weight.mT, case.vectors.unsqueeze(1) @ key_weight.mT
    logit_spread = dispersion.logit_spread(q @ k.mT)
    return at_most(logit_spread, bound(query_weight, key_weight, queries, case.vectors), ROUNDING)[:, 0, 0]


CLAIMS = [
    claim(
        id="lemma-1",
        proof=f"{DOC}#lemma-1",
        source="Mudarisov et al., Lemma 1",
        form="printed",
        statement="C1/L <= a_i <= C2/L for a = F(l)/sum F(l), with C1 = F_min/F_max and C2 = F_max/F_min",
        domain="F > 0 independent of L, bounded logits; not sparsemax, entmax, top-k, ssmax, unnormalised maps",
        status="holds",
        ratio=_lemma1,
        attained=(EXACTLY, EXACTLY),
    ),
    claim(
        id="corollary-1",
        proof=f"{DOC}#corollary-1",
        source="Mudarisov et al., Corollary 1",
        form="printed",
        statement="exp(-2D/T)/L <= a_i <= exp(2D/T)/L, D = ||q|| max ||k||",
        domain="softmax",
        status="holds",
        correction="lemma-2.1-sharp",
        ratio=_corollary1,
        attained=(NEARLY, NEARLY),
    ),
    claim(
        id="lemma-2.1",
        proof=f"{DOC}#lemma-21",
        source="Velickovic et al., Lemma 2.1",
        form="printed",
        statement="exp(-d/T)/n <= a_i <= exp(d/T)/n, d the logit spread",
        domain="softmax",
        status="holds",
        correction="lemma-2.1-sharp",
        ratio=_lemma21,
        attained=(EXACTLY, EXACTLY),
    ),
    corrected(
        id="lemma-2.1-sharp",
        proof=f"{DOC}#lemma-21",
        source="follows from Lemma 2.1",
        statement="max a <= 1/(1 + (n-1) e^(-d/T)), min a >= 1/(1 + (n-1) e^(d/T)); both attained",
        domain="softmax",
        ratio=_lemma21_sharp,
        attained=(EXACTLY, EXACTLY),
    ),
    added(
        id="entropy-floor",
        proof=f"{DOC}#entropy-floor",
        source="follows from Lemma 2.1",
        statement="entropy >= that of k* equal largest and n - k* equal smallest logits, k* in closed form",
        domain="softmax",
        ratio=_entropy_floor,
        attained=(EXACTLY,),
    ),
    added(
        id="entropy-deficit",
        proof=f"{DOC}#entropy-floor",
        source="follows from Lemma 2.1",
        statement="log n - entropy <= c - 1 - log c, c = d/(1 - e^-d), for every n",
        domain="softmax",
        ratio=_entropy_deficit,
        attained=(NEARLY,),
    ),
    added(
        id="horizon",
        proof=f"{DOC}#lemma-21",
        source="follows from Lemma 2.1",
        statement="beyond n* = 1 + e^(d/T) keys every weight is below 1/2",
        domain="softmax",
        ratio=_horizon,
        attained=(0.999,),  # half of what the horizon is off by
    ),
    claim(
        id="theorem-2.2",
        proof=f"{DOC}#theorem-22-and-the-effective-gap",
        source="Velickovic et al., Theorem 2.2",
        form="printed",
        statement="every global softmax head of a transformer over a finite vocabulary disperses",
        domain="softmax, continuous layers, no positional growth of the logits",
        status="holds",
        correction="effective-gap",
    ),
    added(
        id="effective-gap",
        proof=f"{DOC}#theorem-22-and-the-effective-gap",
        source="follows from Lemma 2.1",
        statement="0 <= G <= d/T, G = logit(max a) + log(n-1) the effective gap; its slope on log n is the rate test",
        domain="softmax",
        ratio=_effective_gap,
        attained=(None, EXACTLY, None),
    ),
    claim(
        id="dispersed-is-uniform",
        proof=f"{DOC}#theorem-22-and-the-effective-gap",
        source="a reading of Velickovic et al., Theorem 2.2",
        form="added",
        statement="weights that disperse converge to the uniform distribution",
        domain="softmax (tested: eight copies of every key at least halve the distance from uniform)",
        status="false",
        counterexample="half of the logits 1, half 0: total variation distance 0.231 at every length",
        correction="effective-gap",
        ratio=_uniform_limit,
    ),
    claim(
        id="proposition-3.1",
        proof=f"{DOC}#proposition-31",
        source="Velickovic et al., Proposition 3.1",
        form="printed",
        statement="spread <= 2 smax(Q) smax(K) ||y|| max ||x_i||",
        domain="dot-product logits without QK-norm; the model's scaling in front, biases as augmented matrices",
        status="holds",
        correction="proposition-3.1-tight",
        ratio=lambda case: _proposition31(case, dispersion.proposition31_bound),
        attained=(NEARLY,),
    ),
    added(
        id="proposition-3.1-tight",
        proof=f"{DOC}#proposition-31",
        source="follows from Proposition 3.1",
        statement="spread <= 2 smax(Q^T K) ||y|| min over c in {0, mean x} of max ||x_i - c||",
        domain="as Proposition 3.1, heads that do not rotate q and k",
        ratio=lambda case: _proposition31(case, dispersion.proposition31_tight),
        attained=(NEARLY,),
    ),
]
