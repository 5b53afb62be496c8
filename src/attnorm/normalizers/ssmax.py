"""Softmax whose logits grow with log n, n the visible keys of the row; by how much is learned, per head or layer.

    ssmax     softmax((s log n + b) z)
    ssa       softmax((1 + e^(-e^beta) log n) z)

ssmax: Scalable-Softmax, Nakanishi 2025, https://arxiv.org/abs/2501.19399. The price: the
Jacobian's bound s log(n) / 2 grows with n.

ssa: the length rule of Selective Self-Attention, Zhang et al. 2024, https://arxiv.org/abs/2411.12892, in the form of
the authors' code for fine-tuning (github.com/umich-sota/selective_attention, lit_gpt/model_finetune_att.py). It starts
at beta = 2, where e^(-e^beta) is 0.00062: a trained model begins as it was and learns how much its logits should grow
with the length. At most log n is added, for beta -> -infinity.

Length rules that are not learned: log_scaled.py.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnorm.normalizers.contract import Normalizer, ScaleRule, set_per_head
from attnorm.normalizers.declaration import HEADS, LayerFacts, Options, Row, WarmStart, declare
from attnorm.normalizers.softmax import Softmax, softmax_row

SSA_START = 2.0  # of beta


class LogLengthScale(ScaleRule):
    length = "log n"
    may_round_queries = True
    s: Tensor
    bias: Tensor | None

    def __init__(self, s: float, *, bias: bool = False, learned: bool = True, heads: int | None = None) -> None:
        super().__init__()
        if math.isinf(s):
            raise ValueError(f"s must be a finite number, got {s}. s = 1 / log n equals softmax for rows of n keys.")
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
        raise ValueError(f"expected s or rho, which determines s, got s={s} and rho={rho}. Remove one.")
    if rho is not None:
        return critical_s(rho, size)
    return neutral_s(train_length) if s is None else s


def _reference(
    row: Row, s: float | None = None, train_length: int = 1024, rho: float | None = None, size: float = 1.0, **_: Any
) -> Tensor:
    start = _initial_s(s, rho, size, train_length)
    factor = row.value("scale.0.s", start) * math.log(row.n) + row.value("scale.0.bias", 0.0)
    return softmax_row(row.z * factor)


def _mean_log_n(layer: LayerFacts, given_options: Options) -> float:
    return replace(layer, length=given_options.get("train_length") or layer.length).mean_log_n()


def _start(layer: LayerFacts, given_options: Options) -> dict[str, Any]:
    if given_options.get("rho") is not None:
        return {"heads": layer.heads}
    return {"s": 0.0 if given_options.get("bias") else 1 / _mean_log_n(layer, given_options), "heads": layer.heads}


def _start_values(layer: LayerFacts, given_options: Options, options: Options) -> dict[str, float | Tensor]:
    if not given_options.get("bias"):
        return {}
    s = critical_s(options["rho"], options.get("size", 1.0)) if options.get("s") is None else options["s"]
    return {"scale.0.bias": 1 - s * _mean_log_n(layer, given_options)}


@declare(
    reference=_reference,
    examples=[{}, {"s": 0.43}, {"rho": 0.2, "size": 3.0}, {"s": 0.6, "bias": True, "heads": HEADS}],
    warm_start=WarmStart(
        "s = 1 / mean log n over the rows of a text of train_length tokens: a factor of 1 on average there, of less in "
        "shorter texts, which are flattened; with bias=True s = 0 and b = 1, exactly softmax",
        options=_start,
        values=_start_values,
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

    For contexts longer than in training. Apply it after QK-norm, and not where the model already rescales by length: a
    model trained with softmax is flattened on short texts. bias helps training and hurts extrapolation. A key g above
    all others keeps its weight at every length once s g > 1. rho: Chen et al. 2025, https://arxiv.org/abs/2510.05554.
    """
    start = _initial_s(s, rho, size, train_length)
    return Normalizer(Softmax(), scale=[LogLengthScale(start, bias=bias, learned=learned, heads=heads)], name="ssmax")


class SelectiveLengthScale(ScaleRule):
    length = "1 + e^(-e^beta) log n"
    beta: Tensor

    def __init__(self, beta: float = SSA_START, *, learned: bool = True, heads: int | None = None) -> None:
        super().__init__()
        if math.isinf(beta):
            raise ValueError(f"expected a finite beta, got {beta}. Use 'softmax' or 'ssmax' for the two limits.")
        set_per_head(self, "beta", beta, heads, learned=learned)

    def factor(self, n: Tensor, positions: Tensor | None, hidden_states: Tensor | None) -> Tensor:
        beta = self.beta if self.beta.dim() == 0 else self.beta[:, None, None]
        return 1 + torch.exp(-torch.exp(beta.to(n.dtype))) * torch.log(n.clamp(min=1))


def _ssa_reference(row: Row, beta: float = SSA_START, **_: Any) -> Tensor:
    share = torch.exp(-torch.exp(row.value("scale.0.beta", beta)))
    return softmax_row(row.z * (1 + share * math.log(row.n)))


@declare(
    reference=_ssa_reference,
    examples=[{}, {"beta": -0.5}, {"beta": 0.3, "heads": HEADS}],
    warm_start=WarmStart(
        "beta = 2: a factor of 1.0043 at 1,024 keys and of 1.0073 at 131,072",
        options=lambda layer, given_options: {"heads": layer.heads},
        safe=True,
    ),
)
def ssa(beta: float = SSA_START, *, learned: bool = True, heads: int | None = None) -> Normalizer:
    """softmax((1 + e^(-e^beta) log n) z): starts as softmax and learns how logits grow with the visible keys n.

    To fine-tune a trained model for longer contexts: it starts with a factor of 1.0043 at 1,024 keys. There the factor
    changes by only 0.0046 log n per unit of beta, so give beta a higher learning rate or start lower. The paper's
    temperature that depends on the token is not included.
    """
    return Normalizer(Softmax(), scale=[SelectiveLengthScale(beta, learned=learned, heads=heads)], name="ssa")
