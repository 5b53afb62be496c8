"""attnorm: how sharply attention can select, the limit that theory sets, and what to put in the place of softmax."""

import importlib
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from attnorm.attention import attention, normalize
from attnorm.normalizers import (
    ContractError,
    LogitRule,
    Map,
    Mechanism,
    Normalizer,
    Positions,
    Properties,
    ScaleRule,
    Selection,
    Sink,
    available,
    check_normalizer,
    compose,
    get,
    mixture,
    register,
)

try:
    __version__ = version("attnorm")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+source"

__all__ = [
    "ContractError",
    "LogitRule",
    "Map",
    "Mechanism",
    "Normalizer",
    "Positions",
    "Properties",
    "ScaleRule",
    "Selection",
    "Sink",
    "attention",
    "available",
    "check_normalizer",
    "compose",
    "get",
    "mixture",
    "normalize",
    "register",
    "theory",
]


def __getattr__(name: str) -> ModuleType:
    """`attnorm.theory` loads when first used: it needs SciPy, which attention does not."""
    if name == "theory":
        return importlib.import_module("attnorm.theory")
    raise AttributeError(f"module 'attnorm' has no attribute {name!r}")
