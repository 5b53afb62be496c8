"""The rank of the output logits is the planted one, and what lower ranks lose is the plain formula."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import attnorm
from attnorm.analysis.output_bottleneck import NEGLIGIBLE, OutputBottleneck, RankCurve
from attnorm.models.load import LoadedModel

VOCABULARY, WIDTH = 60, 16


def model(rank: int | None = None, width: int = WIDTH) -> GPT2LMHeadModel:
    """A random model; rank: of its output embedding, whose mean row is 0."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=300, n_embd=width, n_layer=1, n_head=2, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    made = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        made.transformer.wte.weight.normal_()  # hidden states that fill the width
        weight = torch.randn(VOCABULARY, width)
        if rank is not None:
            weight = torch.randn(VOCABULARY, rank) @ torch.randn(rank, width) / width**0.5
        made.lm_head.weight.copy_(weight - weight.mean(0))
    return made


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (1, 300), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def found(tokens: torch.Tensor) -> OutputBottleneck:
    return attnorm.output_bottleneck(model(5), tokens, contexts=64)


def test_a_planted_rank_is_found(found: OutputBottleneck) -> None:
    assert found.own.rank == 5
    assert found.own.needed <= 5
    assert found.width == WIDTH
    assert found.vocabulary == VOCABULARY
    assert found.contexts == 64
    assert found.verdict == "room"


def test_singular_values_and_losses_are_those_of_the_dense_logits(tokens: torch.Tensor) -> None:
    made = model()
    found = attnorm.output_bottleneck(made, tokens, contexts=100)
    with torch.no_grad():
        logits = made(input_ids=tokens[:, :257]).logits[0, :100].double()
    logits -= logits.mean(-1, keepdim=True)
    U, values, V = torch.linalg.svd(logits, full_matrices=False)
    np.testing.assert_allclose(
        found.own.singular_values, values[: len(found.own.singular_values)], rtol=1e-3, atol=1e-3
    )
    full = torch.log_softmax(logits, -1)
    for rank, kl, loss in zip(found.own.ranks, found.own.kl, found.own.loss, strict=True):
        cut = torch.log_softmax((U[:, :rank] * values[:rank]) @ V[:rank], -1)
        assert kl == pytest.approx(float((full.exp() * (full - cut)).sum(-1).mean()), rel=1e-2, abs=1e-5)
        expected = torch.nn.functional.nll_loss(cut, tokens[0, 1:101])
        assert loss == pytest.approx(float(expected), rel=1e-3)
    assert found.own.rank in (WIDTH - 1, WIDTH)  # the layer norm may take one dimension away
    assert found.own.kl[-1] == pytest.approx(0, abs=1e-6)


def test_a_larger_model_shows_what_the_width_costs(tokens: torch.Tensor) -> None:
    found = attnorm.output_bottleneck(model(width=8), tokens, larger=model(width=32), contexts=100)
    assert found.larger is not None
    assert found.larger.rank > 8
    assert found.larger.kl_at(8) > NEGLIGIBLE
    assert found.verdict == "binds"
    assert str(8) in found.sentences[-1]
    low = attnorm.output_bottleneck(model(width=8), tokens, larger=model(3, width=32), contexts=100)
    assert low.verdict == "room"


def test_capped_logits_may_have_a_higher_rank_than_the_width(tokens: torch.Tensor) -> None:
    made = model(3)
    plain = made.lm_head.forward
    made.lm_head.forward = lambda x: 5 * torch.tanh(plain(x) / 5)  # type: ignore[method-assign]
    found = attnorm.output_bottleneck(made, tokens, contexts=64)
    assert found.own.rank > WIDTH


def test_few_contexts_are_not_judged(tokens: torch.Tensor) -> None:
    few = attnorm.output_bottleneck(model(), tokens, contexts=20)
    assert few.verdict == "not tested"
    curve = RankCurve("m", (2.0, 1.0), 2, (1, 2), (0.5, 0.0), (3.0, 2.5), 2.5)
    assert OutputBottleneck(width=2, vocabulary=9, contexts=8, own=curve).verdict == "binds"
    assert OutputBottleneck(width=3, vocabulary=9, contexts=8, own=curve).verdict == "partly"


def test_wrong_models_are_rejected(tokens: torch.Tensor) -> None:
    other = GPT2LMHeadModel(GPT2Config(vocab_size=70, n_positions=300, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match=r"60.*70"):
        attnorm.output_bottleneck(model(), tokens, larger=other)
    with pytest.raises(ValueError, match="vocabulary"):
        attnorm.output_bottleneck(model().transformer, tokens)
    with pytest.raises(ValueError, match=r"contexts.*1"):
        attnorm.output_bottleneck(model(), tokens, contexts=1)


def test_analyze_adds_the_output_layer_to_verdict_manifest_and_report(tokens: torch.Tensor, tmp_path: Path) -> None:
    analysis = attnorm.analyze(model(5), tokens, metrics="output", read_keys=0, rows=8, out=tmp_path / "run")
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["output"]["own"]["rank"] == 5
    assert any(one.startswith("Output layer (not attention)") for one in analysis.verdict.sentences)
    page = analysis.save_html(tmp_path / "report.html").read_text()
    assert 'id="output"' in page
    plain = attnorm.analyze(model(5), tokens, read_keys=0, rows=8)
    assert 'id="output"' not in plain.save_html(tmp_path / "plain.html").read_text()


def test_analyze_takes_a_larger_model(tokens: torch.Tensor, tmp_path: Path) -> None:
    def run(**options: Any) -> attnorm.Analysis:
        return attnorm.analyze(model(width=8), tokens, read_keys=0, rows=8, **options)

    analysis = run(metrics="output", larger=model(3, width=32), out=tmp_path / "run")
    output = json.loads((tmp_path / "run" / "manifest.json").read_text())["output"]
    assert (output["larger"]["rank"], output["verdict"]) == (3, "room")
    assert output["own"]["rank"] > output["larger"]["needed"]
    page = analysis.save_html(tmp_path / "report.html").read_text()
    assert output["sentences"][1] in page
    assert page.count('class="series thick"') == 2
    with pytest.raises(FileExistsError, match="larger"):  # the folder holds the rank of another larger model
        run(metrics="output", larger=model(width=32), out=tmp_path / "run")
    with pytest.raises(ValueError, match=r"larger.*output.*core"):
        run(metrics="core", larger=model(width=32))


def test_a_larger_model_with_another_tokenizer_is_rejected(tokens: torch.Tensor) -> None:
    words = {"a": 0, "b": 1}
    one, other = (
        LoadedModel(model(), PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocab, "a"))), name)
        for name, vocab in (("one", words), ("other", {"a": 1, "b": 0}))
    )
    assert attnorm.output_bottleneck(one, tokens, larger=one).larger is not None
    with pytest.raises(ValueError, match=r"tokenizer of one.*other"):
        attnorm.output_bottleneck(one, tokens, larger=other)
