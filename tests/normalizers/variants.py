"""Every built-in row normalizer with the options that change what it computes: one table for tests that go over all."""

from typing import NamedTuple

import torch

from attnorm.normalizers import Normalizer, compose, get, mixture
from attnorm.normalizers.local import Local
from attnorm.normalizers.registry import BUILT_IN
from attnorm.normalizers.topk import TopK

ROW_NAMES = [name for name, entry in BUILT_IN.items() if str(entry.target).startswith("attnorm.normalizers.")]


class Variant(NamedTuple):
    """A normalizer by name and options, or a composition; `width` is that of the hidden states it reads."""

    name: str
    options: dict[str, object]
    width: int | None = None

    def __str__(self) -> str:
        return ",".join([self.name, *(f"{key}={value}" for key, value in self.options.items())])

    def make(self) -> Normalizer:
        if self.name in COMPOSITIONS:
            return COMPOSITIONS[self.name](**self.options)
        normalizer = get(self.name, **self.options)
        assert isinstance(normalizer, Normalizer)
        return _with_heads_apart(normalizer)


def _with_heads_apart(normalizer: Normalizer) -> Normalizer:
    """Per-head parameters start equal; different ones show whether each head gets its own."""
    with torch.no_grad():
        for parameter in normalizer.parameters():
            if parameter.dim() == 1:
                parameter += torch.linspace(-0.1, 0.2, len(parameter))
    return normalizer


COMPOSITIONS = {
    "ssmax before entmax15": lambda: compose("entmax15", scale="ssmax"),
    "adaptive before sparsemax": lambda: compose("sparsemax", scale="adaptive_temperature"),
    "topk before entmax15": lambda: compose("entmax15", select=TopK(3)),
    "window, topk and sink": lambda: compose(scale="log_scaled", select=[Local(5), TopK(2)], sink="sink"),
    "distance before sa_softmax": lambda: compose("sa_softmax", scale="scale_invariant"),
    "sink after sparsemax": lambda: compose("sparsemax", sink="softmax1"),
    "mixture": lambda heads=None: mixture("softmax", "entmax15", share=0.3, heads=heads),
    "mixture of ssmax and sigmoid": lambda: mixture("ssmax", "sigmoid"),
}

VARIANTS = [
    *(Variant(name, {}) for name in ROW_NAMES),
    Variant("softmax", {"temperature": 0.3}),
    Variant("softmax", {"temperature": 2.0, "learned": True, "heads": 2}),
    Variant("entmax", {"alpha": 1.0}),
    Variant("entmax", {"alpha": 1.0001}),
    Variant("entmax", {"alpha": 1.25}),
    Variant("entmax", {"alpha": 1.9}),
    Variant("entmax", {"alpha": 1.5, "learned": True, "heads": 2}),
    Variant("kneemax", {"share": 0.2, "temperature": 0.5, "learned": True, "heads": 2}),
    Variant("kneemax", {"knee": 0.25}),
    Variant("ssmax", {"bias": True, "heads": 2}),
    Variant("asentmax", {"gamma": -1.0, "heads": 2}),
    Variant("asentmax", {"heads": 2, "width": 6}, 6),
    Variant("sa_softmax", {"normalised": False}),
    Variant("adaptive_temperature", {"monotone": True}),
    Variant("sigmoid", {"bias": -3.0}),
    Variant("sink", {"logit": -1.0, "heads": 2}),
    Variant("relu", {"power": 2.0}),
    Variant("stick_breaking", {"attend_current": False}),
    Variant("topk", {"k": 3}),
    Variant("topk", {"k": "sqrt"}),
    Variant("topk", {"k": "log"}),
    Variant("log_scaled", {"train_length": 4}),
    Variant("log_scaled", {"rule": "llama4", "floor_scale": 4}),
    Variant("log_scaled", {"rule": "yarn"}),
    Variant("kernel", {"function": "exp"}),
    Variant("kernel", {"function": "elu+1"}),
    Variant("kernel", {"function": "polynomial", "power": 4}),
    Variant("local", {"window": 2}),
    *(Variant(name, {}) for name in COMPOSITIONS),
    Variant("mixture", {"heads": 2}),
]
