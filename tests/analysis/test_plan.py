"""What is wrong with texts and lengths is said before anything runs."""

from typing import Any

import pytest
import torch

from attnorm.analysis.manifest import text_facts
from attnorm.analysis.plan import BUDGET, plan
from attnorm.analysis.settings import default_text, topics
from attnorm.models.inputs import texts_from
from attnorm.models.load import load
from tests.analysis.tiny_models import gpt2, ids, llama, vit


def lengths_of(inputs: Any, lengths: Any = None, model: Any = None, **options: Any) -> list[int | None]:
    return [part.length for part in plan(load(model or gpt2()), texts_from(inputs), lengths, **options).parts]


def test_without_lengths_a_text_is_read_as_far_as_it_and_the_model_go() -> None:
    assert lengths_of(ids(128)) == [128]
    assert lengths_of(ids(100)) == [100]
    assert lengths_of(ids(249), model=gpt2(positions=256)) == [249], "every token, also beyond a multiple of 64"
    assert lengths_of([ids(20), ids(30)]) == [20, 30]


def test_a_text_longer_than_the_model_is_covered_by_windows_of_one_length() -> None:
    made = plan(load(gpt2()), texts_from(ids(500)), None)
    assert [(part.length, part.start) for part in made.parts] == [(125, 0), (125, 125), (125, 250), (125, 375)]
    assert not made.notes, "nothing is left out"
    little = plan(load(gpt2()), texts_from(ids(140)), None)
    assert [(part.length, part.start) for part in little.parts] == [(128, 0)], "a small rest is left out ..."
    assert "12 tokens (8.57 %) are left out" in little.notes[0], "... and said so"
    assert little.coverage["text"].as_dict() == {"tokens": 140, "left_out": 12, "windows": 1}


def test_windows_are_disjoint_spread_over_the_text_and_within_the_budget() -> None:
    made = plan(load(gpt2()), texts_from(ids(1000)), (32, 64), windows="auto", budget=320)
    starts = [part.start for part in made.parts if part.length == 64]
    assert starts == [0, 234, 468, 702, 936], "five windows of 64 are 320 tokens; the last ends with the text"
    assert [part.start for part in made.parts if part.length == 32] == starts, "the same starts at every length"
    for part in made.parts:
        expected = texts_from(ids(1000))[0].content.reshape(1, -1)[:, part.start : part.start + part.length]
        assert part.model_inputs["input_ids"].equal(expected)
    assert made.windows == 5
    assert "5 windows of 64 tokens, spread over the text, are measured; 680 tokens (68 %) are left out" in made.notes[0]


def test_windows_of_a_given_length_use_the_whole_budget_up_to_sixteen_of_them() -> None:
    assert lengths_of(ids(2000), 32, budget=384) == [32] * 12
    assert lengths_of(ids(2000), 32, budget=1024) == [32] * 16
    assert lengths_of(ids(2000), budget=1024) == [128] * 8, "without a length: an eighth of the budget each"


def test_one_window_is_the_start_of_the_text() -> None:
    made = plan(load(gpt2()), texts_from(ids(500)), (64,), windows=1)
    assert [(part.length, part.start) for part in made.parts] == [(64, 0)]
    assert lengths_of(ids(500), windows=1) == [128]
    assert lengths_of(ids(400), windows=4) == [100] * 4


def test_a_model_without_a_limit_is_not_given_a_whole_book() -> None:
    model = llama()
    model.config.max_position_embeddings = 10**6
    assert lengths_of(ids(10_000), model=model) == [BUDGET // 8] * 8
    assert lengths_of(ids(10_000), model=model, windows=1) == [BUDGET]


def test_every_text_at_every_length_once() -> None:
    made = plan(load(gpt2()), texts_from({"a": ids(64), "b": ids(64, seed=1)}), (32, 16, 32), windows=1)
    assert [(part.text.name, part.length, part.tokens) for part in made.parts] == [
        ("a", 16, 16), ("a", 32, 32), ("b", 16, 16), ("b", 32, 32),
    ]  # fmt: skip
    assert all(part.model_inputs["input_ids"].shape == (1, part.length) for part in made.parts)


def test_empty_input_and_one_name_twice_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        lengths_of("")
    with pytest.raises(ValueError, match="at least one input"):
        lengths_of([])
    twice = [*texts_from({"a": ids(20)}), *texts_from({"a": ids(30)})]
    with pytest.raises(ValueError, match="'a'"):
        plan(load(gpt2()), twice, None)


def test_beyond_the_trained_length_is_possible_with_rotary_positions_and_noted() -> None:
    made = plan(load(llama()), texts_from(ids(300)), (300,))
    assert made.notes == ("300 tokens is more than the 256 that LlamaForCausalLM was made for",)


def test_a_dict_of_model_inputs_is_measured_as_it_is() -> None:
    assert lengths_of({"pixel_values": torch.zeros(1, 3, 16, 16)}, model=vit()) == [None]
    assert lengths_of({"input_ids": ids(20, batch=2)}) == [None]
    assert lengths_of({"input_ids": ids(20, batch=2)}, (16,)) == [16]
    with pytest.raises(ValueError, match=r"'inputs'.*8.*got 7"):
        lengths_of({"input_ids": ids(7)})
    with pytest.raises(ValueError, match="input_ids"):
        lengths_of({"pixel_values": torch.zeros(1, 3, 16, 16)}, (16,), vit())


def test_the_manifest_names_a_text_by_its_hash_and_never_holds_it() -> None:
    secret = "the launch code is 0000" * 10
    made = text_facts(texts_from({"memo": secret})[0])
    assert made["name"] == "memo"
    assert len(made["sha256"]) == 64
    assert made["size"] == "230 characters"
    assert "launch" not in str(made)


def test_the_text_by_default_is_one_that_every_installation_has() -> None:
    assert len(topics().split()) > 30_000
    assert [*default_text(bundled=False).values()] == [topics()]
    assert all(len(text.split()) > 1_500 for text in default_text(bundled=True).values())
