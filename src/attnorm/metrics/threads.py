"""Heads, or other parts, shared out among threads: blocks are too small for torch to share one of them well."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from attnorm.engines.inputs import without_autocast


def in_threads(measure: Callable[[range], None], parts: int, device: torch.device, *, whole: bool = False) -> None:
    """measure(parts) for all parts, a share of them in each of torch's threads; `whole` keeps them together.

    Each thread works alone inside; torch has its own number of threads again afterwards.
    """
    threads = torch.get_num_threads()
    shares = 1 if whole or device.type != "cpu" else min(threads, parts)
    if shares == 1:
        with without_autocast(device):
            measure(range(parts))
        return

    inference = torch.is_inference_mode_enabled()  # each thread has a mode of its own

    def alone(share: int) -> None:
        torch.set_num_threads(1)
        with torch.inference_mode(inference), torch.no_grad(), without_autocast(device):
            measure(range(parts * share // shares, parts * (share + 1) // shares))

    try:
        with ThreadPoolExecutor(shares) as pool:
            for done in [pool.submit(alone, share) for share in range(shares)]:
                done.result()
    finally:
        torch.set_num_threads(threads)
