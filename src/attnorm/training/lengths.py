"""At which lengths a trained model is evaluated: the one it was trained at, and beyond where it has positions."""

from collections.abc import Sequence

from attnorm.training.architectures import ARCHITECTURES
from attnorm.training.settings import Settings
from attnorm.training.tokens import Tokens
from attnorm.training.windows import check_length

LONGER = (1, 2, 4)  # times the training length


def check_lengths(lengths: Sequence[int], settings: Settings) -> None:
    """
    Raises:
        ValueError: A length that is none, or that the model has no positions for.
    """
    for length in lengths:
        if length < 1:
            raise ValueError(f"a length to evaluate at must be at least 1, got {length}")
        if length > settings.context and not ARCHITECTURES[settings.architecture].rotary:
            rotary = " or ".join(name for name, each in ARCHITECTURES.items() if each.rotary)
            raise ValueError(
                f"{settings.architecture} has {settings.context} positions and none beyond, so it cannot be evaluated "
                f"at {length}; leave that length out, or train a model with rotary positions ({rotary})"
            )


def evaluation_lengths(wanted: Sequence[int] | None, settings: Settings, valid: Tokens) -> list[int]:
    """Those wanted, and always the training length; None: 1, 2 and 4 times that, if model and text are long enough.

    Raises:
        ValueError: The text has no window of a length that was asked for.
    """
    if wanted is None:
        times = LONGER if ARCHITECTURES[settings.architecture].rotary else LONGER[:1]
        longer = [factor * settings.context for factor in times]
        return [length for length in longer if length == settings.context or length < len(valid) - 1]
    for length in wanted:
        check_length(valid, length, "validation")
    return sorted({settings.context, *wanted})
