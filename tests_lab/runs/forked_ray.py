"""What a sweep uses of Ray, without Ray: a task is a fork of the test process. A real cluster takes half a minute.

Every commit tests the engine on this; the nightly run repeats the same tests on a real cluster.
"""

import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

NODE = {"Alive": True, "Resources": {"CPU": 1.0, "memory": float(2**30)}}


class RayError(Exception):
    pass


class RayTaskError(RayError):
    pass


class OutOfMemoryError(RayError):
    pass


class LocalRayletDiedError(RayError):
    pass


class WorkerCrashedError(RayError):
    pass


@dataclass
class ForkedRay:
    """Takes the place of the module `ray`; the cluster has two nodes of one CPU and a lost one."""

    address: str
    joined: list[str] = field(default_factory=list)
    exceptions: ModuleType = sys.modules[__name__]

    def init(self, address: str, **_: Any) -> None:
        assert address == self.address
        self.joined.append(address)

    def is_initialized(self) -> bool:
        return bool(self.joined)

    def shutdown(self) -> None:
        self.joined.clear()

    def nodes(self) -> list[dict[str, Any]]:
        return [NODE, {**NODE, "Alive": False}, NODE]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(gcs_address=self.address)

    def remote(self, *, max_retries: int, **_: Any) -> Callable[[Callable[..., Any]], "Task"]:
        assert max_retries == 0, "the sweep starts items again by itself"
        return Task


@dataclass
class Task:
    call: Callable[..., Any]

    def options(self, *, name: str) -> "Task":
        assert name
        return self

    def remote(self, *given: Any) -> Any:
        future: Future[Any] = Future()
        given = pickle.loads(pickle.dumps(given))  # as Ray sends it to a worker
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            _answer(write, self.call, given)
        os.close(write)
        threading.Thread(target=_wait, args=(pid, read, future)).start()
        return SimpleNamespace(future=lambda: future)


def _answer(write: int, call: Callable[..., Any], given: tuple[Any, ...]) -> None:
    """The child, which never returns into the tests."""
    try:
        try:
            found = call(*given)
        except Exception as error:
            found = RayTaskError(str(error))
        os.write(write, pickle.dumps(found))
    finally:
        os._exit(0)


def _wait(pid: int, read: int, future: Future[Any]) -> None:
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    found = pickle.loads(answer) if answer else WorkerCrashedError("killed")
    if isinstance(found, Exception):
        future.set_exception(found)
    else:
        future.set_result(found)


@contextmanager
def forked_cluster() -> Iterator[ForkedRay]:
    with socket.create_server(("127.0.0.1", 0)) as head, pytest.MonkeyPatch.context() as patch:
        cluster = ForkedRay(f"127.0.0.1:{head.getsockname()[1]}")
        patch.setitem(sys.modules, "ray", cluster)
        yield cluster
