"""Python in a process of its own: what it holds and how long it takes is then due to nothing that ran before."""

import json
import subprocess
import sys
from typing import Any


def run_and_read_json(code: str) -> dict[str, Any]:
    """The JSON object that this code writes to its stdout; RuntimeError with its last words where it fails."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise RuntimeError((run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1])
    told: dict[str, Any] = json.loads(run.stdout)
    return told
