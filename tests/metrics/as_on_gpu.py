"""The code that a GPU runs, on a CPU: nothing is asked of the device, and many small operations become a few."""

import sys

import pytest

from attnorm.metrics import call as call_module
from attnorm.metrics import sampling

ROOMS = ("attnorm.metrics.", "attnorm.theory.")


def as_on_gpu(patched: pytest.MonkeyPatch) -> None:
    """Layers wait for each other, and numbers are not inspected on the way.

    Triton's interpreter would take minutes for the quantiles' kernel.
    """
    patched.setattr(call_module, "saves_time", lambda call: True)
    patched.setattr(sampling, "runs_triton", lambda device: False)
    for name, module in list(sys.modules.items()):
        if name.startswith(ROOMS) and hasattr(module, "runs_asynchronously"):
            patched.setattr(module, "runs_asynchronously", lambda tensor: True)
