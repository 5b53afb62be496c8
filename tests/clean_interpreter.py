"""Run a script in an interpreter that has imported torch only, for tests of what is imported, and when.

Importing torch takes seconds. Each process that runs tests does it, forks a server before it imports more, and each
script runs in a fork of that server.
"""

import atexit
import json
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any, NoReturn

_pipes: tuple[int, int] | None = None  # to ask the server, and to read exit codes


def start_server() -> None:
    """Call it once, before anything but torch is imported. The server ends with this process."""
    global _pipes
    import torch  # noqa: F401

    (asked, asks), (answers, answered) = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(asks)
        os.close(answers)
        _serve(asked, answered)
    os.close(asked)
    os.close(answered)
    _pipes = asks, answers


def run_in_clean_interpreter(
    script: str, *arguments: str, environment: dict[str, str] | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """What `python -c script arguments` prints and returns; `check` raises if it fails."""
    assert _pipes is not None
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
        stdout.touch()
        stderr.touch()
        call = {"script": script, "arguments": arguments, "environment": environment or dict(os.environ)}
        call |= {"stdout": str(stdout), "stderr": str(stderr), "folder": str(Path.cwd())}
        os.write(_pipes[0], json.dumps(call).encode() + b"\n")
        code = int(os.read(_pipes[1], 100))
        done = subprocess.CompletedProcess(script, code, stdout.read_text(), stderr.read_text())
    if check and code:
        raise AssertionError(f"exit code {code}\n{done.stdout}\n{done.stderr}")
    return done


def _serve(asked: int, answered: int) -> NoReturn:
    for line in os.fdopen(asked):
        pid = os.fork()
        if pid == 0:
            _run(json.loads(line))
        os.write(answered, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    os._exit(0)


def _run(call: dict[str, Any]) -> NoReturn:
    code = 1
    try:
        for number, path in enumerate((os.devnull, call["stdout"], call["stderr"])):
            os.dup2(os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY), number)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, "r" if n == 0 else "w", closefd=False) for n in range(3))
        os.environ.clear()
        os.environ.update(call["environment"])
        os.chdir(call["folder"])
        sys.argv = ["-c", *call["arguments"]]
        _warn_as_without_pytest()
        exec(compile(call["script"], "<fresh>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _warn_as_without_pytest() -> None:
    """pytest records the warnings of the process that the server comes from."""

    def show(message: Any, category: Any, filename: str, line: int, file: Any = None, text: str | None = None) -> None:
        (file or sys.stderr).write(warnings.formatwarning(message, category, filename, line, text))

    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    warnings.showwarning = show
