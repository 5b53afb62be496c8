# ruff: noqa: T201 - a script that prints a table
"""Prints the rows of docs/reliability.md about random calls of attention: how many, on which engine, how many differ.

python -m tests.fuzz [--examples 500] [--seed 0] [--stop-after SECONDS]
"""

import argparse
import os
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis

from tests.fuzz.calls import ENGINES, Example, check, examples

ROOT = Path(__file__).resolve().parents[2]
SHOWN = 3  # failures per engine that are printed


@dataclass
class Totals:
    """Of one engine."""

    ran: int = 0
    not_supported: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def failed(self) -> int:
        return len(self.failures)


def fuzz(number: int, seed: int, stop_after: float = float("inf")) -> dict[str, Totals]:
    """Check so many random calls, without a stop at the first that fails."""
    totals = {engine: Totals() for engine in ENGINES}
    ends = time.monotonic() + stop_after

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=number, deadline=None, database=None, phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(examples())
    def run(example: Example) -> None:
        if time.monotonic() > ends:
            return
        of = totals[example.engine]
        try:
            outcome = check(example)
        except Exception as error:  # any error of a call is a finding
            of.failures.append(f"{example}: {type(error).__name__}: {error}")
            return
        of.ran += outcome == "ran"
        of.not_supported += outcome == "not supported"

    run()
    return totals


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m tests.fuzz")
    options.add_argument("--examples", type=int, default=500, help="Random calls (default: 500).")
    options.add_argument("--seed", type=int, default=0, help="Random seed (default: 0).")
    options.add_argument("--stop-after", type=float, default=float("inf"), help="Seconds after which none is begun.")
    asked = options.parse_args()
    _as_in_tests()
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    totals = fuzz(asked.examples, asked.seed, asked.stop_after)
    print("| engine | commit | calls | not supported | different |")
    print("|---|---|---:|---:|---:|")
    for engine, one in totals.items():
        calls = one.ran + one.failed
        print(f"| `{engine}` | {git.stdout.strip() or 'unknown'} | {calls} | {one.not_supported} | {one.failed} |")
    for one in totals.values():
        for failure in one.failures[:SHOWN]:
            print(failure, file=sys.stderr)
    return 1 if any(one.failed for one in totals.values()) else 0


def _as_in_tests() -> None:
    """One thread, small blocks so that there are several, and Triton's interpreter where there is no GPU."""
    import torch

    from attnorm.engines import blocked

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".* encountered in .*", RuntimeWarning)  # of values that kernels do not take
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    blocked.BLOCK_ELEMENTS = 2**9  # type: ignore[misc]


if __name__ == "__main__":
    sys.exit(main())
