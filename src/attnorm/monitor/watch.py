"""Observe one training forward of a model: the first one with gradients enabled.

Forwards without gradients, such as a generation inside a training step, are ignored. So is what gradient checkpointing
runs again in the backward pass (models.observe leaves it out).
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnorm.metrics.call import AttentionCall
from attnorm.metrics.sampling import query_masks
from attnorm.models.dispatch import UnsupportedModel
from attnorm.models.observe import observe
from attnorm.monitor.measure import BROKEN, REPORTED, Sample, Sampler, measure
from attnorm.normalizers.contract import Mechanism

HELD_BYTES = 2**28  # of samples, before they are measured and freed

Layers = dict[str, dict[str, list[float]]]  # layer -> metric -> one number per head


@contextmanager
def watch(model: nn.Module, *, rows: int, top_n: int, check: bool) -> Iterator["ForwardWatch"]:
    """Run compiled models uncompiled meanwhile: compiled code calls no attention function that could be observed."""
    watched = ForwardWatch(rows, top_n)
    with ExitStack() as until_exit:
        until_exit.enter_context(torch.compiler.set_stance("force_eager"))
        until_exit.enter_context(watched.observation)
        watched.observation.enter_context(observe(model, watched.on_call, check=check))
        begin = model.register_forward_pre_hook(watched.begin, with_kwargs=True)
        until_exit.callback(begin.remove)
        end = model.register_forward_hook(watched.end, always_call=True)
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
