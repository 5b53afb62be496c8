"""Normalizers of stacks by name, with options where the default is not meant for sets: topk:k=4, entmax:alpha=1.3.

Each model of a stack has parameters of its own where the normalizer learns any: the models are its heads.
"""

from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.registry import get
from attnorm.training.spelling import spelled


def normalizer_for(spelling: str, copies: int) -> Normalizer:
    """The normalizer of that name and options, with parameters for each copy where it learns any.

    Raises:
        ValueError: Unknown, or one that cannot be asked for the weights of a set.
    """
    name, options = spelled(spelling)
    try:
        chosen = get(name, **options)
    except TypeError as error:
        raise ValueError(str(error)) from None
    if not isinstance(chosen, Normalizer):
        raise ValueError(
            f"{name!r} is a mechanism: it needs q, k and v of a sequence, and sets of items are rows of logits; "
            "choose a normalizer, `attnorm normalizers` lists them"
        )
    if not any(True for _ in chosen.parameters()):
        return chosen
    try:
        per_copy = get(name, heads=copies, **options)
    except TypeError:
        raise ValueError(
            f"{name!r} learns parameters but has no option `heads`, so the models of a stack would share them"
        ) from None
    assert isinstance(per_copy, Normalizer)
    return per_copy
