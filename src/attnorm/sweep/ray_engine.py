"""Tasks of Ray, on a cluster or on a Ray that is started here."""

import os
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from attnorm.sweep.engine import ClusterLost, WorkerDied
from attnorm.sweep.plan import Item, Resources
from attnorm.sweep.work import Hook, Outcome, run_chunk

REACH_SECONDS = 5.0
WATCH_SECONDS = 3.0  # between two looks at the head of a Ray cluster
MISSED_LOOKS = 3  # after which the cluster counts as lost; Ray itself ends the process after a minute


class RayEngine:
    """One Ray task per item. Ray schedules by CPUs, GPUs and memory, and reuses worker processes between tasks."""

    def __init__(
        self, out: Path, resources: Resources, address: str | None, workers: int | None, hook: Hook | None
    ) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default, 15, starves workers on a busy machine
        try:
            import ray
        except ImportError:
            raise ImportError("--on ray needs Ray, which is not installed. Run: pip install 'attnorm[ray]'") from None
        self._ray: Any = ray
        self._call = (str(out.resolve()), resources.threads, hook)
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
        self._task = ray.remote(max_retries=0, max_calls=0, **needs)(run_chunk)
        head = ray.get_runtime_context().gcs_address
        threading.Thread(target=self._watch, args=(head,), daemon=True).start()

    def _watch(self, head: str) -> None:
        """Fail what is running if the head is gone: Ray would wait, and then end this process without a word."""
        missed = 0
        while missed < MISSED_LOOKS:
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
                f"expected a machine of the Ray cluster that can hold one item ({_describe_resources(resources)}), "
                f"got {len(nodes)} too small. Lower [resources] in the plan, or add a larger machine."
            )
        return sum(per_node)

    def chunks(self, items: Sequence[Item]) -> list[list[Item]]:
        return [[item] for item in items]

    def submit(self, items: list[Item]) -> "Future[list[Outcome]]":
        out, threads, hook = self._call
        task = self._task.options(name=items[0].label[:80])
        answer: Future[list[Outcome]] = Future()
        if self._lost:
            answer.set_exception(_lost_cluster())
            return answer
        with self._lock:
            self._open.add(answer)
        ray_future = task.remote(out, [item.as_dict() for item in items], threads, hook).future()
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


def _lost_cluster() -> ClusterLost:
    return ClusterLost("lost the Ray cluster. Finished items are kept; run the same command to resume.")


def _is_reachable(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), REACH_SECONDS).close()
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
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), REACH_SECONDS).close()
    except (OSError, ValueError) as error:
        raise ClusterLost(
            f"expected a Ray cluster at {address!r}, got no answer ({error}). Start it with `ray start --head`, or "
            "correct --address or RAY_ADDRESS."
        ) from None
