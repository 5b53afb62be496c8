"""ReLU attention: p_j = [z_j]_+^power / n, with n the visible keys of the row.

Wortsman et al. 2023, https://arxiv.org/abs/2309.08586 (power 1); power 2 as in squared-ReLU attention.
"""

from torch import Tensor

from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import KernelForm, Map, Normalizer, Properties, at_least_one
from attnorm.normalizers.declaration import Row, WarmStart, declare


class Relu(Map):
    properties = Properties(row_sum="free", exact_zeros=True, shift_invariant=False, length="1/n")

    def __init__(self, power: float = 1.0) -> None:
        super().__init__()
        if not power >= 1:
            raise ValueError(f"power must be at least 1, got {power}; below it the gradient is unbounded at 0")
        self.power = power

    def forward(self, block: Block) -> Tensor:
        positive = block.logits.relu()
        if self.power != 1:
            positive = positive**self.power
        return block.hide(positive / block.n.clamp(min=1))

    def lipschitz(self, n: int) -> float | None:
        return 1 / n if self.power == 1 else None

    def kernel_form(self) -> KernelForm | None:
        power = int(self.power)
        if power != self.power:
            return None
        # [z]^p / n = [z n^(-1/p)]^p
        return KernelForm(
            "relu",
            power=power,
            row_factor=lambda n: at_least_one(n) ** (-1 / power),
            counts_keys=True,
            takes_numbers=True,
        )


def _reference(row: Row, power: float = 1.0) -> Tensor:
    return row.z.relu() ** power / row.n


@declare(reference=_reference, examples=[{}, {"power": 2.0}], warm_start=WarmStart("far"))
def relu(power: float = 1.0) -> Normalizer:
    """[z]_+^power / n: no normalization across keys, exact zeros for negative logits."""
    return Normalizer(Relu(power), name="relu")
