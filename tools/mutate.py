"""Mutation testing: change one operator or number of the package, run the tests of that file, and list what survives.

    python tools/mutate.py --areas theory,normalizers --sample 60 --out mutants     # a sample, seeded
    python tools/mutate.py --out mutants                                            # every mutant; resumes

Mutants: comparisons (< to <=, == to !=), arithmetic (+ to -, * to /), whole and real numbers (plus 1; times 1.01),
`and` to `or`, `not x` to `x`. Each is tried in a copy of the tree and in a fork of this process, which has imported the
libraries, so that a mutant takes seconds. Several processes may run at once with different --shard values (1/4, 2/4,
...). OUT/results.jsonl holds one line per mutant that is done; a second call skips them.
Mutants that change nothing observable are listed with a reason in tests/mutation/equivalents.txt, one per line:
`path:line:column:change  reason`. The exit code is 1 where fewer than --target of the others are killed.
"""

import argparse
import ast
import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
AREAS = ("theory", "normalizers", "engines", "metrics", "models")
EQUIVALENTS = ROOT / "tests" / "mutation" / "equivalents.txt"
TESTS = ROOT / "tests" / "mutation" / "tests.json"  # file or folder -> the tests that cover it

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


def tests_of(path: str) -> list[str]:
    """The tests named for the file, else for its folder."""
    known: dict[str, list[str]] = json.loads(TESTS.read_text(encoding="utf-8"))
    for key in (path, *(parent.as_posix() for parent in Path(path).parents)):
        if key in known:
            return known[key]
    raise ValueError(f"expected an entry of {TESTS.name} for {path}. Name the tests that cover it")


def equivalents() -> dict[str, str]:
    lines = EQUIVALENTS.read_text(encoding="utf-8").splitlines()
    named = (line.partition(" ") for line in lines if line.strip() and not line.startswith("#"))
    return {name: reason.strip() for name, _, reason in named}


def preload() -> None:
    """Import what the tests import besides attnorm, once: each mutant is tried in a fork of this process."""
    os.environ.update({"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"})
    os.environ.setdefault("TRITON_INTERPRET", "1")
    sys.dont_write_bytecode = True
    for name in ("setuptools", "torch", "numpy", "scipy.stats", "scipy.optimize", "hypothesis", "jaxtyping", "pytest",
                 "transformers", "transformers.models.auto.modeling_auto", "pyarrow", "typer", "rich"):  # fmt: skip
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


def outcome(tree: Path, mutant: Mutant, seconds: float) -> str:
    """killed, survived or timeout: what the tests say of the tree with this one change."""
    target = tree / mutant.path
    source = target.read_bytes()
    target.write_bytes(source[: mutant.start] + mutant.new.encode() + source[mutant.end :])
    output = tree / "pytest.txt"
    try:
        code = _in_a_fork(tree, tests_of(mutant.path), output, seconds)
    finally:
        target.write_bytes(source)
    if code is None:
        return "timeout"
    if code not in (0, 1, 2):  # 1 and 2: a test failed, or could not be collected
        raise RuntimeError(f"pytest ended with code {code}:\n{output.read_text(encoding='utf-8')[-2000:]}")
    return "survived" if code == 0 else "killed"


def _in_a_fork(tree: Path, tests: list[str], output: Path, seconds: float) -> int | None:
    """Exit code of pytest, None after `seconds`."""
    child = os.fork()
    if child == 0:
        os.setsid()  # so that what the tests start ends with them
        code = 70
        try:
            log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.chdir(tree)
            os.environ["PYTHONPATH"] = str(tree / "src")
            sys.path[:0] = [str(tree / "src"), str(tree)]
            import pytest

            code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not real_model", *tests]))
        finally:
            os._exit(code)
    ends = time.monotonic() + seconds
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
    parser.add_argument("--areas", default=",".join(AREAS), help=f"folders of src/attnorm (default: {','.join(AREAS)})")
    parser.add_argument("--sample", type=int, help="number of mutants drawn at random (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the sample (default: 0)")
    parser.add_argument("--shard", default="1/1", help="which part of the mutants, e.g. 2/4 (default: 1/1)")
    parser.add_argument("--target", type=float, default=0.95, help="least share killed (default: 0.95)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds per mutant (default: 300)")
    parser.add_argument("--stop-after", type=float, default=float("inf"), help="seconds after which none is begun")
    parser.add_argument("--out", type=Path, required=True, help="directory of results.jsonl")
    given = parser.parse_args()

    folders = [ROOT / "src" / "attnorm" / area for area in given.areas.split(",")]
    every = [mutant for folder in folders for path in sorted(folder.rglob("*.py")) for mutant in mutants_of(path)]
    known = equivalents()
    chosen = every
    if given.sample is not None:
        chosen = random.Random(given.seed).sample(every, min(given.sample, len(every)))
    chosen = [mutant for mutant in chosen if mutant.name not in known]
    part, parts = map(int, given.shard.split("/"))
    chosen = chosen[part - 1 :: parts]
    given.out.mkdir(parents=True, exist_ok=True)
    journal = given.out / "results.jsonl"
    done = {}
    if journal.exists():
        done = {entry["mutant"]: entry["outcome"] for entry in map(json.loads, journal.read_text().splitlines())}
    preload()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutate-") as temporary:
        tree = Path(temporary) / "tree"
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "mutants")
        shutil.copytree(ROOT, tree, ignore=ignored)
        for mutant in chosen:
            if mutant.name in done or time.monotonic() - began > given.stop_after:
                continue
            start = time.monotonic()
            done[mutant.name] = outcome(tree, mutant, given.timeout)
            took = time.monotonic() - start
            with journal.open("a", encoding="utf-8") as file:
                file.write(
                    json.dumps({"mutant": mutant.name, "outcome": done[mutant.name], "seconds": round(took, 1)}) + "\n"
                )
            sys.stdout.write(f"{done[mutant.name]:9} {took:6.1f} s  {mutant.name}\n")
            sys.stdout.flush()
    tried = [done[mutant.name] for mutant in chosen if mutant.name in done]
    killed, slow = tried.count("killed"), tried.count("timeout")
    decided = len(tried) - slow  # a test that did not end has not decided: the machine may be busy
    sys.stdout.write(
        f"{killed} of {decided} killed; {slow} not decided in time; {len(chosen) - len(tried)} left; "
        f"{len(known)} equivalent\n"
    )
    return 0 if killed >= given.target * decided else 1


if __name__ == "__main__":
    sys.exit(main())
