"""A script in a new interpreter that has imported torch and nothing else: for tests of what is imported, and when.

Importing torch takes seconds. One process per test session does it, and each script runs in a fork of that process.
"""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SERVER = """
import json, os, sys
import torch

for line in sys.stdin:
    if os.fork() == 0:
        break
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
else:
    sys.exit()
call = json.loads(line)
for number, path in enumerate((os.devnull, call["stdout"], call["stderr"])):
    os.dup2(os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY), number)
os.environ.clear()
os.environ.update(call["environment"])
sys.argv = ["-c", *call["arguments"]]
exec(compile(call["script"], "<fresh>", "exec"), {"__name__": "__main__"})
"""


def run_fresh(
    script: str, *arguments: str, environment: dict[str, str] | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """What `python -c script arguments` prints and returns; `check` raises if it fails."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
        stdout.touch()
        stderr.touch()
        call = {"script": script, "arguments": arguments, "environment": environment or dict(os.environ)}
        server.stdin.write(json.dumps({**call, "stdout": str(stdout), "stderr": str(stderr)}) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        done = subprocess.CompletedProcess(script, code, stdout.read_text(), stderr.read_text())
    if check and code:
        raise AssertionError(f"exit code {code}\n{done.stdout}\n{done.stderr}")
    return done


@functools.cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.terminate)
    return server
