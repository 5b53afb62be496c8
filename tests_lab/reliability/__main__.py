# ruff: noqa: T201 - a script that prints a table
"""Print the rows of docs/results/kills.md: what was tried, on which commit, what was lost.

python -m tests_lab.reliability [--trials 10] [--kills 3] [--seed 0] [--only analyze]
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests_lab.reliability.kills import COMMANDS, ROOT, Runner, kill_and_resume


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m tests_lab.reliability")
    options.add_argument("--trials", type=int, default=10, help="Trials per command (default: 10).")
    options.add_argument("--kills", type=int, default=3, help="Kills per trial (default: 3).")
    options.add_argument("--seed", type=int, default=0, help="Random seed of the moments (default: 0).")
    options.add_argument("--only", action="append", choices=COMMANDS, help="Commands (default: all).")
    asked = options.parse_args()
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    commit = git.stdout.strip() or "unknown"
    lost = 0
    print("| command | commit | trials | kills | finished before the kill | temporary files left | lost |")
    print("|---|---|---:|---:|---:|---:|---|")
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(Path(folder) / "log.txt")
        for place, name in enumerate(asked.only or COMMANDS):
            own = Path(folder) / f"runs-{place}"
            try:
                tally = kill_and_resume(
                    COMMANDS[name], runner, own, trials=asked.trials, kills=asked.kills, seed=asked.seed
                )
            except RuntimeError:
                print((Path(folder) / "log.txt").read_text()[-3000:], file=sys.stderr)
                raise
            lost += len(tally.lost)
            words = "; ".join(tally.lost) or "nothing"
            numbers = f"{tally.trials} | {tally.kills} | {tally.too_late} | {tally.leftovers}"
            print(f"| `{name}` | {commit} | {numbers} | {words} |", flush=True)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
