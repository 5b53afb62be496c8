"""Odd polynomial: p_j = z_j^power / sqrt(n), n the visible keys of the row.

Saratchandran et al. 2024, https://arxiv.org/abs/2410.18613: softmax bounds the Frobenius norm of the attention matrix
by sqrt(n), and the factor 1/sqrt(n) keeps this growth for polynomials. The weights are no distribution: they have the
sign of the logit, no fixed sum, and 0 only at a logit of 0.
"""

import math

from torch import Tensor

from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import KernelForm, Map, Normalizer, Properties, at_least_one
from attnorm.normalizers.declaration import Row, WarmStart, declare


class OddPolynomial(Map):
    properties = Properties(row_sum="free", signed=True, shift_invariant=False, length="1/sqrt(n)")
    jacobian = "diagonal"

    def __init__(self, power: int = 3) -> None:
        super().__init__()
        if power < 1 or power % 2 == 0:
            raise ValueError(
                f"expected an odd power of at least 1, got {power}. For an even power use get('kernel', "
                "function='polynomial', power=...), which divides by the row's sum."
            )
        self.power = int(power)

    def forward(self, block: Block) -> Tensor:
        return block.hide(block.logits**self.power / block.n.clamp(min=1).sqrt())

    def lipschitz(self, n: int) -> float | None:
        return n**-0.5 if self.power == 1 else None

    def kernel_form(self) -> KernelForm:
        power = self.power
        # z^p / sqrt(n) = (z n^(-1/(2p)))^p; float16 ends at a weight of 65,504, which z = 41 passes.
        return KernelForm(
            "power",
            power=power,
            row_factor=lambda n: at_least_one(n) ** (-0.5 / power),
            takes_numbers=True,
            counts_keys=True,
            float16=False,
        )


def _reference(row: Row, power: int = 3) -> Tensor:
    return row.z**power / math.sqrt(row.n)


@declare(reference=_reference, examples=[{}, {"power": 1}, {"power": 5}], warm_start=WarmStart())
def odd_polynomial(power: int = 3) -> Normalizer:
    """z^power / sqrt(n) for odd powers: signed weights that are not normalized over the row.

    To study what a distribution is good for: entropy and other metrics of distributions do not apply. It needs QK-norm
    or a norm after attention. The paper divides by the square root of the sequence length.
    """
    return Normalizer(OddPolynomial(power), name="odd_polynomial")
