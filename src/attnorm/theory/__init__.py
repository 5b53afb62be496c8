"""Theory of attention weights: bounds as printed in the papers, corrected bounds, and exact quantities."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnorm.theory.catalogue import Claim, claims
    from attnorm.theory.search import Counterexample, Finding, SearchInterrupted, replay, verify

__all__ = ["Claim", "Counterexample", "Finding", "SearchInterrupted", "claims", "replay", "verify"]

# Loaded when first used: a measurement needs a formula or two, and neither the catalogue nor SciPy's distributions.
_LAZY = {
    "Claim": "attnorm.theory.catalogue",
    "Counterexample": "attnorm.theory.search",
    "Finding": "attnorm.theory.search",
    "SearchInterrupted": "attnorm.theory.search",
    "claims": "attnorm.theory.catalogue",
    "replay": "attnorm.theory.search",
    "verify": "attnorm.theory.search",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'attnorm.theory' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
