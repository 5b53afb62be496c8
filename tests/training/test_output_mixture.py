"""Mixtures at the output of `train lm`: the formula of the paper, its gradients, saving, and the rank of its logits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import attnorm
from attnorm.models.load import load
from attnorm.models.output_head import MixtureHead, output_of, parse_output, set_output
from attnorm.training.lm.data import prepare, validation_windows
from attnorm.training.lm.evaluate import predicted_loss, validation_loss
from attnorm.training.lm.model import build_model, count_parameters, softmax_of_equal_size
from tests.training.conftest import tiny
from tests.training.test_lm import assert_equal_runs, metrics

Train = Callable[..., dict[str, Any]]
WIDTH, VOCABULARY, COMPONENTS = 6, 40, 3


def head(kind: str, dtype: torch.dtype = torch.float64) -> MixtureHead:
    torch.manual_seed(0)
    made = MixtureHead(torch.nn.Parameter(torch.randn(VOCABULARY, WIDTH, dtype=dtype)), kind, COMPONENTS)
    torch.nn.init.normal_(made.attnorm_prior)  # weights that differ
    return made


def probabilities(made: MixtureHead, hidden: torch.Tensor) -> torch.Tensor:
    """The formulas of the paper for one hidden state (width,)."""
    weights = torch.softmax(made.attnorm_prior @ hidden, 0)
    states = [torch.tanh(U @ hidden) for U in made.attnorm_latent.view(COMPONENTS, WIDTH, WIDTH)]
    if made.kind == "moc":
        return torch.softmax(made.weight @ sum(w * h for w, h in zip(weights, states, strict=True)), 0)
    mixed: Any = sum(w * torch.softmax(made.weight @ h, 0) for w, h in zip(weights, states, strict=True))
    return mixed  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["mos", "moc"])
def test_probabilities_and_gradients_are_those_of_the_formula(kind: str) -> None:
    made = head(kind)
    hidden = torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(VOCABULARY, (2, 5))
    expected = torch.stack([probabilities(made, h) for h in hidden.flatten(0, 1)]).view(2, 5, -1)
    torch.testing.assert_close(torch.softmax(made(hidden).double(), -1), expected, rtol=1e-5, atol=1e-8)
    plain = -expected.gather(-1, targets[..., None]).log().mean()
    loss = predicted_loss(hidden, made, targets)
    torch.testing.assert_close(loss.double(), plain, rtol=1e-6, atol=0)
    inputs = [hidden, *made.parameters()]
    for got, want in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(plain, inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-7)


def test_log_probabilities_are_float32_and_finite_in_half_precision() -> None:
    made = head("mos", torch.float32).bfloat16()
    found = made(30 * torch.randn(4, WIDTH, dtype=torch.bfloat16))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.logsumexp(-1), torch.zeros(4), rtol=0, atol=1e-5)


def test_the_loss_keeps_no_logits_for_the_backward_pass() -> None:
    """What a plain implementation keeps: K x tokens x vocabulary. Here: nothing with the size of the vocabulary."""
    made, hidden, targets = head("mos"), torch.randn(7, WIDTH, dtype=torch.float64), torch.randint(VOCABULARY, (7,))
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.numel()), t)[1], lambda t: t):
        made.loss(hidden[None], targets[None]).backward()
    inside = [numel for numel in kept if numel >= 7 * VOCABULARY]
    assert len(inside) <= COMPONENTS * 2  # seen only while one component is computed again
    before: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (before.append(t.numel()), t)[1], lambda t: t):
        made.loss(hidden[None], targets[None])
    assert max(before) < 7 * VOCABULARY


@pytest.mark.parametrize("spec", ["mos", "mos:1", "mos:65", "mos:x", "dos:4", "", "mos:4:2"])
def test_a_mixture_that_cannot_be(spec: str) -> None:
    with pytest.raises(ValueError, match=r"mos:K") as error:
        tiny(output=spec)
    assert repr(spec) in str(error.value)


def test_specs() -> None:
    assert parse_output("softmax") is None
    assert parse_output("mos:4") == ("mos", 4)
    assert "output" not in tiny().as_dict()  # folders from before there was a choice continue
    assert tiny(output="moc:2").as_dict()["output"] == "moc:2"


def test_both_mixtures_have_equal_parameters_and_the_body_of_the_plain_model() -> None:
    models = {
        output: build_model(tiny(architecture="llama", output=output), vocabulary=300, end_of_text=0)
        for output in ("softmax", "mos:4", "moc:4")
    }
    sizes = {output: count_parameters(model) for output, model in models.items()}
    assert sizes["mos:4"] == sizes["moc:4"] == sizes["softmax"] + 4 * 32 * 32 + 4 * 32
    assert models["mos:4"].lm_head.weight is models["mos:4"].model.embed_tokens.weight
    for name, value in models["softmax"].state_dict().items():
        assert torch.equal(models["mos:4"].state_dict()[name], value), name
    equal = softmax_of_equal_size(tiny(architecture="llama", output="mos:4"), 300, sizes["mos:4"])
    wider = build_model(tiny(architecture="llama", width=equal["width"]), vocabulary=300, end_of_text=0)
    assert count_parameters(wider) == equal["parameters"] >= sizes["mos:4"]
    narrower = build_model(tiny(architecture="llama", width=equal["width"] - 4), vocabulary=300, end_of_text=0)
    assert count_parameters(narrower) < sizes["mos:4"]


def test_an_output_layer_with_a_bias_is_refused() -> None:
    model = build_model(tiny(), vocabulary=300, end_of_text=0)
    model.lm_head = torch.nn.Linear(32, 300)
    with pytest.raises(ValueError, match=r"mos:4.*bias=True"):
        set_output(model, "mos:4")


@pytest.fixture(scope="module")
def run(train: Train, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("mixture") / "run"
    changed = {"architecture": "llama", "normalizer": "ssmax", "output": "mos:4"}
    return out, train(out, **changed, options={"sample_tokens": 8, "lengths": [16, 64]})


def test_a_mixture_learns_and_is_evaluated_at_every_length(run: tuple[Path, dict[str, Any]]) -> None:
    out, record = run
    losses = [entry["loss"] for entry in metrics(out)]
    assert losses[-1] < 0.75 * losses[0]
    assert [each["length"] for each in record["result"]["validation"]["by_length"]] == [16, 32, 64]
    assert record["run"]["output"] == "mos:4"
    card = (out / "README.md").read_text()
    assert "mixture of 4 softmaxes" in card
    assert "attnorm.from_pretrained" in card
    assert f"{record['result']['softmax_of_equal_size']['parameters']:,}" in card
    assert json.loads((out / "config.json").read_text())["attnorm_output"] == "mos:4"


def test_the_saved_folder_has_the_loss_it_says(
    run: tuple[Path, dict[str, Any]], texts: tuple[Path, Path], encoded: Path, tmp_path: Path
) -> None:
    out, record = run
    corpus = prepare([texts[0]], texts[1], encoded, vocab=300, seed=0)
    windows = validation_windows(corpus.valid, 32)
    stated = record["result"]["validation"]["model"]["nats_per_token"]
    first = attnorm.from_pretrained(out, dtype=torch.float32).eval()
    first.save_pretrained(tmp_path / "again")  # transformers' own
    models = [first, load(out, device="cpu").model, attnorm.from_pretrained(tmp_path / "again", dtype=torch.float32)]
    for model in models:
        assert output_of(model) == "mos:4"
        assert validation_loss(model.eval(), windows, torch.device("cpu"), torch.float32) == pytest.approx(
            stated, abs=2e-5
        )
    ids = windows[0][None, :20]
    with torch.no_grad():
        logits = first(input_ids=ids[:, :-1]).logits
    own = F.cross_entropy(logits[0], ids[0, 1:])
    assert own.item() == pytest.approx(validation_loss(first, [ids[0]], torch.device("cpu"), torch.float32), abs=1e-5)


def test_a_run_in_two_parts_equals_one_in_one(train: Train, run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    again = {"architecture": "llama", "normalizer": "ssmax", "output": "mos:4"}
    train(tmp_path / "run", **again, options={"max_minutes": 0.0})
    train(tmp_path / "run", **again)
    assert_equal_runs(tmp_path / "run", run[0])
    with pytest.raises(ValueError, match=r"output.*mos:2.*mos:4|output.*mos:4.*mos:2"):
        train(run[0], **{**again, "output": "mos:2"})


def test_damaged_values_are_named(run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    model = attnorm.from_pretrained(run[0], dtype=torch.float32)
    model.config.attnorm_output = "mos:3"
    model.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"attnorm_latent.*\(96, 32\).*mos:3.*\(128, 32\)"):
        attnorm.from_pretrained(tmp_path / "other")


@pytest.mark.parametrize(("output", "lifted"), [("mos:4", True), ("moc:4", False)])
def test_the_rank_exceeds_the_width_of_a_mixture_of_softmaxes_only(output: str, lifted: bool) -> None:
    model = build_model(tiny(architecture="llama", width=8, output=output), vocabulary=300, end_of_text=0).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(100)  # logits as large as those of a trained model
    tokens = torch.randint(300, (1, 300), generator=torch.Generator().manual_seed(1))
    found = attnorm.output_bottleneck(model, tokens, contexts=100)
    assert found.width == 8
    assert (found.own.rank > 8) is lifted
    assert (found.verdict == "lifted") is lifted


@pytest.mark.parametrize("kind", ["mos", "moc"])
def test_the_loss_can_be_traced_whole(kind: str) -> None:
    """As --compile does, without the compiler's own kernels."""
    made, targets = head(kind, torch.float32), torch.randint(VOCABULARY, (2, 5))
    hidden = torch.randn(2, 5, WIDTH, requires_grad=True)
    traced = torch.compile(predicted_loss, backend="aot_eager", dynamic=False, fullgraph=True)
    inputs = [hidden, *made.parameters()]
    plain, found = (loss(hidden, made, targets) for loss in (predicted_loss, traced))
    torch.testing.assert_close(found, plain)
    for got, want in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(plain, inputs), strict=True):
        torch.testing.assert_close(got, want)
