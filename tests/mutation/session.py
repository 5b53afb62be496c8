"""One pytest session that tries many mutants: tests are collected once, and each mutant runs in a fork of the session.

First every test file runs unchanged, to record which lines of attnorm each test runs and what it costs. A mutant is
then tried on the tests that run its line and pass, until one fails.
"""

import hashlib
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from tests.mutation.mutants import (
    ROOT,
    Function,
    Mutant,
    changed_names,
    names_by_test,
    put_into_functions,
    statement_at,
    uses_of,
)

SOURCE = str(ROOT / "src" / "attnorm") + os.sep
IMPORTS = "imports"  # stands for a test: what importing and collecting the tests calls
# Exit codes of a fork: a test failed; it ran without end; there was no time; no imported function has the mutant.
KILLED, ENDED, NOT_DECIDED, IMPORT_IT, BROKEN = 1, 10, 11, 12, 13


class Lines:
    """Which lines of attnorm run; {"path:qualified name" of a function: its lines}."""

    def __init__(self) -> None:
        self.seen: dict[str, set[int]] = {}
        self._known: dict[
            int, tuple[CodeType, str | None, set[int]]
        ] = {}  # holds the code, so that its id stays its own

    def start(self) -> None:
        self.seen = {}
        threading.settrace(self._trace)
        sys.settrace(self._trace)

    def stop(self) -> dict[str, set[int]]:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        return self.seen

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        known = self._known.get(id(code))
        if known is None:
            inside = code.co_filename.startswith(SOURCE)
            name = f"{Path(code.co_filename).relative_to(ROOT).as_posix()}:{code.co_qualname}" if inside else None
            known = self._known[id(code)] = (code, name, {line for _, _, line in code.co_lines() if line is not None})
        _, name, lines = known
        if name is None:
            return None
        seen = self.seen.setdefault(name, set())
        seen.add(frame.f_lineno)
        if lines <= seen:
            return None  # nothing new can come

        def line(frame: FrameType, event: str, argument: object) -> Any:
            seen.add(frame.f_lineno)
            return line

        return line


class CallRecords:
    """Which lines each test runs and what it costs."""

    def __init__(self, records: Iterable[dict[str, Any]]) -> None:
        self.seconds: dict[str, float] = {}
        self.by_function: dict[str, set[str]] = defaultdict(set)
        self.by_file: dict[str, set[str]] = defaultdict(set)
        self.by_line: dict[tuple[str, int], set[str]] = defaultdict(set)
        self.at_import: set[str] = set()
        for record in records:
            for test, entry in record.items():
                if test == IMPORTS:
                    self.at_import |= set(entry["lines"])
                    continue
                self.seconds[test] = entry["seconds"]
                for function, lines in entry["lines"].items():
                    path = function.partition(":")[0]
                    self.by_function[function].add(test)
                    self.by_file[path].add(test)
                    for line in lines:
                        self.by_line[path, line].add(test)

    def needs_import(self, mutant: Mutant, function: Function) -> bool:
        """Whether the change acts while the file is imported or tests are collected."""
        names = function.name.split(".<locals>.")
        around = [".<locals>.".join(names[:count]) for count in range(1, len(names) + 1)]
        return function.runs_once or any(f"{mutant.path}:{name}" in self.at_import for name in around)

    def rounds(self, mutant: Mutant, function: Function, first: float, further: float) -> list[list[str]]:
        """The tests to try on a mutant, and those to try if it survives: of up to so many seconds together."""
        chosen = self.of(mutant, function, first)
        others = [test for test in self.of(mutant, function, further) if test not in set(chosen)]
        return [tests for tests in (chosen, others) if tests]

    def of(self, mutant: Mutant, function: Function, most_seconds: float) -> list[str]:
        """The tests to try on a mutant, in the order in which to try them: near, cheap and different ones first."""
        counts: dict[str, int] = defaultdict(int)
        costs: dict[str, float] = {}
        naming = self._that_name(mutant, function)
        for test in sorted(self._that_run(mutant, function) | naming, key=lambda test: (self.seconds[test], test)):
            file, _, case = test.partition("::")
            same = file + case.partition("[")[0]  # the parameters of one test notice mostly the same
            counts[same] += 1
            away = 1 if Path(mutant.path).stem in file or test in naming else 3
            costs[test] = (self.seconds[test] + 0.02) * counts[same] * away
        chosen, total = list[str](), 0.0
        for test in sorted(costs, key=lambda test: (costs[test], test)):
            if not chosen or total + self.seconds[test] <= most_seconds:
                chosen.append(test)
                total += self.seconds[test]
        files = list(dict.fromkeys(test.partition("::")[0] for test in chosen))  # a file's fixtures are set up once
        return sorted(chosen, key=lambda test: files.index(test.partition("::")[0]))

    def _that_run(self, mutant: Mutant, function: Function) -> set[str]:
        """The tests that run the changed line or, where it acts on import, the lines that use its result."""
        called = self.by_function[f"{mutant.path}:{function.name}"]
        if not function.runs_once:
            first, last = statement_at(mutant.file, mutant.line, mutant.column)
            running = set[str]().union(*(self.by_line[mutant.path, line] for line in range(first, last + 1))) & called
        else:
            running = set[str]().union(*(self.by_line[place] for place in uses_of(mutant)))
            if function.name:
                running &= called
        if self.needs_import(mutant, function):
            return running or called or self.by_file[mutant.path]
        return running

    def _that_name(self, mutant: Mutant, function: Function) -> set[str]:
        """The tests that themselves name the constant, or call by its name the function whose default is changed."""
        names = changed_names(mutant) if function.runs_once else set[str]()
        if not names:
            return set()
        called = self.by_function[f"{mutant.path}:{function.name}"] if function.name else set(self.seconds)
        return {test for test in called if names & _names_in(test)}


class MutantSession:
    """The pytest plugin: runs `work` on the collected tests in place of pytest's own loop."""

    def __init__(self, calls: Path, work: Callable[["MutantSession", CallRecords], None], timeout: float) -> None:
        self.calls, self.work, self.timeout = calls, work, timeout
        self.items: dict[str, pytest.Item] = {}
        self.failed = ""
        self._recorder = Lines()
        self._by_fixture: dict[str, dict[str, set[int]]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, Any, Any]:
        self._recorder.start()
        try:
            return (yield)
        finally:
            self._at_import = self._recorder.stop()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        by_file = defaultdict(list)
        for item in session.items:
            by_file[item.nodeid.partition("::")[0]].append(item)
        records: list[dict[str, Any]] = [{IMPORTS: {"lines": sorted(self._at_import)}}]
        for name, items in by_file.items():
            folder = (ROOT / name).parent
            helpers = [path for path in folder.rglob("*.py") if not path.name.startswith("test_")]
            version = digest([ROOT / name, *helpers, *(ROOT / "tests").glob("*.py")])
            path = self.calls / f"{name.removesuffix('.py').replace('/', '.')}.{version}.json"
            if not is_current(path):
                code = in_a_fork(lambda items=items, path=path: self._record(items, path), 3600, 3600)
                if code:
                    raise RuntimeError(f"the tests of {name} could not be recorded: exit code {code}")
            known = json.loads(path.read_text(encoding="utf-8"))["tests"]
            records.append({test: entry for test, entry in known.items() if test in self.items})
        self.work(self, CallRecords(records))
        return True

    def try_on(self, mutant: Mutant, tests: list[str], processor: float) -> tuple[int, str]:
        """0, or one of the exit codes above, and the test that failed."""
        note = self.calls / f"failed.{os.getpid()}"

        def run() -> int:
            if not put_into_functions(mutant):
                return IMPORT_IT
            try:
                failed = next(filter(None, self._run([self.items[test] for test in tests])), "")
            except BaseException as error:  # a test that interrupts pytest
                failed = type(error).__name__
            note.write_text(failed, encoding="utf-8")
            return KILLED if failed else 0

        code = in_a_fork(run, processor, self.timeout)
        failed = note.read_text(encoding="utf-8") if note.exists() else ""
        note.unlink(missing_ok=True)
        return code, failed

    def _run(self, items: list[pytest.Item]) -> Generator[str, None, None]:
        """Run the tests; after each the id of one that failed, or ""."""
        for item, following in zip(items, [*items[1:], None], strict=True):
            self.failed = ""
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            yield self.failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = report.nodeid
        elif report.skipped and report.when != "teardown":
            self.failed = self.failed or "skipped"

    def _record(self, items: list[pytest.Item], path: Path) -> int:
        found = {}
        start = time.process_time()
        self._recorder.start()
        for item, failed in zip(items, self._run(items), strict=True):
            lines = self._recorder.stop()
            for fixture in getattr(item, "fixturenames", ()):
                _add(lines, self._by_fixture.get(fixture, {}))
            if not failed:
                seconds = round(time.process_time() - start, 3)
                named = {function: sorted(numbers) for function, numbers in sorted(lines.items())}
                found[item.nodeid] = {"seconds": seconds, "lines": named}
            start = time.process_time()
            self._recorder.start()
        self._recorder.stop()
        draft = path.with_suffix(f".{os.getpid()}")
        ran = {function.partition(":")[0] for entry in found.values() for function in entry["lines"]}
        sources = {name: digest([ROOT / name]) for name in sorted(ran)}
        draft.write_text(json.dumps({"sources": sources, "tests": found}), encoding="utf-8")
        draft.replace(path)
        return 0

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        """What a shared fixture runs counts for every test that uses it."""
        before, self._recorder.seen = self._recorder.seen, {}
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                _add(self._by_fixture.setdefault(fixturedef.argname, {}), self._recorder.seen)
            _add(self._recorder.seen, before)


def _names_in(test: str) -> set[str]:
    file, _, case = test.partition("::")
    path = ROOT / file
    return names_by_test(path).get(case.partition("[")[0].rpartition("::")[2], set()) if path.exists() else set()


def _add(lines: dict[str, set[int]], more: dict[str, set[int]]) -> None:
    for function, numbers in more.items():
        lines.setdefault(function, set()).update(numbers)


def is_current(record: Path) -> bool:
    """Whether a record exists and the source files that its tests ran are unchanged."""
    if not record.exists():
        return False
    sources = json.loads(record.read_text(encoding="utf-8"))["sources"]
    return all((ROOT / name).exists() and digest([ROOT / name]) == known for name, known in sources.items())


def digest(paths: Iterable[Path]) -> str:
    """Of the files' contents: records of other versions do not count."""
    whole = hashlib.sha256()
    for path in sorted(paths):
        whole.update(hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()[:8]


def in_a_fork(work: Callable[[], int], processor: float, clock: float) -> int:
    """Exit code of `work` in a fork: ENDED after `processor` seconds of work, NOT_DECIDED after `clock` seconds."""
    child = os.fork()
    if child == 0:
        code = BROKEN
        try:
            os.setsid()  # so that what the tests start ends with them
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if processor < float("inf"):
                resource.setrlimit(resource.RLIMIT_CPU, (int(processor) + 1, resource.RLIM_INFINITY))
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    ends = time.monotonic() + clock
    while time.monotonic() < ends:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            if code == BROKEN:
                raise RuntimeError("a fork could not do its work; its error is in the log")
            return code if code >= 0 else ENDED if code == -signal.SIGXCPU else KILLED
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return NOT_DECIDED
