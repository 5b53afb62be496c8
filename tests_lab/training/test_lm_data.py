"""From text to tokens and back: nothing is lost, and it does not matter how the text is cut, packed or read."""

import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from attnorm.evaluation.windows import validation_windows
from attnorm_lab.training.lm import data as texts_module
from attnorm_lab.training.lm.data import (
    END_OF_TEXT,
    as_transformers,
    check_length,
    pieces,
    prepare,
    token_bytes,
    train_tokenizer,
    training_windows,
)


@pytest.fixture(scope="module")
def tokenizer(texts: tuple[Path, Path]) -> Any:
    return train_tokenizer([texts[0]], 400, seed=0)


ANYTHING = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
LIKE_PROSE = st.text(st.sampled_from("ab '\n\n1.,é\t"), max_size=80)


@given(text=ANYTHING | LIKE_PROSE)
def test_every_text_comes_back_unchanged(text: str, tokenizer: Any) -> None:
    assume(END_OF_TEXT not in text)  # the marker between texts is no text
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@given(text=LIKE_PROSE, size=st.integers(1, 20))
def test_tokens_do_not_depend_on_where_a_text_is_cut(
    text: str, size: int, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("cut") / "text.txt"
    path.write_text(text, encoding="utf-8")
    parts = list(pieces(path, size))
    assert "".join(parts) == text
    assert [token for part in parts for token in tokenizer.encode(part).ids] == tokenizer.encode(text).ids


def test_a_text_without_line_ends_is_cut_at_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts_module, "PIECE", 10)
    (tmp_path / "line.txt").write_text("one two three " * 50 + "x" * 500)
    parts = list(pieces(tmp_path / "line.txt", 10))
    assert "".join(parts) == "one two three " * 50 + "x" * 500
    assert max(len(part) for part in parts) <= 60
    assert all(part.startswith(" ") for part in parts[1:10])


def test_the_tokenizer_is_the_same_for_the_same_seed(texts: tuple[Path, Path], tokenizer: Any) -> None:
    assert train_tokenizer([texts[0]], 400, seed=0).to_str() == tokenizer.to_str()


def test_words_numbers_and_paragraphs_are_split_apart(tokenizer: Any) -> None:
    split = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str("It's 12345 o'clock.\n\n  Here --")]
    assert [word.replace("Ġ", " ").replace("Ċ", "\n") for word in split] == [
        "It", "'s", " 123", "45", " o", "'", "clock", ".", "\n\n", " ", " Here", " --",
    ]  # fmt: skip


@given(text=ANYTHING)
def test_bytes_of_tokens_add_up_to_the_bytes_of_the_text(text: str, tokenizer: Any) -> None:
    assert token_bytes(tokenizer)[tokenizer.encode(text).ids].sum() == len(text.encode())


def test_saved_and_loaded_it_is_the_same_tokenizer(tokenizer: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    as_transformers(tokenizer, context=64).save_pretrained(tmp_path)
    loaded: Any = AutoTokenizer.from_pretrained(tmp_path)
    text = "The old captain's house.\n\nNobody  saw it, “naïve” as he was."
    assert loaded(text).input_ids == tokenizer.encode(text).ids
    assert loaded.decode(loaded(text).input_ids) == text


def test_packed_and_plain_texts_give_the_same_tokens(texts: tuple[Path, Path], tmp_path: Path) -> None:
    packed = tmp_path / "train.txt.xz"
    packed.write_bytes(lzma.compress(texts[0].read_bytes()))
    plain = prepare([texts[0]], texts[1], tmp_path / "one", vocab=300, seed=0)
    same = prepare([packed], texts[1], tmp_path / "two", vocab=300, seed=0)
    assert np.array_equal(plain.train, same.train)
    assert plain.tokenizer.to_str() == same.tokenizer.to_str()


def test_the_corpus_holds_every_text_and_its_end(texts: tuple[Path, Path], tmp_path: Path) -> None:
    marked = tmp_path / "marked.txt"
    marked.write_text("One book.<|endoftext|>Another book.\n")
    seen: list[tuple[str, int]] = []
    corpus = prepare(
        [texts[0], marked], texts[1], tmp_path / "data", vocab=300, seed=0,
        progress=lambda what, tokens: seen.append((what, tokens)),
    )  # fmt: skip
    end = corpus.end_of_text
    assert (corpus.train == end).sum() == 3
    assert corpus.train[-1] == corpus.valid[-1] == end
    text = corpus.tokenizer.decode(corpus.train, skip_special_tokens=True)
    assert text == texts[0].read_text() + "One book.Another book.\n"
    assert isinstance(corpus.train, np.memmap)
    assert [what for what, _ in seen] == [
        "preparing the tokenizer",
        *["encoding the training text"] * 2,
        "encoding the validation text",
    ]
    assert seen[2][1] == len(corpus.train) - 1


def test_an_encoded_text_is_not_encoded_again(texts: tuple[Path, Path], tmp_path: Path) -> None:
    first = prepare([texts[0]], texts[1], tmp_path, vocab=300, seed=0)
    seen: list[str] = []
    second = prepare([texts[0]], texts[1], tmp_path, vocab=300, seed=0, progress=lambda what, tokens: seen.append(what))
    assert not seen
    assert np.array_equal(first.train, second.train)
    prepare([texts[0]], texts[1], tmp_path, vocab=301, seed=0)
    assert len(list(tmp_path.iterdir())) == 2


TOKENS = np.arange(100, dtype=np.uint16)


def test_windows_depend_on_seed_and_step_alone() -> None:
    def windows(seed: int, step: int) -> torch.Tensor:
        return training_windows(TOKENS, seed=seed, step=step, batch=4, context=8)

    first = windows(3, 7)
    np.random.seed(1)
    torch.manual_seed(1)
    windows(3, 6)
    assert torch.equal(windows(3, 7), first)
    assert not torch.equal(windows(3, 8), first)
    assert not torch.equal(windows(4, 7), first)


def test_windows_are_runs_of_the_text_and_reach_both_of_its_ends() -> None:
    many = torch.cat([training_windows(TOKENS, seed=0, step=step, batch=100, context=8) for step in range(20)])
    assert many.shape == (2000, 9)
    assert torch.equal(many - many[:, :1], torch.arange(9).expand(2000, 9))
    assert set(many[:, 0].tolist()) == set(range(92))


@pytest.mark.parametrize("length", [10, 11, 17, 18, 19, 100])
def test_every_validation_token_but_the_first_is_predicted_once(length: int) -> None:
    windows = validation_windows(TOKENS[:length], context=9)
    predicted = torch.cat([window[1:] for window in windows])
    assert predicted.tolist() == list(range(1, length))
    assert all(len(window) <= 10 for window in windows)


def test_a_few_windows_are_spread_over_the_text() -> None:
    windows = validation_windows(TOKENS, context=9, most=3)
    assert [int(window[0]) for window in windows] == [0, 36, 81]
    assert all(len(window) == 10 for window in windows)


def test_the_shortest_text_has_one_window() -> None:
    check_length(TOKENS[:10], 8, "training")
    assert training_windows(TOKENS[:10], seed=0, step=0, batch=5, context=8).shape == (5, 9)
    with pytest.raises(ValueError, match=r"training text.*9 tokens.*8"):
        check_length(TOKENS[:9], 8, "training")
