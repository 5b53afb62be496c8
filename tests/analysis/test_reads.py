"""Which tokens a head reads: the weights of the model's own eager attention, with the text of their positions."""

from io import StringIO
from typing import Any

import pyarrow as pa
import pytest
import torch
from rich.console import Console
from transformers import ViTConfig, ViTModel

import attnorm
from attnorm.analysis.reads import listed_rows, token_text
from attnorm.analysis.result import Analysis
from attnorm.analysis.tables import SCHEMAS
from attnorm.models.load import load
from attnorm.report.terminal import analysis_summary
from attnorm.report.top_keys import top_keys
from attnorm.text import visible
from tests.models.tiny import llama, tiny, tokens

CORE: dict[str, Any] = {"metrics": "core", "top_n": (1, 5)}


@pytest.fixture(scope="module")
def text_run() -> Analysis:
    """The bundled model, which has a tokenizer."""
    return attnorm.analyze("bundled", "He said to her, and she to him: " * 6, lengths=48, read_keys=5, **CORE)


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_keys_and_weights_are_those_of_eager_attention(family: str) -> None:
    model, ids = tiny(family).double(), tokens(1, 40)
    found = attnorm.analyze(model, {"input_ids": ids}, read_keys=6, read_rows=(3, -1), **CORE)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = torch.stack(model(input_ids=ids, output_attentions=True).attentions)[:, 0]
    assert sorted(set(found.reads["row"].to_pylist())) == [3, 39]
    margin = 1e-5  # eager softmax is in float32
    for one in found.reads.to_pylist():
        row = weights[one["layer"], one["head"], one["row"]]
        assert row[one["key"]].item() == pytest.approx(one["weight"], rel=margin)
        heavier, no_lighter = (row > one["weight"] * (1 + margin)).sum(), (row >= one["weight"] * (1 - margin)).sum()
        assert heavier < one["rank"] <= no_lighter  # any order of keys that weigh the same
        assert (one["row_token"], one["key_token"]) == (f"#{ids[0, one['row']]}", f"#{ids[0, one['key']]}")
    kept = {row: min(6, 40 if family == "bert" else row + 1) for row in (3, 39)}
    expected = [(row, rank) for row, count in kept.items() for rank in range(1, count + 1)] * found.heads.num_rows
    assert sorted((one["row"], one["rank"]) for one in found.reads.to_pylist()) == sorted(expected)


def test_cross_attention_reads_the_encoders_tokens() -> None:
    model, ids = tiny("t5"), tokens(1, 30)
    later = tokens(1, 12, seed=3)
    found = attnorm.analyze(model, {"input_ids": ids, "decoder_input_ids": later}, read_keys=3, **CORE)
    sides = {one["side"] for one in found.tokens.to_pylist()}
    assert sides == {"encoder", "decoder"}
    for one in found.reads.to_pylist():
        keys, rows = (ids if one["kind"] != "decoder" else later), (ids if one["kind"] == "encoder" else later)
        assert one["key_token"] == f"#{keys[0, one['key']]}"
        assert one["row_token"] == f"#{rows[0, one['row']]}"


def test_padding_is_neither_a_row_nor_a_key() -> None:
    ids, mask = tokens(2, 30), torch.ones(2, 30, dtype=torch.long)
    mask[0, :10] = 0
    found = attnorm.analyze(llama(), {"input_ids": ids, "attention_mask": mask}, read_keys=4, read_rows=(0, -1), **CORE)
    assert set(found.reads["row"].to_pylist()) == {10, 29}
    assert min(found.reads["key"].to_pylist()) >= 10


def test_images_have_positions_without_text() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = ViTModel(ViTConfig(**sizes, image_size=32, patch_size=8))
    pixels = torch.randn(1, 3, 32, 32)
    found = attnorm.analyze(model, {"pixel_values": pixels}, read_keys=2, **CORE)
    assert found.reads.num_rows
    assert set(found.reads["key_token"].to_pylist()) == {None}
    assert found.tokens.num_rows == 0
    assert "(no text)" in str(found.top_keys(0, 0))


def test_tokens_spell_the_text_and_keys_quote_it(text_run: Analysis) -> None:
    text = "".join(text_run.tokens["token"].to_pylist())
    assert ("He said to her, and she to him: " * 6).startswith(text)
    at = dict(zip(text_run.tokens["position"].to_pylist(), text_run.tokens["token"].to_pylist(), strict=True))
    assert len(at) == 48
    for one in text_run.reads.to_pylist():
        assert (at[one["row"]], at[one["key"]]) == (one["row_token"], one["key_token"])


def test_by_default_four_rows_spread_over_the_text_with_the_last(text_run: Analysis) -> None:
    assert sorted(set(text_run.reads["row"].to_pylist())) == [11, 23, 35, 47]
    found = text_run.top_keys(2, 3)
    assert (found.row, len(found)) == (47, 5)
    assert [one.weight for one in found] == sorted((one.weight for one in found), reverse=True)
    assert text_run.top_keys(2, 3, row=11) == text_run.top_keys(2, 3, row=-4)
    assert text_run.top_keys(2, 3, row=11).row == 11
    assert str(found).startswith("layer 2 head 3, row 47")
    assert text_run.head(2, 3).reads.num_rows == 4 * 5


def test_a_row_that_was_not_kept_is_named_with_what_to_do(text_run: Analysis) -> None:
    with pytest.raises(ValueError, match=r"rows 11, 23, 35, 47, got 12.*read_rows=\(12,\)"):
        text_run.top_keys(0, 0, row=12)
    with pytest.raises(ValueError, match="got -5"):
        text_run.top_keys(0, 0, row=-5)
    with pytest.raises(ValueError, match="--tokens 8"):
        top_keys(SCHEMAS["reads"].empty_table(), -1)


def test_0_keys_keep_no_token_of_the_text() -> None:
    found = attnorm.analyze(llama(), tokens(1, 32), read_keys=0, **CORE)
    assert (found.reads.num_rows, found.tokens.num_rows) == (0, 0)


def test_several_normalizers_read_from_the_same_rows() -> None:
    found = attnorm.analyze(llama(), tokens(1, 32), normalizers=("model", "sparsemax"), read_keys=4, **CORE)
    for name in ("model", "sparsemax"):
        head = found.head(0, 0, normalizer=name).reads
        assert set(head["row"].to_pylist()) == {7, 15, 23, 31}
    sparse = [read["weight"] for read in found.reads.to_pylist() if read["normalizer"] == "sparsemax"]
    assert sparse
    assert min(sparse) > 0


def test_merged_runs_keep_every_row_once() -> None:
    model = llama()
    one, two = (
        attnorm.analyze(model, tokens(1, 32), read_keys=4, read_rows=rows, normalizers=names, **CORE)
        for rows, names in (((-1,), "model"), ((-1,), ("model", "ssmax")))
    )
    merged = Analysis.merged([one, two])
    assert merged.reads.num_rows == two.reads.num_rows
    assert merged.tokens.num_rows == 32


@pytest.mark.parametrize(
    ("wanted", "rows"),
    [(1, [9]), (3, [2, 6, 9]), (20, list(range(10))), ((0, -1), [0, 9]), ((4, 99, -99), [4]), ((50,), [])],
)  # fmt: skip
def test_listed_rows(wanted: Any, rows: list[int]) -> None:
    assert listed_rows(wanted, 10, None).tolist() == rows


def test_what_no_tokenizer_knows_is_shown_as_its_number() -> None:
    assert token_text(None, 17) == "#17"
    assert token_text(load("bundled").tokenizer, 10**7) == "#10000000"


def test_every_character_of_a_hostile_token_is_seen() -> None:
    shown = visible("a\x1b]0;title\x07\x9b31m\u202egpj\u2028\r\n\t\x00\u200b\U000e0041")
    assert shown.isprintable()
    assert shown == "a␛]0;title␇⟨U+009B⟩31m⟨U+202E⟩gpj⟨U+2028⟩␍⏎⇥␀⟨U+200B⟩⟨U+E0041⟩"
    assert visible("x" * 100, 10) == "x" * 9 + "…"


def test_hostile_tokens_do_not_reach_a_terminal_as_they_are(text_run: Analysis) -> None:
    evil = "\x1b[2J[b]\x07\u202e"
    reads = text_run.reads
    for name in ("row_token", "key_token"):
        reads = reads.set_column(reads.column_names.index(name), name, pa.array([evil] * reads.num_rows))
    hostile = Analysis(**{**text_run.tables, "reads": reads}, manifest=text_run.manifest)
    out = StringIO()
    Console(file=out, width=120).print(analysis_summary(hostile.report_data))
    assert "␛[2J[b]␇⟨U+202E⟩" in out.getvalue()
    assert not {"\x1b", "\x07", "\u202e"} & set(out.getvalue())
    assert "\x1b" not in str(hostile.top_keys(0, 0))


def test_the_first_window_of_a_text_shows_what_heads_read() -> None:
    found = attnorm.analyze(llama(), tokens(1, 96)[0], lengths=32, windows=3, read_keys=4, **CORE)
    assert found.windows["window"].unique().to_pylist() == [0, 1, 2]
    assert found.reads["window"].unique().to_pylist() == found.tokens["window"].unique().to_pylist() == [0]
    assert found.tokens.num_rows == 32
