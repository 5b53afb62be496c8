"""What makes one training run different from another: every number here changes the weights."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any

SMALLEST_VOCABULARY = 257  # every byte, and the end of a text
LARGEST_VOCABULARY = 2**16  # tokens are stored as uint16
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A language model and the recipe that trains it.

    Raises:
        ValueError: A number is out of range, or two of them do not fit together.
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
        from attnorm.training.architectures import ARCHITECTURES

        if self.architecture not in ARCHITECTURES:
            raise ValueError(f"unknown architecture {self.architecture!r}; known are {', '.join(ARCHITECTURES)}")
        for name in ("layers", "heads", "width", "context", "steps", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(
                f"width must be a multiple of heads, so that every head gets the same share; got width {self.width} "
                f"and {self.heads} heads, try width {self.heads * max(1, round(self.width / self.heads))}"
            )
        if ARCHITECTURES[self.architecture].rotary and self.width // self.heads % 2:
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
        """Whether the model's own softmax is replaced."""
        return self.normalizer != "softmax" or bool(self.normalizer_options)

    def as_dict(self) -> dict[str, Any]:
        """Without the normalizer where it is the model's own: runs from before there was a choice keep their name."""
        plain = asdict(self)
        return plain if self.patched else {key: plain[key] for key in plain if not key.startswith("normalizer")}


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """One phrase per name whose value differs: 'seed is 1 here and 0 there'."""
    ours, theirs = ({"normalizer": "softmax", "normalizer_options": {}, **each} for each in (ours, theirs))
    order = [field.name for field in fields(Settings)]
    names = sorted(set(ours) | set(theirs), key=lambda name: (order.index(name) if name in order else 99, name))
    different = [(name, ours.get(name), theirs.get(name)) for name in names if ours.get(name) != theirs.get(name)]
    return [_difference(name, _words(here), _words(there)) for name, here, there in different]


def _difference(name: str, here: str, there: str) -> str:
    if here == there:  # files of the same name
        return f"{name} is {here} here and there, but with another content"
    return f"{name} is {here} here and {there} there"


def _words(value: Any) -> str:
    """Files by their names, without their hashes."""
    if isinstance(value, dict) and "name" in value:
        return str(value["name"])
    if isinstance(value, list):
        return " and ".join(map(_words, value))
    return str(value)
