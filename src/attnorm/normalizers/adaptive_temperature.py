"""Adaptive temperature: softmax(beta(H) z), beta a polynomial of the row's own entropy H.

Velickovic, Perivolaropoulos, Barbero & Pascanu 2024, https://arxiv.org/abs/2410.01104. Where H > 0.5 nats the logits
are multiplied by max(beta(H), 1).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import LogitRule, Normalizer
from attnorm.normalizers.declaration import Row, WarmStart, declare
from attnorm.normalizers.softmax import Softmax, softmax_row

PRINTED = (-0.037, 0.481, -2.3, 4.917, -1.791)  # highest power first
MIN_ENTROPY = 0.5
MAX_BETA = 1e4  # in `fit`: a row that needs more counts as one that cannot be sharpened


class EntropyRule(LogitRule):
    length = "entropy of the row"

    def __init__(self, coefficients: Sequence[float] = PRINTED, *, monotone: bool = False) -> None:
        super().__init__()
        if not hasattr(coefficients, "__len__") or not all(hasattr(c, "__float__") for c in coefficients):
            raise TypeError(f"coefficients: expected several numbers, highest power first, got {coefficients!r}.")
        if len(coefficients) == 0 or not all(map(math.isfinite, coefficients)):
            raise ValueError(f"coefficients must be finite numbers, highest power first, got {list(coefficients)}")
        self.coefficients = tuple(float(c) for c in coefficients)
        self.monotone = monotone
        turns = _turning_points(self.coefficients) if monotone else []  # eigenvalues, which no export can contain
        self.turning_points = (MIN_ENTROPY, *(turn for turn in turns if turn > MIN_ENTROPY))

    def beta(self, entropy: Tensor) -> Tensor:
        """The factor for rows of this entropy, in nats."""
        beta = torch.maximum(_polyval(self.coefficients, entropy), self._least(entropy))
        return torch.where(entropy > MIN_ENTROPY, beta, 1.0)

    def slope(self, entropy: Tensor) -> Tensor:
        """The derivative of beta."""
        sharpens = (entropy > MIN_ENTROPY) & (_polyval(self.coefficients, entropy) > self._least(entropy))
        return torch.where(sharpens, _polyval(_derivative(self.coefficients) or [0.0], entropy), 0.0)

    def _least(self, entropy: Tensor) -> Tensor:
        """The smallest beta for rows of this entropy: 1, or the largest that the polynomial has reached."""
        least = torch.ones_like(entropy)
        for turn in self.turning_points if self.monotone else ():
            height = _polynomial(self.coefficients, turn)
            least = torch.where(entropy > turn, least.clamp(min=height), least)
        return least

    def steps(self) -> tuple[float, ...]:
        """Return pairs of an entropy and the least beta of the rows above it. Rows below the first one have beta 1."""
        if not self.monotone:
            return MIN_ENTROPY, 1.0
        heights = (_polynomial(self.coefficients, turn) for turn in self.turning_points)
        return tuple(number for step in zip(self.turning_points, heights, strict=True) for number in step)

    def forward(self, block: Block) -> Tensor:
        return block.logits * self.beta(softmax_entropy(block))

    def extra_repr(self) -> str:
        return f"coefficients={self.coefficients}, monotone={self.monotone}"


def softmax_entropy(block: Block) -> Tensor:
    """Entropy in nats of softmax over each row, (..., Q, 1)."""
    log_p = torch.log_softmax(block.filled_low(), dim=-1)
    p = torch.exp(log_p)
    return -block.hide(p * block.hide(log_p)).sum(-1, keepdim=True)


def _polyval(coefficients: Sequence[float], x: Tensor) -> Tensor:
    value = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + coefficient
    return value


def _polynomial(coefficients: Sequence[float], x: float) -> float:
    value = 0.0
    for coefficient in coefficients:
        value = value * x + coefficient
    return value


def _derivative(coefficients: Sequence[float]) -> list[float]:
    degree = len(coefficients) - 1
    return [c * (degree - i) for i, c in enumerate(coefficients[:-1])]


def _turning_points(coefficients: Sequence[float]) -> list[float]:
    """Real roots of the derivative, as eigenvalues of its companion matrix on the CPU, in rising order."""
    slope = _derivative(coefficients)
    while slope and slope[0] == 0:
        slope.pop(0)
    if len(slope) < 2:
        return []
    companion = torch.diag(torch.ones(len(slope) - 2, dtype=torch.float64, device="cpu"), -1)
    companion[0] = -torch.tensor(slope[1:], dtype=torch.float64, device="cpu") / slope[0]
    return sorted(root.real for root in torch.linalg.eigvals(companion).tolist() if abs(root.imag) < 1e-9)


def fit(
    logits: Tensor, targets: Tensor | None = None, mask: Tensor | None = None, *, keep: float = 0.9, degree: int = 4
) -> tuple[float, ...]:
    """Coefficients of beta(H) fitted to rows of logits: pass them as `adaptive_temperature(coefficients=...)`.

    For every row, beta is the smallest factor (from 1 up) at which the target key - given by index, or the row's
    largest logit - keeps the weight `keep`; the polynomial is the least-squares fit of beta on the row's entropy.
    Rows whose target cannot reach it (it is not the single largest logit, or leads by too little) are left out.
    """
    if not 0 < keep < 1:
        raise ValueError(f"keep must lie strictly between 0 and 1, got {keep}")
    block = Block.of(logits.detach().double(), mask)
    rows = block.filled_low()
    target = rows.argmax(-1) if targets is None else targets
    gaps = rows - rows.gather(-1, target[..., None])  # softmax weight of the target = 1 / sum exp(beta gaps)
    others = torch.ones_like(gaps, dtype=torch.bool).scatter(-1, target[..., None], False)
    reachable = ((gaps < 0) | ~others).all(-1)
    low, high = torch.ones_like(gaps[..., :1]), torch.full_like(gaps[..., :1], MAX_BETA)
    for _ in range(60):
        middle = (low * high).sqrt()
        enough = torch.exp(middle * gaps).sum(-1, keepdim=True) <= 1 / keep
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    reachable &= high[..., 0] < MAX_BETA
    entropy = softmax_entropy(block)[..., 0][reachable]
    beta = high[..., 0][reachable]
    if entropy.numel() <= degree:
        raise ValueError(
            f"expected more than {degree} usable rows for a fit of degree {degree}, got {entropy.numel()}. Rows "
            "whose target is not the single largest logit are not used. Pass more rows."
        )
    powers = entropy[:, None] ** torch.arange(degree, -1, -1, device=entropy.device)
    return tuple(torch.linalg.lstsq(powers, beta[:, None]).solution[:, 0].tolist())


def adapted(z: Tensor, coefficients: Sequence[float] = PRINTED, monotone: bool = False) -> Tensor:
    """The logits of one row times beta(H), by definition."""
    p = softmax_row(z)
    entropy = -(p * torch.log(p.clamp(min=torch.finfo(p.dtype).tiny))).sum()
    if entropy <= MIN_ENTROPY:
        return z

    def beta(h: Tensor) -> Tensor:
        return sum((c * h**power for power, c in enumerate(reversed(coefficients))), torch.zeros_like(h))

    reached = [beta(entropy), torch.ones_like(entropy)]
    if monotone:
        turns = [MIN_ENTROPY, *_turning_points(coefficients)]
        reached += [beta(entropy.new_tensor(turn)) for turn in turns if MIN_ENTROPY <= turn < entropy]
    return z * torch.stack(reached).max()


def _reference(row: Row, **options: Any) -> Tensor:
    return softmax_row(adapted(row.z, **options))


@declare(
    reference=_reference,
    examples=[{}, {"monotone": True}],
    warm_start=WarmStart("nothing to set: rows of medium entropy are sharpened up to 2.4 times"),
)
def adaptive_temperature(coefficients: Sequence[float] = PRINTED, *, monotone: bool = False) -> Normalizer:
    """softmax(beta(H) z): rows are sharpened by a polynomial of their own entropy.

    For inference. The printed polynomial acts for 0.849 < H < 5.945 nats only: a row as flat as uniform over more than
    381 keys is not sharpened. monotone: keep the largest beta reached. coefficients: from the highest power; `fit` in
    this file refits them to your logits.
    """
    return Normalizer(Softmax(), scale=[EntropyRule(coefficients, monotone=monotone)], name="adaptive_temperature")
