"""What a stack in training leaves behind: checkpoints to go on from, and the losses of each seed as JSONL.

The data of a step follow from seed and step, so weights, optimizer state and the number of steps are all there is to
save. Losses logged after the last checkpoint are dropped when training goes on from it: those steps are done again.
"""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from attnorm.training import atomic
from attnorm.training.checkpoints import finished_checkpoints, load_checkpoint, save_checkpoint
from attnorm.training.retrieval.records import append_records, read_records

METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Journal:
    """Of the stack `name`, in the folder of its run."""

    out: Path
    name: str
    every: int = 2000  # steps from one checkpoint to the next

    @property
    def folder(self) -> Path:
        return self.out / CHECKPOINTS / self.name

    def resume(
        self, models: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> tuple[int, float]:
        """Puts models and optimizer into the state of the last checkpoint; steps done by then, and seconds spent.

        Raises:
            ValueError: The checkpoint is damaged or belongs to other models.
        """
        found = finished_checkpoints(self.folder)
        record = load_checkpoint(found[-1], models, optimizer, device) if found else {}
        step, seconds = int(record.get("step", 0)), float(record.get("seconds", 0))
        self._forget_after(step)
        return step, seconds

    def log(self, step: int, losses: Sequence[float], seconds: float) -> None:
        """Cross-entropy of each seed in a step, without penalties; null where it is no longer a number."""
        numbers = [round(loss, 6) if math.isfinite(loss) else None for loss in losses]
        append_records(
            self.out / METRICS, [{"stack": self.name, "step": step, "losses": numbers, "seconds": round(seconds, 2)}]
        )

    def save(self, models: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, seconds: float) -> None:
        save_checkpoint(self.folder, models, optimizer, step, {"seconds": seconds})

    def close(self) -> None:
        """The trained weights are saved elsewhere: no checkpoint is needed any more."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.folder.parent.is_dir() and not any(self.folder.parent.iterdir()):
            self.folder.parent.rmdir()

    def _forget_after(self, step: int) -> None:
        path = self.out / METRICS
        lines = read_records(path)
        kept = [line for line in lines if line.get("stack") != self.name or line["step"] <= step]
        if len(kept) < len(lines):
            atomic.write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
