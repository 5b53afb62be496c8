"""Workers divide the work of rewriting assertions, which pytest does for each test file that has changed.

In a new clone every worker would rewrite every file, 8 s each. Here each rewrites its share before tests are collected,
and pytest finds the files of the others where it stores them.
"""

from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def rewrite_share(config: pytest.Config, files: list[Path], number: int, workers: int) -> None:
    """Rewrite every file of this worker's share that pytest has not stored already."""
    for path in files[number::workers]:
        stored = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(path, stored) is None:
            stored.parent.mkdir(exist_ok=True)
            source, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, stored)
