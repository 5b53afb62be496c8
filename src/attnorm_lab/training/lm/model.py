"""The settings of a training run that determine its weights, and the model families that can be trained.

Only the repeating blocks of a model are compiled: one small graph serves all layers, so compilation takes seconds. The
code around the blocks, which prepares masks and positions, is not compiled.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from attnorm.arithmetic import ceil_div, round_up
from attnorm.models.layer_normalizer import SOFTMAX, compact, specs_by_layer
from attnorm.models.output_head import parse_output, set_output
from attnorm.normalizers.spec import parse_spec, with_options
from attnorm.text import did_you_mean
from attnorm_lab.training.lm.data import LARGEST_VOCABULARY

SMALLEST_VOCABULARY = 257  # every byte, and the end of a text
DTYPES = ("float32", "bfloat16")
ANY_LENGTH = {"gpt2": False, "llama": True, "nope": True}  # architecture -> whether it has no largest position


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
    recipe: dict[str, str] = field(default_factory=dict)
    """Layers -> normalizer, instead of `normalizer`. Equal recipes become equal: ranges are as long as possible, and a
    recipe with one normalizer for all layers becomes `normalizer`."""
    output: str = "softmax"
    """Output layer: "softmax", or a mixture "mos:K" or "moc:K" (models.output_head)."""

    def __post_init__(self) -> None:
        if self.architecture not in ANY_LENGTH:
            name = self.architecture
            raise ValueError(f"unknown architecture {name!r}; {did_you_mean(name, ANY_LENGTH)}")
        for name in ("layers", "heads", "width", "context", "steps", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(
                f"expected a width that is a multiple of the number of heads, got width {self.width} and "
                f"{self.heads} heads. Use e.g. width {self.heads * max(1, round(self.width / self.heads))}."
            )
        if ANY_LENGTH[self.architecture] and self.width // self.heads % 2:
            raise ValueError(
                f"expected an even width / heads, because the rotary positions of {self.architecture} use pairs of "
                f"coordinates, got width {self.width} and {self.heads} heads. Try width {self.width + self.heads}."
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
        parse_output(self.output)
        if self.recipe:
            self._simplify_recipe()
        name, options = with_options(self.normalizer, self.normalizer_options)
        object.__setattr__(self, "normalizer", name)
        object.__setattr__(self, "normalizer_options", options)

    def _simplify_recipe(self) -> None:
        if self.normalizer != SOFTMAX or self.normalizer_options:
            raise ValueError(
                f"expected a recipe or a normalizer, got both, a recipe and {self.normalizer!r}. Remove one."
            )
        recipe = compact(specs_by_layer(self.recipe, self.layers))
        if len(recipe) == 1:
            name, options = parse_spec(next(iter(recipe.values())))
            object.__setattr__(self, "normalizer", name)
            object.__setattr__(self, "normalizer_options", options)
            recipe = {}
        object.__setattr__(self, "recipe", recipe)

    @property
    def normalizers(self) -> list[tuple[str, dict[str, Any]]]:
        """Name and options of every normalizer of the model, each once."""
        if not self.recipe:
            return [(self.normalizer, self.normalizer_options)]
        return [parse_spec(spec) for spec in dict.fromkeys(self.recipe.values())]

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.context

    @property
    def patched(self) -> bool:
        """Whether another normalizer replaces the model's softmax."""
        return any(named != (SOFTMAX, {}) for named in self.normalizers)

    def as_dict(self) -> dict[str, Any]:
        """Return the settings without those about softmaxes that are not used."""
        used = {
            "normalizer": self.patched and not self.recipe,
            "normalizer_options": self.patched and not self.recipe,
            "recipe": bool(self.recipe),
            "output": self.output != SOFTMAX,
        }
        return {key: value for key, value in asdict(self).items() if used.get(key, True)}


FEED_FORWARD_STEP = 64  # widths that suit matrix units


@dataclass(frozen=True)
class Architecture:
    build: Callable[[LMSettings, int, int], Any]
    """settings, vocabulary size, id of the end-of-text token -> a model with random weights"""
    blocks: Callable[[Any], Iterable[torch.nn.Module]]
    description: str


def _build_gpt2(settings: LMSettings, vocabulary: int, end_of_text: int) -> Any:
    import transformers

    build: Any = transformers.GPT2LMHeadModel  # its constructor has no annotations
    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_positions=settings.context,
        n_embd=settings.width,
        n_layer=settings.layers,
        n_head=settings.heads,
        # A model this small reads too little text to memorize it.
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        tie_word_embeddings=True,
    )
    return build(config)


def _build_llama(settings: LMSettings, vocabulary: int, end_of_text: int) -> Any:
    import transformers

    build: Any = transformers.LlamaForCausalLM  # as above
    return build(_llama_config(transformers.LlamaConfig, settings, vocabulary, end_of_text))


def _build_nope(settings: LMSettings, vocabulary: int, end_of_text: int) -> Any:
    """SmolLM3 is Llama with layers that leave out the rotation; here all do."""
    import transformers

    build: Any = transformers.SmolLM3ForCausalLM  # as above
    none: dict[str, Any] = {"no_rope_layers": [0] * settings.layers, "pad_token_id": None}
    return build(_llama_config(transformers.SmolLM3Config, settings, vocabulary, end_of_text, **none))


def _llama_config(config: Any, settings: LMSettings, vocabulary: int, end_of_text: int, **others: Any) -> Any:
    return config(
        vocab_size=vocabulary,
        max_position_embeddings=settings.context,
        hidden_size=settings.width,
        # Three matrices instead of two: 8/3 of the width has as many weights as 4 times the width in GPT-2.
        intermediate_size=round_up(ceil_div(8 * settings.width, 3), FEED_FORWARD_STEP),
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        tie_word_embeddings=True,
        **others,
    )


ARCHITECTURES = {
    "gpt2": Architecture(
        build=_build_gpt2,
        blocks=lambda model: model.transformer.h,
        description="GPT-2: learned positions, layer norm before each part, GELU, tied embeddings",
    ),
    "llama": Architecture(
        build=_build_llama,
        blocks=lambda model: model.model.layers,
        description="Llama: rotary positions, RMS norm before each part, SwiGLU, no biases, tied embeddings",
    ),
    "nope": Architecture(
        build=_build_nope,
        blocks=lambda model: model.model.layers,
        description="Llama without positions (NoPE): RMS norm before each part, SwiGLU, no biases, tied embeddings",
    ),
}


def build_model(settings: LMSettings, vocabulary: int, end_of_text: int) -> Any:
    """Build a float32 model whose weights depend only on the settings; the global random state does not change.

    The normalizer starts at the values of its paper, not at those that change a trained model least. The weights below
    the output layer are those of the same model with another output layer.

    Raises:
        ValueError: The normalizer is unknown, has no such options, or fits no language model.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = ARCHITECTURES[settings.architecture].build(settings, vocabulary, end_of_text)
        if settings.patched:
            _replace_softmax(model, settings)
        set_output(model, settings.output)
    return model


def count_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def learned_values(model: torch.nn.Module, at_most: int = sys.maxsize) -> dict[str, list[float]]:
    """Return the numbers of the normalizers' parameters by name, without parameters of more than `at_most` numbers."""
    from attnorm.models.dispatch import NORMALIZER

    return {
        name: [round(value, 5) for value in parameter.detach().flatten().float().tolist()]
        for name, parameter in model.named_parameters()
        if NORMALIZER in name.split(".") and parameter.numel() <= at_most
    }


def training_memory_gb(settings: LMSettings) -> float:
    """Estimate the memory of a training step in float32, in units of 2^30 bytes.

    Weights, gradients and the two means of AdamW; per token and layer 20 numbers for each unit of width; three arrays
    of logits; half a unit for the libraries. On a CPU, Llamas of 5 to 20 million parameters took 0.98 to 1.12 of it.
    """
    parameters = 12 * settings.layers * settings.width**2 + settings.vocab * settings.width
    per_token = 20 * settings.layers * settings.width + 3 * settings.vocab
    return 0.5 + (16 * parameters + 4 * settings.batch * settings.context * per_token) / 2**30


def softmax_of_equal_size(settings: LMSettings, vocabulary: int, parameters: int) -> dict[str, int]:
    """Return width and parameters of the narrowest model with a plain output layer and at least as many parameters."""
    plain = replace(settings, output=SOFTMAX)
    step = settings.heads * (2 if ANY_LENGTH[settings.architecture] else 1)
    while True:
        with torch.device("meta"):
            count = count_parameters(ARCHITECTURES[plain.architecture].build(plain, vocabulary, 0))
        if count >= parameters:
            return {"width": plain.width, "parameters": count}
        plain = replace(plain, width=plain.width + step)


def check_normalizer(settings: LMSettings) -> None:
    """Try every normalizer on a model of one small layer, before anything is written.

    Raises:
        ValueError: As `build_model`.
    """
    for name, options in settings.normalizers:
        width = settings.width if "width" in options else 2 * settings.heads
        alone = replace(settings, layers=1, width=width, recipe={}, normalizer=name, normalizer_options=options)
        if alone.patched:
            build_model(alone, vocabulary=2, end_of_text=0)


def with_sizes(name: str, options: dict[str, Any], settings: LMSettings) -> dict[str, Any]:
    """Return the options with the sizes of the model, which normalizers that read hidden states need."""
    if name == "differential_v2":
        options = {"width": settings.width, "head_width": settings.width // settings.heads, **options}
    return {"heads": settings.heads, **options} if "width" in options else options


def _replace_softmax(model: Any, settings: LMSettings) -> None:
    from attnorm.models.patch import patch
    from attnorm.normalizers.registry import get

    try:
        for name, options in settings.normalizers:
            if "train_length" in options:
                raise ValueError(f"the training length is always the context, {settings.context}. Remove train_length.")
            get(name, **with_sizes(name, options, settings))  # rejects options that only patch() has
        if settings.recipe:
            patch(model, settings.recipe, warm_start=False, train_length=settings.context)
        else:
            patch(
                model, settings.normalizer, warm_start=False, train_length=settings.context,
                **with_sizes(settings.normalizer, settings.normalizer_options, settings),
            )  # fmt: skip
    except TypeError as error:
        raise ValueError(str(error)) from None
