"""A random GPT-2 of two layers in a folder, with a tokenizer of whole words: loaded as any user's model is."""

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from tests.analysis.tiny_models import VOCABULARY, gpt2


def save_model(folder: Path, *, layers: int = 2, seed: int = 0, broken: bool = False) -> Path:
    model = gpt2(layers=layers, heads=2, positions=64, seed=seed)
    if broken:
        with torch.no_grad():
            model.transformer.h[-1].attn.c_attn.weight[0] = torch.nan
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({"[UNK]": 0} | {f"w{i}": i for i in range(1, VOCABULARY)}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
    return folder


def save_text(path: Path, words: int = 80, seed: int = 0) -> Path:
    chosen = random.Random(seed)
    path.write_text(" ".join(f"w{chosen.randrange(1, VOCABULARY)}" for _ in range(words)), encoding="utf-8")
    return path
