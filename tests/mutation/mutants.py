"""Mutants: one operator or number of a source file changed, and how the change gets into a running process."""

import ast
import gc
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

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
    text: str  # of the line, as it was
    which: int = 1  # of the same changes in this line, from the left

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}:{self.column}:{self.change.replace(' ', '_')}"

    @property
    def area(self) -> str:
        return Path(self.path).parts[2]

    @property
    def file(self) -> Path:
        return ROOT / self.path

    def source(self) -> bytes:
        """The changed file."""
        plain = self.file.read_bytes()
        return plain[: self.start] + self.new.encode() + plain[self.end :]


@dataclass(frozen=True)
class Function:
    """A function around a place in a file; names as code objects have them."""

    name: str = ""  # of the innermost function; "" outside functions
    outermost: str = ""  # of the outermost function around it
    runs_once: bool = True  # the place is evaluated when the file is imported, as a default or a decorator is


def mutants_of(path: Path) -> list[Mutant]:
    """Every mutant of one file."""
    found, alike = list(_mutants_of(path)), dict[tuple[int, str], list[int]]()
    for mutant in found:
        alike.setdefault((mutant.line, mutant.change), []).append(mutant.start)
    return [
        replace(mutant, which=1 + sum(start < mutant.start for start in alike[mutant.line, mutant.change]))
        for mutant in found
    ]


def _mutants_of(path: Path) -> Iterator[Mutant]:
    source = path.read_bytes()
    starts, lines = [0], source.splitlines(keepends=True)
    for line in lines:
        starts.append(starts[-1] + len(line))
    relative = path.relative_to(ROOT).as_posix()

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + column

    def mutant(node: ast.expr, start: int, end: int, new: str, change: str) -> Mutant:
        text = lines[node.lineno - 1].decode().strip()
        return Mutant(relative, node.lineno, node.col_offset, start, end, new, change, text)

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


def function_at(path: Path, line: int, column: int) -> Function:
    """The function around a place; a lambda is one, a comprehension is not."""
    found, names = Function(), list[str]()
    inside: ast.AST = ast.parse(path.read_bytes())
    while True:
        inner = [node for node in ast.walk(inside) if node is not inside and _holds(node, line, column)]
        if not inner:
            return found
        if names and not isinstance(inside, ast.ClassDef):
            names.append("<locals>")
        inside = inner[0]  # ast.walk comes from the outside
        names.append(getattr(inside, "name", "<lambda>"))
        if not isinstance(inside, ast.ClassDef):
            name, body = ".".join(names), inside.body
            first = body[0] if isinstance(body, list) else body
            runs_once = found.runs_once if found.name else (line, column) < (first.lineno, first.col_offset)
            found = Function(name, found.outermost or name, runs_once)


def _holds(node: ast.AST, line: int, column: int) -> bool:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        return False
    decorators = [one.lineno for one in getattr(node, "decorator_list", [])]
    start = (min([node.lineno, *decorators]), 0 if decorators else node.col_offset)
    return start <= (line, column) <= (node.end_lineno or 0, node.end_col_offset or 0)


def statement_at(path: Path, line: int, column: int) -> tuple[int, int]:
    """First and last line of the innermost statement around a place; of `if` and the like without their bodies."""
    first, last = line, line
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.stmt) and (node.lineno, node.col_offset) <= (line, column):
            body = getattr(node, "body", None)
            end = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or 0
            if line <= (node.end_lineno or 0) and node.lineno <= line <= end:
                first, last = node.lineno, end  # ast.walk comes from the outside
    return first, last


def uses_of(mutant: Mutant) -> Iterator[tuple[str, int]]:
    """Path and number of the lines that name what a change outside functions acts on."""
    if names := changed_names(mutant):
        named = re.compile(rf"\b({'|'.join(sorted(names))})\b")
        for path in sorted((ROOT / "src" / "attnorm").rglob("*.py")):
            for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if named.search(text):
                    yield path.relative_to(ROOT).as_posix(), number


def changed_names(mutant: Mutant) -> set[str]:
    """What a change outside functions acts on: a constant and others made of it, a field, a function with a default."""
    tree = ast.parse(mutant.file.read_bytes())
    function = function_at(mutant.file, mutant.line, mutant.column)
    found = {function.outermost.rpartition(".")[2]} if function.name and function.runs_once else set[str]()
    found -= {"__init__", "<lambda>"}
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AnnAssign)]
    for node in assigned:
        if node.lineno <= mutant.line <= (node.end_lineno or 0):
            found |= _names(*_targets(node))
    while True:
        made = [node for node in tree.body if node in assigned and node.value and _names(node.value) & found]
        more = found.union(*(_names(*_targets(node)) for node in made))
        if more == found:
            return found
        found = more


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _names(*nodes: ast.AST) -> set[str]:
    every = [one for node in nodes for one in ast.walk(node)]
    names = {one.id for one in every if isinstance(one, ast.Name)}
    return names | {one.attr for one in every if isinstance(one, ast.Attribute)}


@cache
def names_by_test(path: Path) -> dict[str, set[str]]:
    """The names that each function of a test file uses, itself or through what the file defines."""
    defined: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(path.read_bytes())):
        arguments = {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)}
        if isinstance(node, ast.FunctionDef):
            defined[node.name] = _names(node) | arguments  # an argument may be a fixture
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.col_offset == 0 and node.value:
            for name in _names(*_targets(node)):
                defined.setdefault(name, set()).update(_names(node.value))
    while True:
        wider = {name: used.union(*(defined.get(one, set()) for one in used)) for name, used in defined.items()}
        if wider == defined:
            return defined
        defined = wider


def import_as(mutant: Mutant) -> None:
    """Let this process import the changed file in place of the original, which it must not have imported yet."""
    target, changed = str(mutant.file), mutant.source()
    loader: Any = SourceFileLoader
    stats, data = loader.path_stats, loader.get_data

    def path_stats(self: Any, path: str) -> Any:
        if path == target:
            raise OSError("no compiled code")  # nor is any written
        return stats(self, path)

    loader.path_stats = path_stats
    loader.get_data = lambda self, path: changed if path == target else data(self, path)


def put_into_functions(mutant: Mutant) -> bool:
    """Change the functions that this process has imported; False where none of them holds the mutant."""
    outermost = function_at(mutant.file, mutant.line, mutant.column).outermost
    candidates = _named(compile(mutant.source(), str(mutant.file), "exec", dont_inherit=True), outermost)
    around = [code for code in candidates if code.co_firstlineno <= mutant.line <= _last_line(code)]
    if len(around) != 1:  # two lambdas of one line
        return False
    new, found = around[0], False
    gc.unfreeze()  # tests/conftest.py froze what was imported; frozen objects are not listed
    for function in [one for one in gc.get_objects() if type(one) is FunctionType]:
        code = function.__code__
        same = (code.co_filename, code.co_qualname) == (new.co_filename, new.co_qualname)
        if same and _last_line(code) == _last_line(new) and code.co_freevars == new.co_freevars:
            function.__code__ = new
            found = True
    return found


def _named(code: CodeType, name: str) -> Iterator[CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_qualname == name:
                yield inner
            yield from _named(inner, name)


def _last_line(code: CodeType) -> int:
    own = max((line for _, _, line in code.co_lines() if line is not None), default=0)
    return max([own, *(_last_line(inner) for inner in code.co_consts if isinstance(inner, CodeType))])
