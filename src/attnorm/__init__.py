"""attnorm: measure how sharply attention can select, know the limit theory sets, replace softmax by something better."""



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

__version__ = "0.1.0"

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
