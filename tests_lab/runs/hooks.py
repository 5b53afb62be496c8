"""Work that costs little, for tests of engines: workers import it by name."""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from attnorm_lab.runs.plan import Item
from attnorm_lab.runs.tasks import TASKS


def counted(values: Mapping[str, Any], out: Path, shared: Path) -> list[dict[str, Any]]:
    """Sleep for a while, note the start and the end, and return a number that depends only on the values."""
    seed = int(values["seed"])
    _note(shared / "started", f"{seed}\n")
    _note(shared / "order", "+")
    time.sleep(float(os.environ.get("ATTNORM_TEST_SECONDS", "0.2")))
    if seed in (values.get("sizes") or ()):
        raise ValueError(f"seed {seed} is bad")
    _note(shared / "ended", f"{seed} {os.getpid()}\n")
    _note(shared / "order", "-")
    return [{"score": seed * seed / 7}]


def counted_after_a_kill(values: Mapping[str, Any], out: Path, shared: Path) -> list[dict[str, Any]]:
    """Like `counted`, but every fourth item kills its own process, as kill -9 would, the first time it runs."""
    seed = int(values["seed"])
    if seed % 4 == 1 and not (shared / f"killed-{seed}").exists():
        _note(shared / f"killed-{seed}", "")
        _note(shared / "started", f"{seed}\n")
        os.kill(os.getpid(), signal.SIGKILL)
    return counted(values, out, shared)


def analyze_and_count_loads(values: Mapping[str, Any], out: Path, shared: Path) -> list[dict[str, Any]]:
    """Run an item of `analyze`, and note the process whenever transformers reads the weights of a model."""
    from transformers import PreTrainedModel

    real: Any = PreTrainedModel.from_pretrained

    def noted(cls: Any, *given: Any, **options: Any) -> Any:
        _note(shared / "loads", f"{os.getpid()}\n")
        return real.__func__(cls, *given, **options)

    with mock.patch.object(PreTrainedModel, "from_pretrained", classmethod(noted)):
        return TASKS["analyze"].run(values, out, shared)


def _note(path: Path, line: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def most_at_once(shared: Path) -> int:
    """Return how many items ran at the same time."""
    running, most = 0, 0
    for mark in (shared / "order").read_text():
        running += 1 if mark == "+" else -1
        most = max(most, running)
    return most


def items(count: int, bad: tuple[int, ...] = ()) -> tuple[Item, ...]:
    values = [{"seed": seed, "sizes": list(bad)} for seed in range(count)]
    return tuple(Item(f"{each['seed']:016x}", "train retrieval", each, {"seed": each["seed"]}) for each in values)
