"""What is wrong with texts and lengths is said before anything runs."""

from typing import Any

import pytest
import torch

from attnorm.analysis.default_text import default_text, topics
from attnorm.analysis.plan import LONGEST_BY_DEFAULT, described, plan
from attnorm.models.inputs import texts_from
from attnorm.models.load import load
from tests.analysis.tiny_models import gpt2, ids, llama, vit


def lengths_of(inputs: Any, lengths: Any = None, model: Any = None) -> list[int | None]:
    return [part.length for part in plan(load(model or gpt2()), texts_from(inputs), lengths).parts]


def test_without_lengths_a_text_is_read_as_far_as_it_and_the_model_go() -> None:
    assert lengths_of(ids(500)) == [128]
    assert lengths_of(ids(100)) == [100]
    assert lengths_of(ids(200), model=gpt2(positions=256)) == [192]
    assert lengths_of([ids(20), ids(30)]) == [20, 30]


def test_a_model_without_a_limit_is_not_given_a_whole_book() -> None:
    model = llama()
    model.config.max_position_embeddings = 10**6
    assert lengths_of(ids(10_000), model=model) == [LONGEST_BY_DEFAULT]


def test_every_text_at_every_length_once() -> None:
    made = plan(load(gpt2()), texts_from({"a": ids(64), "b": ids(64, seed=1)}), (32, 16, 32))
    assert [(part.text.name, part.length, part.tokens) for part in made.parts] == [
        ("a", 16, 16), ("a", 32, 32), ("b", 16, 16), ("b", 32, 32),
    ]  # fmt: skip
    assert all(part.model_inputs["input_ids"].shape == (1, part.length) for part in made.parts)


@pytest.mark.parametrize(
    ("inputs", "lengths", "message"),
    [
        (ids(3), None, "'text' has 3 tokens; at least 8 are needed"),
        (ids(1), None, "has 1 token; at least 8"),
        (ids(64), (128,), r"'text' has 64 tokens, fewer than the length 128.*longer text or a smaller length"),
        (ids(512), (256,), "GPT2LMHeadModel has positions for 128 tokens and no more; got the length 256"),
        (ids(64), (4,), "at least 8 tokens .* got 4"),
        (ids(64), (), r"lengths must be numbers of tokens, .* got \(\)"),
        (ids(64), (True,), "lengths must be numbers of tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_numbers(inputs: Any, lengths: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lengths_of(inputs, lengths)


def test_empty_input_and_one_name_twice_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        lengths_of("")
    with pytest.raises(ValueError, match="empty"):
        lengths_of([])
    twice = [*texts_from({"a": ids(20)}), *texts_from({"a": ids(30)})]
    with pytest.raises(ValueError, match="two texts are named 'a'"):
        plan(load(gpt2()), twice, None)


def test_a_text_needs_a_tokenizer() -> None:
    with pytest.raises(ValueError, match=r"no tokenizer.*tokenizer="):
        lengths_of("Well, Prince, so Genoa and Lucca are now just family estates of the Buonapartes.")


def test_beyond_the_trained_length_is_possible_with_rotary_positions_and_noted() -> None:
    made = plan(load(llama()), texts_from(ids(300)), (300,))
    assert made.notes == ("300 tokens is more than the 256 that LlamaForCausalLM was made for",)


def test_a_dict_of_model_inputs_is_measured_as_it_is() -> None:
    assert lengths_of({"pixel_values": torch.zeros(1, 3, 16, 16)}, model=vit()) == [None]
    assert lengths_of({"input_ids": ids(20, batch=2)}) == [None]
    assert lengths_of({"input_ids": ids(20, batch=2)}, (16,)) == [16]
    with pytest.raises(ValueError, match="no input_ids to cut"):
        lengths_of({"pixel_values": torch.zeros(1, 3, 16, 16)}, (16,), vit())


def test_the_manifest_names_a_text_by_its_hash_and_never_holds_it() -> None:
    secret = "the launch code is 0000" * 10
    made = described(texts_from({"memo": secret})[0])
    assert made["name"] == "memo"
    assert len(made["sha256"]) == 64
    assert made["size"] == "230 characters"
    assert "launch" not in str(made)


def test_the_text_by_default_is_one_that_every_installation_has() -> None:
    assert len(topics().split()) > 30_000
    assert [*default_text(bundled=False).values()] == [topics()]
    assert all(len(text.split()) > 1_500 for text in default_text(bundled=True).values())
