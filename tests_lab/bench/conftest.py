"""Workers that start in no time."""

from tests.forked_workers import forked_workers as forked_workers
