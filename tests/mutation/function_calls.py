"""Pytest plugin: record which functions of attnorm each test calls, and how long it takes.

    CALLS_OF_TESTS=calls.json pytest -p tests.mutation.function_calls tests/theory/test_coverage.py

The file maps the id of each test that passed to {"seconds": processor time, "functions": ["path:qualified name", ...]}.
What a shared fixture calls counts for every test that uses it. Calls in other processes are not seen.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = str(ROOT / "src" / "attnorm") + os.sep

_names: dict[int, tuple[CodeType, str | None]] = {}  # holds the code, so that its id stays its own
_called: set[str] = set()
_by_fixture: dict[str, set[str]] = {}
_by_test: dict[str, dict[str, Any]] = {}


def _trace(frame: FrameType, event: str, argument: object) -> None:
    code = frame.f_code
    known = _names.get(id(code))
    if known is None:
        inside = code.co_filename.startswith(SOURCE)
        name = f"{Path(code.co_filename).relative_to(ROOT).as_posix()}:{code.co_qualname}" if inside else None
        known = _names[id(code)] = (code, name)
    if known[1] is not None:
        _called.add(known[1])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    _called.clear()
    start = time.process_time()
    threading.settrace(_trace)  # type: ignore[arg-type]
    sys.settrace(_trace)  # type: ignore[arg-type]
    try:
        return (yield)
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        functions = set(_called)
        for fixture in getattr(item, "fixturenames", ()):
            functions |= _by_fixture.get(fixture, set())
        entry = _by_test.setdefault(item.nodeid, {"passed": False})
        entry.update(seconds=round(time.process_time() - start, 3), functions=sorted(functions))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Generator[None, Any, Any]:
    before = set(_called)
    _called.clear()
    try:
        return (yield)
    finally:
        if fixturedef.scope != "function":
            _by_fixture.setdefault(fixturedef.argname, set()).update(_called)
        _called.update(before)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":
        _by_test.setdefault(report.nodeid, {})["passed"] = report.passed


def pytest_sessionfinish() -> None:
    passed = {
        test: {"seconds": entry["seconds"], "functions": entry["functions"]}
        for test, entry in _by_test.items()
        if entry["passed"]
    }
    Path(os.environ["CALLS_OF_TESTS"]).write_text(json.dumps(passed), encoding="utf-8")
