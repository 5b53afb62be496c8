"""`KnownCalls`: repeat attention calls with few queries without choosing an engine again.

Attention of one query takes less time than Python needs to choose an engine and to translate a normalizer. So the
launches of such a call are remembered, for all calls with the same layouts and options.
"""

from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from attnorm.engines.execution import MIN_QUERIES, runs_triton
from attnorm.engines.inputs import Inputs, under_transform
from attnorm.kernels.launch import DecodePlan, PlannedRun, layout_of, product_precision, recorded_runs
from attnorm.normalizers.contract import Normalizer, Properties
from attnorm.normalizers.softmax import Softmax


class KnownCall(NamedTuple):
    """The launches of an attention call with few queries, for calls with the same key."""

    plan: DecodePlan
    # Behind q, k and v: a number, or where a tensor is found: index of the part, `_parameters` or `_buffers`, name.
    # Tensors are looked up in every call, so that kernels read their current values.
    numbers: tuple[float | tuple[int, str, str], ...]

    def run(self, inputs: Inputs, parts: Sequence[nn.Module]) -> Tensor:
        sources: list[Any] = [inputs.q_BHQD, inputs.k_BGKD, inputs.v_BGKE]
        for number in self.numbers:
            if isinstance(number, float):
                sources.append(number)
            else:
                part, kind, name = number
                sources.append(getattr(parts[part], kind)[name])
        return self.plan.run(sources)


class KnownCalls:
    """Remembers how calls with few queries ran, so that the next one of the same kind is only launched.

    The launches depend on the key of a call: layouts and options, and for every part of the normalizer its class, its
    attributes and the layouts of its parameters and buffers. Their values are no part of the key, so that the layers of
    a model share it.
    """

    LIMIT = 1024  # keys; a model needs one per kind of layer for every length of its cache
    _INTERNAL = frozenset(vars(nn.Module())) - {"training"}  # attributes that no part has of its own
    _IMMUTABLE = frozenset((bool, int, float, str, NoneType, Properties))

    def __init__(self) -> None:
        self._calls: dict[tuple[Any, ...], KnownCall | Literal[False]] = {}  # False: must be computed every time

    def forget(self) -> None:
        self._calls.clear()

    def attend(self, inputs: Inputs, normalizer: Normalizer, engine: str, compute: Callable[[], Tensor]) -> Tensor:
        """Return the output of a call for which `may_be_known`. compute: how to get it if it is not known."""
        parts = normalizer.parts
        by_sdpa = engine == "auto" and inputs.plain_logits and len(parts) == 1 and type(parts[0]) is Softmax
        key = None if by_sdpa or type(normalizer) is not Normalizer else self._key(inputs, parts, engine)
        if key is None:
            return compute()
        known = self._calls.get(key)  # one lookup: another thread may make all forgotten
        if known is not None:
            return known.run(inputs, parts) if known else compute()
        with recorded_runs() as runs:
            output = compute()
        if len(self._calls) >= self.LIMIT:
            self.forget()
        was_all = len(runs) == 1 and runs[0].output is output
        self._calls[key] = (was_all and self._known(inputs, parts, runs[0])) or False
        return output

    def _key(self, inputs: Inputs, parts: Sequence[nn.Module], engine: str) -> tuple[Any, ...] | None:
        """Return the key; None if a part is not ours, or if one of its attributes may change unseen."""
        q = inputs.q_BHQD
        key: list[Any] = [
            engine, inputs.causal, inputs.scale, inputs.softcap, product_precision(q.dtype), q.device, layout_of(q),
            layout_of(inputs.k_BGKD), layout_of(inputs.v_BGKE),
        ]  # fmt: skip
        for part in parts:
            if part._modules or not type(part).__module__.startswith("attnorm."):
                return None
            key.append(type(part))
            for name, value in part.__dict__.items():
                if name not in self._INTERNAL:
                    if type(value) not in self._IMMUTABLE and not self._holds_immutable(value):
                        return None
                    key += name, value
            for name, parameter in part._parameters.items():
                key += "parameter", name, layout_of(parameter)
            for name, buffer in part._buffers.items():
                key += "buffer", name, layout_of(buffer)
        return tuple(key)

    def _holds_immutable(self, value: object) -> bool:
        return type(value) is tuple and self._IMMUTABLE.issuperset(map(type, value))

    @staticmethod
    def _known(inputs: Inputs, parts: Sequence[nn.Module], run: PlannedRun) -> KnownCall | None:
        """Return how to repeat a run, if all that it reads are the inputs, numbers, and each tensor of a part once."""
        q, k, v, *numbers = run.sources
        if q is not inputs.q_BHQD or k is not inputs.k_BGKD or v is not inputs.v_BGKE:
            return None
        places = {
            (index, kind, name): tensor
            for index, part in enumerate(parts)
            for kind in ("_parameters", "_buffers")
            for name, tensor in getattr(part, kind).items()
            if tensor is not None
        }
        found: list[float | tuple[int, str, str]] = []
        for number in numbers:
            if isinstance(number, Tensor):
                own = [place for place, tensor in places.items() if tensor is number]
                if not own:  # computed from parameters
                    return None
                found.append(own[0])
            else:
                found.append(float(number))
        read = [place for place in found if isinstance(place, tuple)]
        return KnownCall(run.plan, tuple(found)) if sorted(read) == sorted(places) else None


def may_be_known(inputs: Inputs, engine: str) -> bool:
    """Whether this is a call of few queries on kernels, in eager mode, without gradients and anything seldom."""
    q = inputs.q_BHQD
    if not (q.is_cuda or engine == "triton"):  # on a CPU no other engine runs kernels, and Triton is not imported
        return False
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or q.shape[-2] >= MIN_QUERIES:
        return False
    if inputs.mask is not None or inputs.bias is not None or inputs.positions is not None or inputs.dropout > 0:
        return False
    if inputs.hidden_states is not None or not type(q) is type(inputs.k_BGKD) is type(inputs.v_BGKE) is Tensor:
        return False
    return runs_triton(q.device) and not is_in_torch_dispatch_mode() and not under_transform()


known_calls = KnownCalls()
