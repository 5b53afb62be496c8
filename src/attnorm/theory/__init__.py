"""What is provable about attention weights: bounds as printed, bounds as corrected, and the exact quantities."""

from attnorm.theory.catalogue import Claim, claims
from attnorm.theory.search import Counterexample, Finding, SearchInterrupted, replay, verify

__all__ = ["Claim", "Counterexample", "Finding", "SearchInterrupted", "claims", "replay", "verify"]
