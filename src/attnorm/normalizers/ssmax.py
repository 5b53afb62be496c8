"""Scalable-Softmax: softmax((s log n + b) z), with n the visible keys of the row and s learned per head.

Nakanishi 2025, https://arxiv.org/abs/2501.19399. A token whose logit is g above the rest keeps its weight at every
length once s g > 1. The price: the Jacobian's bound s log(n) / 2 grows with n.
"""

import math
from typing import Any

import torch
from torch import Tensor

from attnorm.normalizers.contract import Normalizer, ScaleRule, set_per_head
from attnorm.normalizers.declaration import HEADS, LayerFacts, Options, Row, WarmStart, declare
from attnorm.normalizers.softmax import Softmax, softmax_row


class LogLengthScale(ScaleRule):
    length = "log n"
    may_round_queries = True
    swap_untrained = False  # near softmax at one length only: on short texts SmolLM2's perplexity rises from 18 to 61
    s: Tensor
    bias: Tensor | None

    def __init__(self, s: float, *, bias: bool = False, learned: bool = True, heads: int | None = None) -> None:
        super().__init__()
        if math.isinf(s):
            raise ValueError(f"s must be a finite number, got {s}; 1 / log n keeps rows of n keys as softmax has them")
        set_per_head(self, "s", s, heads, learned=learned)
        if bias:
            set_per_head(self, "bias", 0.0, heads, learned=learned)
        else:
            self.register_parameter("bias", None)

    def factor(self, n: Tensor, positions: Tensor | None, hidden_states: Tensor | None) -> Tensor:
        log_n = torch.log(n.clamp(min=1))
        s, bias = (p if p is None or p.dim() == 0 else p[:, None, None] for p in (self.s, self.bias))
        assert s is not None
        return s * log_n if bias is None else s * log_n + bias

    def log_length(self) -> tuple[Tensor, int] | None:
        return (self.s, 1) if self.bias is None else None


def neutral_s(train_length: int) -> float:
    """The s whose factor s log n is 1 on average over the rows of a causal sequence: 0.1685 at 1024."""
    if train_length < 2:
        raise ValueError(f"train_length must be at least 2, got {train_length}")
    return train_length / math.lgamma(train_length + 1)


def critical_s(rho: float, size: float = 1.0) -> float:
    """The critical s of Chen, Lin, Polyanskiy & Rigollet 2025 (https://arxiv.org/abs/2510.05554): 1 / (1 - rho).

    There a key that equals the query has the logit 1 and all others rho: below this s the row spreads over all keys as
    n grows, above it the row keeps to that one key. size: the logit of that key, |q| |k| / sqrt(d), where it is not 1.
    """
    if not rho < 1 or not size > 0 or math.isinf(rho) or math.isinf(size):
        raise ValueError(f"expected a cosine rho below 1 and a positive size, got rho={rho} and size={size}.")
    return 1 / (size * (1 - rho))


def _initial_s(s: float | None, rho: float | None, size: float, train_length: int) -> float:
    if s is not None and rho is not None:
        raise ValueError(f"expected s or rho, which sets it, got s={s} and rho={rho}.")
    if rho is not None:
        return critical_s(rho, size)
    return neutral_s(train_length) if s is None else s


def _reference(
    row: Row, s: float | None = None, train_length: int = 1024, rho: float | None = None, size: float = 1.0, **_: Any
) -> Tensor:
    start = _initial_s(s, rho, size, train_length)
    factor = row.value("scale.0.s", start) * math.log(row.n) + row.value("scale.0.bias", 0.0)
    return softmax_row(row.z * factor)


def _start(layer: LayerFacts, given_options: Options) -> dict[str, Any]:
    if given_options.get("rho") is not None:
        return {"heads": layer.heads}
    return {"s": 0.0 if given_options.get("bias") else 1 / layer.mean_log_n(), "heads": layer.heads}


def _start_values(layer: LayerFacts, given_options: Options, options: Options) -> dict[str, float | Tensor]:
    if not given_options.get("bias"):
        return {}
    s = critical_s(options["rho"], options.get("size", 1.0)) if options.get("s") is None else options["s"]
    return {"scale.0.bias": 1 - s * layer.mean_log_n()}


@declare(
    reference=_reference,
    examples=[{}, {"s": 0.43}, {"rho": 0.2, "size": 3.0}, {"s": 0.6, "bias": True, "heads": HEADS}],
    warm_start=WarmStart(
        "near at the training length",
        "s = 1 / mean log n over the rows of a text of train_length tokens: a factor of 1 on average there, of less in "
        "shorter texts, which are flattened; with bias=True s = 0 and b = 1, exactly softmax",
        options=_start,
        values=_start_values,
        by_length="s",
    ),
)
def ssmax(
    s: float | None = None,
    *,
    bias: bool = False,
    train_length: int = 1024,
    rho: float | None = None,
    size: float = 1.0,
    learned: bool = True,
    heads: int | None = None,
) -> Normalizer:
    """softmax((s log n + b) z): the scale grows with the row's visible keys n; s learned.

    s starts at 1 on average over a causal sequence of train_length (default), or where rho sets it: the critical scale
    of logits whose largest is `size` and whose others are rho times that.
    """
    start = _initial_s(s, rho, size, train_length)
    return Normalizer(Softmax(), scale=[LogLengthScale(start, bias=bias, learned=learned, heads=heads)], name="ssmax")
