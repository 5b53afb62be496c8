"""Defer SIGINT (Ctrl-C) and SIGTERM to the next step, where the state can be saved."""

import signal
import threading
from types import FrameType
from typing import Any


class TrainingInterrupted(KeyboardInterrupt):
    """Training was interrupted; the last checkpoint has everything up to `step`."""

    def __init__(self, step: int) -> None:
        super().__init__(f"interrupted after step {step}; the same command continues from there")
        self.step = step


class StopRequest:
    """Context manager: the first signal sets `asked`, a second one has its usual effect."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # only this thread may set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self._restore()

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)
