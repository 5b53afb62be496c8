"""The model families that can be trained: how to build one, and which of its parts repeat.

Only the repeating blocks are compiled: one small graph serves all layers, so compilation takes seconds, and the code
around the blocks, which prepares masks and positions, stays as transformers wrote it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from attnorm.training.settings import Settings


@dataclass(frozen=True)
class Architecture:
    build: "Callable[[Settings, int, int], Any]"
    """From settings, the number of tokens known and the id that ends a text: a model with fresh weights."""
    blocks: Callable[[Any], Iterable[torch.nn.Module]]
    description: str


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


ARCHITECTURES = {
    "gpt2": Architecture(
        build=_build_gpt2,
        blocks=lambda model: model.transformer.h,
        description="GPT-2: learned positions, layer norm before each part, GELU, tied embeddings",
    ),
}


def build_model(settings: "Settings", vocabulary: int, end_of_text: int) -> Any:
    """A model in float32 whose weights depend on nothing but the settings; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return ARCHITECTURES[settings.architecture].build(settings, vocabulary, end_of_text)
