"""The table of claims: every statement of the papers, printed and corrected, and what our normalizers declare."""

from attnorm.theory.catalogue import coverage, dispersion, distance, geometry, gradient, normalizers
from attnorm.theory.catalogue.claim import Claim, ClaimCase


def claims() -> list[Claim]:
    """All claims: the papers' in the order of THEORY's families, then up to three for each registered normalizer."""
    families = (dispersion, distance, geometry, gradient, coverage, normalizers)
    return [claim for family in families for claim in family.CLAIMS] + list(normalizers.normalizer_claims())


__all__ = ["Claim", "ClaimCase", "claims"]
