"""QKClip: keep attention logits below a limit by scaling the weights that make queries and keys, after each step.

    gamma_h = min(1, tau / S_h),   W_q and W_k of head h times sqrt(gamma_h)

S_h is the largest logit of head h over all rows of the step, exactly. Kimi Team 2025, https://arxiv.org/abs/2507.20534
(MuonClip); query heads that share a key head share the smallest gamma, as in Megatron's qk_clip. Moments of the
optimizer stay as they are, as in both.
"""

import math
import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from attnorm.metrics.call import AttentionCall
from attnorm.metrics.normalized import MODEL
from attnorm.metrics.rows import measure_rows
from attnorm.models.dispatch import UnsupportedModel, attention_sites, check_observable
from attnorm.models.observe import observe
from attnorm.models.private_names import lightning_step
from attnorm.models.query_key_origin import QueryKeyWeights, query_key_weights
from attnorm.models.threads import only_in_this_thread
from attnorm.monitor.monitor import (
    PREFIX,
    AttentionMonitor,
    ObservingCallback,
    add_to_log,
    lightning_logs,
    lightning_observer,
    log_in_lightning,
)
from attnorm.monitor.watch import trained_model

KEPT_CLIPS = 10_000


@dataclass(frozen=True)
class Clip:
    """One head whose weights were scaled."""

    step: int
    layer: str  # as in the keys of the monitor: layer_03
    head: int
    largest_logit: float
    gamma: float  # what the head's logits were multiplied by


class QKClip(ObservingCallback):
    """After each training step, scale the query and key weights of heads whose largest logit exceeds tau.

    Args:
        tau: Limit of the largest attention logit (default: 100).
        monitor: An AttentionMonitor that logs what was clipped together with its own numbers.
        on_alert: Do nothing, at no cost, until that monitor raises its alert "exploding_logits".

    >>> clip = QKClip(tau=100).attach(trainer)
    >>> trainer.train()
    >>> clip.clips
    """

    _variable = "clip"

    def __init__(self, tau: float = 100.0, *, monitor: AttentionMonitor | None = None, on_alert: bool = False) -> None:
        if not isinstance(tau, int | float) or isinstance(tau, bool) or not tau > 0 or math.isinf(tau):
            raise ValueError(f"expected tau as a positive number, got {tau!r}.")
        if monitor is not None and not isinstance(monitor, AttentionMonitor):
            raise TypeError(f"expected monitor as an attnorm.AttentionMonitor, got {monitor!r}.")
        if on_alert and monitor is None:
            raise ValueError("expected a monitor with on_alert=True, got None. Pass monitor=AttentionMonitor(...).")
        self.tau = float(tau)
        self.monitor = monitor
        self.on_alert = on_alert
        self.clips: deque[Clip] = deque(maxlen=KEPT_CLIPS)  # the last ones
        self.steps = 0  # of your own training loop
        self._weights: weakref.WeakKeyDictionary[nn.Module, QueryKeyWeights] = weakref.WeakKeyDictionary()
        self._largest: dict[nn.Module, Tensor] = {}  # (H,), of this step
        self._names: dict[nn.Module, tuple[str, int]] = {}
        self._running: nn.Module | None = None
        self._counts = False
        self._unlogged: dict[str, float] = {}
        if monitor is not None:
            monitor.also_logged.append(self.take_numbers)

    def __repr__(self) -> str:
        return f"QKClip(tau={self.tau:g}, on_alert={self.on_alert}): {len(self.clips)} clips"

    @contextmanager
    def step(self, model: nn.Module) -> Iterator[None]:
        """Wrap one step of your own training loop, with optimizer.step(); weights are scaled on exit."""
        self.steps += 1
        with self._observing(model):
            yield
        self.finish(self.steps)

    def begin(self, model: nn.Module) -> None:
        """Start to measure the training forward passes of the model."""
        self._start_over()
        if self.on_alert and not self._logits_exploded():
            return
        check_observable(model)
        model = trained_model(model)
        sites = attention_sites(model)
        unknown = any(module not in self._weights for module in sites)
        with ExitStack() as opened:
            opened.enter_context(observe(model, self._on_call, inputs=unknown, check=unknown))
            hooks = [model.register_forward_pre_hook(only_in_this_thread(self._forward_begins))]
            begins = only_in_this_thread(self._module_begins)
            hooks += [module.register_forward_pre_hook(begins) for module in sites]
            for hook in hooks:
                opened.callback(hook.remove)
            self._open = opened.pop_all()

    def finish(self, step: int) -> list[Clip]:
        """Scale the weights of all heads whose largest logit since `begin` exceeds tau; call it after the optimizer."""
        self.close()
        clips = []
        several = len({kind for kind, _ in self._names.values()}) > 1
        for module, largest in _max_over_processes(self._largest).items():
            if not bool((largest > self.tau).any()):
                continue
            kind, layer = self._names[module]
            name = f"{kind}/" * several + f"layer_{layer:02}"
            if not bool(largest.isfinite().all()):
                warnings.warn(f"step {step}: {name} has logits that are not finite. It is not clipped.", stacklevel=2)
                continue
            gamma = self._weights[module].scale_((self.tau / largest).clamp(max=1.0))
            clips += [
                Clip(step, name, head, float(largest[head]), float(factor))
                for head, factor in enumerate(gamma.tolist())
                if factor < 1
            ]
        self._count(clips)
        self._largest.clear()
        self.clips.extend(clips)
        return clips

    def take_numbers(self) -> dict[str, float]:
        """Return what was clipped since the last call, by logging key."""
        numbers, self._unlogged = self._unlogged, {}
        return numbers

    def _count(self, clips: list[Clip]) -> None:
        numbers = self._unlogged
        largest = [
            value for head_logits in self._largest.values() for value in head_logits.tolist() if math.isfinite(value)
        ]
        if largest:
            key = f"{PREFIX}qk_clip/largest_logit"
            numbers[key] = max(numbers.get(key, -math.inf), *largest)
        heads, smallest = f"{PREFIX}qk_clip/clipped_heads", f"{PREFIX}qk_clip/gamma_min"
        numbers[heads] = numbers.get(heads, 0.0) + len(clips)
        numbers[smallest] = min([numbers.get(smallest, 1.0), *(clip.gamma for clip in clips)])

    def close(self) -> None:
        """Stop observing the model."""
        self._running, self._counts = None, False
        super().close()

    def _logits_exploded(self) -> bool:
        assert self.monitor is not None
        return any(alert.kind == "exploding_logits" for alert in self.monitor.alerts)

    def _forward_begins(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        self._counts = torch.is_grad_enabled()  # generation inside a training step does not count

    def _module_begins(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._running = module

    def _on_call(self, call: AttentionCall) -> None:
        module = self._running
        if not self._counts or module is None:
            return
        if module not in self._weights:
            self._weights[module] = _weights(module, call)
        self._names[module] = call.kind, call.layer
        largest = largest_logits(call, self.tau)
        earlier = self._largest.get(module)
        self._largest[module] = largest if earlier is None else torch.maximum(earlier, largest)

    def lightning(self) -> Any:
        """Return a Lightning callback that clips like this object."""
        return lightning_clip_callback(self)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        self.begin(others["model"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        self.finish(state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        if logs is not None and self.monitor is None:
            add_to_log(self.take_numbers(), logs, state)

    def _forget_step(self) -> None:
        self._largest.clear()


@torch.no_grad()
def largest_logits(call: AttentionCall, tau: float) -> Tensor:
    """Return the largest scaled dot product of each head over all rows and visible keys, (H,); inf if it is NaN.

    Before a softcap and a position bias, which no weight of q and k decides. On a CPU norms are looked at first: where
    no |q| |k| exceeds tau no logit does, the dot products are not computed, and the result is -infinity.
    """
    query, key = call.query_BHQD.detach(), call.key_BGKD.detach()
    if not query.is_cuda:
        norms = [torch.linalg.vector_norm(t.float(), dim=-1).amax((0, 2)) for t in (query, key)]
        bound = abs(call.scale) * norms[0] * norms[1].repeat_interleave(len(norms[0]) // len(norms[1]))
        if bool((bound <= tau).all()):
            return torch.full_like(bound, -math.inf)
    plain = replace(
        call, query_BHQD=query, key_BGKD=key, softcap=None, bias=None, sinks_H=None, normalizer=None, inputs_BKC=None
    )
    rows = torch.arange(query.shape[2])
    statistics = measure_rows(plain, [None], rows, (), names=("max_logit",))[MODEL]
    largest = statistics.values["max_logit"].masked_fill(statistics.n < 1, -math.inf)
    return largest.masked_fill(statistics.broken, math.inf).amax((0, 2))


def _weights(module: nn.Module, call: AttentionCall) -> QueryKeyWeights:
    weights = query_key_weights(module, call)
    if weights is None:
        raise UnsupportedModel(
            f"expected {type(module).__name__} to make queries and keys by plain projections, which QK-clip "
            "scales. It normalizes them afterwards (QK-norm, which bounds logits by itself), or computes them "
            "in a way that attnorm does not know. Use the normalizer 'softcap' instead."
        )
    for part in (*weights.query, *weights.key):
        weight = part.projection.weight
        if type(weight) not in (nn.Parameter, Tensor) or not weight.is_floating_point():
            raise UnsupportedModel(
                f"expected whole floating-point weights in {type(module).__name__}, got {type(weight).__name__} "
                f"of {weight.dtype}. QK-clip does not support sharded or quantized weights."
            )
    return weights


def _max_over_processes(largest: dict[nn.Module, Tensor]) -> dict[nn.Module, Tensor]:
    """The largest over all processes of torch.distributed, so that all of them scale alike."""
    if not largest or not (distributed.is_available() and distributed.is_initialized()):
        return largest
    heads = [len(head_logits) for head_logits in largest.values()]
    together = torch.cat([*largest.values()])
    distributed.all_reduce(together, op=distributed.ReduceOp.MAX)
    return dict(zip(largest, together.split(heads), strict=True))


def lightning_clip_callback(clip: QKClip) -> Any:
    """A QKClip as a callback that scales weights after every optimizer step, and writes to the loggers."""

    class LightningQKClip(lightning_observer(clip)):  # type: ignore[misc]
        step: int

        def __init__(self) -> None:
            super().__init__()
            self.clip = clip
            self._updates = 0  # of all optimizers before this step

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            step = lightning_step(trainer)
            if step != self.step:  # an accumulated batch is one step
                clip.begin(pl_module)
                self.step, self._updates = step, trainer.global_step

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == self._updates:  # Lightning counts the batch that stepped only after this call
                return
            clip.finish(self.step)
            if lightning_logs(trainer, self.step) and clip.monitor is None:
                log_in_lightning(trainer, clip.take_numbers(), self.step)

    return LightningQKClip()
