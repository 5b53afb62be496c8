"""Workers that start in no time."""

from tests.quick_workers import quick_workers as quick_workers
