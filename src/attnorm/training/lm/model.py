"""The model families that can be trained: how to build one with any normalizer, and which blocks repeat.

Only the repeating blocks are compiled: one small graph serves all layers, so compilation takes seconds. The code around
the blocks, which prepares masks and positions, is not compiled.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnorm.training.lm.settings import LMSettings

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
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        max_position_embeddings=settings.context,
        hidden_size=settings.width,
        # Three matrices instead of two: 8/3 of the width has as many weights as 4 times the width in GPT-2.
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
    ),
}


def build_model(settings: LMSettings, vocabulary: int, end_of_text: int) -> Any:
    """Build a float32 model whose weights depend only on the settings; the global random state does not change.

    The normalizer starts at the values of its paper, not at those that change a trained model least.

    Raises:
        ValueError: The normalizer is unknown, has no such options, or fits no language model.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = ARCHITECTURES[settings.architecture].build(settings, vocabulary, end_of_text)
        if settings.patched:
            _replace_softmax(model, settings)
    return model


def check_normalizer(settings: LMSettings) -> None:
    """Try the normalizer on a model of one small layer, before anything is written.

    Raises:
        ValueError: As `build_model`.
    """
    if settings.patched:
        build_model(replace(settings, layers=1, width=2 * settings.heads), vocabulary=2, end_of_text=0)


def _replace_softmax(model: Any, settings: LMSettings) -> None:
    from attnorm.models.patch import patch
    from attnorm.normalizers.registry import get

    options = settings.normalizer_options
    if "train_length" in options:
        raise ValueError(f"the training length is the context, {settings.context}; remove train_length")
    try:
        get(settings.normalizer, **options)  # rejects options that only patch() has
        patch(model, settings.normalizer, warm_start=False, train_length=settings.context, **options)
    except TypeError as error:
        raise ValueError(str(error)) from None
