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
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"cannot use device {name!r}: {str(error).splitlines()[0]}; try cpu") from None
    return device
