"""Claims on the formulas of the frontier: which map attains the law, and what gap each map needs for a weight."""

from functools import partial

import torch
from torch import Tensor

from attnorm.normalizers.entmax import entmax_rows
from attnorm.normalizers.kneemax import kneemax
from attnorm.theory import frontier
from attnorm.theory.catalogue.claim import Claim, ClaimCase, equals

claim = partial(
    Claim, family="law", source="added", form="added", status="holds", proof="docs/theory/frontier.md#the-law",
    differentiable=False,
)  # fmt: skip

ROUNDING = 1e-9
MAX_GAP = 30.0  # beyond it 1 - w has too few digits for the gap to be recovered
MIN_SMALL = 1e-6  # of 1 - w, for the same reason


def _rows_with_a_leader(keys: int, gaps: Tensor) -> Tensor:
    return torch.where(torch.arange(keys) == 0, gaps[:, None], 0.0)


def _attained(case: ClaimCase) -> Tensor:
    """Sparsemax has K = 1: its weight against the law, and the effort of that weight against the gap."""
    gaps, n = case.dial, case.keys
    kept = entmax_rows(_rows_with_a_leader(n, gaps), 2.0)[:, 0]
    weight = torch.tensor([frontier.frontier_weight(n, gap) for gap in gaps.tolist()], dtype=torch.float64)
    effort = torch.tensor([frontier.frontier_effort(n, min(w, 1.0)) for w in kept.tolist()], dtype=torch.float64)
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
        stated = torch.tensor([gap_for(min(max(w, 1 / n), 1.0), n) for w in kept.tolist()], dtype=torch.float64)
        applies = (1 - kept > MIN_SMALL) & (weights[:, 1:].amin(-1) > MIN_SMALL / n)
        ratios.append(torch.where(applies, equals(stated, gaps, 1e-6), torch.nan))
    return case.picked(ratios)


CLAIMS = [
    claim(
        id="law-attained",
        statement="sparsemax keeps exactly min(1, 1/n + g (n-1)/n), and (n w - 1)/(n - 1) is the effort of weight w",
        domain="sparsemax, K = 1; a key that leads n-1 equal ones by g",
        ratio=_attained,
    ),
    claim(
        id="gap-for-weight",
        statement="softmax needs logit(w) + log(n-1), entmax and kneemax phi^-1(w) - phi^-1((1-w)/(n-1))",
        domain="softmax, entmax15, kneemax with share 1; searched where the other weights are positive",
        ratio=_gaps,
    ),
]
