"""Output layers that mix: the formula of the paper, its gradients, specs, and what a saved mixture must hold."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from attnorm.models.output_head import MixtureHead, has_saved_output, parse_output, restore_output, set_output

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


def output_of(model: Any) -> str:
    head = model.get_output_embeddings()
    return head.spec if isinstance(head, MixtureHead) else "softmax"


@pytest.mark.parametrize("kind", ["mos", "moc"])
def test_probabilities_and_gradients_are_those_of_the_formula(kind: str) -> None:
    made = head(kind)
    hidden = torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(VOCABULARY, (2, 5))
    expected = torch.stack([probabilities(made, h) for h in hidden.flatten(0, 1)]).view(2, 5, -1)
    torch.testing.assert_close(torch.softmax(made(hidden).double(), -1), expected, rtol=1e-5, atol=1e-8)
    plain = -expected.gather(-1, targets[..., None]).log().mean()
    loss = made.loss(hidden, targets)
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


@pytest.mark.parametrize("spec", ["mos", "mos:1", "mos:65", "mos:x", "dos:4", "", "mos:4:2", "mos:0", "Softmax"])
def test_a_mixture_that_cannot_be(spec: str) -> None:
    with pytest.raises(ValueError, match=r"mos:K") as error:
        parse_output(spec)
    assert repr(spec) in str(error.value)


def test_specs() -> None:
    assert parse_output("softmax") is None
    for components in (2, 4, 64):
        assert parse_output(f"mos:{components}") == ("mos", components)
        assert parse_output(f"moc:{components}") == ("moc", components)


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def test_a_mixture_takes_the_place_of_the_output_layer_and_its_weight() -> None:
    model = llama().eval()
    weight = model.lm_head.weight
    set_output(model, "softmax")
    assert output_of(model) == "softmax"
    set_output(model, "moc:2")
    assert output_of(model) == model.config.attnorm_output == "moc:2"
    assert model.lm_head.weight is weight
    assert not model.lm_head.training
    assert model(torch.zeros(1, 3, dtype=torch.long)).logits.shape == (1, 3, 20)
    biased = llama()
    biased.lm_head = nn.Linear(8, 20)
    with pytest.raises(ValueError, match=r"mos:4.*bias=True"):
        set_output(biased, "mos:4")
    biased.set_output_embeddings(nn.Identity())
    with pytest.raises(ValueError, match=r"mos:4.*Identity"):
        set_output(biased, "mos:4")


def test_a_saved_mixture_is_put_back_or_named(tmp_path: Path) -> None:
    model = llama()
    set_output(model, "mos:3")
    whole = {name: value.detach().clone() for name, value in model.state_dict().items()}
    latent, prior = "lm_head.attnorm_latent", "lm_head.attnorm_prior"

    def saved(**changes: torch.Tensor | None) -> Path:
        values = {name: value for name, value in {**whole, **changes}.items() if value is not None}
        save_file(values, tmp_path / "model.safetensors")
        return tmp_path

    again = llama()
    restore_output(again, saved())  # its config names no mixture
    assert output_of(again) == "softmax"
    assert has_saved_output(tmp_path)
    again.config.attnorm_output = "mos:3"
    restore_output(again, tmp_path)
    assert output_of(again) == "mos:3"
    for name in (latent, prior):
        assert torch.equal(again.state_dict()[name], whole[name])
    restore_output(again.model, tmp_path)  # the base model has no output layer
    for name, changed, shapes in (
        (latent, None, "none"),
        (prior, None, "none"),
        (latent, torch.zeros(3, 8), r"\(24, 8\).*\(3, 8\)"),
        (prior, torch.zeros(2, 8), r"\(3, 8\).*\(2, 8\)"),
    ):
        other = llama()
        other.config.attnorm_output = "mos:3"
        with pytest.raises(ValueError, match=f"{name.rpartition('.')[2]}.*{shapes}"):
            restore_output(other, saved(**{name: changed}))
    assert not has_saved_output(saved(**{latent: None, prior: None}))
