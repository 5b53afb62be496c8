"""Normalizers as measurements use them: the normalizers to measure by name, and their weights on a block of logits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor, nn

from attnorm.engines.execution import runs_asynchronously
from attnorm.metrics.call import AttentionCall, LogitBlock
from attnorm.normalizers.block import Positions, RowsBlock
from attnorm.normalizers.contract import Mechanism, Normalizer, ScaleRule, Sink, remember
from attnorm.normalizers.registry import is_shared, resolve
from attnorm.normalizers.softmax import Softmax
from attnorm.text import count_words

MODEL = "model"
# A name, an object, or None for the normalizer that the model runs.
Choice = str | Normalizer | Mechanism | None
AnyModule = TypeVar("AnyModule", bound=nn.Module)


@dataclass(frozen=True)
class MeasuredNormalizer:
    """A normalizer, and the name of its results. None stands for softmax with the model's own sinks."""

    name: str
    normalizer: Normalizer | None

    @property
    def scaled_softmax(self) -> bool:
        """Whether it is softmax of logits times a factor that does not depend on them, with or without a sink."""
        normalizer = self.normalizer
        return normalizer is None or (
            type(normalizer.map) is Softmax
            and normalizer.has_known_parts()
            and not normalizer.selections
            and all(isinstance(rule, ScaleRule) for rule in normalizer.rules)
        )

    @property
    def rescales(self) -> bool:
        return self.normalizer is not None and bool(self.normalizer.rules)

    def learned_sink(self, call: AttentionCall, heads: slice) -> Tensor | None:
        """Return the logit of the learned sink of each head, (h,); None without one."""
        if self.normalizer is None:
            return None if call.sinks_H is None else call.sinks_H[heads]
        if self.normalizer.sink is None:
            return None
        logit = self.normalizer.sink.logit
        if logit.dim() == 1:
            _check_heads(len(logit), call)
        return logit.expand(heads.stop - heads.start) if logit.dim() == 0 else logit[heads]

    def factor(self, call: AttentionCall, block: LogitBlock) -> Tensor | None:
        """Return the factor by which its rules multiply the logits, broadcastable to (h, r, 1); None without rules."""
        if self.normalizer is None or not self.rescales:
            return None
        n = block.n.to(block.logits.dtype)[None, ..., None]
        states = query_states(call, block)
        positions_in_block = given_positions(call, block)
        positions = None if positions_in_block is None else positions_in_block.query[:, None]
        factor = torch.ones_like(n)
        for rule in self.normalizer.rules:
            assert isinstance(rule, ScaleRule)
            factor = factor * rule.factor(n, positions, states).to(n.dtype)
        factor = factor.reshape(factor.shape[-3:])
        if len(factor) == 1:
            return factor
        _check_heads(len(factor), call)
        return factor[block.heads]


def _check_heads(numbers: int, call: AttentionCall) -> None:
    heads = call.query_BHQD.shape[1]
    if numbers != heads:
        own, given = count_words(numbers, "head"), count_words(heads, "head")
        raise ValueError(f"the normalizer has parameters for {own}, but q has {given}. Build it with heads={heads}.")


class NoRowsError(TypeError, ValueError):
    """Raised for a mechanism, which has no rows of logits. A TypeError in Python, a usage error on the command line."""


def resolve_normalizers(
    call: AttentionCall, choices: Sequence[Choice | MeasuredNormalizer]
) -> list[MeasuredNormalizer]:
    """Return the normalizers to measure, with their names, on the device of the call.

    An object that is on another device stays there, and a copy is measured: it may be in training.
    """
    device = call.query_BHQD.device
    measured: list[MeasuredNormalizer] = []
    for choice in choices:
        if isinstance(choice, MeasuredNormalizer):
            measured.append(choice)
            continue
        is_model = choice is None or choice == MODEL
        normalizer = call.normalizer if is_model else resolve(choice)  # type: ignore[arg-type]
        if isinstance(normalizer, Mechanism):
            raise NoRowsError(
                f"{normalizer.name!r} is a mechanism, which has no rows of logits to measure. Measure a model "
                "whose layers run softmax or another normalizer."
            )
        name = MODEL if is_model or normalizer is None else normalizer.name
        if any(other.name == name for other in measured):
            raise ValueError(
                f"expected normalizers with different names, got {name!r} twice. Change the attribute .name of one "
                "of them."
            )
        if normalizer is not None and not is_shared(normalizer):
            tensors = chain(normalizer.parameters(), normalizer.buffers())
            if any(tensor.device != device for tensor in tensors):
                normalizer = with_own_tensors(normalizer, device)
        measured.append(MeasuredNormalizer(name, normalizer))
    if not measured:
        raise ValueError("expected at least one normalizer, got none. Give None for the one that the model runs.")
    return measured


def with_own_tensors(module: AnyModule, device: torch.device | None = None) -> AnyModule:
    """Like copy.deepcopy, but only for tensors: ten times as fast, and it works for parametrized modules.

    device: where the tensors of the copy are; those that are there already are shared (default: copy all of them).
    """
    twin = type(module).__new__(type(module))
    parts = module._modules.items()
    vars(twin).update(
        vars(module),
        _parameters=_copies(module._parameters, device),
        _buffers=_copies(module._buffers, device),
        _modules={name: part if part is None else with_own_tensors(part, device) for name, part in parts},
    )
    if isinstance(twin, Normalizer):
        twin.handle = remember(twin)
    return twin


def _copies(tensors: Mapping[str, Tensor | None], device: torch.device | None) -> dict[str, Tensor | None]:
    return {
        name: tensor if tensor is None else tensor.detach().clone() if device is None else tensor.detach().to(device)
        for name, tensor in tensors.items()
    }


def rows_block(call: AttentionCall, block: LogitBlock) -> RowsBlock:
    """Convert a block of logits to the input of a normalizer, (1, h, r, w)."""
    all_visible = block.common == block.logits.shape[-1]
    visible = None if all_visible else block.visible[None]
    logits = block.logits[None]
    logits = logits if visible is None else torch.where(visible, logits, 0.0)
    states = query_states(call, block)
    positions = given_positions(call, block)
    return RowsBlock(
        logits, visible, positions, states, queries=block.queries + _offset(call), first_key=block.first_key
    )


def given_positions(call: AttentionCall, block: LogitBlock) -> Positions | None:
    """Return the given positions of the block's queries (r,) and keys (w,); padding repeats the last key."""
    if call.positions is None:
        return None
    query, key = (t[block.item if len(t) > 1 else 0] for t in (call.positions.query, call.positions.key))
    columns = torch.arange(block.first_key, block.first_key + block.logits.shape[-1], device=key.device)
    return Positions(query[block.queries], key[columns.clamp(max=len(key) - 1)])


def query_states(call: AttentionCall, block: LogitBlock) -> Tensor | None:
    """Return the layer input of the block's queries, (1, r, width); None if unknown.

    In self-attention the queries are the last tokens of that input.
    """
    queries = call.query_BHQD.shape[-2]
    if call.inputs_BKC is None or call.kind == "cross" or call.inputs_BKC.shape[1] < queries:
        return None
    return call.inputs_BKC[block.item, block.queries - queries][None].to(block.logits.dtype)


def _offset(call: AttentionCall) -> int:
    return call.key_BGKD.shape[-2] - call.query_BHQD.shape[-2]


def as_normalizer(one: MeasuredNormalizer, call: AttentionCall) -> Normalizer:
    """Return the normalizer; for the model's own softmax, build one with its sinks."""
    if one.normalizer is not None:
        return one.normalizer
    if call.sinks_H is None:
        return Normalizer(Softmax(), name=MODEL)
    sink = Sink(heads=len(call.sinks_H), learned=False)
    sink.logit = call.sinks_H.detach()
    return Normalizer(Softmax(), sink=sink, name=MODEL)


def weights_and_logs(
    one: MeasuredNormalizer, call: AttentionCall, block: LogitBlock, view: RowsBlock
) -> tuple[Tensor, Tensor | None]:
    """Return weights (h, r, w), and their logarithms up to a constant per row, for weights that underflow to 0.

    For a scaled softmax the logarithms are its logits. Other maps are computed in float64, which represents weights
    that float32 rounds to 0. Signed weights have no logarithm: None.
    """
    normalizer = as_normalizer(one, call)
    if one.scaled_softmax:
        factor = one.factor(call, block)
        return normalizer.weights(view)[0], block.logits if factor is None else block.logits * factor
    weights = normalizer.weights(view.with_logits(view.logits.double()))[0]
    signed = normalizer.properties.signed if runs_asynchronously(weights) else not bool((weights >= 0).all())
    logs = None if signed else weights.log()
    return weights.to(view.logits.dtype), logs
