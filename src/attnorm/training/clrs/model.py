"""Settings and construction of a CLRS-Text model: every value here changes its weights.

A model is either a pretrained one, whose softmax is replaced in all heads before fine-tuning, or a Llama of a given
shape with random weights. A pretrained model's new normalizer starts as close to softmax as it can.
"""

import copy
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attnorm.normalizers.spec import state_options
from attnorm.provenance import file_hash
from attnorm.training.clrs.data import CHARACTERS, Characters, ClrsTokenizer, Pretrained
from attnorm.training.lm.model import LMSettings, build_model

if TYPE_CHECKING:
    from attnorm.models.load import LoadedModel

FROM_SCRATCH = "from-scratch"


@dataclass(frozen=True, kw_only=True)
class ClrsRecipe:
    """One training run; `layers`, `heads` and `width` are those of a model trained from scratch.

    Raises:
        ValueError: A value is out of range.
    """

    normalizer: str = "softmax"
    normalizer_options: dict[str, Any] = field(default_factory=dict)
    steps: int = 1000
    batch: int = 256
    """Questions per step."""
    learning_rate: float = 3e-4
    warmup: int = 50
    weight_decay: float = 0.1
    seed: int = 0
    dtype: str = "float32"
    tokens_at_once: int = 2**14
    """Padded tokens of one forward pass; a step has as many passes as it needs."""
    layers: int = 4
    heads: int = 4
    width: int = 128
    context: int = 256
    """Training length for the normalizers that depend on one, in tokens: most questions are shorter."""

    def __post_init__(self) -> None:
        if self.tokens_at_once < 1:
            raise ValueError(f"tokens_at_once must be at least 1, got {self.tokens_at_once}")
        object.__setattr__(self, "normalizer_options", state_options(self.normalizer, self.normalizer_options))
        self.as_lm()  # checks the values that both have

    def as_lm(self) -> LMSettings:
        """Return the settings that the language model trainer's model, optimizer and schedule read."""
        return LMSettings(
            architecture="llama", layers=self.layers, heads=self.heads, width=self.width, context=self.context,
            vocab=CHARACTERS + 1, steps=self.steps, batch=self.batch, learning_rate=self.learning_rate,
            warmup=self.warmup, weight_decay=self.weight_decay, seed=self.seed, dtype=self.dtype,
            normalizer=self.normalizer, normalizer_options=self.normalizer_options,
        )  # fmt: skip

    def as_dict(self, *, pretrained: bool) -> dict[str, Any]:
        """Return the values that decide the weights."""
        unused = ("layers", "heads", "width") if pretrained else ()
        return {name: value for name, value in asdict(self).items() if name not in unused}


@dataclass(frozen=True)
class ClrsBase:
    """What training starts from: a pretrained model (a folder or a .gguf file), or None for random weights."""

    path: Path | None = None

    @property
    def name(self) -> str:
        return FROM_SCRATCH if self.path is None else self.path.name

    def identity(self) -> dict[str, str]:
        """Return the name and, of a pretrained model, the hash of its weights."""
        if self.path is None:
            return {"name": FROM_SCRATCH}
        return {"name": self.name, **_weight_hashes(self.path)}

    def tokenizer(self) -> ClrsTokenizer:
        """
        Raises:
            ValueError: The pretrained model has no tokenizer.
        """
        if self.path is None:
            return Characters()
        loaded = _loaded(self.path)
        if loaded.tokenizer is None:
            raise ValueError(f"{self.path} has no tokenizer: {loaded.tokenizer_problem}")
        return Pretrained(loaded.tokenizer)

    def build(self, recipe: ClrsRecipe, device: torch.device) -> Any:
        """Return the model in float32 with the recipe's normalizer in all heads.

        Raises:
            ValueError: The normalizer is unknown, has no such options, or does not fit the model.
        """
        if self.path is None:
            return build_model(recipe.as_lm(), CHARACTERS, 0).to(device)
        from attnorm.models.patch import patch

        pretrained: Any = _loaded(self.path).model
        model = copy.deepcopy(pretrained).to(device)
        if recipe.as_lm().patched:
            patch(model, recipe.normalizer, train_length=recipe.context, **recipe.normalizer_options)
        return model


@lru_cache(maxsize=1)
def _loaded(path: Path) -> "LoadedModel":
    """Load the model in float32 on the CPU; the models of a plan are copies of it."""
    from attnorm.models.load import load

    return load(path, dtype="float32", device="cpu")


@lru_cache(maxsize=1)
def _weight_hashes(path: Path) -> dict[str, str]:
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"expected a model folder with safetensors or a .gguf file, got {path}")
    return {file.name: file_hash(file) for file in files}


def with_normalizer(recipe: ClrsRecipe, spec: str, options: dict[str, Any] | None = None) -> ClrsRecipe:
    """Return the recipe with a normalizer given as in topk:k=4; `options` are added."""
    from attnorm.normalizers.spec import parse_spec

    name, spec_options = parse_spec(spec)
    return replace(recipe, normalizer=name, normalizer_options={**spec_options, **(options or {})})
