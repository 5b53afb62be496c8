"""Picking the largest of n, learned on at most 16: who still can at 131,072, what fails in the others, and what helps.

plan -> collect -> lines (comparison, ranking) -> tables, figures, verdict; `answer` puts them together.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnorm.experiments.retrieval.answer import EXPERIMENT

__all__ = ["EXPERIMENT"]


def __getattr__(name: str) -> Any:
    """EXPERIMENT when it is asked for: a machine that only trains the plan needs no library for figures."""
    if name == "EXPERIMENT":
        from attnorm.experiments.retrieval.answer import EXPERIMENT

        return EXPERIMENT
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
