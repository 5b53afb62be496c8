"""Where not to look at numbers on the way.

A GPU runs behind the program. Whoever asks it for a number - `if bool(x.any())`, `.item()`, `.nonzero()` - waits until
all of its work is done, and then it waits for the program: in training that costs more than a few passes too many.
"""

from torch import Tensor


def runs_behind(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"
