"""Observe one training forward of a model, and keep the numbers of its layers and heads over the steps.

`watch` observes the first forward with gradients enabled. Forwards without gradients, such as a generation inside a
training step, are ignored. So is what gradient checkpointing runs again in the backward pass (models.observe leaves it
out). `History` keeps the numbers. Logged are the requested heads (`head_keys`) and the worst head of each metric
(`worst_keys`).
"""

import inspect
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnorm.metrics.call import AttentionCall
from attnorm.metrics.sampling import query_masks
from attnorm.models.dispatch import UnsupportedModel
from attnorm.models.observe import observe
from attnorm.models.threads import only_in_this_thread, uncompiled_meanwhile
from attnorm.monitor.measure import BROKEN, REPORTED, Sample, Sampler, measure
from attnorm.normalizers.contract import Mechanism

HELD_BYTES = 2**28  # of samples, before they are measured and freed

KEPT = 1000  # measurements

Heads = Mapping[str, list[float]]  # metric -> one number per head
Layers = dict[str, Heads]  # by layer, named as logged: layer_03, or encoder/layer_03 in a model of two stacks
PerHead = bool | Sequence[tuple[int, int] | tuple[str, int, int]]


@contextmanager
def watch(model: nn.Module, *, rows: int, top_n: int, check: bool) -> Iterator["ForwardWatch"]:
    """Run compiled models uncompiled meanwhile: compiled code calls no attention function that could be observed."""
    watched = ForwardWatch(rows, top_n)
    with ExitStack() as until_exit:
        until_exit.enter_context(uncompiled_meanwhile())
        until_exit.enter_context(watched.observation)
        watched.observation.enter_context(observe(model, watched.on_call, check=check))
        begin = model.register_forward_pre_hook(only_in_this_thread(watched.begin), with_kwargs=True)
        until_exit.callback(begin.remove)
        end = model.register_forward_hook(only_in_this_thread(watched.end), always_call=True)
        until_exit.callback(end.remove)
        yield watched


def trained_model(model: nn.Module) -> nn.Module:
    """The transformers model inside wrappers (DDP, PEFT, a LightningModule): its forward is observed.

    Of several models the first trainable one: a frozen one beside it is a teacher or a reference.
    """
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    learning = (
        candidate for candidate in models if any(parameter.requires_grad for parameter in candidate.parameters())
    )
    return next(learning, models[0] if models else model)


class ForwardWatch:
    """Observes the forward pass of a model."""

    def __init__(self, rows: int, top_n: int) -> None:
        self.observation = ExitStack()
        self._rows, self._top_n = rows, top_n
        self._sampler: Sampler | None = None
        self._held: list[Sample] = []
        self._numbers: dict[tuple[str, int], Tensor] = {}  # by kind and layer: (metrics, heads), on the device
        self.done = False
        self.only_padding = False

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if torch.is_grad_enabled() and not self.done:
            encoder_decoder = bool(getattr(getattr(module, "config", None), "is_encoder_decoder", False))
            tokens = query_masks(_tensors(module, args, kwargs), encoder_decoder=encoder_decoder)
            self._sampler = Sampler(tokens, self._rows)

    def on_call(self, call: AttentionCall) -> None:
        if self._sampler is None or isinstance(call.normalizer, Mechanism):  # a mechanism has no rows of logits
            return
        sample = self._sampler.take(call)
        if not len(sample.rows):
            self.only_padding = True
            return
        self._held.append(sample)
        if sum(sample.size for sample in self._held) > HELD_BYTES:
            self._measure()

    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._sampler is None:
            return
        self._sampler, self.done = None, True
        failed = output is None
        if not failed:
            self._measure()
        with suppress(UnsupportedModel) if failed else nullcontext():  # the error of the forward explains more
            self.observation.close()  # the model is unchanged from here on, whatever happens

    def layers(self) -> Layers:
        """Numbers by layer name, as logged. The only transfer from the device."""
        if not self._numbers:
            return {}
        first = next(iter(self._numbers.values()))
        heads = [numbers.shape[1] for numbers in self._numbers.values()]
        numbers_on_cpu = torch.cat([numbers.to(first.device) for numbers in self._numbers.values()], dim=1).cpu()
        several = len({kind for kind, _ in self._numbers}) > 1
        width = max(2, len(str(max(layer for _, layer in self._numbers))))
        return {
            f"{kind}/" * several + f"layer_{layer:0{width}}": dict(zip((*REPORTED, BROKEN), part.tolist(), strict=True))
            for (kind, layer), part in zip(self._numbers, numbers_on_cpu.split(heads, dim=1), strict=True)
        }

    def _measure(self) -> None:
        for sample, numbers in measure(self._held, self._top_n):
            self._numbers[sample.call.kind, sample.call.layer] = numbers
        self._held.clear()


def _tensors(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    names = inspect.signature(module.forward).parameters
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    return {name: value for name, value in arguments.items() if isinstance(value, Tensor)}


@dataclass(frozen=True)
class Measurement:
    """All heads at one step."""

    step: int
    layers: Layers


class History(Sequence[Measurement]):
    """The last measurements, the oldest first, and the series of single heads in them."""

    def __init__(self, kept: int = KEPT) -> None:
        self._measurements: deque[Measurement] = deque(maxlen=kept)

    def add(self, step: int, layers: Layers) -> None:
        self._measurements.append(Measurement(step, layers))

    def __len__(self) -> int:
        return len(self._measurements)

    def __getitem__(self, index: Any) -> Any:
        return list(self._measurements)[index]

    def series(self, metric: str, layer: int, head: int, kind: str | None = None) -> list[tuple[int, float]]:
        """Return (step, value) of one head; NaN if no row had such a number."""
        if metric not in (*REPORTED, BROKEN):
            raise ValueError(f"expected a metric of {', '.join((*REPORTED, BROKEN))}; got {metric!r}.")
        points = []
        for measurement in self._measurements:
            for label, heads in measurement.layers.items():
                own_kind, own_layer = layer_of(label)
                if (own_kind, own_layer) == (kind, layer) and 0 <= head < len(heads[metric]):
                    points.append((measurement.step, heads[metric][head]))
        if self._measurements and not points:
            labels = ", ".join(self._measurements[-1].layers)
            raise KeyError(
                f"expected a head that was measured, got {f'{kind} ' if kind else ''}layer {layer} "
                f"head {head}. Choose one of these layers: {labels}."
            )
        return points

    def table(self) -> pa.Table:
        """One row per step and head: step, kind, layer, head and every metric."""
        columns: dict[str, list[Any]] = {name: [] for name in ("step", "kind", "layer", "head", *REPORTED, BROKEN)}
        for measurement in self._measurements:
            for label, heads in measurement.layers.items():
                kind, layer = layer_of(label)
                count = len(heads[BROKEN])
                columns["step"] += [measurement.step] * count
                columns["kind"] += [kind] * count
                columns["layer"] += [layer] * count
                columns["head"] += range(count)
                for name in (*REPORTED, BROKEN):
                    columns[name] += heads[name]
        key_types = {"step": pa.int64(), "kind": pa.string(), "layer": pa.int64(), "head": pa.int64()}
        return pa.table({name: pa.array(values, key_types.get(name, pa.float64())) for name, values in columns.items()})


def layer_of(label: str) -> tuple[str | None, int]:
    """Return kind and layer of a key: ("encoder", 3) for "encoder/layer_03"; the kind is None if there is only one."""
    kind, _, layer = label.rpartition("/")
    return kind or None, int(layer.removeprefix("layer_"))


def check_per_head(per_head: Any) -> bool | tuple[tuple[str | None, int, int], ...]:
    """True, False, or the heads as (kind or None, layer, head)."""
    if isinstance(per_head, bool):
        return per_head
    try:
        heads = [tuple(head) for head in per_head]
    except TypeError:
        heads = [()]
    full = [(None, *head) if len(head) == 2 else head for head in heads]
    if not full or not all(len(head) == 3 and _is_head(*head) for head in full):
        raise ValueError(
            f"expected per_head as True, False or a list of (layer, head), got {per_head!r}. Give e.g. [(3, 5)], "
            "or [('encoder', 3, 5)] in a model with an encoder and a decoder."
        )
    return tuple(full)


def _is_head(kind: Any, layer: Any, head: Any) -> bool:
    numbers = all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in (layer, head))
    return numbers and (kind is None or isinstance(kind, str))


def worst_of_layer(values: Iterable[float], lowest: bool) -> tuple[int, float] | None:
    """Index and number of the worst head; None where no head has a number."""
    numbered = [(value, head) for head, value in enumerate(values) if not math.isnan(value)]
    if not numbered:
        return None
    value, head = min(numbered) if lowest else max(numbered, key=lambda entry: (entry[0], -entry[1]))
    return head, value


def head_keys(
    layers: Layers, per_head: bool | tuple[tuple[str | None, int, int], ...], prefix: str
) -> Iterator[tuple[str, float]]:
    """Return attn/layer_03/head_05/entropy and so on for the requested heads, without undefined numbers."""
    if per_head is False:
        return
    for label, heads in layers.items():
        kind, layer = layer_of(label)
        width = max(2, len(str(len(heads[BROKEN]) - 1)))
        for head in range(len(heads[BROKEN])):
            if per_head is True or (kind, layer, head) in per_head:
                for name in REPORTED:
                    if not math.isnan(heads[name][head]):
                        yield f"{prefix}{label}/head_{head:0{width}}/{name}", heads[name][head]


def worst_keys(layers: Layers, prefix: str) -> Iterator[tuple[str, float]]:
    """attn/worst/entropy_ratio with its _layer and _head, of all layers of a kind; the first of equal ones."""
    kinds = dict.fromkeys(layer_of(label)[0] for label in layers)
    for kind in kinds:
        start = f"{prefix}{kind}/worst/" if kind else f"{prefix}worst/"
        for name, metric in REPORTED.items():
            lowest = metric.worst == "min"
            candidates = [
                (worst[1] if lowest else -worst[1], layer_of(label)[1], worst[0])
                for label, heads in layers.items()
                if layer_of(label)[0] == kind and (worst := worst_of_layer(heads[name], lowest)) is not None
            ]
            if candidates:
                value, layer, head = min(candidates)
                yield f"{start}{name}", value if lowest else -value
                yield f"{start}{name}_layer", float(layer)
                yield f"{start}{name}_head", float(head)
