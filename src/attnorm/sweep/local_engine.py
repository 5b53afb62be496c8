"""Processes of this machine."""

import multiprocessing
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from attnorm.sweep.engine import WorkerDied
from attnorm.sweep.plan import Item, Resources
from attnorm.sweep.work import Hook, Outcome, run_chunk

START_METHOD = "spawn"  # torch does not survive a fork


class LocalEngine:
    """One process per slot, each behind its own pool, so that a killed process takes one item with it and no other."""

    in_flight: int | None = None

    def __init__(self, out: Path, resources: Resources, workers: int | None, hook: Hook | None) -> None:
        self.slots = workers or processes_that_fit(resources)
        self._call = (str(out), resources.threads, hook)
        self._gpus = resources.gpus
        self._threads = ThreadPoolExecutor(self.slots)
        self._own = threading.local()
        self._numbers = iter(range(self.slots))
        self._pools: list[ProcessPoolExecutor] = []
        self._closed = False

    def chunks(self, items: Sequence[Item]) -> list[list[Item]]:
        return [[item] for item in items]

    def submit(self, items: list[Item]) -> "Future[list[Outcome]]":
        return self._threads.submit(self._run, items)

    def _run(self, items: list[Item]) -> list[Outcome]:
        out, threads, hook = self._call
        try:
            future = self._pool().submit(run_chunk, out, [item.as_dict() for item in items], threads, hook)
            return future.result()
        except BrokenProcessPool:
            self._own.pool = None
            if self._closed:
                return []
            raise WorkerDied("the worker process was killed; perhaps the machine ran out of memory") from None

    def _pool(self) -> ProcessPoolExecutor:
        if getattr(self._own, "pool", None) is None:
            if not hasattr(self._own, "number"):
                self._own.number = next(self._numbers)
            context = multiprocessing.get_context(START_METHOD)
            self._own.pool = ProcessPoolExecutor(
                1, context, initializer=_start_worker, initargs=(self._own.number, self._gpus)
            )
            self._pools.append(self._own.pool)
        pool: ProcessPoolExecutor = self._own.pool
        return pool

    def close(self, *, kill: bool = False) -> None:
        self._closed = True
        if kill:
            self._threads.shutdown(wait=False, cancel_futures=True)
            for pool in self._pools:
                for process in (getattr(pool, "_processes", None) or {}).values():
                    process.kill()
        for pool in self._pools:
            pool.shutdown(wait=not kill, cancel_futures=True)
        self._threads.shutdown(wait=not kill)


def _start_worker(number: int, gpus: float) -> None:
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the driver ends the workers
    threading.Thread(target=_end_with_driver, daemon=True).start()
    if gpus > 0:
        per_gpu = max(1, int(1 / gpus))
        first = number // per_gpu if gpus < 1 else number * int(gpus)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(first, first + max(1, int(gpus)))))


def _end_with_driver() -> None:
    """A killed driver cannot end its workers, and each of them would wait for its next item for ever."""
    if (driver := multiprocessing.parent_process()) is not None:
        driver.join()
        os._exit(1)


def processes_that_fit(resources: Resources) -> int:
    """Return how many items fit on this machine at the same time.

    Raises:
        ValueError: None.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits = {"cpus": cores // resources.cpus}
    if resources.memory_gb is not None and (memory := _memory_gb()) is not None:
        limits["memory_gb"] = memory // resources.memory_gb
    if resources.gpus:
        import torch

        limits["gpus"] = torch.cuda.device_count() // resources.gpus
    name, fitting = min(limits.items(), key=lambda limit: limit[1])
    if fitting < 1:
        raise ValueError(
            f"expected items that fit on this machine, got resources.{name} = {getattr(resources, name):g}, more than "
            "there is. Lower it, or use a larger machine."
        )
    return int(fitting)


def _memory_gb() -> float | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    except (ValueError, OSError, AttributeError):
        return None
