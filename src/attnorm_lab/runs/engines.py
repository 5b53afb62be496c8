"""Engines of a sweep, which run its items: in processes of this machine, on Ray, or on Slurm.

An engine starts chunks of items and returns futures. `WorkerDied` means that a worker ended without an answer: killed,
out of memory, or its machine is gone. The caller decides whether to start the items again.
"""

import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from attnorm.arithmetic import ceil_div
from attnorm.provenance import machine_memory_gb
from attnorm_lab.runs.plan import Item, Resources, require_known

NAMES = ("local", "ray", "slurm")
LIBRARIES = {"ray": "ray", "slurm": "submitit"}
START_METHOD = "spawn"  # torch does not survive a fork
REACH_SECONDS = 5.0
WATCH_SECONDS = 3.0  # between two checks that the head of a Ray cluster can be reached
MISSED_CHECKS = 3  # after which the cluster counts as lost; Ray itself ends the process after a minute
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Outcome:
    id: str
    error: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    pruned: bool = False
    found: bool = False  # it was finished before
    diverged: bool = False  # the error is that its loss is not finite


Work = Callable[[list[dict[str, Any]]], list[Outcome]]
"""Runs items one after another, each as `Item.as_dict` has it; pickled to reach a worker."""


class WorkerDied(Exception):  # noqa: N818 - what happened, in words
    """Raised by a future whose worker process ended without a result."""


class ClusterLost(ValueError):  # noqa: N818
    """Raised if the cluster cannot be reached, or the connection is lost."""


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


def check_engine(name: str) -> None:
    """Check that an engine can be used, before anything is written.

    Raises:
        ValueError: Unknown engine.
        ImportError: The library of the engine is not installed.
    """
    if name not in NAMES:
        raise ValueError(f"expected an engine of {', '.join(NAMES)}, got {name!r}")
    library = LIBRARIES.get(name)
    if library and not (sys.modules[library] if library in sys.modules else find_spec(library)):
        raise ImportError(f"--on {name} needs {library}, which is not installed. Run: pip install 'attnorm[lab]'")


def open_engine(
    name: str,
    out: Path,
    resources: Resources,
    work: Work,
    *,
    workers: int | None = None,
    address: str | None = None,
    slurm: dict[str, Any] | None = None,
) -> Engine:
    """Start an engine for items of the sweep in `out`; its workers call `work`.

    workers: processes on this machine, items at the same time on Ray (also the CPUs of a Ray that is started here), or
    jobs on Slurm (default: as many as fit; 16 jobs).

    Raises:
        ValueError: Unknown engine, a cluster out of reach, or an item that fits on no machine.
        ImportError: The library of the engine is not installed.
    """
    check_engine(name)
    if name == "ray":
        return RayEngine(resources, work, address, workers)
    if name == "slurm":
        return SlurmEngine(out / "slurm", resources, work, slurm or {}, workers)
    return LocalEngine(resources, work, workers)


class LocalEngine:
    """One process per slot, each behind its own pool, so that a killed process takes one item with it and no other."""

    in_flight: int | None = None

    def __init__(self, resources: Resources, work: Work, workers: int | None) -> None:
        self.slots = workers or processes_that_fit(resources)
        self._work = work
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
        try:
            return self._pool().submit(self._work, [item.as_dict() for item in items]).result()
        except BrokenProcessPool:
            self._own.pool = None
            if self._closed:
                return []
            raise WorkerDied("the worker process was killed, perhaps because the machine ran out of memory") from None

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
    if resources.memory_gb is not None and (memory := machine_memory_gb()) is not None:
        limits["memory_gb"] = memory // resources.memory_gb
    if resources.gpus:
        import torch

        limits["gpus"] = torch.cuda.device_count() // resources.gpus
    name, fitting = min(limits.items(), key=lambda limit: limit[1])
    if fitting < 1:
        raise ValueError(
            f"expected items that fit on this machine, got resources.{name} = {getattr(resources, name):g}, more "
            "than the machine has. Lower it, or use a larger machine."
        )
    return int(fitting)


class RayEngine:
    """One Ray task per item. Ray schedules by CPUs, GPUs and memory, and reuses worker processes between tasks."""

    def __init__(self, resources: Resources, work: Work, address: str | None, workers: int | None) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default, 15, starves workers on a busy machine
        import ray

        self._ray: Any = ray
        self._work = work
        self._ours = not ray.is_initialized()
        self._open: set[Future[list[Outcome]]] = set()
        self._lock, self._closed, self._lost = threading.Lock(), threading.Event(), False
        if self._ours:
            _join_cluster(ray, address, workers)
        needs: dict[str, Any] = {"num_cpus": resources.cpus, "num_gpus": resources.gpus}
        if resources.memory_gb is not None:
            needs["memory"] = int(resources.memory_gb * 2**30)
        self.slots = self._slots(resources)
        self.in_flight = workers
        if workers is not None:
            self.slots = min(self.slots, workers)
        # max_retries: the caller starts items again. max_calls: keep workers with a GPU, and the model they hold.
        self._task = ray.remote(max_retries=0, max_calls=0, **needs)(_call)
        head = ray.get_runtime_context().gcs_address
        threading.Thread(target=self._watch, args=(head,), daemon=True).start()

    def _watch(self, head: str) -> None:
        """Fail what is running if the head is gone: Ray would wait, and then end this process without a message."""
        missed = 0
        while missed < MISSED_CHECKS:
            if self._closed.wait(WATCH_SECONDS):
                return
            missed = 0 if _is_reachable(head) else missed + 1
        self._lost = True
        with self._lock:
            for answer in self._open:
                answer.set_exception(_lost_cluster())
            self._open.clear()

    def _slots(self, resources: Resources) -> int:
        """Return how many items fit into the cluster at the same time; raise ValueError if no machine can hold one."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        needed = {"CPU": resources.cpus, "GPU": resources.gpus, "memory": (resources.memory_gb or 0) * 2**30}
        needed = {name: amount for name, amount in needed.items() if amount}
        per_node = [min(int(node.get(name, 0) // amount) for name, amount in needed.items()) for node in nodes]
        if not any(per_node):
            self.close()
            raise ValueError(
                "expected a machine of the Ray cluster that can hold one item "
                f"({_describe_resources(resources)}), got {len(nodes)} machines that are too small. Lower "
                "[resources] in the plan, or add a larger machine."
            )
        return sum(per_node)

    def chunks(self, items: Sequence[Item]) -> list[list[Item]]:
        return [[item] for item in items]

    def submit(self, items: list[Item]) -> "Future[list[Outcome]]":
        task = self._task.options(name=items[0].label[:80])
        answer: Future[list[Outcome]] = Future()
        if self._lost:
            answer.set_exception(_lost_cluster())
            return answer
        with self._lock:
            self._open.add(answer)
        ray_future = task.remote(self._work, [item.as_dict() for item in items]).future()
        ray_future.add_done_callback(lambda done: self._answer(done, answer))
        return answer

    def _answer(self, done: "Future[Any]", answer: "Future[list[Outcome]]") -> None:
        with self._lock:
            if answer not in self._open:  # the cluster was lost meanwhile
                return
            self._open.remove(answer)
        error = done.exception()
        if error is None:
            answer.set_result(done.result())
        else:
            answer.set_exception(self._explain_error(error))

    def _explain_error(self, error: BaseException) -> BaseException:
        errors = self._ray.exceptions
        if isinstance(error, errors.OutOfMemoryError):
            return WorkerDied("Ray ended the worker because its machine ran out of memory")
        if isinstance(error, errors.RayTaskError):
            return WorkerDied(f"the worker could not start the item: {str(error).splitlines()[-1]}")
        if isinstance(error, errors.LocalRayletDiedError):
            return _lost_cluster()
        if isinstance(error, errors.RayError):
            return WorkerDied(f"the worker or its machine is gone ({type(error).__name__})")
        return error

    def close(self, *, kill: bool = False) -> None:
        self._closed.set()
        if self._ours:
            self._ray.shutdown()


def _call(work: Work, items: list[dict[str, Any]]) -> list[Outcome]:
    return work(items)  # Ray makes tasks of functions only


def _lost_cluster() -> ClusterLost:
    return ClusterLost("lost the Ray cluster. Finished items are kept; run the same command to resume.")


def _connect(address: str) -> None:
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), REACH_SECONDS).close()


def _is_reachable(address: str) -> bool:
    try:
        _connect(address)
    except OSError:
        return False
    return True


def _describe_resources(resources: Resources) -> str:
    memory = "" if resources.memory_gb is None else f", {resources.memory_gb:g} GB of memory"
    return f"{resources.cpus:g} CPUs, {resources.gpus:g} GPUs{memory}"


def _join_cluster(ray: Any, address: str | None, workers: int | None) -> None:
    """Connect to the named or a running cluster; without any, start Ray on this machine with `workers` CPUs."""
    named = address or os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if named and named not in ("auto", "local"):
        _check_reachable(named)
    try:
        if named != "local":
            ray.init(named or "auto", **options)
            return
    except ConnectionError as error:
        if named:
            raise ClusterLost(f"cannot join the Ray cluster {named!r}. {_remedy(error)}") from None
    ray.init("local", num_cpus=workers, include_dashboard=False, **options)


def _remedy(error: BaseException) -> str:
    if "AuthenticationError" in repr(error.__cause__):  # `ray start` asks for a token by default
        return "It asks for a token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN as on its head."
    return f"{str(error).splitlines()[0]}. Start it with `ray start --head`."


def _check_reachable(address: str) -> None:
    """Try the port: Ray itself would wait for a minute and end the process."""
    try:
        _connect(address.removeprefix("ray://"))
    except (OSError, ValueError) as error:
        raise ClusterLost(
            f"expected a Ray cluster at {address!r}, got no answer ({error}). Start it with `ray start --head`, or "
            "correct --address or RAY_ADDRESS."
        ) from None


class SlurmEngine:
    """Jobs of Slurm through submitit; each job runs its share of the items in one process."""

    OPTIONS = ("cluster", "jobs", "minutes")
    in_flight: int | None = None

    def __init__(
        self, folder: Path, resources: Resources, work: Work, table: dict[str, Any], workers: int | None
    ) -> None:
        import submitit

        require_known("[slurm]", {name: 0 for name in table if not name.startswith("slurm_")}, self.OPTIONS)
        self._work = work
        self.slots = int(workers or table.get("jobs", 16))
        try:
            self._executor: Any = submitit.AutoExecutor(folder, cluster=table.get("cluster"))
            if self._executor.cluster == "local" and table.get("cluster") != "local":
                raise ValueError("the command sbatch was not found on this machine")
            self._executor.update_parameters(
                name="attnorm-sweep", timeout_min=int(table.get("minutes", 60)), cpus_per_task=resources.threads,
                gpus_per_node=int(resources.gpus),
                **({} if resources.memory_gb is None else {"mem_gb": resources.memory_gb}),
                **{name: value for name, value in table.items() if name.startswith("slurm_")},
            )  # fmt: skip
        except (RuntimeError, ValueError, TypeError, NameError) as error:
            raise ClusterLost(
                f'cannot use Slurm here ({error}). Run it on a login node with sbatch, or set cluster = "local" in '
                "[slurm] to try the plan on this machine."
            ) from None
        self._jobs: list[Any] = []

    def chunks(self, items: Sequence[Item]) -> list[list[Item]]:
        """Return chunks of neighboring items: items with the same model are neighbors."""
        size = ceil_div(len(items), self.slots) if items else 1
        return [list(items[start : start + size]) for start in range(0, len(items), size)]

    def submit(self, items: list[Item]) -> "Future[list[Outcome]]":
        job = self._executor.submit(self._work, [item.as_dict() for item in items])
        self._jobs.append(job)
        answer: Future[list[Outcome]] = Future()
        threading.Thread(target=self._follow, args=(job, answer), daemon=True).start()
        return answer

    def _follow(self, job: Any, answer: "Future[list[Outcome]]") -> None:
        while not job.done():
            time.sleep(POLL_SECONDS)
        try:
            answer.set_result(job.result())
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            answer.set_exception(WorkerDied(f"job {job.job_id} ended in the state {job.state}: {reason}"))

    def close(self, *, kill: bool = False) -> None:
        for job in self._jobs if kill else ():
            if not job.done():
                job.cancel(check=False)
