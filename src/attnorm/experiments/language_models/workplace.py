"""One folder that several processes share: nobody does what another is doing or has done.

plan.json                     what is run here; a folder belongs to one plan
results.jsonl                 one line per finished piece of work, written the moment it is finished
runs/NORMALIZER/NAME/         metrics and checkpoints of a run
locks/                        who works on what; the operating system frees the locks of a process that ends
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnorm.experiments.language_models.plan import Plan
from attnorm.training import atomic

PLAN = "plan.json"
RESULTS = "results.jsonl"
WAIT_TO_WRITE = 60  # seconds


@dataclass(frozen=True)
class Workplace:
    folder: Path
    plan: Plan

    @classmethod
    def open(cls, folder: Path, plan: Plan) -> "Workplace":
        """
        Raises:
            ValueError: The folder holds another plan.
        """
        folder.mkdir(parents=True, exist_ok=True)
        place = cls(folder, plan)
        ours = json.loads(json.dumps(plan.as_dict()))
        with place.locked("plan", WAIT_TO_WRITE):
            if not (folder / PLAN).exists():
                atomic.write_json(folder / PLAN, ours)
        theirs = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        different = sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))
        if different:
            raise ValueError(
                f"{folder} holds another plan: {different[0]} is {theirs.get(different[0])} there and "
                f"{ours.get(different[0])} here; choose another folder"
            )
        return place

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def run_folder(self, normalizer: str, name: str) -> Path:
        return self.folder / "runs" / _as_file(normalizer) / name

    def model_folder(self, normalizer: str, seed: int) -> Path:
        return self.folder / "models" / f"{_as_file(normalizer)}-seed-{seed}"

    def results(self, **wanted: Any) -> list[dict[str, Any]]:
        """The finished pieces of work that have these values, in the order in which they were finished."""
        path = self.folder / RESULTS
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines]
        return [each for each in found if all(each.get(key) == value for key, value in wanted.items())]

    def add(self, result: dict[str, Any]) -> dict[str, Any]:
        line = json.dumps(result, ensure_ascii=False, allow_nan=False)
        with self.locked("results", WAIT_TO_WRITE), (self.folder / RESULTS).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
        return result

    @contextmanager
    def claimed(self, work: str) -> Iterator[bool]:
        """Whether this process may do it now: False where another one is at it."""
        from filelock import Timeout

        try:
            with self.locked(work, 0):
                yield True
        except Timeout:
            yield False

    @contextmanager
    def alone(self, work: str) -> Iterator[None]:
        """Waits until no other process is at it."""
        with self.locked(work, -1):
            yield

    @contextmanager
    def locked(self, name: str, timeout: float) -> Iterator[None]:
        from filelock import FileLock

        path = self.folder / "locks" / f"{_as_file(name)}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path, timeout=timeout):
            yield


def _as_file(name: str) -> str:
    """kneemax:knee=0.25 as a name that every system takes."""
    return name.replace(":", "-")
