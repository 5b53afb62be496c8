"""Mutation testing: change one operator or number of the package, run the tests that call it, and list what survives.

    python tools/mutate.py --areas theory,normalizers --sample 60 --out mutants     # a sample, seeded
    python tools/mutate.py --out mutants                                            # every mutant; resumes

Mutants: comparisons (< to <=, == to !=), arithmetic (+ to -, * to /), whole and real numbers (plus 1; times 1.01),
`and` to `or`, `not x` to `x`.

Before the mutants of an area, each of its test files runs once, unchanged, to record which lines each test runs
(OUT/calls, once per version of the test file and of the sources that it runs). A mutant is put into the imported
function and tried on the tests that run its statement and pass. One that acts on import is imported in a new process
and tried on the tests that name the constant, or the function with the default, or run a line which does. Up to
--test-seconds, tests in files named after the source file come first, cheap tests before expensive ones, and one case
of each test before further cases of the same test; the first failure ends the run. A survivor is tried a second time,
on the further tests that fit into --further-seconds. Processes that tests start run the original code. A mutant that
uses ten times the processor time of its tests is endless and counts as killed. One that reaches --timeout on the clock
is not decided.

OUT/results.jsonl holds one line per mutant that is done; a second call skips them. Several processes may share OUT,
with different --shard values (1/4, 2/4, ...). Mutants that change nothing observable are listed with a reason in
tests/mutation/equivalents.toml and left out. The exit code is 1 where fewer than --target of the decided mutants are
killed.
"""

import argparse
import contextlib
import importlib
import json
import os
import random
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
os.environ["PYTHONPATH"] = str(ROOT / "src")

from tests.mutation import equivalents  # noqa: E402
from tests.mutation.mutants import Mutant, function_at, import_as, mutants_of  # noqa: E402
from tests.mutation.session import ENDED, IMPORT_IT, KILLED, NOT_DECIDED, CallRecords, MutantSession, in_a_fork  # noqa: E402

# Folders of src/attnorm, and those of tests/ that run their code.
AREAS = {
    "theory": ["theory", "metrics"], "normalizers": ["normalizers", "attention", "models"],
    "engines": ["attention", "models", "metrics"], "metrics": ["metrics", "analysis", "monitor"],
    "models": ["models", "analysis", "monitor"],
}  # fmt: skip
PRELOADED = ["setuptools", "torch", "numpy", "scipy.stats", "scipy.optimize", "hypothesis", "jaxtyping", "pytest",
             "transformers", "transformers.models.auto.modeling_auto", "pyarrow", "typer", "rich"]  # fmt: skip
USAGE_ERROR = 4  # exit code of pytest
OUTCOMES = {0: "survived", KILLED: "killed", ENDED: "endless", NOT_DECIDED: "timeout"}


def preload() -> None:
    """Import what the tests import besides attnorm, once: everything runs in forks of this process."""
    os.environ.update({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    os.environ.setdefault("TRITON_INTERPRET", "1")
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


def run_pytest(arguments: list[str], log: Path, *plugins: object) -> int:
    """Exit code of pytest in this process, what it prints in `log`."""
    import pytest

    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.chdir(ROOT)
    wanted = "(further_case or not further_case) and not slow and not real_model"  # named, so that none is left out
    options = ["-q", "-p", "no:cacheprovider", "-m", wanted, "--tb=line"]
    return int(pytest.main([*options, *arguments], plugins=list(plugins)))


class Journal:
    """The mutants that are done, in a file that several processes append to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.printed = os.fdopen(os.dup(1), "w")

    def outcomes(self) -> dict[str, str]:
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        return {entry["mutant"]: entry["outcome"] for entry in map(json.loads, lines)}

    def add(self, mutant: Mutant, outcome: str, seconds: float, tests: int, failed: str, again: bool) -> None:
        entry = {
            "mutant": mutant.name,
            "outcome": outcome,
            "seconds": round(seconds, 1),
            "tests": tests,
            "again": again,
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**entry, "failed": failed}) + "\n")
        self.printed.write(f"{outcome:9} {seconds:6.1f} s  {tests:4} tests  {mutant.name}  {failed}\n")
        self.printed.flush()


def try_mutants(
    mutants: list[Mutant], journal: Journal, given: argparse.Namespace, ends: float
) -> dict[str, list[list[str]]]:
    """Collect the tests of an area once and try its mutants, in a fork; return those to import, with their tests."""
    calls = given.out / "calls"
    later = calls / f"later.{os.getpid()}"
    selected: dict[str, list[list[str]]] = {}

    def work(session: MutantSession, tests: CallRecords) -> None:
        for mutant in mutants:
            if time.monotonic() > ends:
                break
            start = time.monotonic()
            function = function_at(mutant.file, mutant.line, mutant.column)
            rounds = tests.rounds(mutant, function, given.test_seconds, given.further_seconds)
            if rounds and tests.needs_import(mutant, function):
                selected[mutant.name] = rounds
                continue
            code, failed, tried = 0, "", 0
            for chosen in rounds:
                processor = 60 + 10 * sum(tests.seconds[test] for test in chosen)
                code, failed = session.try_on(mutant, chosen, processor)
                tried += len(chosen)
                if code:
                    break
            if code == IMPORT_IT:
                selected[mutant.name] = rounds
                continue
            again = tried > len(rounds[0]) if rounds else False
            journal.add(mutant, OUTCOMES[code], time.monotonic() - start, tried, failed, again)
        later.write_text(json.dumps(selected), encoding="utf-8")

    def session() -> int:
        log = given.out / f"pytest.{os.getpid()}.txt"
        folders = [f"tests/{folder}" for folder in AREAS[mutants[0].area]]
        return run_pytest(folders, log, MutantSession(calls, work, given.timeout))

    code = in_a_fork(session, float("inf"), float("inf"))
    if code not in (0, 5):
        raise RuntimeError(f"pytest ended with code {code}. See {given.out}/pytest.*.txt")
    found: dict[str, list[list[str]]] = json.loads(later.read_text(encoding="utf-8"))
    later.unlink()
    return found


def try_imported(mutant: Mutant, rounds: list[list[str]], journal: Journal, given: argparse.Namespace) -> None:
    """Try a mutant that acts on import: in a fork that has imported nothing of attnorm yet."""
    start = time.monotonic()
    log = given.out / f"pytest.{os.getpid()}.txt"

    def run(arguments: list[str]) -> int:
        def work() -> int:
            import_as(mutant)
            return run_pytest(["-x", *arguments], log)

        return in_a_fork(work, 600, given.timeout)

    code, tried = 0, 0
    for tests in rounds:
        code = run(tests)
        if code == USAGE_ERROR:  # a test is not found: its id depends on what was changed
            code = run(sorted({test.partition("::")[0] for test in tests}))
        tried += len(tests)
        if code:
            break
    text = log.read_text(encoding="utf-8", errors="replace")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", text, flags=re.MULTILINE)
    outcome, again = OUTCOMES.get(code, "killed"), tried > len(rounds[0])
    journal.add(mutant, outcome, time.monotonic() - start, tried, failed[1] if failed else "", again)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--areas", type=lambda text: text.split(","), default=list(AREAS),
        help=f"folders of src/attnorm, in the order in which to try them (default: {','.join(AREAS)})",
    )  # fmt: skip
    parser.add_argument("--sample", type=int, help="number of mutants drawn at random (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the sample (default: 0)")
    parser.add_argument("--shard", default="1/1", help="which part of the mutants, e.g. 2/4 (default: 1/1)")
    parser.add_argument("--target", type=float, default=0.95, help="least share killed (default: 0.95)")
    parser.add_argument(
        "--test-seconds", type=float, default=20.0, help="most processor time of its tests (default: 20)"
    )
    parser.add_argument(
        "--further-seconds", type=float, default=120.0, help="the same when a survivor is tried again (default: 120)"
    )
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds on the clock per mutant (default: 1800)")
    parser.add_argument("--stop-after", type=float, default=float("inf"), help="seconds after which none is begun")
    parser.add_argument("--out", type=Path, required=True, help="directory of results.jsonl and of calls/")
    given = parser.parse_args()
    ends = time.monotonic() + given.stop_after

    folders = [ROOT / "src" / "attnorm" / area for area in AREAS if area in given.areas]
    every = [mutant for folder in folders for path in sorted(folder.rglob("*.py")) for mutant in mutants_of(path)]
    chosen = every
    if given.sample is not None:
        chosen = random.Random(given.seed).sample(every, min(given.sample, len(every)))
    drawn = len(chosen)
    chosen = [mutant for mutant in chosen if equivalents.reason(mutant) is None]
    left_out = drawn - len(chosen)
    part, parts = map(int, given.shard.split("/"))
    chosen = chosen[part - 1 :: parts]
    given.out = given.out.resolve()
    (given.out / "calls").mkdir(parents=True, exist_ok=True)
    journal = Journal(given.out / "results.jsonl")
    preload()
    for area in given.areas:
        done = journal.outcomes()
        left = [mutant for mutant in chosen if mutant.area == area and mutant.name not in done]
        imported = try_mutants(left, journal, given, ends) if left and time.monotonic() < ends else {}
        for mutant in left:
            if mutant.name in imported and time.monotonic() < ends:
                try_imported(mutant, imported[mutant.name], journal, given)
    done = journal.outcomes()
    tried = [done[mutant.name] for mutant in chosen if mutant.name in done]
    killed, slow = tried.count("killed") + tried.count("endless"), tried.count("timeout")
    decided = len(tried) - slow  # a test that did not end has not decided: the machine may be busy
    sys.stdout.write(
        f"{killed} of {decided} killed; {slow} not decided in time; {len(chosen) - len(tried)} left; "
        f"{left_out} equivalent\n"
    )
    return 0 if killed >= given.target * decided else 1


if __name__ == "__main__":
    sys.exit(main())
