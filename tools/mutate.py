"""Mutation testing: change one line of the source, run the tests of its room, and list the changes no test notices.

    python tools/mutate.py --number 100 --seed 7 --out mutants/new.jsonl   # a new sample
    python tools/mutate.py --frozen --out mutants/frozen.jsonl             # the list in tools/mutants.diff again
    python tools/mutate.py --freeze mutants/new.jsonl --number 200         # write that list from a sample

A mutant is a diff of one line: an operator, a number, a condition, a name or two arguments are swapped. Rooms (folders
of src/PACKAGE) get mutants in proportion to their lines. Tests run in a copy of the tree, in forks of a process that
has imported the libraries: first the recorded test, then files that name the changed function, then the rest of
tests/ROOM. A mutant of the list is skipped if its line is gone, or a line beside it; its file may have moved.

--out has one line per mutant. The same command resumes; use a new file when the code has changed. At the end every test
that failed runs on the unchanged code. If it fails there too, its mutants count as undecided, as those that need more
than --seconds do. The exit code is 1 if fewer than --target of the decided mutants are killed.
"""

import argparse
import ast
import contextlib
import difflib
import importlib
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FROZEN = ROOT / "tools" / "mutants.diff"
ELSEWHERE = {"engines": ["attention"], "kernels": ["attention", "metrics"]}
LIBRARIES = ["pytest", "hypothesis", "torch", "scipy.stats", "scipy.optimize", "pyarrow.parquet", "matplotlib.pyplot",
             "typer.testing", "rich.console", "beartype", "jaxtyping", "transformers.modeling_utils", "triton.language",
             "transformers.models.llama", "transformers.models.gpt2", "jinja2", "torch._dynamo"]  # fmt: skip
STAMPS = itertools.count(1)
PROBABLE = 4  # test files that are tried before the rest of the room

COMPARISONS = {ast.Lt: "< >=", ast.LtE: "<= >", ast.Gt: "> <=", ast.GtE: ">= <", ast.Eq: "== !=", ast.NotEq: "!= ==",
               ast.Is: "is is_not", ast.IsNot: "is_not is", ast.In: "in not_in", ast.NotIn: "not_in in"}  # fmt: skip
ARITHMETIC = {ast.Add: "+ -", ast.Sub: "- +", ast.Mult: "* /", ast.Div: "/ *", ast.Pow: "** *", ast.FloorDiv: "// *",
              ast.Mod: "% *"}  # fmt: skip
NAMES = ["min max", "amin amax", "minimum maximum", "argmin argmax", "any all", "floor ceil", "tril triu", "sum mean",
         "zeros ones", "zeros_like ones_like", "repeat repeat_interleave", "exp log", "sin cos", "cumsum cumprod",
         "low high", "lower upper", "start stop", "first last", "left right", "queries keys", "query key",
         "rows columns", "heads layers", "before after", "smallest largest"]  # fmt: skip
SWAPS = {a: b for pair in NAMES for a, b in (pair.split(), pair.split()[::-1])}
SYMMETRIC = {"min", "max", "minimum", "maximum", "isclose", "union", "print", "gcd", "logaddexp"}
# Keywords of speed and looks, which no number depends on.
UNTESTED = {"num_warps", "num_stages", "dpi", "figsize", "linewidth", "fontsize", "color", "indent", "stacklevel"}


def changes(text: str) -> Iterator[tuple[int, int, int, str]]:
    """Yield every change of a source: its line, first and last column in bytes, and what to put there."""
    tree = ast.parse(text)
    lines, words = [line.encode() for line in text.splitlines()], set(re.findall(r"\w+", text))
    skipped = set(_unseen(tree))

    def operator(left: ast.expr, right: ast.expr, pair: str) -> Iterator[tuple[int, int, int, str]]:
        old, new = (word.replace("_", " ") for word in pair.split())
        if left.end_lineno == right.lineno:
            at = lines[right.lineno - 1].find(old.encode(), left.end_col_offset, right.col_offset)
            if at >= 0:
                yield right.lineno, at, at + len(old), new

    for node in ast.walk(tree):
        if id(node) in skipped or not isinstance(node, ast.expr | ast.If):
            continue
        here = node.lineno, node.col_offset, node.end_col_offset or 0
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for left, right, kind in zip(operands, operands[1:], node.ops, strict=False):
                yield from operator(left, right, COMPARISONS[type(kind)])
        elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _is_text(node):
            yield from operator(node.left, node.right, ARITHMETIC[type(node.op)])
        elif isinstance(node, ast.BoolOp):
            yield from operator(*node.values[:2], "and or" if isinstance(node.op, ast.And) else "or and")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            yield node.lineno, node.col_offset, node.operand.col_offset, ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield *here, str(not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield *here, str(node.value + 1 if isinstance(node.value, int) else 2 * node.value or 1.0)
        elif isinstance(node, ast.If | ast.IfExp) and isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
            if node.test.lineno == node.test.end_lineno:
                yield node.test.lineno, node.test.col_offset, node.test.col_offset, "not "
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if SWAPS.get(name) in words and node.lineno == node.end_lineno:
                yield node.lineno, here[2] - len(name.encode()), here[2], SWAPS[name]
        elif isinstance(node, ast.Call) and len(node.args) >= 2 and _called(node) not in SYMMETRIC:
            one, two = node.args[:2]
            if (
                isinstance(one, ast.Name)
                and isinstance(two, ast.Name)
                and one.lineno == two.lineno
                and one.id != two.id
            ):
                yield one.lineno, one.col_offset, two.end_col_offset or 0, f"{two.id}, {one.id}"


def _called(node: ast.Call) -> str:
    return ast.unparse(node.func).rpartition(".")[2]


def _is_text(node: ast.BinOp) -> bool:
    return any(isinstance(one, ast.Constant | ast.JoinedStr) and not isinstance(getattr(one, "value", ""), int | float)
               for one in (node.left, node.right))  # fmt: skip


def _unseen(tree: ast.AST) -> Iterator[int]:
    """Yield the nodes that no test can see: annotations, decorators, what stands in an error, speed and looks."""
    for node in ast.walk(tree):
        parts: list[Any] = []
        if isinstance(node, ast.FunctionDef):
            parts = [node.returns, *(one.annotation for one in ast.walk(node.args) if isinstance(one, ast.arg))]
            parts += [node] if "overload" in map(ast.unparse, node.decorator_list) else node.decorator_list
        elif isinstance(node, ast.ClassDef):
            parts = [*node.decorator_list]
        elif isinstance(node, ast.AnnAssign):
            parts = [node.annotation]
        elif isinstance(node, ast.Raise | ast.JoinedStr) or (isinstance(node, ast.keyword) and node.arg in UNTESTED):
            parts = [node]
        yield from (id(inner) for part in parts if part is not None for inner in ast.walk(part))


def mutant_of(path: Path, change: tuple[int, int, int, str]) -> str | None:
    """Return a mutant of a file as a diff, with as much context as names one place; None if it does not compile."""
    text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
    number, start, end, new = change
    lines = text.splitlines(keepends=True)
    mutated = [*lines]
    old = lines[number - 1].encode()
    mutated[number - 1] = (old[:start] + new.encode() + old[end:]).decode()
    try:
        compile("".join(mutated), name, "exec", dont_inherit=True)
    except SyntaxError:
        return None
    diffs = ("".join(difflib.unified_diff(lines, mutated, name, name, n=context)) for context in range(1, 9))
    return next((diff for diff in diffs if ("\n" + text).count("\n" + _sides(diff)[0]) == 1), None)


def _sides(diff: str) -> tuple[str, str]:
    hunk = diff.splitlines(keepends=True)[3:]
    return "".join(line[1:] for line in hunk if line[0] != "+"), "".join(line[1:] for line in hunk if line[0] != "-")


def applied(diff: str) -> tuple[Path, str] | None:
    """Return the file that a mutant changes, which may have moved, and its new text; None if the code is gone."""
    (before, after), named = _sides(diff), ROOT / diff.split()[1]
    for files in ([named] if named.exists() else [], sorted((ROOT / "src").rglob("*.py"))):
        texts = {path: "\n" + path.read_text(encoding="utf-8") for path in files}
        found = [path for path, text in texts.items() if text.count("\n" + before) == 1]
        if len(found) == 1:
            return found[0], texts[found[0]].replace("\n" + before, "\n" + after)[1:]
    return None


def sample(number: int, seed: int) -> list[str]:
    """Draw mutants from every room in proportion to its lines."""
    rooms: dict[tuple[str, ...], list[Path]] = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        rooms.setdefault(path.relative_to(ROOT).parts[1:3][: len(path.relative_to(ROOT).parts) - 2], []).append(path)
    lines = {room: sum(len(path.read_bytes().splitlines()) for path in files) for room, files in rooms.items()}
    drawn = []
    for room, files in rooms.items():
        every = [(path, change) for path in files for change in changes(path.read_text(encoding="utf-8"))]
        random.Random(f"{seed} {room}").shuffle(every)
        found = filter(None, (mutant_of(path, change) for path, change in every))
        drawn += itertools.islice(found, max(1, round(number * lines[room] / sum(lines.values()))))
    random.Random(seed).shuffle(drawn)
    return drawn


def tests_of(path: Path, text: str, number: int) -> tuple[list[str], list[str]]:
    """Return the test files of a room: those that probably run this line, and the others."""
    package, room, *_ = path.relative_to(ROOT / "src").with_suffix("").parts
    tests = ROOT / package.replace("attnorm", "tests", 1)
    folders = [tests / name for name in ELSEWHERE.get(room, [room]) if (tests / name).is_dir()]
    files = [one for folder in folders for one in folder.rglob("test_*.py")] or [*tests.rglob(f"test_{room}.py")]
    around = [
        node.name for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.lineno <= number <= (node.end_lineno or 0)
    ]  # fmt: skip

    def score(file: Path) -> int:
        content = file.read_text(encoding="utf-8")
        named = sum(bool(re.search(rf"\b{name}\b", content)) for name in around)
        imported = bool(re.search(rf"\b{path.stem}\b", content))
        return 4 * (file.stem == f"test_{path.stem}") + 2 * named + imported

    ranked = sorted(files, key=lambda file: (-score(file), file.stat().st_size))
    names = [file.relative_to(ROOT).as_posix() for file in ranked]
    probable = sum(score(file) > 0 for file in ranked[:PROBABLE]) or 1
    return names[:probable], names[probable:]


class Failures:
    """A plugin of pytest that writes into a file which tests fail."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w", encoding="utf-8")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.file.write(f"{report.nodeid}\n")
            self.file.flush()

    pytest_collectreport = pytest_runtest_logreport


def pytest_here(tree: Path, arguments: list[str], seconds: float, failures: Path) -> int:
    """Run pytest in this process, which has not imported what it tests, silently and with limited processor time."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds)))
    os.chdir(tree)
    sys.path[:0] = [str(tree), str(tree / "src")]
    os.environ["PYTHONPATH"] = str(tree / "src")
    silent = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silent, stream)
    import pytest

    chosen = ["-p", "no:cacheprovider", "-m", "not slow and not real_model", "--timeout", "300"]
    return int(pytest.main([*chosen, *arguments], plugins=[Failures(failures)]))


def run_tests(tree: Path, tests: list[str], seconds: float, *options: str) -> tuple[str, list[str]]:
    """Run tests in a fork; return "survived", "killed", "undecided" or "not found", and which tests failed."""
    failures = tree / "failures.txt"
    failures.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = pytest_here(tree, [*options, *tests], seconds, failures)
        finally:
            os._exit(code)  # whatever happens: the cleaning up belongs to the parent
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what its tests have left
    failed = failures.read_text(encoding="utf-8").splitlines() if failures.exists() else []
    if failed:
        return "killed", failed
    if os.WIFSIGNALED(status):
        return "undecided", []
    return {4: "not found"}.get(os.WEXITSTATUS(status), "survived"), []


def try_mutant(tree: Path, diff: str, known: str, seconds: float) -> tuple[str, str, str]:
    """Return the outcome, the test that failed, and the file."""
    place = applied(diff)
    if place is None:
        return "gone", "", ""
    path, text = place
    name, original = path.relative_to(ROOT), path.read_text(encoding="utf-8")
    both = zip(original.splitlines(), text.splitlines(), strict=True)
    number = next(number for number, (old, new) in enumerate(both, start=1) if old != new)
    probable, others = tests_of(path, original, number)
    write(tree / name, text)
    outcome, failed = "survived", []
    for tests in ([known] if known else [], probable, others):
        if tests and outcome in ("survived", "not found"):
            outcome, failed = run_tests(tree, tests, seconds, "-x")
    if outcome == "not found":  # even conftest.py does not run
        outcome, failed = "killed", probable
    write(tree / name, original)
    return outcome, failed[0] if failed else "", name.as_posix()


def failing_anyway(tree: Path, tests: set[str]) -> set[str]:
    """Return the tests that fail on the unchanged code; all cases run, as a mutant may change the name of a case."""
    functions = sorted({test.partition("[")[0] for test in tests})
    outcome, failed = run_tests(tree, functions, 60 + 20 * len(functions)) if functions else ("survived", [])
    if outcome in ("not found", "undecided"):
        raise SystemExit(f"expected the tests to run on the unchanged code, got {outcome}. Run them: {functions}")
    return tests & set(failed)


def write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    stamp = next(STAMPS)
    os.utime(path, (stamp, stamp))  # no compiled file has this time


def read_frozen() -> list[tuple[str, str]]:
    """Return the mutants of the list, and the test that killed each."""
    parts = re.split(r"^killed by (.*)\n", FROZEN.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [*zip(parts[2::2], parts[1::2], strict=True)]


def read_done(out: Path) -> dict[str, dict[str, Any]]:
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    return {entry["diff"]: entry for entry in map(json.loads, lines)}


def record(out: Path, entry: dict[str, Any]) -> None:
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def freeze(out: Path, number: int) -> None:
    """Write the killed mutants of a sample as the list, in the order of their files."""
    killed = [entry for entry in read_done(out).values() if entry["outcome"] == "killed"][:number]
    ordered = sorted(killed, key=lambda entry: (entry["path"], int(re.findall(r"@@ -(\d+)", entry["diff"])[0])))
    FROZEN.write_text("".join(f"killed by {one['test']}\n{one['diff']}" for one in ordered), encoding="utf-8")


def copy_of_tree(tree: Path) -> None:
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="file with one line per tried mutant; the same file resumes")
    parser.add_argument("--number", type=int, default=100, help="mutants to draw or to freeze (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the sample (default: 0)")
    parser.add_argument("--frozen", action="store_true", help="try the frozen list instead of a sample")
    parser.add_argument("--freeze", type=Path, metavar="FILE", help="write the list from the results in FILE, and end")
    parser.add_argument(
        "--seconds", type=float, default=300, help="most processor time of a run of tests (default: 300)"
    )
    parser.add_argument("--stop-after", type=float, default=float("inf"), help="seconds after which none is begun")
    parser.add_argument("--target", type=float, default=0.95, help="least share killed (default: 0.95)")
    given = parser.parse_args()
    if given.freeze:
        freeze(given.freeze, given.number)
        return 0
    if given.out is None:
        parser.error("expected --out FILE or --freeze FILE")
    ends = time.monotonic() + given.stop_after
    mutants = read_frozen() if given.frozen else [(diff, "") for diff in sample(given.number, given.seed)]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    defaults = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg"}
    defaults |= {"ATTNORM_SHARED": str(ROOT.parent / "shared")}
    defaults |= {} if shutil.which("nvidia-smi") else {"TRITON_INTERPRET": "1"}
    os.environ.update({name: os.environ.get(name, value) for name, value in defaults.items()})
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    done = read_done(given.out)
    tree = Path(tempfile.mkdtemp()).resolve()  # TemporaryDirectory would end with a process that a test forks
    try:
        copy_of_tree(tree)
        for diff, known in mutants:
            if diff in done or time.monotonic() > ends:
                continue
            started = time.monotonic()
            outcome, test, path = try_mutant(tree, diff, known, given.seconds)
            done[diff] = {"outcome": outcome, "test": test, "path": path, "diff": diff}
            record(given.out, done[diff])
            sys.stdout.write(f"{outcome:9} {time.monotonic() - started:6.1f} s  {path}  {test}\n")
            sys.stdout.flush()
        results = [done[diff] for diff, _ in mutants if diff in done]
        broken = failing_anyway(tree, {entry["test"] for entry in results if entry["outcome"] == "killed"})
    finally:
        shutil.rmtree(tree)
    for entry in results:
        if entry["test"] in broken:
            sys.stdout.write(f"fails without a mutant: {entry['test']}\n")
            entry["outcome"] = "undecided"
            record(given.out, entry)
    found = Counter(entry["outcome"] for entry in results)
    decided = found["killed"] + found["survived"]
    killed, left = f"{found['killed']} of {decided} killed", len(mutants) - len(results)
    sys.stdout.write(f"{killed}; {found['undecided']} undecided; {found['gone']} gone; {left} left\n")
    return 0 if found["killed"] >= given.target * decided else 1


if __name__ == "__main__":
    sys.exit(main())
