"""Normalizers: logits -> weights, one file per idea, every one a composition under one contract."""

from attnorm.normalizers.block import Block, Positions
from attnorm.normalizers.composition import compose, mixture
from attnorm.normalizers.contract import (
    LogitRule,
    Map,
    Mechanism,
    Normalizer,
    Properties,
    ScaleRule,
    Selection,
    Sink,
)
from attnorm.normalizers.registry import available, get, register

__all__ = [
    "Block",
    "LogitRule",
    "Map",
    "Mechanism",
    "Normalizer",
    "Positions",
    "Properties",
    "ScaleRule",
    "Selection",
    "Sink",
    "available",
    "compose",
    "get",
    "mixture",
    "register",
]
