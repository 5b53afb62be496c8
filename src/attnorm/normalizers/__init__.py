"""Normalizers: logits -> weights, one file per idea, every one a composition under one contract."""

from attnorm.normalizers.block import Block, Positions
from attnorm.normalizers.check import ContractError, check_normalizer
from attnorm.normalizers.composition import compose, mixture
from attnorm.normalizers.contract import LogitRule, Map, Mechanism, Normalizer, Properties, ScaleRule, Selection, Sink
from attnorm.normalizers.registry import available, get, register

__all__ = [
    "Block",
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
    "available",
    "check_normalizer",
    "compose",
    "get",
    "mixture",
    "register",
]
