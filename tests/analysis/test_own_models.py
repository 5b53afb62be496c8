"""observe() and measure(): the Analysis of code that is no transformers model."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attnorm
from attnorm.models.dispatch import UnsupportedModel
from tests.analysis.tiny_models import VOCABULARY, llama

NUMBERS = ("entropy_nats", "max_weight", "logit_spread", "effective_keys", "sink_mass")


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """A GPT as people write it themselves."""

    def __init__(self, width: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, width)
        self.wpe = nn.Embedding(128, width)
        self.h = nn.ModuleList(CausalSelfAttention(width, heads) for _ in range(layers))
        nn.init.normal_(self.wte.weight, std=3.0)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = x + block(x)
        return x @ self.wte.weight.T


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 64))


def test_a_model_of_ones_own_is_analyzed_and_computes_the_same(tokens: Tensor, tmp_path: Path) -> None:
    model = GPT()
    expected = model(tokens)
    with attnorm.observe() as seen:
        observed = model(tokens)
    assert torch.equal(observed, expected)
    analysis = seen.analysis()
    assert analysis.heads.num_rows == 8
    about = analysis.manifest["model"]
    assert (about["name"], about["layers"], about["heads"]) == ("GPT", 2, 4)
    assert [module["path"] for module in about["modules"]] == ["h.0", "h.1"]
    assert "h.*" in analysis.summary()
    assert str(attnorm.Analysis.load(analysis.save(tmp_path / "run")).heads.to_pylist()) == str(
        analysis.heads.to_pylist()
    )
    assert analysis.save_html(tmp_path / "report.html").is_file()


def test_numbers_are_those_of_dense_weights_in_float64(tokens: Tensor) -> None:
    model = GPT()
    with attnorm.observe(rows="last", metrics="core") as seen:
        model(tokens[:1])
    row = seen.analysis().head(0, 3).numbers
    x = (model.wte(tokens[:1]) + model.wpe(torch.arange(64))).double()
    attention = model.h[0].double()
    q, k, _ = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in attention.c_attn(x).chunk(3, -1))
    weights = torch.softmax(q[0, 3, -1] @ k[0, 3].T / math.sqrt(8), -1)
    entropy = float(-(weights * weights.log()).sum())
    assert row["entropy_nats"] == pytest.approx(entropy, rel=1e-6)
    assert row["max_weight"] == pytest.approx(float(weights.max()), rel=2e-6)


def test_a_transformers_model_has_the_numbers_of_analyze(tokens: Tensor) -> None:
    model = llama()
    with attnorm.observe() as seen, torch.no_grad():
        model(tokens, use_cache=False)
    ours, theirs = seen.analysis(), attnorm.analyze(model, tokens)
    assert ours.heads.num_rows == theirs.heads.num_rows
    for row, expected in zip(ours.heads.to_pylist(), theirs.heads.to_pylist(), strict=True):
        assert [row[name] for name in ("kind", "layer", "head", "rows")] == [
            expected[name] for name in ("kind", "layer", "head", "rows")
        ]
        for name in NUMBERS:
            assert row[name] == pytest.approx(expected[name], rel=1e-6), name


def test_padding_is_left_out_as_analyze_leaves_it_out(tokens: Tensor) -> None:
    model, mask = llama(), torch.ones(2, 64, dtype=torch.long)
    mask[1, 40:] = 0
    with attnorm.observe(metrics="core") as seen, torch.no_grad():
        model(tokens, attention_mask=mask, use_cache=False)
    expected = attnorm.analyze(model, {"input_ids": tokens, "attention_mask": mask}, metrics="core")
    for table in ("heads", "by_length"):
        ours, theirs = (one.tables[table]["rows"].to_pylist() for one in (seen.analysis(), expected))
        assert ours == theirs


def test_every_pass_is_a_text_of_its_own(tokens: Tensor) -> None:
    model = GPT()
    with attnorm.observe(metrics="core") as seen:
        model(tokens)
        model(tokens[:, :32])
    assert seen.passes == 2
    rows = seen.analysis().heads.select(["text", "length"]).to_pylist()
    assert {(row["text"], row["length"]) for row in rows} == {("input 1", 64), ("input 2", 32)}


def test_code_without_a_known_call_is_an_error_that_names_the_way_out() -> None:
    with attnorm.observe() as seen:
        nn.Linear(3, 3)(torch.randn(2, 3))
    with pytest.raises(UnsupportedModel, match=r"attnorm\.measure"):
        seen.analysis()


def test_an_observation_is_read_after_it_ended() -> None:
    with attnorm.observe() as seen, pytest.raises(RuntimeError, match="Leave"):
        seen.analysis()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", ["no", "boolean", "float"])
def test_tensors_are_measured_as_attention_computes_them(causal: bool, masked: str) -> None:
    q, k, v = torch.randn(1, 4, 20, 8), torch.randn(1, 2, 24, 8), torch.randn(1, 2, 24, 5)
    hidden = torch.rand(20, 24) > 0.7
    added = torch.randn(20, 24)
    mask = {"no": None, "boolean": ~hidden, "float": added}[masked]
    analysis = attnorm.measure(q, k, v, mask=mask, causal=causal, scale=0.9, rows="last", metrics="core")
    logits = q[0, 2, -1].double() @ k[0, 1].double().T * 0.9
    logits = logits + added[-1] if masked == "float" else logits
    logits = logits.masked_fill(hidden[-1], -torch.inf) if masked == "boolean" else logits
    weights = logits.softmax(-1)
    kind = "decoder" if causal else "cross"
    row = analysis.head(0, 2, kind=kind).numbers
    assert row["entropy_nats"] == pytest.approx(float(torch.special.entr(weights).sum()), rel=1e-6)


def test_lists_of_tensors_are_layers() -> None:
    layers = [torch.randn(1, 2, 16, 8) for _ in range(3)]
    analysis = attnorm.measure(layers, layers, layers, causal=True, name="mine", metrics="core")
    assert analysis.heads["layer"].to_pylist() == [0, 0, 1, 1, 2, 2]
    assert analysis.manifest["model"]["name"] == "mine"
    with pytest.raises(ValueError, match="3 q, 2 k"):
        attnorm.measure(layers, layers[:2], layers)


def test_timm_models_are_observed() -> None:
    """The real package, with random weights."""
    timm = pytest.importorskip("timm", reason="timm is not installed, or it has no torchvision that imports here")
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, depth=2).eval()
    image = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        expected = model(image)
        with attnorm.observe(rows=16, metrics="core") as seen:
            observed = model(image)
    assert torch.equal(observed, expected)
    assert [(layer.path, layer.heads) for layer in seen.layers] == [("blocks.0.attn", 3), ("blocks.1.attn", 3)]
    assert seen.analysis().heads["length"].to_pylist() == [197] * 6


def test_a_length_rule_starts_at_the_number_of_keys_of_the_first_call() -> None:
    q, k, v = torch.randn(3, 1, 2, 48, 8)
    seen = {
        spec: attnorm.measure(q, k, v, causal=True, normalizers=(spec,), metrics="core")
        for spec in ("ssmax", "ssmax:train_length=48")
    }
    short, stated = (run.heads["entropy_nats"].to_pylist() for run in seen.values())
    assert short == pytest.approx(stated)
    assert "ssmax starts with train_length 48" in seen["ssmax"].summary()
    assert "train_length 48," not in seen["ssmax:train_length=48"].summary()
