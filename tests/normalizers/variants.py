"""Every built-in row normalizer with the examples that its file declares, and compositions of them."""

from typing import Any, NamedTuple

import torch

from attnorm.normalizers import Normalizer, compose, get, mixture
from attnorm.normalizers.declaration import HEADS
from attnorm.normalizers.local import Local
from attnorm.normalizers.registry import BUILT_IN
from attnorm.normalizers.topk import TopK

ROW_NAMES = [name for name, entry in BUILT_IN.items() if str(entry.target).startswith("attnorm.normalizers.")]


# Those that differ from another one in a number or in a rule that multiplies or adds. Expensive tests that ask for more
# than the values, which test_reference.py of normalizers and of attention compare for all, run them at night.
ALIKE = {
    "sparsemax": "entmax15", "entmax": "entmax15", "asentmax": "entmax15", "softmax1": "sink", "composed": "softmax",
    "log_scaled": "ssmax", "ssa": "ssmax", "tempered": "ssmax", "alibi": "ssmax",
}  # fmt: skip


class Variant(NamedTuple):
    """A normalizer by name and options, or a composition."""

    name: str
    options: dict[str, Any]

    @property
    def width(self) -> int | None:
        """Of the hidden states that it reads."""
        return self.options.get("width")

    @property
    def heads(self) -> int:
        return self.options.get("heads") or 2

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

DECLARED = {name: [Variant(name, dict(o)) for o in BUILT_IN[name].declaration.examples] for name in ROW_NAMES}
COMPOSED = [*(Variant(name, {}) for name in COMPOSITIONS), Variant("mixture", {"heads": HEADS})]

VARIANTS = [*(variant for variants in DECLARED.values() for variant in variants), *COMPOSED]
# The default and the richest options of each.
TYPICAL = [*(one for some in DECLARED.values() for one in (some if len(some) < 3 else (some[0], some[-1]))), *COMPOSED]
