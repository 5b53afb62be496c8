"""Adaptive-scale entmax: entmax((delta + beta log(n+1)^gamma) z) with alpha = 1.5.

Vasylenko, Pitorro, Martins & Treviso 2025, https://arxiv.org/abs/2506.16640. beta = softplus(b) and
gamma = 2 tanh(c) either learned per head, or read from the hidden state of each query by two linear maps. The length
enters as log(n+1), so that a row of one key is not scaled by log 1 = 0.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, softplus

from attnorm.normalizers.contract import Normalizer, ScaleRule, per_head_parameter
from attnorm.normalizers.declaration import HEADS, WIDTH, LayerFacts, Options, Row, WarmStart, declare
from attnorm.normalizers.entmax import Entmax, entmax_row


class AdaptiveLengthScale(ScaleRule):
    length = "log(n+1)^gamma"

    def __init__(
        self,
        delta: float = 1.0,
        beta: float = 0.55,
        gamma: float = 0.0,
        *,
        heads: int | None = None,
        width: int | None = None,
    ) -> None:
        super().__init__()
        if not beta > 0:
            raise ValueError(f"beta must be positive, got {beta}")
        if not -2 < gamma < 2:
            raise ValueError(f"gamma must lie strictly between -2 and 2, got {gamma}")
        self.delta = delta
        raw_beta, raw_gamma = math.log(math.expm1(beta)), math.atanh(gamma / 2)
        self.from_hidden: nn.Linear | None = None
        if width is None:
            self.raw_beta = per_head_parameter(raw_beta, heads)
            self.raw_gamma = per_head_parameter(raw_gamma, heads)
            return
        if heads is None:
            raise ValueError(
                f"expected heads with width={width}, because beta and gamma are computed per head from the hidden "
                "state, got None. Pass heads=."
            )
        self.from_hidden = nn.Linear(width, 2 * heads)
        with torch.no_grad():
            self.from_hidden.bias[:heads] = raw_beta
            self.from_hidden.bias[heads:] = raw_gamma

    def factor(self, n: Tensor, positions: Tensor | None, hidden_states: Tensor | None) -> Tensor:
        raw_beta, raw_gamma = self._raw_parameters(hidden_states, n.dtype)
        logarithm = torch.log1p(n.clamp(min=1)).log()  # a power would have a derivative of ten operations
        return self.delta + softplus(raw_beta) * torch.exp(2 * torch.tanh(raw_gamma) * logarithm)

    def _raw_parameters(self, hidden_states: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if self.from_hidden is None:
            parameters = (self.raw_beta.to(dtype), self.raw_gamma.to(dtype))
            beta, gamma = (p if p.dim() == 0 else p[:, None, None] for p in parameters)
            return beta, gamma
        if hidden_states is None:
            raise ValueError(
                "expected hidden_states, from which beta and gamma are computed, got none. Pass hidden_states "
                "of shape (batch, queries, width)."
            )
        if (width := hidden_states.shape[-1]) != self.from_hidden.in_features:
            raise ValueError(
                f"expected hidden_states of width {self.from_hidden.in_features}, got width {width}. Pass the layer "
                f"input that q is projected from, or build the normalizer with width={width}."
            )
        weight, bias = self.from_hidden.weight.to(dtype), self.from_hidden.bias.to(dtype)
        per_query = linear(hidden_states.to(dtype), weight, bias)  # (B, Q, 2H)
        beta, gamma = per_query.transpose(-1, -2)[..., None].chunk(2, dim=-3)  # (B, H, Q, 1)
        return beta, gamma

    def gain(self, n: int) -> float | None:
        return None if self.from_hidden is not None else super().gain(n)


def _reference(
    row: Row, alpha: float = 1.5, delta: float = 1.0, beta: float = 0.55, gamma: float = 0.0, **_: Any
) -> Tensor:
    raw_beta = row.value("scale.0.raw_beta", math.log(math.expm1(beta)))
    raw_gamma = row.value("scale.0.raw_gamma", math.atanh(gamma / 2))
    if row.hidden is not None:
        weight, bias = (row.learned[f"scale.0.from_hidden.{name}"] for name in ("weight", "bias"))
        per_head = weight @ row.hidden + bias
        raw_beta, raw_gamma = per_head[row.head], per_head[row.head + len(per_head) // 2]
    factor = delta + softplus(raw_beta) * math.log(row.n + 1) ** (2 * torch.tanh(raw_gamma))
    return entmax_row(row.z * factor, alpha)


# With the factor c, d log p / dz is 1 for softmax's weights and c p^(1 - alpha) for entmax's: equal at this weight if
# c = p^(alpha - 1). Of the factors tried on SmolLM2, those of 1/4 were best for entmax15 and for sparsemax.
MATCHED_WEIGHT = 0.25


def _start(layer: LayerFacts, given_options: Options) -> dict[str, Any]:
    factor = MATCHED_WEIGHT ** (given_options.get("alpha", 1.5) - 1)
    beta, gamma = given_options.get("beta", factor / 2), given_options.get("gamma", 0.0)
    return {"delta": factor - beta * math.log(layer.length + 1) ** gamma, "beta": beta, "heads": layer.heads}


@declare(
    reference=_reference,
    examples=[{}, {"gamma": 1.5}, {"gamma": -1.0, "heads": HEADS}, {"heads": HEADS, "width": WIDTH}],
    warm_start=WarmStart(
        "delta = beta = 1/4, gamma = 0: with the factor 1/2 a weight of 1/4 changes with its logit as softmax's does",
        options=_start,
    ),
)
def asentmax(
    *,
    alpha: float = 1.5,
    delta: float = 1.0,
    beta: float = 0.55,
    gamma: float = 0.0,
    heads: int | None = None,
    width: int | None = None,
) -> Normalizer:
    """entmax((delta + beta log(n+1)^gamma) z): sparse and length-aware; starts at the authors' mean initialization.

    beta and gamma are shared, per head (heads), or computed from the hidden state of each query (heads and width).
    gamma starts at 0: the length has no effect until it is trained.
    """
    rule = AdaptiveLengthScale(delta, beta, gamma, heads=heads, width=width)
    return Normalizer(Entmax(alpha), scale=[rule], name="asentmax")
