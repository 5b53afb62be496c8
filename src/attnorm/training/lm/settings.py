"""Settings of a training run: the model and the optimizer. Every value here changes the weights."""

from dataclasses import asdict, dataclass, field
from typing import Any

from attnorm.suggest import did_you_mean

SMALLEST_VOCABULARY = 257  # every byte, and the end of a text
LARGEST_VOCABULARY = 2**16  # tokens are stored as uint16
DTYPES = ("float32", "bfloat16")
RECORD = "training.json"  # in the folder of a run: its settings and, at the end, its result
ROTARY = {"gpt2": False, "llama": True}  # architecture -> whether positions are angles, which have no largest value


@dataclass(frozen=True, kw_only=True)
class LMSettings:
    """A language model and how it is trained.

    Raises:
        ValueError: A value is out of range, or two values do not fit together.
    """

    architecture: str = "gpt2"
    layers: int = 6
    heads: int = 6
    width: int = 192
    context: int = 1024
    vocab: int = 4096
    steps: int = 1000
    batch: int = 16
    learning_rate: float = 1e-3
    warmup: int = 100
    weight_decay: float = 0.1
    seed: int = 0
    dtype: str = "float32"
    normalizer: str = "softmax"
    normalizer_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.architecture not in ROTARY:
            raise ValueError(f"unknown architecture {self.architecture!r}; {did_you_mean(self.architecture, ROTARY)}")
        for name in ("layers", "heads", "width", "context", "steps", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(
                f"width must be a multiple of heads, so that every head gets the same share; got width {self.width} "
                f"and {self.heads} heads, try width {self.heads * max(1, round(self.width / self.heads))}"
            )
        if ROTARY[self.architecture] and self.width // self.heads % 2:
            raise ValueError(
                f"{self.architecture} turns the coordinates of a head in pairs, so width / heads must be even; got "
                f"width {self.width} and {self.heads} heads, try width {self.width + self.heads}"
            )
        if not SMALLEST_VOCABULARY <= self.vocab <= LARGEST_VOCABULARY:
            raise ValueError(f"vocab must be between {SMALLEST_VOCABULARY} and {LARGEST_VOCABULARY}, got {self.vocab}")
        if not self.learning_rate > 0:
            raise ValueError(f"the learning rate must be above 0, got {self.learning_rate}")
        if self.warmup < 0 or self.weight_decay < 0 or self.seed < 0:
            raise ValueError(
                f"warmup, weight decay and seed must not be negative; got {self.warmup}, {self.weight_decay} "
                f"and {self.seed}"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r}; known are {', '.join(DTYPES)}")

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.context

    @property
    def patched(self) -> bool:
        """Whether another normalizer replaces the model's softmax."""
        return self.normalizer != "softmax" or bool(self.normalizer_options)

    def as_dict(self) -> dict[str, Any]:
        """Return the settings, without the normalizer if it is softmax: records of earlier versions stay valid."""
        plain = asdict(self)
        return plain if self.patched else {key: plain[key] for key in plain if not key.startswith("normalizer")}
