"""Mixtures at the output of `train lm`: the formula of the paper, its gradients, saving, and the rank of its logits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import attnorm
from attnorm.evaluation.windows import validation_windows
from attnorm.models.load import load
from attnorm_lab.training.lm.data import prepare
from attnorm_lab.training.lm.evaluate import predicted_loss, validation_loss
from attnorm_lab.training.lm.model import build_model, count_parameters, softmax_of_equal_size
from tests.models.test_output_head import VOCABULARY, WIDTH, head
from tests_lab.training.conftest import tiny
from tests_lab.training.test_lm import assert_equal_runs, metrics

Train = Callable[..., dict[str, Any]]
MIXTURE: dict[str, Any] = {"architecture": "llama", "normalizer": "ssmax", "output": "mos:4", "steps": 12}


def test_the_output_is_saved_with_a_run_only_if_it_was_chosen() -> None:
    assert "output" not in tiny().as_dict()  # folders from before there was a choice continue
    assert tiny(output="moc:2").as_dict()["output"] == "moc:2"
    with pytest.raises(ValueError, match=r"mos:K.*'mos:65'"):
        tiny(output="mos:65")


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


@pytest.fixture(scope="module")
def run(train: Train, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("mixture") / "run"
    return out, train(out, **MIXTURE, options={"sample_tokens": 8, "lengths": [16, 64]})


def test_a_mixture_learns_and_is_evaluated_at_every_length(run: tuple[Path, dict[str, Any]]) -> None:
    out, record = run
    losses = [entry["loss"] for entry in metrics(out)]
    assert losses[-1] < 0.9 * losses[0]
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
        assert model.get_output_embeddings().spec == "mos:4"
        assert validation_loss(model.eval(), windows, torch.device("cpu"), torch.float32) == pytest.approx(
            stated, abs=2e-5
        )
    ids = windows[0][None, :20]
    with torch.no_grad():
        logits = first(input_ids=ids[:, :-1]).logits
    own = F.cross_entropy(logits[0], ids[0, 1:])
    assert own.item() == pytest.approx(validation_loss(first, [ids[0]], torch.device("cpu"), torch.float32), abs=1e-5)


def test_a_run_in_two_parts_equals_one_in_one(train: Train, run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    train(tmp_path / "run", **MIXTURE, options={"max_minutes": 0.0})
    train(tmp_path / "run", **MIXTURE)
    assert_equal_runs(tmp_path / "run", run[0])
    with pytest.raises(ValueError, match=r"output.*mos:2.*mos:4|output.*mos:4.*mos:2"):
        train(run[0], **{**MIXTURE, "output": "mos:2"})


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


@pytest.mark.parametrize("kind", [pytest.param("mos", marks=pytest.mark.nightly), "moc"])
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
