"""accelerate's Accelerator for one training: one process, on the device and in the precision that were asked for.

accelerate keeps both once per process, and what it is not told it takes from the environment. But here several models
are trained in one process, and what `accelerate config` or a launcher left must not change their weights. So a training
has accelerate's state to itself and hides the variables that accelerate reads; afterwards both are as they were.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from accelerate import Accelerator

PRECISIONS = {"float32": "no", "bfloat16": "bf16"}
PROCESSES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")  # as accelerate counts them


def check_accelerate() -> None:
    """To be asked before anything is read or written; `accelerated` asks too.

    Raises:
        ImportError: accelerate is not installed.
        ValueError: This is one of several processes.
    """
    if find_spec("accelerate") is None:
        raise ImportError("training needs accelerate, which is not installed. Run: pip install accelerate")
    for name in PROCESSES:
        if os.environ.get(name, "1") not in ("0", "1"):
            raise ValueError(
                f"attnorm trains in one process, on one GPU or CPU, and this is one of several: {name} is "
                f"{os.environ[name]}; start it without a launcher, or with --num_processes 1, and to use several GPUs "
                "start one run on each, with --device cuda:0, --device cuda:1, ... and folders of their own"
            )


@contextmanager
def accelerated(device: torch.device, dtype: str) -> "Iterator[Accelerator]":
    """
    Raises:
        ImportError, ValueError: As `check_accelerate`.
    """
    check_accelerate()
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    # accelerate has no public way to end what an Accelerator began, not even for the Trainer of transformers.
    states = [kind._shared_state for kind in (AcceleratorState, GradientState, PartialState)]
    before = [dict(state) for state in states]
    names = [name for name in os.environ if name.startswith("ACCELERATE_") or name == "LOCAL_RANK"]
    hidden = {name: os.environ.pop(name) for name in names}
    try:
        for state in states:
            state.clear()
        os.environ["ACCELERATE_TORCH_DEVICE"] = str(device)  # the only way to name one GPU of several
        yield Accelerator(mixed_precision=PRECISIONS[dtype])
    finally:
        for state, old in zip(states, before, strict=True):
            state.clear()
            state.update(old)
        del os.environ["ACCELERATE_TORCH_DEVICE"]
        os.environ.update(hidden)
