"""Rules by which deployed models scale q with the position or the length; none is learned.

- qwen: max(1, log n / log L), the "logn" attention of Qwen beyond its training length L, https://arxiv.org/abs/2309.16609
- llama4: 1 + a log(1 + floor((position + 1) / L0)), a = 0.1, L0 = 8192 (Llama 4, layers without rotary embedding)
- yarn: (0.1 ln s + 1)^2 for an extension factor s, the same at every position, https://arxiv.org/abs/2309.00071
The position is n - 1 unless the caller passes positions.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from attnorm.normalizers.contract import Normalizer, ScaleRule
from attnorm.normalizers.declaration import Row, WarmStart, declare
from attnorm.normalizers.softmax import Softmax, softmax_row
from attnorm.text import did_you_mean

Rule = Literal["qwen", "llama4", "yarn"]


class QwenScale(ScaleRule):
    length = "log n beyond the training length"
    may_round_queries = True

    def __init__(self, train_length: int) -> None:
        super().__init__()
        if train_length < 2:
            raise ValueError(f"train_length must be at least 2, got {train_length}")
        self.train_length = train_length

    def factor(self, n: Tensor, positions: Tensor | None, hidden_states: Tensor | None) -> Tensor:
        reached = n if positions is None else positions.to(n.dtype) + 1
        return torch.log(reached.clamp(min=1)).div(math.log(self.train_length)).clamp(min=1)

    def log_length(self) -> tuple[float, int]:
        return 1 / math.log(self.train_length), self.train_length


class Llama4Scale(ScaleRule):
    length = "log of the position"
    may_round_queries = True

    def __init__(self, attention_scale: float = 0.1, floor_scale: int = 8192) -> None:
        super().__init__()
        if floor_scale < 1:
            raise ValueError(f"floor_scale must be at least 1, got {floor_scale}")
        self.attention_scale, self.floor_scale = attention_scale, floor_scale

    def factor(self, n: Tensor, positions: Tensor | None, hidden_states: Tensor | None) -> Tensor:
        reached = n if positions is None else positions.to(n.dtype) + 1
        return 1 + self.attention_scale * torch.log1p(torch.floor(reached.clamp(min=0) / self.floor_scale))


class YarnScale(ScaleRule):
    may_round_queries = True

    def __init__(self, extension: float) -> None:
        super().__init__()
        if extension < 1:
            raise ValueError(f"extension (new length over training length) must be at least 1, got {extension}")
        self.constant = (0.1 * math.log(extension) + 1) ** 2

    def factor(self, n: Tensor, positions: Tensor | None, hidden_states: Tensor | None) -> Tensor:
        return torch.full_like(n, self.constant)


def _reference(
    row: Row,
    rule: Rule = "qwen",
    train_length: int = 1024,
    attention_scale: float = 0.1,
    floor_scale: int = 8192,
    extension: float = 4.0,
) -> Tensor:
    factors = {
        "qwen": max(1.0, math.log(row.n) / math.log(train_length)),
        "llama4": 1 + attention_scale * math.log(1 + row.n // floor_scale),
        "yarn": (0.1 * math.log(extension) + 1) ** 2,
    }
    return softmax_row(row.z * factors[rule])


@declare(
    reference=_reference,
    examples=[{}, {"train_length": 2}, {"train_length": 5}, {"rule": "llama4", "floor_scale": 4}, {"rule": "yarn"}],
    warm_start=WarmStart(
        "qwen's factor is 1 up to the training length, llama4's up to 8191 keys; yarn sharpens every row",
        options=lambda layer, given_options: {"train_length": layer.length},
        safe=True,
    ),
)
def log_scaled(
    rule: Rule = "qwen",
    *,
    train_length: int = 1024,
    attention_scale: float = 0.1,
    floor_scale: int = 8192,
    extension: float = 4.0,
) -> Normalizer:
    """softmax of logits scaled by the fixed length rule of a deployed model: qwen, llama4 or yarn.

    To match a deployed model; nothing is learned. Models that ship such a rule have it in q already: do not apply it
    twice. n is the number of visible keys; if positions are passed, position + 1 replaces it.
    """
    scale: ScaleRule
    if rule == "qwen":
        scale = QwenScale(train_length)
    elif rule == "llama4":
        scale = Llama4Scale(attention_scale, floor_scale)
    elif rule == "yarn":
        scale = YarnScale(extension)
    else:
        raise ValueError(f"unknown rule {rule!r}; {did_you_mean(rule, get_args(Rule))}")
    return Normalizer(Softmax(), scale=[scale], name="log_scaled")
