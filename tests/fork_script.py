"""Run a script in a fork of the test process, which has imported the libraries (a new interpreter needs seconds).

For tests of processes that are killed or that hold a lock. Tests of what is imported need a new interpreter.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attnorm_lab.bench.timing import run_and_read_json


class Forked:
    """A running script; `stdin` is what it reads, `stdout` what it prints."""

    def __init__(self, script: str, *arguments: str) -> None:
        (asked, asks), (answers, answered) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(asks)
            os.close(answers)
            _run(script, arguments, asked, answered)
        os.close(asked)
        os.close(answered)
        self.stdin, self.stdout = os.fdopen(asks, "w"), os.fdopen(answers)
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code as subprocess gives it, or None while the script runs."""
        if self._code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.01)
        return code

    def kill(self) -> int:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        return self.wait()


@contextmanager
def forked(script: str, *arguments: str) -> Iterator[Forked]:
    """Killed at the end of the block if it still runs."""
    child = Forked(script, *arguments)
    try:
        yield child
    finally:
        child.kill()
        child.stdin.close()
        child.stdout.close()


def forked_json(script: str) -> Any:
    """The JSON that a script prints. In a new interpreter if it fails in the fork: of a process in which autograd has
    threads, as on a machine with an accelerator, torch lets no fork compute gradients.
    """
    with forked(script) as child:
        printed = child.stdout.read()
        return json.loads(printed) if child.wait() == 0 else run_and_read_json(script)


def _run(script: str, arguments: tuple[str, ...], asked: int, answered: int) -> None:
    """The child, which never returns into the tests."""
    code = 1
    try:
        os.dup2(asked, 0)
        os.dup2(answered, 1)
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.argv = ["-c", *arguments]
        exec(compile(script, "<forked>", "exec"), {"__name__": "__main__"})
        sys.stdout.flush()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
