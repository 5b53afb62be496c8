"""The papers' general normalizer: p_j = F(z_j) / sum F(z) for a positive function F.

Mudarisov et al. 2025, https://arxiv.org/abs/2508.17821, eq. 3. With F bounded between F_min and F_max on the logits,
every weight lies between (F_min/F_max)/n and (F_max/F_min)/n: Lemma 1, dispersion for every such F. The Jacobian is (I
- p 1^T) diag(F') / sum F.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import softplus

from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import KernelForm, Map, Normalizer, Properties, same_as, slope_of_each
from attnorm.normalizers.declaration import Row, WarmStart, declare
from attnorm.text import did_you_mean

Elementwise = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class PositiveFunction:
    """F with its derivative; `log`, where given, computes log F without over- or underflow."""

    value: Elementwise
    derivative: Elementwise
    log: Elementwise | None = None
    shift_invariant: bool = False
    tile: tuple[str, int, float] | None = None  # its name in kernels/maps.py, its power, and what is added to z


def _log_softplus(z: Tensor) -> Tensor:
    # softplus(z) = e^z (1 - e^z/2 + ...) far below 0, where it would underflow.
    low = z < -15
    safe = torch.where(low, 0.0, z)
    return torch.where(low, z - torch.exp(z.clamp(max=-15)) / 2, torch.log(softplus(safe, threshold=50)))


def polynomial(power: int = 2, offset: float = 0.0) -> PositiveFunction:
    """(z + offset)^power with an even power, so that F >= 0; not monotone: very negative logits count as well."""
    if power < 2 or power % 2:
        raise ValueError(f"power must be an even number of at least 2, because F must not be negative, got {power}")
    return PositiveFunction(
        partial(_power, power=power, offset=offset),
        partial(_power_slope, power=power, offset=offset),
        tile=("polynomial", power, offset),
    )


def _power(z: Tensor, power: int, offset: float) -> Tensor:
    return (z + offset) ** power


def _power_slope(z: Tensor, power: int, offset: float) -> Tensor:
    return power * (z + offset) ** (power - 1)


def _same(z: Tensor) -> Tensor:
    return z


def _elu_plus_one(z: Tensor) -> Tensor:
    return torch.where(z > 0, z + 1, torch.exp(z.clamp(max=0)))  # elu(z) + 1 would cancel far below 0


def _elu_slope(z: Tensor) -> Tensor:
    return torch.exp(z.clamp(max=0))


def _log_elu_plus_one(z: Tensor) -> Tensor:
    return torch.where(z > 0, torch.log1p(z.clamp(min=0)), z)


# Named functions, not lambdas: a model is pickled with its normalizers, to be saved or sent to a process.
FUNCTIONS: dict[str, PositiveFunction] = {
    "exp": PositiveFunction(torch.exp, torch.exp, log=_same, shift_invariant=True, tile=("softmax", 1, 0.0)),
    "softplus": PositiveFunction(softplus, torch.sigmoid, log=_log_softplus, tile=("softplus", 1, 0.0)),
    "elu+1": PositiveFunction(_elu_plus_one, _elu_slope, log=_log_elu_plus_one, tile=("elu+1", 1, 0.0)),
    "polynomial": polynomial(),
}


class Kernel(Map):
    jacobian = "quotient"

    def __init__(self, function: PositiveFunction) -> None:
        super().__init__()
        self.function = function
        self.properties = Properties(
            row_sum="one" if function.log is not None else "at most one",
            shift_invariant=function.shift_invariant,
            exact_zeros=function.log is None,
        )

    def forward(self, block: Block) -> Tensor:
        if self.function.log is not None:
            return block.hide(torch.softmax(block.with_logits(self.function.log(block.logits)).filled_low(), dim=-1))
        value = block.hide(self.function.value(block.logits))
        total = value.sum(-1, keepdim=True)
        return value / torch.where(total > 0, total, 1.0)

    def lipschitz(self, n: int) -> float | None:
        if self.function.shift_invariant:  # exp, the only one
            return 0.5 if n > 1 else 0.0
        return None

    def slopes(self, block: Block, weights: Tensor) -> Tensor:
        if self.function.log is not None:  # F'/sum F = (log F)' p, which does not overflow
            return slope_of_each(self.function.log, block.logits) * weights
        total = block.hide(self.function.value(block.logits)).sum(-1, keepdim=True)
        return self.function.derivative(block.logits) / torch.where(total > 0, total, 1.0)

    def kernel_form(self) -> KernelForm | None:
        if self.function.tile is None:
            return None
        name, power, offset = self.function.tile
        shift = None if offset == 0 else lambda n: same_as(n, offset)
        # A power of a logit soon exceeds float16.
        return KernelForm(name, power=power, row_shift=shift, takes_numbers=True, float16=name != "polynomial")


def _reference(row: Row, function: str = "softplus", power: int = 2, offset: float = 0.0) -> Tensor:
    z = row.z
    value = {
        "exp": lambda: torch.exp(z),
        "softplus": lambda: torch.log(1 + torch.exp(z)),
        "elu+1": lambda: torch.where(z > 0, z + 1, torch.exp(z.clamp(max=0))),
        "polynomial": lambda: (z + offset) ** power,
    }[function]()
    total = value.sum()
    return value / torch.where(total > 0, total, 1.0)


@declare(
    reference=_reference,
    examples=[
        {},
        {"function": "exp"},
        {"function": "elu+1"},
        {"function": "polynomial"},
        {"function": "polynomial", "power": 4},
    ],
    warm_start=WarmStart("nothing to set; function='exp' is softmax itself"),
)
def kernel(
    function: str | PositiveFunction | Elementwise = "softplus",
    *,
    derivative: Elementwise | None = None,
    power: int = 2,
    offset: float = 0.0,
) -> Normalizer:
    """F(z) / sum F(z) for F = exp, softplus, elu+1, an even polynomial, or your own with its derivative.

    To study the effect of the exponential. For F between F_min and F_max every weight is within a factor F_max/F_min of
    1/n. function: "exp", "softplus", "elu+1", "polynomial" (even power, with offset; it gives weight to very negative
    logits) or your own.
    """
    if isinstance(function, str):
        if function not in FUNCTIONS:
            raise ValueError(
                f"expected a callable or the name of a function, got {function!r}; {did_you_mean(function, FUNCTIONS)}"
            )
        positive_function = polynomial(power, offset) if function == "polynomial" else FUNCTIONS[function]
    elif isinstance(function, PositiveFunction):
        positive_function = function
    elif not callable(function):
        raise TypeError(f"function must be one of {', '.join(FUNCTIONS)}, or a callable, got {function!r}")
    elif derivative is None:
        raise ValueError(
            "expected derivative= with a callable, got none. Pass an elementwise function and its derivative: "
            "kernel(F, derivative=dF)."
        )
    else:
        positive_function = PositiveFunction(function, derivative)
    return Normalizer(Kernel(positive_function), name="kernel")
