"""Claims on what several heads cover together."""

from functools import partial

import torch
from torch import Tensor

from attnorm.theory import coverage
from attnorm.theory.catalogue.claim import EXACTLY, Claim, ClaimCase, at_least, between

HEADS = 4

claim = partial(Claim, family="coverage", proof="docs/theory/coverage.md", differentiable=False)


def _coverage(case: ClaimCase) -> coverage.HeadCoverage:
    """Groups of four rows as four heads over one context."""
    return coverage.top_n_coverage(case.weights.unflatten(0, (-1, HEADS)), case.top_n)


def _per_row(ratio: Tensor) -> Tensor:
    return ratio.repeat_interleave(HEADS, 0)


def _independence(case: ClaimCase) -> Tensor:
    measured = _coverage(case)
    return _per_row(at_least(measured.union, measured.independent))


def _union(case: ClaimCase) -> Tensor:
    measured = _coverage(case)
    lower, upper = coverage.union_bounds(measured.per_head)
    rounding = torch.finfo(upper.dtype).eps * 8
    return _per_row(between(measured.union, lower * (1 - rounding), upper * (1 + rounding)))


CLAIMS = [
    claim(
        id="head-coverage",
        source="Mudarisov et al., Discussion",
        form="printed",
        statement="H heads cover 1 - (1-p)^H of the keys (three heads at p = 0.8: 99 %)",
        domain="independent heads; tested on heads of any kind",
        status="false",
        counterexample="identical heads cover no more than one of them",
        correction="head-coverage-bounds",
        ratio=_independence,
    ),
    claim(
        id="head-coverage-bounds",
        source="Discussion, corrected",
        form="corrected",
        statement="max_h p_h <= union <= min(1, sum_h p_h); measure the union itself",
        domain="any heads",
        status="holds",
        ratio=_union,
        attained=(EXACTLY, EXACTLY),
    ),
]
