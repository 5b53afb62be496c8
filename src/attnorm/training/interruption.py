"""Ctrl-C and SIGTERM as a wish that is granted between two steps, when the state is whole."""

import signal
import threading
from types import FrameType
from typing import Any


class TrainingInterrupted(KeyboardInterrupt):
    """Asked to stop; everything up to `step` is in the last checkpoint."""

    def __init__(self, step: int) -> None:
        super().__init__(f"interrupted after step {step}; the same command continues from there")
        self.step = step


class StopRequest:
    """While inside, the first signal sets `asked`; a second one acts as it always does."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread set handlers
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
