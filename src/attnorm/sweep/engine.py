"""The interface of all engines of a sweep: they start chunks of items and return futures.

`WorkerDied` means that a worker ended without an answer: killed, out of memory, or its machine is gone. The caller
decides whether to start the items again.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from attnorm.sweep.plan import Item
from attnorm.sweep.work import Outcome


class WorkerDied(Exception):  # noqa: N818 - what happened, in words
    """Raised by a future whose worker ended without an answer."""


class ClusterLost(ValueError):  # noqa: N818
    """Raised if the cluster cannot be reached, or no longer."""


class Engine(Protocol):
    slots: int
    """Items that can run at the same time."""
    in_flight: int | None
    """Most chunks to submit before one of them ends; None: any number, the engine queues them."""

    def chunks(self, items: Sequence[Item]) -> list[list[Item]]:
        """Divide items into groups that one worker runs one after another."""

    def submit(self, items: list[Item]) -> "Future[list[Outcome]]": ...

    def close(self, *, kill: bool = False) -> None:
        """Release workers. kill: do not wait for running items."""
