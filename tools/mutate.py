"""Mutation testing: change one operator or number of the package, run the tests that call it, and list what survives.

    python tools/mutate.py --areas theory,normalizers --sample 60 --out mutants     # a sample, seeded
    python tools/mutate.py --out mutants                                            # every mutant; resumes

Mutants: comparisons (< to <=, == to !=), arithmetic (+ to -, * to /), whole and real numbers (plus 1; times 1.01),
`and` to `or`, `not x` to `x`. Each is tried in a copy of the tree and in a fork of this process, which has imported the
libraries, so that a mutant takes seconds.

Before the mutants of an area, each of its test files runs once, unchanged, to record which functions each test calls
(OUT/calls). A mutant of a function is then tried on the tests that call it and pass; one outside functions on the tests
that call anything in its file. Test files named after the source file come first, cheap tests before expensive ones, up
to --test-seconds; the first failure ends the run. A mutant that uses ten times the processor time of its tests is
endless and counts as killed. One that reaches --timeout on the clock is not decided.

OUT/results.jsonl holds one line per mutant that is done; a second call skips them. Several processes may share OUT,
with different --shard values (1/4, 2/4, ...). Mutants that change nothing observable are listed with a reason in
tests/mutation/equivalents.txt, one per line: `path:line:column:change  reason`. The exit code is 1 where fewer than
--target of the decided mutants are killed.
"""

import argparse
import ast
import contextlib
import importlib
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Folders of src/attnorm, and of tests/ where their tests are.
AREAS = {
    "theory": "theory", "normalizers": "normalizers", "engines": "attention", "metrics": "metrics", "models": "models",
}  # fmt: skip
EQUIVALENTS = ROOT / "tests" / "mutation" / "equivalents.txt"

COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
               ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}  # fmt: skip
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.Pow: "*", ast.FloorDiv: "/",
              ast.Mod: "*"}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    path: str  # relative to the root
    line: int
    column: int
    start: int  # byte offsets of what is replaced
    end: int
    new: str
    change: str

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}:{self.column}:{self.change.replace(' ', '_')}"


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every mutant of one file, in the order of the source."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    relative = path.relative_to(ROOT).as_posix()

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + column

    def mutant(node: ast.expr, start: int, end: int, new: str, change: str) -> Mutant:
        return Mutant(relative, node.lineno, node.col_offset, start, end, new, change)

    def between(left: ast.expr, right: ast.expr, symbols: dict[bytes, str]) -> tuple[int, int, str] | None:
        """Where the operator between two operands stands."""
        start, end = offset(left.end_lineno or 0, left.end_col_offset or 0), offset(right.lineno, right.col_offset)
        gap = source[start:end]
        for old in sorted(symbols, key=len, reverse=True):
            if (found := gap.find(old)) >= 0 and b"#" not in gap:
                return start + found, start + found + len(old), old.decode()
        return None

    tree = ast.parse(source)
    skipped = _not_run(tree)
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for left, right, operator in zip(operands, operands[1:], node.ops, strict=False):
                new, old = COMPARISONS[type(operator)], _symbol(operator)
                if place := between(left, right, {old.encode(): new}):
                    yield mutant(left, place[0], place[1], new, f"{old} to {new}")
        elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            new, old = ARITHMETIC[type(node.op)], _symbol(node.op)
            if place := between(node.left, node.right, {old.encode(): new}):
                yield mutant(node, place[0], place[1], new, f"{old} to {new}")
        elif isinstance(node, ast.BoolOp):
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            if place := between(node.values[0], node.values[1], {f" {old} ".encode(): new}):
                yield mutant(node, place[0], place[1], f" {new} ", f"{old} to {new}")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            start = offset(node.lineno, node.col_offset)
            yield mutant(node, start, start + 4, "", "not removed")
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            start, end = offset(node.lineno, node.col_offset), offset(node.end_lineno or 0, node.end_col_offset or 0)
            number: Any = node.value
            new = str(number + 1) if isinstance(number, int) else repr(number * 1.01 if number else 0.01)
            yield mutant(node, start, end, new, f"{number} to {new}")


def _not_run(tree: ast.Module) -> set[int]:
    """Annotations, which no test can see."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.FunctionDef):
            parts = [node.returns, *(one.annotation for one in ast.walk(node.args) if isinstance(one, ast.arg))]
        elif isinstance(node, ast.AnnAssign):
            parts = [node.annotation]
        skipped |= {id(inner) for part in parts if part is not None for inner in ast.walk(part)}
    return skipped


def _symbol(operator: ast.AST) -> str:
    return {
        ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is",
        ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.Add: "+", ast.Sub: "-", ast.Mult: "*",
        ast.Div: "/", ast.Pow: "**", ast.FloorDiv: "//", ast.Mod: "%",
    }[type(operator)]  # fmt: skip


class Tests:
    """What each test calls and what it costs, from the records of `record`."""

    def __init__(self, records: list[Path]) -> None:
        self.seconds: dict[str, float] = {}
        self.by_function: dict[str, set[str]] = defaultdict(set)
        self.by_file: dict[str, set[str]] = defaultdict(set)
        for path in records:
            for test, entry in json.loads(path.read_text(encoding="utf-8")).items():
                self.seconds[test] = entry["seconds"]
                for function in entry["functions"]:
                    self.by_function[function].add(test)
                    self.by_file[function.partition(":")[0]].add(test)

    def of(self, mutant: Mutant, most_seconds: float) -> list[str]:
        """The tests to try on a mutant, in the order in which to try them."""
        function = function_at(ROOT / mutant.path, mutant.line, mutant.column)
        tests = self.by_function[f"{mutant.path}:{function}"] if function else self.by_file[mutant.path]
        by_test_file = defaultdict(list)
        for test in sorted(tests, key=lambda test: (self.seconds[test], test)):
            by_test_file[test.partition("::")[0]].append(test)

        def cost(item: tuple[str, list[str]]) -> tuple[bool, float]:
            return Path(mutant.path).stem not in item[0], sum(self.seconds[test] for test in item[1])

        chosen, total = [], 0.0
        for _, inside in sorted(by_test_file.items(), key=cost):
            for test in inside:
                total += self.seconds[test]
                if chosen and total > most_seconds:
                    return chosen
                chosen.append(test)
        return chosen


def function_at(path: Path, line: int, column: int) -> str:
    """Qualified name of the innermost function or lambda around a place, as its code object has it; "" outside."""
    names: list[str] = []
    inside: ast.AST = ast.parse(path.read_bytes())
    result = ""
    while True:
        inner = [node for node in ast.walk(inside) if node is not inside and _holds(node, line, column)]
        if not inner:
            return result
        if names and not isinstance(inside, ast.ClassDef):
            names.append("<locals>")
        inside = inner[0]  # ast.walk comes from the outside
        names.append(getattr(inside, "name", "<lambda>"))
        result = "" if isinstance(inside, ast.ClassDef) else ".".join(names)


def _holds(node: ast.AST, line: int, column: int) -> bool:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        return False
    decorators = [one.lineno for one in getattr(node, "decorator_list", [])]
    start = (min([node.lineno, *decorators]), node.col_offset if not decorators else 0)
    return start <= (line, column) <= (node.end_lineno or 0, node.end_col_offset or 0)


def area_of(mutant: Mutant) -> str:
    return Path(mutant.path).parts[2]


def equivalents() -> dict[str, str]:
    lines = EQUIVALENTS.read_text(encoding="utf-8").splitlines()
    named = (line.partition(" ") for line in lines if line.strip() and not line.startswith("#"))
    return {name: reason.strip() for name, _, reason in named}


def preload() -> None:
    """Import what the tests import besides attnorm, once: each mutant is tried in a fork of this process."""
    os.environ.update({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("ATTNORM_SHARED", str(ROOT.parent / "shared"))
    for name in ("setuptools", "torch", "numpy", "scipy.stats", "scipy.optimize", "hypothesis", "jaxtyping", "pytest",
                 "transformers", "transformers.models.auto.modeling_auto", "pyarrow", "typer", "rich"):  # fmt: skip
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


def record(tree: Path, test_file: Path, calls: Path) -> Path:
    """Run one test file, unless that was done, and record what its tests call; return the path of the record."""
    target = calls / (test_file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") + ".json")
    if target.exists():
        return target
    draft = target.with_suffix(f".{os.getpid()}")
    os.environ["CALLS_OF_TESTS"] = str(draft.resolve())
    tests = ["-p", "tests.mutation.function_calls", test_file.relative_to(ROOT).as_posix()]
    code = run_tests(tree, tests, tree / "pytest.txt", 3600, 3600, stop_at_first=False)
    if code not in (0, 1, 5):  # 1: failed tests are left out; 5: every test of the file is slow
        output = (tree / "pytest.txt").read_text(encoding="utf-8")
        raise RuntimeError(f"pytest ended with code {code} on {test_file}:\n{output[-2000:]}")
    return draft.replace(target)


def outcome(tree: Path, mutant: Mutant, tests: list[str], processor: float, clock: float) -> tuple[str, str]:
    """killed, endless, survived or timeout, and the first test that failed."""
    if not tests:
        return "survived", ""
    target = tree / mutant.path
    source, times = target.read_bytes(), target.stat()
    target.write_bytes(source[: mutant.start] + mutant.new.encode() + source[mutant.end :])
    os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns + 10**10))  # compiled code of the original is out of date
    output = tree / "pytest.txt"
    try:
        code = run_tests(tree, tests, output, processor, clock)
        if code == 4:  # a test is not found: its id depends on what was changed
            code = run_tests(tree, sorted({test.partition("::")[0] for test in tests}), output, processor, clock)
    finally:
        target.write_bytes(source)
        os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns))
    text = output.read_text(encoding="utf-8", errors="replace")
    if code is None:
        return "timeout", ""
    if code == -signal.SIGXCPU:
        return "endless", ""
    if code < 0 or code in (1, 2, 3):  # a crash, a test failed, or could not be collected
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", text, flags=re.MULTILINE)
        return "killed", failed[1] if failed else f"exit code {code}"
    if code != 0:
        raise RuntimeError(f"pytest ended with code {code}:\n{text[-2000:]}")
    return "survived", ""


def run_tests(
    tree: Path, tests: list[str], output: Path, processor: float, clock: float, stop_at_first: bool = True
) -> int | None:
    """Exit code of pytest in a fork, None after `clock` seconds; it is ended after `processor` seconds of work."""
    child = os.fork()
    if child == 0:
        os.setsid()  # so that what the tests start ends with them
        code = 70
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_CPU, (int(processor) + 1, resource.RLIM_INFINITY))
            log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.chdir(tree)
            os.environ["PYTHONPATH"] = str(tree / "src")
            sys.path[:0] = [str(tree / "src"), str(tree)]
            sys.dont_write_bytecode = stop_at_first  # of mutants
            import pytest

            options = ["-q", "-p", "no:cacheprovider", "-m", "not slow and not real_model", "--tb=line"]
            code = int(pytest.main([*options, *(["-x"] if stop_at_first else []), *tests]))
        finally:
            os._exit(code)
    ends = time.monotonic() + clock
    while time.monotonic() < ends:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--areas", type=lambda text: text.split(","), default=list(AREAS), help=f"default: {','.join(AREAS)}"
    )
    parser.add_argument("--sample", type=int, help="number of mutants drawn at random (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the sample (default: 0)")
    parser.add_argument("--shard", default="1/1", help="which part of the mutants, e.g. 2/4 (default: 1/1)")
    parser.add_argument("--target", type=float, default=0.95, help="least share killed (default: 0.95)")
    parser.add_argument(
        "--test-seconds", type=float, default=60.0, help="processor time of a mutant's tests (default: 60)"
    )
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds on the clock per mutant (default: 1800)")
    parser.add_argument("--stop-after", type=float, default=float("inf"), help="seconds after which none is begun")
    parser.add_argument("--out", type=Path, required=True, help="directory of results.jsonl and of calls/")
    given = parser.parse_args()

    folders = [ROOT / "src" / "attnorm" / area for area in AREAS if area in given.areas]
    every = [mutant for folder in folders for path in sorted(folder.rglob("*.py")) for mutant in mutants_of(path)]
    known = equivalents()
    chosen = every
    if given.sample is not None:
        chosen = random.Random(given.seed).sample(every, min(given.sample, len(every)))
    chosen = [mutant for mutant in chosen if mutant.name not in known]
    part, parts = map(int, given.shard.split("/"))
    chosen = chosen[part - 1 :: parts]
    calls, journal = given.out / "calls", given.out / "results.jsonl"
    calls.mkdir(parents=True, exist_ok=True)
    done = {}
    if journal.exists():
        done = {entry["mutant"]: entry["outcome"] for entry in map(json.loads, journal.read_text().splitlines())}
    preload()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutate-") as temporary:
        tree = Path(temporary) / "tree"
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "mutants")
        shutil.copytree(ROOT, tree, ignore=ignored)
        tests: dict[str, Tests] = {}
        for mutant in sorted(chosen, key=lambda mutant: given.areas.index(area_of(mutant))):
            if mutant.name in done or time.monotonic() - began > given.stop_after:
                continue
            area = area_of(mutant)
            if area not in tests:
                files = sorted((ROOT / "tests" / AREAS[area]).rglob("test_*.py"))
                for test_file in files[part - 1 :: parts] + files[::-1]:  # its own part, then what others have not done
                    record(tree, test_file, calls)
                tests[area] = Tests([record(tree, test_file, calls) for test_file in files])
            start = time.monotonic()
            selected = tests[area].of(mutant, given.test_seconds)
            processor = 60 + 10 * sum(tests[area].seconds[test] for test in selected)
            done[mutant.name], failed = outcome(tree, mutant, selected, processor, given.timeout)
            took = round(time.monotonic() - start, 1)
            entry = {"mutant": mutant.name, "outcome": done[mutant.name], "seconds": took, "tests": len(selected)}
            with journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**entry, "failed": failed}) + "\n")
            sys.stdout.write(f"{done[mutant.name]:9} {took:6.1f} s  {len(selected):4} tests  {mutant.name}  {failed}\n")
            sys.stdout.flush()
    tried = [done[mutant.name] for mutant in chosen if mutant.name in done]
    killed, slow = tried.count("killed") + tried.count("endless"), tried.count("timeout")
    decided = len(tried) - slow  # a test that did not end has not decided: the machine may be busy
    sys.stdout.write(
        f"{killed} of {decided} killed; {slow} not decided in time; {len(chosen) - len(tried)} left; "
        f"{len(known)} equivalent\n"
    )
    return 0 if killed >= given.target * decided else 1


if __name__ == "__main__":
    sys.exit(main())
