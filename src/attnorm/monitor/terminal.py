"""Hundreds of numbers belong into a tracker, not onto every line that a Trainer prints."""

from collections.abc import Iterable
from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback


def keep_off_the_terminal(callbacks: Iterable[TrainerCallback], prefix: str) -> None:
    """What these callbacks print leaves out the keys of that prefix; nothing else changes."""
    for callback in callbacks:
        if isinstance(callback, PrinterCallback | ProgressCallback) and "on_log" not in vars(callback):
            callback.on_log = _without(callback.on_log, prefix)  # type: ignore[method-assign]


def _without(on_log: Any, prefix: str) -> Any:
    def quiet(args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **others: Any) -> Any:
        shown = None if logs is None else {key: value for key, value in logs.items() if not key.startswith(prefix)}
        return on_log(args, state, control, logs=shown, **others)

    return quiet
