"""The table of claims: every statement of the papers, printed and corrected, and what our normalizers declare."""

from attnorm.theory.catalogue import coverage, dispersion, distance, frontier, geometry, gradient
from attnorm.theory.catalogue.claim import Claim, ClaimCase
from attnorm.theory.catalogue.normalizers import normalizer_claims


def claims() -> list[Claim]:
    """All claims: the papers' in the order of THEORY's families, then up to three for each registered normalizer."""
    families = (dispersion, distance, geometry, gradient, coverage, frontier)
    return [claim for family in families for claim in family.CLAIMS] + list(normalizer_claims())


__all__ = ["Claim", "ClaimCase", "claims"]
