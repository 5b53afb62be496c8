"""From what a user has to a forward pass: texts, ids, windows of long texts."""

import lzma
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding, CLIPConfig, CLIPModel

from attnorm.metrics.call import AttentionCall
from attnorm.models import inputs
from attnorm.models.forward_pass import run
from attnorm.models.inputs import Text, Tokens, bos_problem, prepared, texts_from, tokens_of, window_inputs
from attnorm.models.load import LoadedModel, load
from attnorm.models.observe import observe
from tests.models.families import FAMILIES, ids, image, tiny, tiny_inputs, tiny_tokenizer, words


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(tiny("llama"), tokenizer=tiny_tokenizer())


def test_a_text_and_texts() -> None:
    assert texts_from("hello") == [Text("text", "hello")]
    assert texts_from(["a", "b"]) == [Text("text 1", "a"), Text("text 2", "b")]
    assert texts_from({"war": "a", "peace": "b"}) == [Text("war", "a"), Text("peace", "b")]
    assert texts_from(Text("mine", "a")) == [Text("mine", "a")]
    assert texts_from(iter(["a", Text("mine", "b")])) == [Text("text 1", "a"), Text("mine", "b")]


@pytest.mark.parametrize("given", [[1, 2, 3], (1, 2, 3), torch.tensor([1, 2, 3]), np.array([1, 2, 3])])
def test_token_ids(given: Any) -> None:
    (text,) = texts_from(given)
    assert isinstance(text.content, Tensor)
    assert text.content.tolist() == [1, 2, 3]


def test_several_token_ids() -> None:
    first, second = texts_from([[1, 2], torch.tensor([[3, 4], [5, 6]])])
    assert (first.name, second.name) == ("text 1", "text 2")
    assert second.content.shape == (2, 2)


@pytest.mark.parametrize("kind", [dict, BatchEncoding])
def test_a_dict_of_model_inputs(kind: type) -> None:
    (text,) = texts_from(kind({"input_ids": [[1, 2]], "attention_mask": [[1, 1]], "labels": None}))
    assert text.name == "inputs"
    assert set(text.content) == {"input_ids", "attention_mask"}
    assert texts_from(image())[0].content["pixel_values"].shape == (2, 3, 16, 16)


def test_named_model_inputs() -> None:
    first, second = texts_from({"one": {"input_ids": [[1, 2]]}, "two": Text("mine", {"input_ids": [[3]]})})
    assert (first.name, second.name) == ("one", "mine")
    assert [each.content["input_ids"].tolist() for each in (first, second)] == [[[1, 2]], [[3]]]


def test_a_path_is_read_and_gives_its_name(tmp_path: Path) -> None:
    plain, packed = tmp_path / "war.txt", tmp_path / "peace.txt.xz"
    plain.write_text("\ufeffall happy families", encoding="utf-8")
    packed.write_bytes(lzma.compress(b"are alike"))
    assert texts_from(plain) == [Text(str(plain), "all happy families", file=True)]
    assert texts_from([plain, "b", packed]) == [
        Text(str(plain), "all happy families", file=True),
        Text("text 2", "b"),
        Text(str(packed), "are alike", file=True),
    ]
    assert texts_from({"mine": packed}) == [Text("mine", "are alike")]


def test_a_path_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes("Königsberg".encode("latin-1"))
    (tmp_path / "plain.xz").write_text("not packed")
    complaints = {
        "none.txt": "none.txt",
        "empty.txt": "empty.txt' is empty",
        "latin.txt": "latin.txt is not UTF-8 text",
        "plain.xz": "plain.xz.*xz",
    }
    for name, says in complaints.items():
        with pytest.raises(ValueError, match=says):
            texts_from(tmp_path / name)


def test_the_name_of_a_file_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "the war and peace.txt").write_text("Well, Prince")
    for given in ("the war and peace.txt", ["a", "./the war and peace.txt"], {"war": "the war and peace.txt"}):
        with pytest.raises(ValueError, match=r"war and peace\.txt.*pathlib\.Path"):
            texts_from(given)
    for harmless in ("war and peace", "x" * 10_000, "a\0b", "~nobody-of-this-name/x", "the war and peace.txt\n", "."):
        assert texts_from(harmless) == [Text("text", harmless)]


def test_the_name_of_a_file_that_is_missing_is_no_text_either() -> None:
    for name in ("missing.txt", "texts/book.txt.xz"):
        with pytest.raises(ValueError, match=f"got '{name}'"):
            texts_from(name)
    assert texts_from("He wrote to a.txt")[0].content == "He wrote to a.txt"


def test_the_first_tokens_of_a_text(loaded: LoadedModel) -> None:
    text = Text("t", words(50))
    whole = prepared(text, loaded, None)
    assert whole["input_ids"].shape == (1, 50)
    assert torch.equal(prepared(text, loaded, 20)["input_ids"], whole["input_ids"][:, :20])
    assert set(whole) == {"input_ids", "attention_mask"}


@pytest.mark.parametrize("tokenized_by", [lambda text, loaded: prepared(text, loaded, None), tokens_of])
def test_blank_texts_and_single_rows_of_token_ids_that_a_program_made(
    tokenized_by: Callable[[Text, LoadedModel], object], loaded: LoadedModel
) -> None:
    with pytest.raises(ValueError, match="'t' is empty"):
        tokenized_by(Text("t", " \n"), loaded)
    row = torch.arange(3)
    found = tokenized_by(Text("t", row), loaded)
    ids = found["input_ids"] if isinstance(found, dict) else found.ids  # type: ignore[attr-defined]
    assert torch.equal(ids, row[None])


def test_a_long_text_is_not_tokenized_to_its_end(loaded: LoadedModel) -> None:
    text = Text("t", words(100_000))
    assert torch.equal(prepared(text, loaded, 20)["input_ids"], prepared(Text("t", words(50)), loaded, 20)["input_ids"])


def test_a_text_of_very_long_words_is(loaded: LoadedModel) -> None:
    assert prepared(Text("t", f"w1 {'x' * 500} w2 w3"), loaded, 4)["input_ids"].shape == (1, 4)


def test_special_tokens_as_the_tokenizer_puts_them() -> None:
    model = tiny("llama")
    plain = load(model, tokenizer=tiny_tokenizer())
    framed = load(model, tokenizer=tiny_tokenizer(begins=True, ends=True))
    assert prepared(Text("t", words(9)), plain, 4)["input_ids"].tolist() == [[5, 6, 7, 8]]
    assert prepared(Text("t", words(9)), framed, 4)["input_ids"].tolist() == [[1, 5, 6, 2]]


def test_a_text_that_is_too_short(loaded: LoadedModel) -> None:
    for content in (words(10), ids(2, 10)):
        with pytest.raises(ValueError, match=r"'t' .*10 .*11"):
            prepared(Text("t", content), loaded, 11)
    with pytest.raises(ValueError, match="at least 1"):
        prepared(Text("t", ids()), loaded, 0)


@pytest.mark.parametrize("wrong", [-1, 99])
def test_ids_of_another_vocabulary(loaded: LoadedModel, wrong: int) -> None:
    with pytest.raises(ValueError, match=rf"from 0 to 98 .*got {wrong}\."):
        prepared(Text("t", torch.tensor([0, wrong])), loaded, None)


def test_a_dict_is_cut_with_all_that_belongs_to_its_tokens(loaded: LoadedModel) -> None:
    text = texts_from({"input_ids": ids(), "attention_mask": torch.ones(2, 12), "prefix": torch.ones(2, 9)})[0]
    assert {name: tuple(value.shape) for name, value in prepared(text, loaded, 5).items()} == {
        "input_ids": (2, 5),
        "attention_mask": (2, 5),
        "prefix": (2, 9),
    }
    with pytest.raises(ValueError, match="expected input_ids"):
        prepared(texts_from(image())[0], load(tiny("vit")), 5)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_runs_without_its_head(name: str) -> None:
    model = tiny(name, FAMILIES[name].kernels[0])
    one = load(model)
    calls: list[AttentionCall] = []
    with observe(model, calls.append):
        result = run(one, prepared(texts_from(tiny_inputs(name))[0], one, None))
    assert {call.kind for call in calls} == set(FAMILIES[name].kinds)
    first = result if isinstance(result, Tensor) else result[0]
    assert first.shape[-1] == 32  # hidden states, not logits
    assert not any(tensor.requires_grad for tensor in (first, calls[0].query_BHQD))


def test_a_model_of_texts_and_images_has_no_one_thing_that_its_inputs_meet_first() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = CLIPConfig(
        text_config=sizes | {"vocab_size": 99, "max_position_embeddings": 16},
        vision_config=sizes | {"image_size": 16, "patch_size": 4},
    )
    one = load(CLIPModel(config).eval())
    calls: list[AttentionCall] = []
    with observe(one.model, calls.append):
        run(one, prepared(texts_from({"input_ids": ids(), **image()})[0], one, None))
    assert [call.kind for call in calls] == ["encoder", "decoder"]


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_decoder_gets_its_tokens_one_step_later(name: str) -> None:
    one = load(tiny(name))
    inputs = prepared(Text("t", ids()), one, 8)
    assert (
        inputs["decoder_input_ids"].tolist()
        == torch.cat([torch.full((2, 1), one.model.config.decoder_start_token_id), ids()[:, :7]], 1).tolist()
    )
    given = prepared(texts_from({"input_ids": ids(), "decoder_input_ids": ids()[:, :3]})[0], one, None)
    assert given["decoder_input_ids"].shape == (2, 3)


@pytest.mark.parametrize("side", ["left", "right"])
def test_what_the_decoder_reads_is_padded_where_the_input_is(side: str) -> None:
    """Each sequence of the batch gives its decoder what it would give it alone."""
    one = load(tiny("t5"))
    tokens, start = [5, 6, 7, 8], one.model.config.decoder_start_token_id
    padding, hidden = [0, 0, 0], [0, 0, 0]
    row, mask = (
        ([*padding, *tokens], [*hidden, 1, 1, 1, 1]) if side == "left" else ([*tokens, *padding], [1, 1, 1, 1, *hidden])
    )
    given = prepared(texts_from({"input_ids": [row], "attention_mask": [mask]})[0], one, None)
    read = given["decoder_input_ids"][given["decoder_attention_mask"].bool()]
    assert read.tolist() == [start, 5, 6, 7]
    own = {"decoder_input_ids": [[1, 2, 3]], "input_ids": [row], "attention_mask": [mask]}
    assert "decoder_attention_mask" not in prepared(texts_from(own)[0], one, None)


def test_the_head_works_again_afterwards() -> None:
    one = load(tiny("t5"))
    inputs = prepared(Text("t", ids()), one, None)
    with torch.no_grad():
        before = one.model(**inputs).logits
        run(one, inputs)
        assert torch.equal(one.model(**inputs).logits, before)


def test_no_cache_is_built(loaded: LoadedModel) -> None:
    assert run(loaded, prepared(Text("t", ids()), loaded, None)).past_key_values is None


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


def test_two_pieces_of_a_text_are_not_taken_for_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "WHOLE_CHARACTERS", 80)
    loaded = LoadedModel(tiny("llama"), tiny_tokenizer(), "tiny")
    found = tokens_of(Text("t", "ab cd " * 20), loaded, pieces=2)
    assert len(found.piece_ends) == 2
    assert found.piece_ends[-1] == found.ids.shape[1]
    assert not found.whole


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
