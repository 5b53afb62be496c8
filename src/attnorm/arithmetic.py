"""Whole numbers: division that rounds up, and multiples. Sizes may be symbols of torch.compile, so no floats here."""


def ceil_div(number: int, size: int) -> int:
    """Return how many pieces of this size hold a number of things; the last piece may be smaller.

    >>> ceil_div(7, 3), ceil_div(6, 3), ceil_div(0, 3)
    (3, 2, 0)
    """
    return -(-number // size)


def round_up(number: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `number`.

    >>> round_up(7, 8), round_up(16, 8)
    (8, 16)
    """
    return ceil_div(number, step) * step
