"""A paused patch: the model runs as it did before, keeps what it learned, and comes back to it."""

from pathlib import Path

import pytest
import torch

import attnorm
from attnorm.metrics.call import AttentionCall
from attnorm.models.observe import observe
from attnorm.models.patch import patch, swap, unpatch
from tests.models.tiny import FAMILIES, llama, quiet_logits, tiny, tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_a_paused_model_is_the_model_before_and_comes_back(family: str) -> None:
    model, ids = tiny(family), tokens()
    plain = quiet_logits(model, ids)
    handle = patch(model, "ssmax", s=0.7)
    patched, learned, keys = quiet_logits(model, ids), [*handle.parameters()], [*model.state_dict()]
    with handle.paused():
        assert torch.equal(quiet_logits(model, ids), plain)
        assert all(now is before for now, before in zip(handle.parameters(), learned, strict=True))
        assert [*model.state_dict()] == keys
    assert (patched - plain).abs().max() > 1e-3
    assert torch.equal(quiet_logits(model, ids), patched)


def test_an_optimizer_goes_on_after_a_pause_and_a_saved_model_has_its_normalizer(tmp_path: Path) -> None:
    model, ids = llama(), tokens()
    handle = patch(model, "ssmax")
    optimizer = torch.optim.SGD(handle.parameters(), lr=0.1)
    with handle.paused():
        model(ids).logits.square().mean().backward()
        assert all(parameter.grad is None for parameter in handle.parameters())
        attnorm.save_pretrained(model, tmp_path)
    assert torch.equal(quiet_logits(attnorm.from_pretrained(tmp_path).eval(), ids), quiet_logits(model, ids))
    before = [parameter.detach().clone() for parameter in handle.parameters()]
    model(ids).logits.square().mean().backward()
    optimizer.step()
    assert all((now != then).all() for now, then in zip(handle.parameters(), before, strict=True))


def test_who_looks_at_a_paused_model_sees_softmax() -> None:
    model, ids = llama(), tokens()
    handle = patch(model, "entmax15", layers=[0])
    seen: list[AttentionCall] = []
    with handle.paused():
        with observe(model, seen.append):
            quiet_logits(model, ids)
        paused = attnorm.analyze(model, ids[:1], metrics="core")
    running = attnorm.analyze(model, ids[:1], metrics="core")
    assert [call.normalizer for call in seen] == [None, None]
    assert paused.manifest["model"]["runs"] == "softmax"
    assert running.manifest["model"]["runs"] is None  # its layers differ
    assert paused.manifest["model"]["fingerprint"] != running.manifest["model"]["fingerprint"]


def test_an_exception_ends_the_pause() -> None:
    model, ids = llama(), tokens()
    handle = patch(model, "entmax15")
    patched = quiet_logits(model, ids)

    def fail() -> None:
        with handle.paused():
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert torch.equal(quiet_logits(model, ids), patched)


def test_a_pause_within_a_pause_is_refused_and_one_of_other_layers_is_not() -> None:
    model, ids = llama(), tokens()
    plain = quiet_logits(model, ids)
    first, second = patch(model, "ssmax", layers=[0]), patch(model, "entmax15", layers=[1])
    both = quiet_logits(model, ids)
    with first.paused():
        with pytest.raises(RuntimeError, match="paused already"), first.paused():
            pass
        with second.paused():
            assert torch.equal(quiet_logits(model, ids), plain)
        with pytest.raises(ValueError, match="'ssmax'"), swap(model, "softmax", layers=[0]):
            pass
    assert torch.equal(quiet_logits(model, ids), both)


def test_what_was_removed_cannot_be_paused_and_stays_removed_after_a_pause() -> None:
    model, ids = llama(), tokens()
    plain = quiet_logits(model, ids)
    handle = patch(model, "ssmax", layers=[0])
    other = patch(model, "entmax15", layers=[1])
    with handle.paused():
        handle.remove()
    with other.paused():
        unpatch(model)
        again = patch(model, "entmax15", layers=[1])
        patched = quiet_logits(model, ids)
    assert torch.equal(quiet_logits(model, ids), patched)
    again.remove()
    assert torch.equal(quiet_logits(model, ids), plain)
    with pytest.raises(RuntimeError, match="was removed"), handle.paused():
        pass


def test_a_kernel_chosen_in_the_pause_stays_chosen() -> None:
    model, ids = llama(), tokens()
    handle = patch(model, "entmax15")
    patched = quiet_logits(model, ids)
    with handle.paused():
        model.set_attn_implementation("eager")
    assert torch.allclose(quiet_logits(model, ids), patched, atol=1e-5)
    handle.remove()
    assert model.config._attn_implementation == "eager"
