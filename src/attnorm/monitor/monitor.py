"""AttentionMonitor: measure attention while a model trains, in a Trainer, in Lightning or in your own training loop.

The numbers come from inside the ordinary training forward of a logging step. There is no second forward, other
steps cost nothing, and neither outputs nor gradients change.
"""

import importlib
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from threading import get_ident
from typing import Any, NoReturn, Self

from torch import distributed, nn
from transformers import (
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from attnorm.models.dispatch import check_model, check_observable
from attnorm.models.private_names import lightning_step
from attnorm.monitor.alerts import MEANING, Alert, AlertThresholds, AttentionAlert, largest_logit, states
from attnorm.monitor.measure import REPORTED
from attnorm.monitor.watch import (
    ForwardWatch,
    History,
    Layers,
    PerHead,
    check_per_head,
    head_keys,
    trained_model,
    watch,
    worst_keys,
    worst_of_layer,
)

PREFIX = "attn/"
FORGOTTEN = 10  # measurements out of a state after which entering it is news again; at a threshold numbers waver


class ObservingCallback(TrainerCallback):
    """A callback that observes the model while a Trainer, Lightning or a training loop of your own trains it.

    A subclass has `begin`, which fills `_open`, and `lightning`.
    """

    _variable: str  # name of an instance in error messages
    _open: ExitStack | None = None  # while it observes
    _thread = 0  # the one that observes

    def begin(self, model: nn.Module) -> None:
        raise NotImplementedError

    def _start_over(self) -> None:
        """Stop observing for a step that was not finished, and start one in this thread."""
        if self._open is not None and self._thread != get_ident():
            raise RuntimeError(
                f"expected a {type(self).__name__} of one thread, got one that another thread uses for a step. Make "
                "one for each thread."
            )
        self.close()
        self._thread = get_ident()

    def close(self) -> None:
        """Stop observing the model if a step was not finished."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.close()

    @contextmanager
    def _observing(self, model: nn.Module) -> Iterator[None]:
        """Observe the model inside; `finish` has to follow unless an exception is raised."""
        self.begin(model)
        try:
            yield
        except BaseException:
            self.close()
            raise

    def attach(self, trainer: Any) -> Self:
        """Put this callback in front of the Trainer's others, so that every reporter gets its numbers.

        (A callback that is appended, as `Trainer(callbacks=[...])` does, comes after TensorBoard, W&B, MLflow ...)
        """
        if not hasattr(trainer, "callback_handler"):
            raise TypeError(
                f"attach(): expected a transformers Trainer, got {type(trainer).__name__}. In your own loop "
                f"write `with {self._variable}.step(model):`, in Lightning "
                f"Trainer(callbacks=[{self._variable}.lightning()])"
            )
        if trainer.args.n_gpu > 1:
            raise ValueError(
                "expected a Trainer without DataParallel, whose copies of the model cannot be observed, got one "
                f"on {trainer.args.n_gpu} GPUs. Start one process per GPU (torchrun), or make only one GPU "
                "visible."
            )
        callbacks = trainer.callback_handler.callbacks
        self._check_trainer(trainer.model, callbacks)
        callbacks[:] = [self, *(callback for callback in callbacks if callback is not self)]
        keep_off_the_terminal(callbacks, PREFIX)
        return self

    def _check_trainer(self, model: nn.Module, callbacks: Sequence[TrainerCallback]) -> None:
        """Raise an error if this model or another callback makes observing impossible."""

    @property
    def setup(self) -> NoReturn:
        """Raise an error that names the Lightning callback. Lightning reads this attribute first."""
        raise AttributeError(
            f"{type(self).__name__} is a callback of transformers' Trainer. In Lightning write "
            f"Trainer(callbacks=[{self._variable}.lightning()])"
        )

    on_exception = setup  # Lightning reads it after that error, and would report that it is missing

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.close()  # of a run that an exception ended
        self._forget_step()

    def _forget_step(self) -> None:
        """Forget the numbers of a step that an exception ended."""

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.close()


class AttentionMonitor(ObservingCallback):
    """Measure the attention of every layer while a model trains, and raise alerts.

    On logging steps it logs entropy, effective keys, logits, separability, Jacobian norm and sink mass of every layer.
    The worst head of each metric is always logged too. `history` and `to_pandas()` have every head of the last 1,000
    measurements.

    Args:
        every: In your own training loop, measure every `every`-th step (default: 50). A Trainer and Lightning have
            their own settings for that.
        rows: Number of sampled rows, the last ones of the longest sequence (default: 32). On CUDA all rows are measured
            if the normalizer has a kernel (see attention_statistics).
        top_n: Number N of heaviest keys for separability (default: 20).
        thresholds: Thresholds of the alerts.
        per_head: Also log the numbers of single heads: True for all, or a list of (layer, head).

    >>> monitor = AttentionMonitor()
    >>> monitor.attach(trainer)
    >>> trainer.train()
    >>> monitor.alerts
    """

    _variable = "monitor"

    def __init__(
        self,
        *,
        every: int = 50,
        rows: int = 32,
        top_n: int = 20,
        thresholds: AlertThresholds | None = None,
        per_head: PerHead = False,
    ) -> None:
        for name, value in (("every", every), ("rows", rows), ("top_n", top_n)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"expected {name} as a whole number of at least 1, got {value!r}.")
        if thresholds is not None and not isinstance(thresholds, AlertThresholds):
            raise TypeError(
                f"thresholds: expected attnorm.monitor.alerts.AlertThresholds, got {thresholds!r}. Pass e.g. "
                "AlertThresholds(dispersed_entropy=0.95)."
            )
        self.every = every
        self.rows = rows
        self.top_n = top_n
        self.thresholds = thresholds or AlertThresholds()
        self.alerts: list[Alert] = []  # one for each time that a layer enters a state
        self.numbers: dict[str, float] = {}  # of the last measurement
        self.per_head = check_per_head(per_head)
        self.history = History()  # every head of the last measurements
        self.also_logged: list[Callable[[], dict[str, float]]] = []  # numbers of others, such as QKClip
        self.steps = 0  # of your own training loop
        self._called = False  # step, without `with` so far
        self._measurements = 0
        self._first_logits: dict[str, float] = {}  # by layer: the largest
        self._last_in_state: dict[tuple[str, str], int] = {}  # by kind and layer: the measurement
        self._checked: nn.Module | None = None
        self._attached = False
        self._watch: ForwardWatch | None = None
        self._pending: dict[str, float] = {}
        self._pending_step = 0

    def __repr__(self) -> str:
        settings = f"every={self.every}, rows={self.rows}, top_n={self.top_n}, thresholds={self.thresholds}"
        return f"AttentionMonitor({settings}): {self._measurements} measurements, {len(self.alerts)} alerts"

    def step(self, model: nn.Module) -> AbstractContextManager[dict[str, float]]:
        """Wrap the forward pass of one step of your own training loop, with or without the backward pass.

        Yields an empty dict. On every `every`-th step it is filled on exit; other steps cost nothing. If
        torch.distributed runs several processes, only the first one measures.
        """
        if self._called:
            raise RuntimeError(
                "expected the context of the last monitor.step(model) to be entered, but it was not, so that "
                "nothing was measured. Write `with monitor.step(model) as attention:` around the forward pass."
            )
        self._called = True
        return self._enter_step(model)

    @contextmanager
    def _enter_step(self, model: nn.Module) -> Iterator[dict[str, float]]:
        self._called = False
        self.steps += 1
        numbers: dict[str, float] = {}
        if self.steps % self.every or not _is_first_process():
            yield numbers
            return
        with self.measuring(model, self.steps) as numbers:
            yield numbers

    @contextmanager
    def measuring(self, model: nn.Module, step: int) -> Iterator[dict[str, float]]:
        """Measure the training forward pass inside the `with` block, regardless of `every`."""
        numbers: dict[str, float] = {}
        with self._observing(model):
            yield numbers
        numbers.update(self.finish(step))

    def begin(self, model: nn.Module) -> None:
        """Start to observe the model; its next training forward pass is measured. `finish` returns the numbers."""
        self._start_over()
        model = trained_model(check_model(model))
        with ExitStack() as opened:
            check = self._checked is not model
            self._watch = opened.enter_context(watch(model, rows=self.rows, top_n=self.top_n, check=check))
            self._open = opened.pop_all()
        self._checked = model

    def finish(self, step: int) -> dict[str, float]:
        """Return the numbers of the forward pass since `begin` by logging key; empty if there was none.

        Includes the numbers of other callbacks, such as QKClip, since the last call.
        """
        return self._with_others(self._finish(step))

    def _with_others(self, numbers: dict[str, float]) -> dict[str, float]:
        for others in self.also_logged if numbers else ():
            self.numbers |= others()
        return numbers and dict(self.numbers)

    def _finish(self, step: int) -> dict[str, float]:
        watched = self._watch
        self.close()
        if watched is None:
            return {}
        layers = watched.layers()
        if not layers:
            why = (
                "no layer with softmax or another row normalizer was called"
                if watched.done
                else "no forward pass took place"
            )
            why = "the batch is all padding" if watched.only_padding else f"{why} with gradients on"
            _warn(f"attention was not measured at step {step}: {why}", UserWarning)
            return {}
        self.history.add(step, layers)
        heads = dict(head_keys(layers, self.per_head, PREFIX))
        self.numbers = _keys(layers) | dict(worst_keys(layers, PREFIX)) | heads | self._count_states(layers, step)
        return self.numbers

    def to_pandas(self) -> Any:
        """Return the history of every head as a pandas DataFrame: one row per step and head, one column per metric."""
        table = self.history.table()
        try:
            return table.to_pandas()
        except ImportError as error:
            raise ImportError(
                "expected pandas, which is not installed. Install it (pip install pandas), or use "
                "monitor.history.table(), a pyarrow Table."
            ) from error

    def close(self) -> None:
        """Stop observing the model if a step was not finished."""
        self._watch = None
        super().close()

    def _count_states(self, layers: Layers, step: int) -> dict[str, float]:
        """Count the layers in each state, and warn about layers that have just entered it."""
        self._measurements += 1
        counts = dict.fromkeys(MEANING, 0)
        new: dict[str, list[Alert]] = {}
        for layer, heads in layers.items():
            first_logit = self._first_logits.setdefault(layer, largest_logit(heads))
            for state in states(heads, first_logit, self.thresholds):
                counts[state.kind] += 1
                last = self._last_in_state.get((state.kind, layer))
                if last is None or self._measurements - last > FORGOTTEN:
                    new.setdefault(state.kind, []).append(Alert(step=step, layer=layer, **asdict(state)))
                self._last_in_state[state.kind, layer] = self._measurements
        for alert, *others in new.values():
            more = f"; the same for {', '.join(other.layer for other in others)}" if others else ""
            _warn(f"{alert}{more}", AttentionAlert)
            self.alerts += [alert, *others]
        return {f"{PREFIX}alert/{kind}": float(count) for kind, count in counts.items()}

    def attach(self, trainer: Any) -> Self:
        super().attach(trainer)
        self._attached = True
        return self

    def _check_trainer(self, model: nn.Module, callbacks: Sequence[TrainerCallback]) -> None:
        check_observable(trained_model(model))
        if any(isinstance(callback, AttentionMonitor) and callback is not self for callback in callbacks):
            raise ValueError(
                "expected a Trainer without an AttentionMonitor, got one that has it already. A second one would "
                "measure the same layers."
            )

    def lightning(self) -> Any:
        """Return a Lightning callback that logs the numbers of this monitor."""
        return lightning_callback(self)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        if state.is_world_process_zero and _logs_next(args, state, others.get("train_dataloader")):
            self.begin(others["model"])

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        self._take(state.global_step + 1)  # the first part of an accumulated batch is enough

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        self._take(state.global_step)

    def _take(self, step: int) -> None:
        if self._open is not None:
            self._pending, self._pending_step = self._finish(step), step

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        if not self._pending or logs is None or state.global_step != self._pending_step:
            return  # what a program logs between the parts of an accumulated batch has the step before
        if not self._attached:
            missed = (
                f"{', '.join(args.report_to)} ran" if args.report_to else "reporters, if there are any, may have run"
            )
            warnings.warn(
                f"{missed} before this monitor, so that they do not get its numbers. Call "
                "monitor.attach(trainer) instead of passing it to Trainer(callbacks=...).",
                stacklevel=2,
            )
            self._attached = True
        # Others may finish the step after this callback; a checkpoint of the step does not keep what is not logged.
        add_to_log(self._with_others(self._pending), logs, state)
        self._pending = {}

    def _forget_step(self) -> None:
        self._pending = {}


def _is_first_process() -> bool:
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def _warn(words: str, category: type[UserWarning]) -> None:
    """Warn with the location of the training loop, past this package and the context managers in between."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("attnorm", "contextlib"):
        level, frame = level + 1, frame.f_back
    warnings.warn(words, category, stacklevel=level)


def add_to_log(numbers: Mapping[str, float], logs: dict[str, Any], state: TrainerState) -> None:
    """Add numbers to an entry of the Trainer's log, and to the same entry of its history."""
    logs.update(numbers)
    if state.log_history:  # written before callbacks are called
        state.log_history[-1].update(numbers)


def _logs_next(args: TrainingArguments, state: TrainerState, loader: Any) -> bool:
    """Whether the Trainer will log at the end of the step that begins (transformers' DefaultFlowCallback decides)."""
    step = state.global_step + 1
    if step == 1 and args.logging_first_step:
        return True
    if args.logging_strategy == "steps":
        return step % state.logging_steps == 0
    if args.logging_strategy == "epoch" and hasattr(loader, "__len__"):
        epoch = math.ceil(len(loader) / args.gradient_accumulation_steps)
        return step % epoch == 0 or step == state.max_steps
    return False


def _keys(layers: Mapping[str, Mapping[str, list[float]]]) -> dict[str, float]:
    """attn/layer_03/entropy_mean, entropy_min and entropy_min_head, its index; what no row has is left out."""
    numbers: dict[str, float] = {}
    for layer, heads in layers.items():
        for name, metric in REPORTED.items():
            values = [value for value in heads[name] if not math.isnan(value)]
            if values:
                numbers[f"{PREFIX}{layer}/{name}_mean"] = sum(values) / len(values)
                worst = worst_of_layer(heads[name], metric.worst == "min")
                assert worst is not None
                numbers[f"{PREFIX}{layer}/{name}_{metric.worst}"] = worst[1]
                numbers[f"{PREFIX}{layer}/{name}_{metric.worst}_head"] = float(worst[0])
    return numbers


def lightning_callback(monitor: AttentionMonitor) -> Any:
    """An AttentionMonitor as a callback that measures on the steps that Lightning logs, and writes to its loggers."""

    class LightningAttentionMonitor(lightning_observer(monitor)):  # type: ignore[misc]
        step: int

        def __init__(self) -> None:
            super().__init__()
            self.monitor = monitor

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            step = lightning_step(trainer)
            if trainer.is_global_zero and lightning_logs(trainer, step) and step != self.step:
                monitor.begin(pl_module)
                self.step = step  # the first part of an accumulated batch is enough

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            log_in_lightning(trainer, monitor.finish(self.step), self.step)

    return LightningAttentionMonitor()


def lightning_observer(observer: ObservingCallback) -> Any:
    """A class of Lightning callbacks that stop observing when training ends, and know the last step they observed."""
    callback = _lightning_callback_class()

    class LightningObserver(callback):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            self.step = -1

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.step = -1  # steps restart at 0

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            observer.close()  # of a batch that the module skipped

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            observer.close()

    return LightningObserver


def lightning_logs(trainer: Any, step: int) -> bool:
    """Whether Lightning logs at the end of this step."""
    return bool(trainer.log_every_n_steps) and (step + 1) % trainer.log_every_n_steps == 0


def log_in_lightning(trainer: Any, numbers: Mapping[str, float], step: int) -> None:
    for logger in trainer.loggers if numbers else ():
        logger.log_metrics(numbers, step=step)


def _lightning_callback_class() -> Any:
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return importlib.import_module(f"{package}.callbacks").Callback
        except ImportError:
            continue
    raise ImportError("lightning() needs Lightning, which is not installed. Run: pip install lightning")


def keep_off_the_terminal(callbacks: Iterable[TrainerCallback], prefix: str) -> None:
    """Hide keys with that prefix in the logs that these callbacks print."""
    for callback in callbacks:
        if isinstance(callback, PrinterCallback | ProgressCallback) and "on_log" not in vars(callback):
            callback.on_log = _hide_keys(callback.on_log, prefix)  # type: ignore[method-assign]


def _hide_keys(on_log: Any, prefix: str) -> Any:
    def quiet(args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **others: Any) -> Any:
        shown = None if logs is None else {key: value for key, value in logs.items() if not key.startswith(prefix)}
        return on_log(args, state, control, logs=shown, **others)

    return quiet
