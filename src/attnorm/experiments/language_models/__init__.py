"""Language models that differ in nothing but their normalizer, trained and tested under equal conditions.

    plan          what is run: sizes, tokens, learning rates, seeds
    workplace     one folder that several processes share: what is finished, who works on what, one line per result
    corpus        the texts as tokens, made once
    training      short runs that choose the learning rate, and the main runs
    testing       loss at one, two and four times the training length; finding a pass key; what attention does
    stages        all of it in order, resumable, under a time limit
    results       the lines together: one record per model
    learned       what the normalizers themselves learned
    markdown      all of it as tables, and in words

Neither pyarrow nor matplotlib is needed to train and measure; `EXPERIMENT`, which draws, is loaded when asked for.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "EXPERIMENT":
        return import_module(f"{__name__}.recipe").EXPERIMENT
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
