"""Temperature: logits / T, one T for all heads or one per head, fixed or learned (as log T, so it stays positive)."""

import math

import torch
from torch import Tensor

from attnorm.normalizers.contract import ScaleRule, set_per_head


class Temperature(ScaleRule):
    log_temperature: Tensor

    def __init__(self, temperature: float = 1.0, *, learned: bool = False, heads: int | None = None) -> None:
        super().__init__()
        if not temperature > 0 or math.isinf(temperature):
            raise ValueError(f"temperature must be a positive number, got {temperature}")
        if heads is not None and not learned:
            raise ValueError(f"heads={heads} needs learned=True: a fixed temperature is shared by all heads")
        set_per_head(self, "log_temperature", math.log(temperature), heads, learned=learned)

    def factor(self, n: Tensor, positions: Tensor | None, hidden_states: Tensor | None) -> Tensor:
        factor = torch.exp(-self.log_temperature.to(n.dtype))
        return factor if factor.dim() == 0 else factor[:, None, None]
