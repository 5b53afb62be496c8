"""Attention by definition: one query at a time over the keys it sees, with loops and plain formulas.

Nothing here knows of masks inside a row: a row is the list of its visible keys, so padding and packing cannot matter.
Only the parameters are read from the normalizer under test.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

import attnorm


@dataclass(frozen=True)
class Row:
    """Logits of the visible keys in order, how far each lies behind the query, and whose row it is."""

    z: Tensor
    distance: Tensor
    head: int
    hidden: Tensor | None = None

    @property
    def n(self) -> int:
        return len(self.z)

    def of(self, parameter: Tensor) -> Tensor:
        """The parameter's value for this row's head."""
        return parameter if parameter.dim() == 0 else parameter[self.head]


Weights = Callable[[Row, Any], Tensor]


@dataclass(frozen=True)
class Case:
    """A normalizer of `attnorm` and its weights by definition."""

    name: str
    options: dict[str, Any]
    weights: Weights
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
    rows = []
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
                weights = case.weights(Row(z, keys - queries + i - at, h, hidden), normalizer)
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


def softmax(z: Tensor) -> Tensor:
    shifted = torch.exp(z - z.max().detach())
    return shifted / shifted.sum()


def entmax(z: Tensor, alpha: Tensor | float) -> Tensor:
    """[(alpha-1) z - tau]_+^(1/(alpha-1)), tau by bisection, its derivative by the implicit function theorem."""
    alpha = torch.as_tensor(alpha, dtype=z.dtype)
    power, scaled = 1 / (alpha - 1), (alpha - 1) * z
    exponent = power.item()
    tau = _bisected_threshold(scaled.tolist(), lambda x: max(x, 0.0) ** exponent, 1.0)
    support = scaled > tau
    base = torch.where(support, scaled - tau, 1.0)
    slope = -(power * base ** (power - 1) * support).sum().detach()
    moved = tau - ((base**power * support).sum() - 1) / slope
    return torch.where(support, scaled - moved, 1.0) ** power * support


def kneemax(z: Tensor) -> Tensor:
    """phi(z/2 - tau) with phi quadratic up to the knee at 1/n and linear beyond; derivative as for entmax."""
    knee = 1 / len(z)

    def phi(t: float) -> float:
        return max(t, 0.0) ** 2 / (4 * knee) if t <= 2 * knee else t - knee

    tau = _bisected_threshold((z / 2).tolist(), phi, 1 + knee)

    def weights(t: Tensor) -> Tensor:
        return torch.where(t <= 2 * knee, t.relu() ** 2 / (4 * knee), t - knee)

    slope = -((z / 2 - tau).relu() / (2 * knee)).clamp(max=1).sum().detach()
    return weights(z / 2 - (tau - (weights(z / 2 - tau).sum() - 1) / slope))


def _bisected_threshold(row: list[float], phi: Callable[[float], float], reach: float) -> float:
    """tau with sum phi(x - tau) = 1; reach: where phi is 1."""
    low, high = max(row) - reach, max(row)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(phi(x - middle) for x in row) > 1 else (low, middle)
    return low


def _tempered(row: Row, normalizer: Any) -> Tensor:
    return row.z * torch.exp(-row.of(normalizer.scale[0].log_temperature))


def _entmax_learned(row: Row, normalizer: Any) -> Tensor:
    return entmax(row.z, 1 + torch.sigmoid(row.of(normalizer.map.theta)))


def _ssmax_factor(row: Row, rule: Any) -> Tensor:
    bias = 0.0 if rule.bias is None else row.of(rule.bias)
    return row.of(rule.s) * math.log(row.n) + bias


def _ssmax(row: Row, normalizer: Any) -> Tensor:
    return softmax(row.z * _ssmax_factor(row, normalizer.scale[0]))


def _asentmax(row: Row, normalizer: Any) -> Tensor:
    rule = normalizer.scale[0]
    if rule.from_hidden is None:
        beta, gamma = row.of(rule.raw_beta), row.of(rule.raw_gamma)
    else:
        assert row.hidden is not None
        both = rule.from_hidden.weight @ row.hidden + rule.from_hidden.bias
        beta, gamma = both[row.head], both[row.head + len(both) // 2]
    factor = 1 + softplus(beta) * math.log(row.n + 1) ** (2 * torch.tanh(gamma))
    return entmax(row.z * factor, 1.5)


def _self_adjusted(row: Row, normalizer: Any) -> Tensor:
    zero = row.z.new_zeros(())
    low, high = torch.minimum(row.z.min(), zero), torch.maximum(row.z.max(), zero)
    if high == low:
        return 0 * row.z
    return (row.z - low) / (high - low) * softmax(row.z)


def _adaptive(row: Row, normalizer: Any) -> Tensor:
    p = softmax(row.z)
    entropy = -(p * torch.log(p)).sum()
    beta = -0.037 * entropy**4 + 0.481 * entropy**3 - 2.3 * entropy**2 + 4.917 * entropy - 1.791
    return softmax(row.z * beta) if entropy > 0.5 and beta > 1 else p


def _sink(row: Row, normalizer: Any) -> Tensor:
    return softmax(torch.cat([row.of(normalizer.sink.logit)[None], row.z]))[1:]


def _softpick(row: Row, normalizer: Any) -> Tensor:
    above = torch.expm1(row.z)
    return above.relu() / (above.abs().sum() + 1e-8)


def _stick_breaking(row: Row, normalizer: Any) -> Tensor:
    taken: list[Tensor] = []
    left = torch.ones((), dtype=row.z.dtype)
    for share in torch.sigmoid(row.z).flip(0):
        taken.append(left * share)
        left = left * (1 - share)
    return torch.stack(taken[::-1])


def _stick_breaking_before(row: Row, normalizer: Any) -> Tensor:
    """The query's own key takes no share and gets what is left."""
    taken: list[Tensor] = []
    left = torch.ones((), dtype=row.z.dtype)
    for share, distance in zip(torch.sigmoid(row.z).flip(0), row.distance.flip(0), strict=True):
        share = share * (distance != 0)
        taken.append(left * share)
        left = left * (1 - share)
    return torch.stack(taken[::-1]) + left * (row.distance == 0)


def _largest(z: Tensor, k: int) -> Tensor:
    return z >= z.sort(descending=True).values[min(k, len(z)) - 1]


def _softmax_over(z: Tensor, keep: Tensor) -> Tensor:
    weights = torch.zeros_like(z)
    if keep.any():
        weights = weights.index_put((keep.nonzero()[:, 0],), softmax(z[keep]))
    return weights


def _hard(row: Row, normalizer: Any) -> Tensor:
    best = (row.z == row.z.max()).double()
    soft = softmax(row.z)
    return best / best.sum() + soft - soft.detach()


def _scale_invariant(row: Row, normalizer: Any) -> Tensor:
    log_distance = torch.log(1 + row.distance.abs().double() / 10)
    return softmax(torch.sqrt(2 * log_distance + 1) * row.z - 2 * log_distance)


def _qwen(row: Row, train_length: int) -> Tensor:
    return row.z * max(1.0, math.log(row.n) / math.log(train_length))


def _mixture(row: Row, normalizer: Any) -> Tensor:
    share = torch.sigmoid(row.of(normalizer.map.theta))
    return share * softmax(row.z) + (1 - share) * entmax(row.z, 2.0)


def _everything(row: Row, normalizer: Any) -> Tensor:
    """Scale, then selection, then entmax with a sink: the order of a composition."""
    z = row.z * _ssmax_factor(row, normalizer.scale[0])
    keep = _largest(z.detach(), math.ceil(math.sqrt(row.n)))
    logits = torch.cat([row.of(normalizer.sink.logit)[None], z[keep]])
    return torch.zeros_like(z).index_put((keep.nonzero()[:, 0],), entmax(logits, 1.5)[1:])


HEADS = 4
WIDTH = 3  # of the hidden states

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

CASES = [
    Case("softmax", {}, lambda row, _: softmax(row.z)),
    Case("softmax", {"temperature": 0.5, "learned": True, "heads": HEADS}, lambda row, it: softmax(_tempered(row, it))),
    Case("sparsemax", {}, lambda row, _: entmax(row.z, 2.0)),
    Case("entmax15", {}, lambda row, _: entmax(row.z, 1.5)),
    Case("entmax", {"alpha": 1.3}, lambda row, _: entmax(row.z, 1.3)),
    Case("entmax", {"alpha": 1.6, "learned": True, "heads": HEADS}, _entmax_learned),
    Case("ssmax", {"heads": HEADS, "bias": True, "s": 0.6}, _ssmax),
    Case("asentmax", {"heads": HEADS}, _asentmax),
    Case("asentmax", {"heads": HEADS, "width": WIDTH}, _asentmax, hidden_width=WIDTH),
    Case("sa_softmax", {}, _self_adjusted),
    Case("sa_softmax", {"normalised": False}, lambda row, _: row.z * softmax(row.z)),
    Case("adaptive_temperature", {}, _adaptive),
    Case("sigmoid", {}, lambda row, _: 1 / (1 + row.n * torch.exp(-row.z))),
    Case("softmax1", {}, lambda row, _: torch.exp(row.z) / (1 + torch.exp(row.z).sum())),
    Case("sink", {"heads": HEADS}, _sink),
    Case("relu", {}, lambda row, _: row.z.relu() / row.n),
    Case("relu", {"power": 2.0}, lambda row, _: row.z.relu() ** 2 / row.n),
    Case("softpick", {}, _softpick),
    Case("stick_breaking", {}, _stick_breaking),
    Case("stick_breaking", {"attend_current": False}, _stick_breaking_before),
    Case("topk", {"k": 2}, lambda row, _: _softmax_over(row.z, _largest(row.z, 2))),
    Case("topk", {"k": "sqrt"}, lambda row, _: _softmax_over(row.z, _largest(row.z, math.ceil(math.sqrt(row.n))))),
    Case("hard", {}, _hard),
    Case("log_scaled", {"train_length": 2}, lambda row, _: softmax(_qwen(row, 2))),
    Case(
        "log_scaled",
        {"rule": "llama4", "floor_scale": 2},
        lambda row, _: softmax(row.z * (1 + 0.1 * math.log(1 + row.n // 2))),
    ),
    Case("log_scaled", {"rule": "yarn"}, lambda row, _: softmax(row.z * (0.1 * math.log(4) + 1) ** 2)),
    Case("scale_invariant", {}, _scale_invariant),
    Case("kernel", {}, lambda row, _: softplus(row.z) / softplus(row.z).sum()),
    Case("kernel", {"function": "polynomial"}, lambda row, _: row.z**2 / (row.z**2).sum().clamp(min=1e-300)),
    Case("kneemax", {}, lambda row, _: kneemax(row.z)),
    Case("kneemax", {"temperature": 0.5, "learned": True, "heads": HEADS}, lambda row, it: kneemax(_tempered(row, it))),
    Case("local", {"window": 3}, lambda row, _: _softmax_over(row.z, row.distance.abs() < 3)),
    Case("mixture", {}, _mixture),
    Case("scale, selection and sink", {}, _everything),
    Case("sparsemax behind qwen", {}, lambda row, _: entmax(_qwen(row, 2), 2.0)),
    Case(
        "adaptive behind ssmax",
        {},
        lambda row, normalizer: _adaptive(replace(row, z=row.z * _ssmax_factor(row, normalizer.scale[0])), None),
    ),
]  # fmt: skip
