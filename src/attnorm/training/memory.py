"""The most memory that training held: what torch allocated on a GPU, or the whole process on a CPU."""

import sys

import torch


class MemoryPeak:
    """Counted from the last `restart` on a GPU; a CPU's operating system remembers only the whole process's peak."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def restart(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def bytes(self) -> int | None:
        """None where nobody keeps count."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if self._device.type == "cpu" and sys.platform != "win32":
            import resource

            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return peak if sys.platform == "darwin" else 1024 * peak
        return None
