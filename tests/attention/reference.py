"""Attention by definition: one query at a time over the keys it sees, with loops and the declared plain formulas.

A row is the list of its visible keys, so that padding and packing cannot matter. Only the parameters are read from the
normalizer under test.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import attnorm
from attnorm.normalizers.adaptive_temperature import adapted
from attnorm.normalizers.declaration import HEADS, Reference, Row
from attnorm.normalizers.declaration import WIDTH as WIDTH
from attnorm.normalizers.entmax import entmax_row
from attnorm.normalizers.registry import BUILT_IN
from attnorm.normalizers.softmax import softmax_row


@dataclass(frozen=True)
class Case:
    """A normalizer of `attnorm` and its weights by definition."""

    name: str
    options: dict[str, Any]
    reference: Reference
    hidden_width: int | None = None

    @property
    def id(self) -> str:
        return "-".join([self.name, *(f"{k}={v}" for k, v in self.options.items() if k not in ("heads", "width"))])

    def make(self) -> attnorm.Normalizer:
        """The normalizer in float64, its parameters moved apart so that heads differ."""
        made = BUILD[self.name]() if self.name in BUILD else attnorm.get(self.name, **self.options)
        assert isinstance(made, attnorm.Normalizer)
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.requires_grad:
                    parameter += 0.3 * torch.randn_like(parameter)
        return made.double()


def attention(
    case: Case,
    normalizer: attnorm.Normalizer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    hidden_states: Tensor | None = None,
) -> Tensor:
    """(B, H, Lq, Dv) for 4-D inputs; positions are those of the keys, with the last query at the last key."""
    batch, heads, queries, width = q.shape
    keys = k.shape[2]
    visible = seen(q, k, mask, causal)
    scale = 1 / math.sqrt(width) if scale is None else scale
    output = v.new_zeros(batch, heads, queries, v.shape[-1])
    rows, learned = [], {**dict(normalizer.named_buffers()), **dict(normalizer.named_parameters())}
    for b in range(batch):
        for h in range(heads):
            shared = h * k.shape[1] // heads
            for i in range(queries):
                at = visible[b, h, i].nonzero()[:, 0]
                if len(at) == 0:
                    rows.append(output[b, h, i])
                    continue
                z = scale * (k[b, shared, at] @ q[b, h, i])
                hidden = None if hidden_states is None else hidden_states[b, i]
                weights = case.reference(Row(z, keys - queries + i - at, h, hidden, learned), **case.options)
                rows.append(weights @ v[b, shared, at])
    return torch.stack(rows).reshape(output.shape) if rows else output


def seen(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """The boolean (B, H, Lq, Lk) of what each query sees."""
    queries, keys = q.shape[2], k.shape[2]
    visible = torch.ones(*q.shape[:3], keys, dtype=torch.bool)
    if mask is not None:
        visible = visible & mask
    if causal:
        for i in range(queries):
            visible[:, :, i, max(keys - queries + i + 1, 0) :] = False
    return visible


def _mixture(row: Row) -> Tensor:
    share = torch.sigmoid(row.value("map.theta", 0.0))
    return share * softmax_row(row.z) + (1 - share) * entmax_row(row.z, 2.0)


def _scaled(row: Row) -> Tensor:
    """The logits behind ssmax's rule."""
    return row.z * (row.value("scale.0.s", 0.0) * math.log(row.n) + row.value("scale.0.bias", 0.0))


def _everything(row: Row) -> Tensor:
    """Scale, then selection, then entmax with a sink: the order of a composition."""
    z = _scaled(row)
    kept = z >= z.sort(descending=True).values[math.ceil(math.sqrt(row.n)) - 1]
    logits = torch.cat([row.value("sink.logit", 0.0)[None], z[kept]])
    return torch.zeros_like(z).index_put((kept.nonzero()[:, 0],), entmax_row(logits, 1.5)[1:])


BUILD: dict[str, Callable[[], attnorm.Normalizer]] = {
    "mixture": lambda: attnorm.mixture("softmax", "sparsemax", heads=HEADS),
    "scale, selection and sink": lambda: attnorm.compose(
        "entmax15",
        scale=attnorm.get("ssmax", heads=HEADS, bias=True),
        select=attnorm.get("topk", k="sqrt"),
        sink=attnorm.Sink(heads=HEADS),
    ),
    "sparsemax behind qwen": lambda: attnorm.compose("sparsemax", scale=attnorm.get("log_scaled", train_length=2)),
    "adaptive behind ssmax": lambda: attnorm.compose(scale=[attnorm.get("ssmax", s=0.7), "adaptive_temperature"]),
}

DECLARED = [
    Case(name, dict(options), declared.reference, options.get("width"))
    for name, declared in ((name, entry.declaration) for name, entry in BUILT_IN.items())
    if declared.reference is not None
    for options in declared.examples
]
COMPOSED = [
    Case("mixture", {}, _mixture),
    Case("scale, selection and sink", {}, _everything),
    Case("sparsemax behind qwen", {}, lambda row: entmax_row(row.z * max(1.0, math.log2(row.n)), 2.0)),
    Case("adaptive behind ssmax", {}, lambda row: softmax_row(adapted(_scaled(row)))),
]
CASES = [*DECLARED, *COMPOSED]


def _first_and_last(cases: list[Case]) -> list[Case]:
    names = dict.fromkeys(case.name for case in cases)
    of_name = [[case for case in cases if case.name == name] for name in names]
    return [case for some in of_name for case in (some if len(some) < 3 else (some[0], some[-1]))]


# The default and the richest options of each normalizer: enough for what no formula decides (masks, shapes, caches).
TYPICAL = [*_first_and_last(DECLARED), *COMPOSED]


def typical(first: int) -> Callable[[Any], Any]:
    """Run a test on every second of them, so mostly the default or the richest; others of its file run on the rest."""
    parametrized = pytest.mark.parametrize("case", TYPICAL, ids=lambda case: case.id)

    def decorate(test: Any) -> Any:
        return pytest.mark.every_second("case", first=first)(parametrized(test))

    return decorate
