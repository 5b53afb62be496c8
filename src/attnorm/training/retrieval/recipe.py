"""Training settings of the retrieval models: every value here changes the weights."""

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

DTYPES = ("float32", "bfloat16")
OF_THE_PAPER = ("steps", "batch", "smallest", "largest", "width", "learning_rate", "weight_decay")


@dataclass(frozen=True, kw_only=True)
class RetrievalRecipe:
    """The defaults are those of Velickovic et al. 2024 (https://arxiv.org/abs/2410.01104), with fewer steps.

    Raises:
        ValueError: A number is out of range.
    """

    steps: int = 20_000
    batch: int = 128
    smallest: int = 5
    largest: int = 16
    width: int = 128
    learning_rate: float = 1e-3
    weight_decay: float = 1e-3
    # Ours, 0 = off. Penalty on the share of the logits' variance that comes from the class.
    leak_penalty: float = 0.0
    # Share of the steps before that penalty. A logit that still falls with the priority would have to pass through
    # one that only the class moves, where the penalty is largest; it must rise first.
    leak_from: float = 0.25
    # Ours, 0 = off. Share of the sets whose priorities are squeezed toward 1, by up to a factor 2^-12.
    squeezed: float = 0.0
    # Ours, 0 = off. In training, the logits of every set are scaled to this standard deviation, so that squeezed sets
    # require the right order, not larger logits. Tests use the logits unscaled.
    standardized: float = 0.0
    cosine: bool = False  # cosine learning rate; constant in the paper
    dtype: str = "float32"  # of the matrix products in training; tests always use float32

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 2 <= self.smallest <= self.largest:
            raise ValueError(
                f"sets in training must have at least 2 items, and the smallest no more than the largest; "
                f"got {self.smallest} to {self.largest}"
            )
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"the learning rate must be above 0, got {self.learning_rate}")
        for name in ("weight_decay", "leak_penalty", "standardized"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name.replace('_', ' ')} must be 0 or more, got {getattr(self, name)}")
        if not 0 <= self.leak_from < 1:
            raise ValueError(f"leak_from is a share of the steps, at least 0 and below 1; got {self.leak_from}")
        if not 0 <= self.squeezed <= 1:
            raise ValueError(f"squeezed is a share of the sets, between 0 and 1; got {self.squeezed}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be {' or '.join(DTYPES)}, got {self.dtype!r}")
        if self.dtype == "bfloat16" and (self.squeezed or self.leak_penalty or self.standardized):
            raise ValueError(
                "bfloat16 rounds priorities near 1 to steps of 1/256, and squeezed, leak_penalty and standardized need "
                "far smaller differences; train in float32, or set them to 0"
            )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def identity(self) -> dict[str, Any]:
        """Return the values without options that are off, so that a new option does not rename earlier runs."""
        usual = {field.name: field.default for field in fields(self)}
        return {name: value for name, value in asdict(self).items() if name in OF_THE_PAPER or value != usual[name]}

    def penalised(self, step: int) -> bool:
        """Return whether a step, counted from 0, has the leak penalty."""
        return self.leak_penalty > 0 and step >= self.leak_from * self.steps

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return self.learning_rate * (0.5 + 0.5 * math.cos(math.pi * step / self.steps) if self.cosine else 1.0)
