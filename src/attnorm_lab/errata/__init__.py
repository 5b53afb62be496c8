"""The claims of the papers as code: which hold, which do not, counterexamples, and the price of selectivity."""

from attnorm_lab.errata.catalogue import Claim, claims
from attnorm_lab.errata.search import Counterexample, Finding, SearchInterrupted, replay, verify

__all__ = ["Claim", "Counterexample", "Finding", "SearchInterrupted", "claims", "replay", "verify"]
