"""The table of claims: every statement of the papers, printed and corrected, and the declarations of normalizers."""

from attnorm_lab.errata.catalogue import dispersion, distance, geometry, gradient, normalizers
from attnorm_lab.errata.catalogue.claim import Claim, ClaimCase


def claims() -> list[Claim]:
    """All claims: the papers' in the order of THEORY's families, then up to three for each registered normalizer."""
    return [
        *dispersion.CLAIMS,
        *distance.CLAIMS,
        *geometry.CLAIMS,
        *gradient.CLAIMS,
        *geometry.COVERAGE_CLAIMS,
        *normalizers.CLAIMS,
        *normalizers.normalizer_claims(),
    ]


__all__ = ["Claim", "ClaimCase", "claims"]
