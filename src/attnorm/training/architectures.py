"""The model families that can be trained: how to build one, with any normalizer, and which of its parts repeat.

Only the repeating blocks are compiled: one small graph serves all layers, so compilation takes seconds, and the code
around the blocks, which prepares masks and positions, stays as transformers wrote it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

FEED_FORWARD_STEP = 64  # widths that matrix units like

if TYPE_CHECKING:
    from attnorm.training.settings import Settings


@dataclass(frozen=True)
class Architecture:
    build: "Callable[[Settings, int, int], Any]"
    """From settings, the number of tokens known and the id that ends a text: a model with fresh weights."""
    blocks: Callable[[Any], Iterable[torch.nn.Module]]
    description: str
    rotary: bool = False
    """Positions are angles, which do not end with the training length."""


def _build_gpt2(settings: "Settings", vocabulary: int, end_of_text: int) -> Any:
    import transformers

    build: Any = transformers.GPT2LMHeadModel  # its constructor has no annotations
    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_positions=settings.context,
        n_embd=settings.width,
        n_layer=settings.layers,
        n_head=settings.heads,
        # A model this small sees too little of its text to learn it by heart.
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        tie_word_embeddings=True,
    )
    return build(config)


def _build_llama(settings: "Settings", vocabulary: int, end_of_text: int) -> Any:
    import transformers

    build: Any = transformers.LlamaForCausalLM  # as above
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        max_position_embeddings=settings.context,
        hidden_size=settings.width,
        # Three matrices in place of two: 8/3 of the width holds as many weights as GPT-2's 4.
        intermediate_size=-(-8 * settings.width // (3 * FEED_FORWARD_STEP)) * FEED_FORWARD_STEP,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        tie_word_embeddings=True,
    )
    return build(config)


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
        rotary=True,
    ),
}


def build_model(settings: "Settings", vocabulary: int, end_of_text: int) -> Any:
    """A model in float32 whose weights depend on nothing but the settings; the global generator is left as it was.

    Its normalizer starts as its paper has it, not where a trained model would change least.

    Raises:
        ValueError: The normalizer is unknown, has no such options, or fits no language model.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = ARCHITECTURES[settings.architecture].build(settings, vocabulary, end_of_text)
        if settings.patched:
            _replace_softmax(model, settings)
    return model


def check_normalizer(settings: "Settings") -> None:
    """On a model of one small layer, before anything is written.

    Raises:
        ValueError: As `build_model`.
    """
    if settings.patched:
        build_model(replace(settings, layers=1, width=2 * settings.heads), vocabulary=2, end_of_text=0)


def _replace_softmax(model: Any, settings: "Settings") -> None:
    from attnorm.models.patch import patch
    from attnorm.normalizers.registry import get

    options = settings.normalizer_options
    if "train_length" in options:
        raise ValueError(f"the training length is the context, {settings.context}; leave train_length out")
    try:
        get(settings.normalizer, **options)  # patch() has options of its own, which are none of the normalizer's
        patch(model, settings.normalizer, warm_start=False, train_length=settings.context, **options)
    except TypeError as error:
        raise ValueError(str(error)) from None
