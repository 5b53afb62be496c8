"""Divide the rewriting of assertions, which pytest does for each changed test file, among its workers.

In a new clone every worker would rewrite every file, 8 s each. Here each rewrites its share before tests are collected,
and pytest finds the files of the others where it stores them.
"""

import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def rewrite_share(config: pytest.Config, files: list[Path], number: int, workers: int) -> None:
    """Rewrite every file of this worker's share that pytest has not stored already.

    A file that cannot be read or parsed is left to pytest, which reports it when it collects the tests.
    """
    state = config.stash.get(rewrite.assertstate_key, None)
    if state is None or sys.dont_write_bytecode:  # --assert=plain, or nothing may be stored
        return
    for path in files[number::workers]:
        stored = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(path, stored) is None and rewrite.try_makedirs(stored.parent):
            try:
                source, code = rewrite._rewrite_test(path, config)
            except (OSError, SyntaxError, ValueError):
                continue
            rewrite._write_pyc(state, code, source, stored)
