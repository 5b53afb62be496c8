"""The monitor in trainers: a Lightning callback (Lightning is imported only when used), and quiet Trainer output."""

import importlib
from collections.abc import Iterable
from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback


def lightning_callback(monitor: Any) -> Any:
    """An AttentionMonitor as a callback that measures on the steps that Lightning logs, and writes to its loggers."""
    callback = _callback_class()

    class LightningAttentionMonitor(callback):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            self.monitor = monitor
            self._measured = -1

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self._measured = -1  # steps restart at 0

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            step = _step(trainer)
            due = trainer.log_every_n_steps and (step + 1) % trainer.log_every_n_steps == 0
            if trainer.is_global_zero and due and step != self._measured:
                monitor.begin(pl_module)
                self._measured = step  # the first part of an accumulated batch is enough

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            numbers = monitor.finish(self._measured)
            if numbers:
                for logger in trainer.loggers:
                    logger.log_metrics(numbers, step=self._measured)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            monitor.close()  # of a batch that the module skipped

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            monitor.close()

    return LightningAttentionMonitor()


def lightning_clip_callback(clip: Any) -> Any:
    """A QKClip as a callback that scales weights after every optimizer step, and writes to the loggers."""
    callback = _callback_class()

    class LightningQKClip(callback):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            self.clip = clip
            self._begun = -1
            self._updates = 0  # of all optimizers before this step

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self._begun = -1  # steps restart at 0

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            step = _step(trainer)
            if step != self._begun:  # an accumulated batch is one step
                clip.begin(pl_module)
                self._begun, self._updates = step, trainer.global_step

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == self._updates:  # Lightning counts the batch that stepped only after this call
                return
            clip.finish(self._begun)
            due = trainer.log_every_n_steps and (self._begun + 1) % trainer.log_every_n_steps == 0
            if due and clip.monitor is None:
                numbers = clip.take_numbers()
                for logger in trainer.loggers:
                    logger.log_metrics(numbers, step=self._begun)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            clip.close()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            clip.close()

    return LightningQKClip()


def _step(trainer: Any) -> int:
    """Counted from 0, as Lightning's own numbers are, so that attention and the loss of a batch share a step.

    Not global_step, which moves on by two where two optimizers step. Lightning's callbacks ask for the same attribute.
    """
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def _callback_class() -> Any:
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return importlib.import_module(f"{package}.callbacks").Callback
        except ImportError:
            continue
    raise ImportError("lightning() needs Lightning, which is not installed. Run: pip install lightning")


def keep_off_the_terminal(callbacks: Iterable[TrainerCallback], prefix: str) -> None:
    """Make these callbacks print their logs without the keys of that prefix."""
    for callback in callbacks:
        if isinstance(callback, PrinterCallback | ProgressCallback) and "on_log" not in vars(callback):
            callback.on_log = _hide_keys(callback.on_log, prefix)  # type: ignore[method-assign]


def _hide_keys(on_log: Any, prefix: str) -> Any:
    def quiet(args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **others: Any) -> Any:
        shown = None if logs is None else {key: value for key, value in logs.items() if not key.startswith(prefix)}
        return on_log(args, state, control, logs=shown, **others)

    return quiet
