"""attnorm: measure how sharply attention can select, know the limit theory sets, replace softmax by something better."""

from importlib.metadata import version

from attnorm.attention import attention, normalize
from attnorm.normalizers import (
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
    compose,
    get,
    mixture,
    register,
)

__version__ = version("attnorm")

__all__ = [
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
    "compose",
    "get",
    "mixture",
    "normalize",
    "register",
]
