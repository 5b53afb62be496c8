"""The device that a trainer runs on."""

import torch


def chosen_device(name: str | None) -> torch.device:
    """The device of this name; a GPU where none is named and there is one.

    Raises:
        ValueError: Not a device, or none that this machine has.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:  # its message lists every kind that torch has a name for
        raise ValueError(f"cannot use device {name!r}: expected cpu, cuda or, say, cuda:1; try cpu") from None
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0].partition(". ")[0]
        raise ValueError(f"cannot use device {name!r}: {why}; try cpu") from None
    return device
