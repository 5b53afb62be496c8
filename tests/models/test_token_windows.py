"""Windows of a text: where they start, in whole texts and in pieces of long ones, and the inputs they become."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnorm.models import inputs
from attnorm.models.inputs import Text, Tokens, bos_problem, tokens_of, window_inputs
from attnorm.models.load import LoadedModel
from tests.models.families import tiny, tiny_tokenizer


def tokens(count: int, **options: object) -> Tokens:
    return Tokens(torch.arange(count)[None], **options)  # type: ignore[arg-type]


def test_special_tokens_count_and_pieces_stand_for_the_whole_text() -> None:
    assert tokens(10).count == 10
    assert tokens(10, before=(1,), after=(2, 3)).count == 13
    assert tokens(10, before=(1,), after=(2,), share=0.25, piece_ends=(5, 10)).count == 42


@pytest.mark.parametrize(
    ("windows", "length", "starts"),
    [(1, 6, [0]), (2, 6, [0, 8]), (3, 6, [0, 4, 8]), (3, 7, None), (1, 14, [0]), (1, 15, None)],
)
def test_windows_of_a_whole_text_reach_from_its_start_to_its_end(
    windows: int, length: int, starts: list[int] | None
) -> None:
    assert tokens(12, before=(1,), after=(2,)).starts(windows, length) == starts


@pytest.mark.parametrize(
    ("windows", "length", "starts"),
    [(1, 4, [0]), (2, 4, [0, 11]), (3, 4, [0, 5, 11]), (3, 5, [0, 5, 10]), (4, 4, None), (1, 6, None)],
)
def test_windows_of_pieces_start_at_pieces_and_the_last_ends_with_the_text(
    windows: int, length: int, starts: list[int] | None
) -> None:
    assert tokens(15, piece_ends=(5, 10, 15)).starts(windows, length) == starts


def test_of_a_long_text_equal_pieces_from_start_to_end_are_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "WHOLE_CHARACTERS", 80)
    content = " ".join(f"{number:03d}" for number in range(250))  # 999 characters
    loaded = LoadedModel(tiny("llama"), tiny_tokenizer(), "tiny")
    pieces = inputs._pieces(content, inputs.PIECES)
    assert [piece[:3] for piece in pieces] == ["000", "036", "071", "107", "142", "177", "213", "248"]
    assert pieces[0] == content[:10]
    assert pieces[-1] == content[-7:]
    found = tokens_of(Text("t", content), loaded)
    assert len(found.piece_ends) == 8
    assert found.share == sum(map(len, pieces)) / len(content)
    assert tokens_of(Text("t", content), loaded, whole=True).whole


def test_inputs_that_the_tokenizer_makes_are_filled_for_each_window() -> None:
    of = tokens(9, before=(1,), after=(2,), names=("input_ids", "token_type_ids", "attention_mask"))
    found = window_inputs(Text("t", "unused"), of, LoadedModel(tiny("bert"), tiny_tokenizer(), "tiny"), 3, 6)
    assert found["input_ids"].tolist() == [[1, 3, 4, 5, 6, 2]]
    assert found["token_type_ids"].tolist() == [[0] * 6]
    assert found["attention_mask"].tolist() == [[1] * 6]


def with_bos_token(**changed: Any) -> LoadedModel:
    """A causal model whose BOS, token 1, is not its EOS."""
    about = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": None, "is_encoder_decoder": False, **changed}
    config = SimpleNamespace(**{name: about[name] for name in ("bos_token_id", "eos_token_id", "is_encoder_decoder")})
    model: Any = SimpleNamespace(config=config, can_generate=lambda: about.get("generates", True))
    tokenizer: Any = SimpleNamespace(**about, convert_ids_to_tokens=lambda token: f"<{token}>")
    return LoadedModel(model, tokenizer, "a model")


@pytest.mark.parametrize(
    "changed",
    [
        {"bos_token_id": None},
        {"eos_token_id": 1},
        {"cls_token_id": 3},
        {"is_encoder_decoder": True},
        {"generates": False},
    ],
)
def test_only_a_causal_model_with_a_bos_of_its_own_needs_it(changed: dict[str, Any]) -> None:
    without = Tokens(torch.tensor([[5, 6]]))
    found = bos_problem(without, with_bos_token())
    assert found is not None
    assert "'<1>'" in found
    assert bos_problem(without, with_bos_token(**changed)) is None


def test_a_bos_before_or_in_front_of_the_tokens_is_no_problem() -> None:
    loaded = with_bos_token()
    assert bos_problem(Tokens(torch.tensor([[1, 5]])), loaded) is None
    assert bos_problem(Tokens(torch.tensor([[5, 6]]), before=(1,)), loaded) is None
    assert bos_problem(Tokens(torch.tensor([[1, 6]]), before=(4,)), loaded) is not None
    assert bos_problem(Tokens(torch.zeros(1, 0, dtype=torch.long)), loaded) is not None


@pytest.mark.parametrize(
    ("before", "bos", "expected"),
    [((), None, ()), ((7, 5), None, (7, 5)), ((5,), True, (7, 5)), ((7, 5), True, (7, 5)), ((7, 5), False, (5,))],
)
def test_a_bos_token_is_put_first_or_left_out(
    before: tuple[int, ...], bos: bool | None, expected: tuple[int, ...]
) -> None:
    loaded: Any = SimpleNamespace(
        name="a model", tokenizer=SimpleNamespace(bos_token_id=7), model=SimpleNamespace(config=None)
    )
    assert inputs._with_bos(before, loaded, bos) == expected
    loaded.tokenizer.bos_token_id = None
    loaded.model.config = SimpleNamespace(bos_token_id=7)
    assert inputs._with_bos(before, loaded, bos) == expected
    loaded.model.config.bos_token_id = None
    if bos is not None:
        with pytest.raises(ValueError, match=f"bos={bos}.*a model"):
            inputs._with_bos(before, loaded, bos)


def test_a_piece_starts_at_a_word_unless_its_first_200_characters_have_no_space(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inputs, "WHOLE_CHARACTERS", 900)
    for letters, at_word in ((199, True), (200, False)):
        content = ("a" * letters + " b").ljust(300, "c") * 4
        first, second = inputs._pieces(content, 2)
        assert first == content[:450]  # the start of the text is the start of a word
        assert second == content[600 + letters + 1 : 1200]
        pieces = inputs._pieces(content, 3)
        assert pieces[0] == content[:300]
        assert pieces[1] == content[300 + letters + 1 : 750]
        assert pieces[2] == (content[900 + letters + 1 : 1200] if at_word else content[900:1200])


@pytest.mark.parametrize(("length", "pieces"), [(80, 0), (81, 8)])
def test_texts_up_to_the_limit_are_tokenized_whole(length: int, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "WHOLE_CHARACTERS", 80)
    loaded = LoadedModel(tiny("llama"), tiny_tokenizer(), "tiny")
    found = tokens_of(Text("t", ("ab cd " * 20)[:length]), loaded)
    assert len(found.piece_ends) == pieces
    assert (found.share == 1) == (pieces == 0)


def test_two_pieces_of_a_text_are_not_taken_for_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "WHOLE_CHARACTERS", 80)
    loaded = LoadedModel(tiny("llama"), tiny_tokenizer(), "tiny")
    found = tokens_of(Text("t", "ab cd " * 20), loaded, pieces=2)
    assert len(found.piece_ends) == 2
    assert found.piece_ends[-1] == found.ids.shape[1]
    assert not found.whole
