"""Claims on how small weights must become: Lemma 1, Corollary 1, Lemma 2.1, entropy, horizon, Proposition 3.1."""

import math
from functools import partial

import torch
from torch import Tensor

from attnorm.normalizers.kernel import FUNCTIONS
from attnorm.theory import dispersion, spread
from attnorm.theory.catalogue.claim import Case, Claim, at_least, at_most, between

ROUNDING = 1e-12  # of an entropy in nats

claim = partial(Claim, family="dispersion", proof="docs/theory/dispersion.md")


def _lemma1(case: Case) -> Tensor:
    ratios = []
    for name in ("exp", "softplus", "elu+1"):
        values = FUNCTIONS[name].value((case.logits / case.temperature).clamp(-50, 50))  # F stays a positive number
        weights = values / values.sum(-1, keepdim=True)
        bounds = dispersion.lemma1_bounds(*dispersion.observed_range(values), float(case.keys))
        ratios.append(between(weights.amax(-1), bounds.lower, bounds.upper))
        ratios.append(between(weights.amin(-1), bounds.lower, bounds.upper))
    return torch.stack(ratios).amax(0)


def _weights_between(case: Case, weights: Tensor, bounds: dispersion.Bounds) -> Tensor:
    return torch.maximum(at_most(weights.amax(-1), bounds.upper), at_least(weights.amin(-1), bounds.lower))


def _corollary1(case: Case) -> Tensor:
    query, keys = case.vectors[:, 0], case.vectors
    weights = torch.softmax((keys @ query[..., None])[..., 0] / case.temperature, dim=-1)
    largest = torch.linalg.vector_norm(keys, dim=-1).amax(-1)
    bounds = dispersion.corollary1_bounds(
        torch.linalg.vector_norm(query, dim=-1), largest, float(case.keys), case.temperature
    )
    return _weights_between(case, weights, bounds)


def _entropy_deficit(case: Case) -> Tensor:
    deficit = math.log(case.keys) - dispersion.entropy_nats(case.weights)
    return at_most(deficit, dispersion.entropy_floor_deficit(case.spread, case.temperature), ROUNDING)


def _horizon(case: Case) -> Tensor:
    beyond = case.keys > dispersion.horizon(case.spread, case.temperature)
    return torch.where(beyond, case.weights.amax(-1) / 0.5, torch.nan)


def _proposition31(case: Case, *, tight: bool) -> Tensor:
    width = case.vectors.shape[-1]
    generator = torch.Generator().manual_seed(case.keys * 31 + width)
    shape = (case.vectors.shape[0], 1, 4, width)
    query_weight, key_weight = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    queries = case.vectors[:, :1]
    q, k = queries.unsqueeze(1) @ query_weight.mT, case.vectors.unsqueeze(1) @ key_weight.mT
    found = spread.logit_spread(q @ k.mT)
    bound = spread.proposition31_tight if tight else spread.proposition31_bound
    return at_most(found, bound(query_weight, key_weight, queries, case.vectors))[:, 0, 0]


CLAIMS = [
    claim(
        id="lemma-1",
        source="Mudarisov et al., Lemma 1",
        form="printed",
        statement="C1/L <= a_i <= C2/L for a = F(l)/sum F(l), with C1 = F_min/F_max and C2 = F_max/F_min",
        domain="F > 0 and free of L, bounded logits; not sparsemax, entmax, top-k, ssmax, unnormalised maps",
        status="holds",
        ratio=_lemma1,
    ),
    claim(
        id="corollary-1",
        source="Mudarisov et al., Corollary 1",
        form="printed",
        statement="exp(-2D/T)/L <= a_i <= exp(2D/T)/L, D = ||q|| max ||k||",
        domain="softmax",
        status="holds",
        correction="lemma-2.1-sharp",
        ratio=_corollary1,
    ),
    claim(
        id="lemma-2.1",
        source="Velickovic et al., Lemma 2.1",
        form="printed",
        statement="exp(-d/T)/n <= a_i <= exp(d/T)/n, d the logit spread",
        domain="softmax",
        status="holds",
        correction="lemma-2.1-sharp",
        ratio=lambda case: _weights_between(
            case, case.weights, dispersion.lemma21_bounds(case.spread, float(case.keys), case.temperature)
        ),
    ),
    claim(
        id="lemma-2.1-sharp",
        source="follows from Lemma 2.1",
        form="corrected",
        statement="max a <= 1/(1 + (n-1) e^(-d/T)), min a >= 1/(1 + (n-1) e^(d/T)); both attained",
        domain="softmax",
        status="holds",
        ratio=lambda case: _weights_between(
            case, case.weights, dispersion.sharp_weight_bounds(case.spread, float(case.keys), case.temperature)
        ),
    ),
    claim(
        id="entropy-floor",
        source="follows from Lemma 2.1",
        form="added",
        statement="entropy >= that of k* logits at the top and n - k* at the bottom, k* in closed form",
        domain="softmax",
        status="holds",
        ratio=lambda case: at_least(
            dispersion.entropy_nats(case.weights),
            dispersion.entropy_floor(case.spread, float(case.keys), case.temperature),
            ROUNDING,
        ),
    ),
    claim(
        id="entropy-deficit",
        source="follows from Lemma 2.1",
        form="added",
        statement="log n - entropy <= c - 1 - log c, c = d/(1 - e^-d), whatever n",
        domain="softmax",
        status="holds",
        ratio=_entropy_deficit,
    ),
    claim(
        id="horizon",
        source="follows from Lemma 2.1",
        form="added",
        statement="beyond n* = 1 + e^(d/T) keys every weight is below 1/2",
        domain="softmax",
        status="holds",
        ratio=_horizon,
    ),
    claim(
        id="theorem-2.2",
        source="Velickovic et al., Theorem 2.2",
        form="printed",
        statement="every global softmax head of a transformer over a finite vocabulary disperses",
        domain="softmax, continuous layers, no positional growth of the logits",
        status="holds",
    ),
    claim(
        id="proposition-3.1",
        source="Velickovic et al., Proposition 3.1",
        form="printed",
        statement="spread <= 2 smax(Q) smax(K) ||y|| max ||x_i||",
        domain="dot-product logits without QK-norm; the model's scaling in front, biases as augmented matrices",
        status="holds",
        correction="proposition-3.1-tight",
        ratio=lambda case: _proposition31(case, tight=False),
    ),
    claim(
        id="proposition-3.1-tight",
        source="follows from Proposition 3.1",
        form="added",
        statement="spread <= 2 smax(Q^T K) ||y|| min over c in {0, mean x} of max ||x_i - c||",
        domain="as Proposition 3.1, heads that do not rotate q and k",
        status="holds",
        ratio=lambda case: _proposition31(case, tight=True),
    ),
]
