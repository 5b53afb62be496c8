"""A real language model still writes sensible text with every normalizer that is called safe without training."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from attnorm.analysis.settings import passage
from attnorm.models.load import load
from attnorm.models.patch import swap
from attnorm.normalizers.declaration import warm_start_of
from attnorm.normalizers.registry import BUILT_IN

# ssmax is near softmax at one length only, so it is not called safe; at the length of this prompt it holds.
OPTIONS: dict[str, dict[str, Any]] = {"ssmax": {"train_length": 256}}

# Long enough that top-k has keys to leave out.
QUESTION = """\
I am preparing a lesson about the countries of Europe for a class of ten-year-olds. For every country I want to show a
map, a photograph of the landscape, a flag, and a short text about the largest rivers, the mountains, the climate, the
food that people like to eat, and the most famous buildings. We begin in the west. Last week the children learned about
Spain, whose capital is Madrid, and about Portugal, whose capital is Lisbon. Today it is the turn of France. Please help
me with the first line of the text. What is the capital of France?"""
SAFE = [name for name, entry in BUILT_IN.items() if warm_start_of(entry.factory()).safe and name != "softmax"]


@torch.no_grad()
def test_the_bundled_model_loses_a_tenth_of_a_nat_at_most() -> None:
    """The model is trained, so a normalizer that is far from softmax costs it more: entmax15 2.5 nats."""
    bundled = load("bundled", device="cpu")
    tokens = bundled.tokenizer(passage(), return_tensors="pt").input_ids[:, :128]
    losses = {}
    for name in ("softmax", *OPTIONS, *SAFE, "entmax15"):
        with swap(bundled.model, name, **OPTIONS.get(name, {})):
            losses[name] = bundled.model(input_ids=tokens, labels=tokens).loss.item()
    assert losses.pop("entmax15") > losses["softmax"] + 0.5
    assert max(losses.values()) < losses["softmax"] + 0.1


@pytest.fixture(scope="module")
def smol(smollm2: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(smollm2)


def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        tokens = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    return str(tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.mark.nightly  # 2 s each, and half a minute where the model is not unpacked yet
@pytest.mark.real_model
@pytest.mark.parametrize("name", [*OPTIONS, *SAFE])
def test_it_still_knows_the_capital_of_france(name: str, smol: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    model, tokenizer = smol
    with swap(model, name, **OPTIONS.get(name, {})):
        text = answer(model, tokenizer, QUESTION)
    assert "Paris" in text
