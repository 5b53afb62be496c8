"""observe() leaves nothing behind, however it ends, and never shows nothing without saying so."""

import threading
from contextlib import ExitStack

import pytest
import torch
from transformers import AttentionInterface, PreTrainedModel

from attnorm.metrics.call import AttentionCall
from attnorm.models.dispatch import UnsupportedModel
from attnorm.models.observe import observe
from tests.models.families import ids, tiny

ORIGINAL = AttentionInterface.get_interface


def hooks(model: PreTrainedModel) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


@pytest.fixture(autouse=True)
def _nothing_is_left() -> None:
    yield
    assert AttentionInterface.get_interface is ORIGINAL


def test_after_an_exception_in_the_model() -> None:
    model = tiny("llama")
    configured, attached = model.config.to_dict(), hooks(model)
    with pytest.raises(IndexError), observe(model, lambda call: None):
        model(input_ids=torch.tensor([[1, 10**6]]))
    assert AttentionInterface.get_interface is ORIGINAL
    assert (model.config.to_dict(), hooks(model)) == (configured, attached)


def test_after_an_exception_in_the_callback() -> None:
    model = tiny("llama")
    expected = model(input_ids=ids()).logits

    def fail(call: AttentionCall) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), observe(model, fail):
        model(input_ids=ids())
    assert hooks(model) == 0
    assert torch.equal(model(input_ids=ids()).logits, expected)


def test_after_a_generator_was_dropped_halfway() -> None:
    model = tiny("llama")

    def half() -> object:
        with observe(model, lambda call: None):
            yield model(input_ids=ids())

    next(half())
    assert hooks(model) == 0


def test_a_model_can_be_observed_again() -> None:
    model = tiny("llama")
    calls: list[AttentionCall] = []
    for _ in range(2):
        with observe(model, calls.append):
            model(input_ids=ids())
    assert [call.layer for call in calls] == [0, 1, 0, 1]


def test_two_observers_at_once_see_every_call_and_leave_in_any_order() -> None:
    model, first, second = tiny("llama"), [], []
    expected = model(input_ids=ids()).logits
    outer, inner = ExitStack(), ExitStack()
    outer.enter_context(observe(model, first.append))
    inner.enter_context(observe(model.model, second.append))
    assert torch.equal(model(input_ids=ids()).logits, expected)
    outer.close()
    model(input_ids=ids())
    inner.close()
    model(input_ids=ids())
    assert ([call.layer for call in first], [call.layer for call in second]) == ([0, 1], [0, 1, 0, 1])
    assert hooks(model) == 0


def test_another_model_is_not_seen() -> None:
    model, other, calls = tiny("llama"), tiny("llama"), []
    with observe(model, calls.append):
        model(input_ids=ids())
        other(input_ids=ids())
    assert len(calls) == 2


def test_two_models_in_two_threads_see_their_own_calls() -> None:
    models = [tiny("llama", num_hidden_layers=layers) for layers in (2, 3)]
    seen: list[list[AttentionCall]] = [[], []]
    together = threading.Barrier(2)

    def watch(number: int) -> None:
        with torch.no_grad(), observe(models[number], seen[number].append):
            together.wait(10)
            for _ in range(5):
                models[number](input_ids=ids())
            together.wait(10)

    threads = [threading.Thread(target=watch, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[call.layer for call in calls] for calls in seen] == [[0, 1] * 5, [0, 1, 2] * 5]


def test_a_run_without_one_visible_call_is_an_error() -> None:
    """reorder_and_upcast_attn sends GPT-2 past the interface."""
    model = tiny("gpt2", "eager", reorder_and_upcast_attn=True)
    with pytest.raises(UnsupportedModel, match="made no call"), observe(model, lambda call: None):
        model(input_ids=ids())


def test_not_running_the_model_is_no_error() -> None:
    with observe(tiny("llama"), lambda call: None):
        pass


def test_attention_that_is_not_what_it_seems_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.eager_attention_forward

    def secretly_sharper(module, query, *others, **options):  # type: ignore[no-untyped-def]
        return plain(module, query * 3, *others, **options)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", secretly_sharper)
    model = tiny("llama", "eager")
    refused = pytest.raises(UnsupportedModel, match=r"model\.layers\.0\.self_attn.*not softmax")
    with refused, observe(model, lambda call: None), torch.no_grad():
        model(input_ids=ids())


def test_broken_weights_are_no_reason_to_refuse() -> None:
    """NaN in, NaN out: for the measurement to flag, not for the observer to stumble over."""
    model, calls = tiny("llama"), []
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[0] = torch.nan
        with observe(model, calls.append):
            model(input_ids=ids())
    assert len(calls) == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_is_seen() -> None:
    model, calls = tiny("llama", num_hidden_layers=1), []
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(input_ids=ids())
        expected = model(input_ids=ids()).logits
        with observe(compiled, calls.append):
            seen = compiled(input_ids=ids()).logits
    assert len(calls) == 1
    assert torch.equal(seen, expected)


def test_offloaded_weights_are_no_obstacle() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, calls = tiny("llama"), []
    with torch.no_grad():
        expected = model(input_ids=ids()).logits
        offloaded = accelerate.cpu_offload(model, execution_device="cpu")
        with observe(offloaded, calls.append, inputs=True):
            seen = offloaded(input_ids=ids()).logits
    assert torch.equal(seen, expected)
    assert [call.inputs_BKC is not None for call in calls] == [True, True]
