"""ReLU attention: powers of the logits above zero, or above a threshold that grows with the n visible keys of the row.

    relu               p_j = [z_j]_+^power / n
    threshold_relu     p_j = [z_j - beta sqrt(2 log n)]_+^power / d^(power/2)

relu: Wortsman et al. 2023, https://arxiv.org/abs/2309.08586 (power 1); power 2 as in squared-ReLU attention.

threshold_relu: the weights of threshold differential attention (Huang et al. 2026, https://arxiv.org/abs/2601.12145;
github.com/snap-research/TDA): [cos - beta sqrt(2 log n / d)]_+^power of the cosine of q and k. For q and k of length
sqrt(d), as a QK-norm leaves them, the scaled logit is z = sqrt(d) cos, which gives the form above. n standard normal
numbers have their largest near sqrt(2 log n): at beta = 1 noise stays below the threshold at every length. The whole
mechanism, with cosines and the difference of two views, is `tda`.
"""

import math

import torch
from torch import Tensor

from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import KernelForm, Map, Normalizer, Properties, at_least_one
from attnorm.normalizers.declaration import Row, WarmStart, declare


class Relu(Map):
    properties = Properties(row_sum="free", exact_zeros=True, shift_invariant=False, length="1/n")
    jacobian = "diagonal"

    def __init__(self, power: float) -> None:
        super().__init__()
        if not power >= 1:
            raise ValueError(f"power must be at least 1, got {power}. Below it the gradient is unbounded at 0.")
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


@declare(reference=_reference, examples=[{}, {"power": 2.0}], warm_start=WarmStart())
def relu(power: float = 1.0) -> Normalizer:
    """[z]_+^power / n: no normalization across keys, exact zeros for negative logits.

    Train from scratch, with a norm after attention. The weight of the best key falls like 1/n by construction.
    """
    return Normalizer(Relu(power), name="relu")


class ThresholdRelu(Map):
    properties = Properties(
        row_sum="free", exact_zeros=True, shift_invariant=False, length="threshold beta sqrt(2 log n)"
    )
    jacobian = "diagonal"

    def __init__(self, beta: float, power: float, width: int | None = None) -> None:
        super().__init__()
        if not beta >= 0 or math.isinf(beta):
            raise ValueError(f"expected beta of at least 0, got {beta}. 0 is ReLU without a threshold.")
        if not power >= 1:
            raise ValueError(f"expected a power of at least 1, got {power}. Below it the gradient is unbounded at 0.")
        if width is not None and width < 1:
            raise ValueError(f"expected the width of q and k, got {width}. Use None to leave the logits unscaled.")
        self.beta, self.power, self.width = float(beta), float(power), width

    @property
    def unit(self) -> float:
        """Factor from a logit of q and k of length sqrt(d) to their cosine; 1 without a width."""
        return 1.0 if self.width is None else self.width**-0.5

    def threshold(self, n: Tensor) -> Tensor:
        return self.beta * torch.sqrt(2 * torch.log(n.clamp(min=1)))

    def forward(self, block: Block) -> Tensor:
        above = (block.logits - self.threshold(block.n)).relu() * self.unit
        return block.hide(above if self.power == 1 else above**self.power)

    def lipschitz(self, n: int) -> float | None:
        return self.unit if self.power == 1 else None

    def kernel_form(self) -> KernelForm | None:
        if int(self.power) != self.power:
            return None
        unit = self.unit
        return KernelForm(
            "relu",
            power=int(self.power),
            row_factor=lambda n: torch.full_like(n, unit),
            row_shift=lambda n: -unit * self.threshold(n),
            counts_keys=True,
        )


def _threshold_reference(row: Row, beta: float = 1.0, power: float = 2.0, width: int | None = None) -> Tensor:
    above = (row.z - beta * math.sqrt(2 * math.log(row.n))).relu()
    return (above / math.sqrt(1 if width is None else width)) ** power


@declare(
    reference=_threshold_reference,
    examples=[{}, {"beta": 0.3, "power": 1.0}, {"beta": 0.5, "power": 3.0, "width": 16}],
    warm_start=WarmStart(),
)
def threshold_relu(beta: float = 1.0, power: float = 2.0, *, width: int | None = None) -> Normalizer:
    """[z - beta sqrt(2 log n)]_+^power: only logits above the largest that noise would reach get weight.

    Train from scratch, with QK-norm before (without it the threshold has no meaning) and a norm after attention. width:
    d, for the factor d^(-power/2).
    """
    return Normalizer(ThresholdRelu(beta, power, width), name="threshold_relu")
