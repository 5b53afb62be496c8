"""The monitor says what analyze says, of the training forward as it is, and changes nothing about it."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import register_parametrization
from transformers import PreTrainedModel

import attnorm
from attnorm.metrics import vectors
from attnorm.metrics.call import AttentionCall
from attnorm.models.observe import observe
from attnorm.models.patch import patch
from attnorm.monitor import measure
from attnorm.monitor import watch as watching
from attnorm.monitor.measure import LARGEST, MEANS_OF_ALL, OF_LONGEST, REPORTED, SEPARABILITY_ROWS
from attnorm.monitor.monitor import AttentionMonitor
from tests.metrics.reference import dense_logits, dense_visible
from tests.models.tiny import llama, tiny, tokens

ALL = 64  # rows: more than any sequence here has


@pytest.fixture(autouse=True)
def the_same_rows_for_separability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "NULL_ROWS", SEPARABILITY_ROWS)


@pytest.fixture
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


pytestmark = pytest.mark.filterwarnings("ignore::attnorm.monitor.alerts.AttentionAlert")


def measured(model: PreTrainedModel, monitor: AttentionMonitor, **inputs: Any) -> dict[str, float]:
    with monitor.measuring(model, 1) as numbers:
        model(**inputs)
    return numbers


def analyzed(model: PreTrainedModel, **inputs: Tensor) -> dict[str, float]:
    """What the monitor shall say of one sequence, from the tables of analyze."""
    found = attnorm.analyze(model, inputs, top_n=(5,), vector_rows=ALL, metrics="vectors")
    expected: dict[str, float] = {}
    kinds = found.heads.column("kind").to_pylist()
    for table, names in ((found.heads, OF_LONGEST), (found.top_n, ["separability"])):
        kind, layer = (np.array(table.column(name).to_pylist()) for name in ("kind", "layer"))
        for one in {*kinds}:
            for number in {*layer[kind == one]}:
                label = f"attn/{one}/layer_{number:02}" if len({*kinds}) > 1 else f"attn/layer_{number:02}"
                for name in names:
                    source = REPORTED[name].source
                    column = f"{source}_mean" if f"{source}_mean" in table.column_names else source
                    values = np.array(table.column(column))[(kind == one) & (layer == number)]
                    expected[f"{label}/{name}_mean"] = values.mean()
                    worst = REPORTED[name].worst
                    expected[f"{label}/{name}_{worst}"] = values.min() if worst == "min" else values.max()
    return expected


def compared(numbers: dict[str, float]) -> dict[str, float]:
    """Without what is drawn at random or of all rows, and without indices of heads (test_heads.py)."""
    return {
        key: value
        for key, value in numbers.items()
        if not any(part in key for part in ("alert", "null", "/worst/", LARGEST, *MEANS_OF_ALL))
        and not key.endswith("_head")
    }


def compare(numbers: dict[str, float], expected: dict[str, float]) -> None:
    numbers = compared(numbers)
    assert {*numbers} == {*expected}
    for key, value in numbers.items():
        assert value == pytest.approx(expected[key], rel=2e-4, abs=1e-5), key


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "t5"])
def test_the_numbers_are_those_of_analyze_on_the_same_rows(family: str) -> None:
    """In float64: where a single key has all of the weight, rounding decides which of the others are as near."""
    model, ids = tiny(family).double(), tokens(1, 40)
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if family == "t5" else {})}
    compare(measured(model, AttentionMonitor(rows=ALL, top_n=5), **inputs), analyzed(model, **inputs))


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_where_kernels_measure_all_rows_the_largest_logit_is_that_of_all(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other numbers are means over the longest rows in any case."""
    model, ids = tiny(family).double(), tokens(2, 40)
    monitor = AttentionMonitor(rows=ALL, top_n=5)
    longest_only = measured(model, monitor, input_ids=ids)
    monkeypatch.setattr(measure, "takes_all_rows", lambda *_: True)
    found = measured(model, monitor, input_ids=ids)
    seen: list[AttentionCall] = []
    with observe(model, seen.append):
        model(input_ids=ids)
    for layer, call in enumerate(seen):
        logits = dense_logits(call)[0].masked_fill(~dense_visible(call)[0], -torch.inf)
        largest = logits.amax((-2, -1))
        assert found[f"attn/layer_{layer:02}/{LARGEST}_max"] == pytest.approx(float(largest.max()))
        assert found[f"attn/layer_{layer:02}/{LARGEST}_mean"] == pytest.approx(float(largest.mean()))
    assert compared(found) == pytest.approx(compared(longest_only))


@pytest.mark.parametrize("family", ["gpt2", "bert"])
@pytest.mark.parametrize("padding", [0, 9])
def test_where_kernels_measure_all_rows_entropy_and_sink_mass_have_means_over_all(
    family: str, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the sequence with the most tokens; the others are padded by 9 more of them."""
    model, ids = tiny(family).double(), tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[0, 40 - padding - 9 :] = 0
    mask[1, 40 - padding :] = 0
    monkeypatch.setattr(measure, "takes_all_rows", lambda *_: True)
    found = measured(model, AttentionMonitor(rows=ALL, top_n=5), input_ids=ids, attention_mask=mask)
    seen: list[AttentionCall] = []
    with observe(model, seen.append):
        model(input_ids=ids[1:, : 40 - padding])
    for layer, call in enumerate(seen):
        visible = dense_visible(call)[0]
        p = dense_logits(call)[0].masked_fill(~visible, -torch.inf).softmax(-1)
        entropy = torch.special.entr(p).sum(-1)
        n = visible.sum(-1).double()
        means = {
            "entropy": entropy.mean(-1),
            "entropy_ratio": (entropy / n.log()).nanmean(-1),  # a row of one key has none
            "sink_mass": p[..., 0].mean(-1),
        }
        for name, heads in means.items():
            label = f"attn/layer_{layer:02}/{name}_all_rows"
            assert found[f"{label}_mean"] == pytest.approx(float(heads.mean()), rel=1e-9)
            worst = heads.min() if name == "entropy" else heads.max()
            assert found[f"{label}_{REPORTED[name].worst}"] == pytest.approx(float(worst), rel=1e-9)
            if family == "gpt2":
                assert abs(found[f"{label}_mean"] - found[f"attn/layer_{layer:02}/{name}_mean"]) > 1e-3


@pytest.mark.parametrize("normalizer", ["ssmax", "entmax15", "sink", "scale_invariant"])
def test_a_patched_model_is_measured_as_it_runs(normalizer: str) -> None:
    model, ids = llama(), tokens(1, 40)
    patch(model, normalizer)
    with torch.no_grad():
        for number, parameter in enumerate(p for name, p in model.named_parameters() if "attnorm" in name):
            parameter.add_(torch.linspace(0, 0.1, parameter.numel()).reshape(parameter.shape) * (number + 1))
    numbers = measured(model, AttentionMonitor(rows=ALL, top_n=5), input_ids=ids)
    expected = analyzed(model, input_ids=ids)
    if normalizer == "scale_invariant":  # whose Jacobian is measured on a few of the rows asked for, here on others
        numbers, expected = ({k: v for k, v in d.items() if "jacobian" not in k} for d in (numbers, expected))
    compare(numbers, expected)


def test_layers_patched_differently_keep_their_own_numbers() -> None:
    model, ids = llama(), tokens(1, 40)
    patch(model, "ssmax", layers=[1], s=0.9)
    compare(measured(model, AttentionMonitor(rows=ALL, top_n=5), input_ids=ids), analyzed(model, input_ids=ids))


@pytest.mark.parametrize("options", [{"temperature": 2.0}, {"learned": True, "heads": None}, {"learned": True}])
def test_one_number_for_all_heads_and_one_for_each_go_together(options: dict[str, Any]) -> None:
    """Layers of one shape are measured as one; the second has a factor per head and a bias."""
    model, ids = llama(), tokens(1, 40)
    patch(model, "softmax", layers=[0], **options)
    patch(model, "ssmax", layers=[1], bias=True)
    compare(measured(model, AttentionMonitor(rows=ALL, top_n=5), input_ids=ids), analyzed(model, input_ids=ids))


def test_a_batch_of_nothing_but_padding_stops_no_training() -> None:
    model, ids = llama(), tokens(2, 12)
    with pytest.warns(UserWarning, match=r"step 1.*padding"):
        assert measured(model, AttentionMonitor(), input_ids=ids, attention_mask=torch.zeros_like(ids)) == {}


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt_oss"])
def test_windows_softcap_and_sinks_are_the_models_own(family: str) -> None:
    """Layer 1 sees everything; layer 0 has a window of 5, so that all its rows are as long, and the last are taken."""
    model, ids = tiny(family), tokens(1, 40)
    numbers = measured(model, AttentionMonitor(rows=ALL, top_n=5), input_ids=ids)
    expected = analyzed(model, input_ids=ids)
    of_layer_1 = {key: value for key, value in expected.items() if "layer_01" in key}
    compare({key: value for key, value in numbers.items() if "layer_01" in key}, of_layer_1)
    assert 0 < numbers["attn/layer_00/entropy_mean"] < np.log(5)
    assert numbers["attn/layer_00/entropy_mean"] == pytest.approx(expected["attn/layer_00/entropy_mean"], rel=0.2)


def test_fewer_rows_are_some_of_the_longest() -> None:
    model, ids = llama(), tokens(1, 60)
    every = measured(model, AttentionMonitor(rows=ALL), input_ids=ids)
    some = measured(model, AttentionMonitor(rows=6), input_ids=ids)
    assert some["attn/layer_00/entropy_mean"] != every["attn/layer_00/entropy_mean"]
    assert some["attn/layer_00/entropy_mean"] == pytest.approx(every["attn/layer_00/entropy_mean"], rel=0.1)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_padding_is_no_row_and_the_longest_sequence_is_taken(family: str, side: str) -> None:
    model = tiny(family)
    ids = tokens(3, 40)
    mask = torch.ones_like(ids)
    hidden = [(0, 25), (1, 7), (2, 30)]
    for item, count in hidden:
        mask[item, slice(count) if side == "left" else slice(40 - count, None)] = 0
    alone = ids[1:2, 7:] if side == "left" else ids[1:2, :33]
    monitor = AttentionMonitor(rows=ALL, top_n=5)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = measured(model, monitor, input_ids=ids, attention_mask=mask, position_ids=positions)
    compare(padded, compared(measured(model, monitor, input_ids=alone)))


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "t5"])
def test_outputs_and_gradients_do_not_change_by_a_bit(family: str) -> None:
    model, ids = tiny(family).train(), tokens(2, 40)
    inputs = {"input_ids": ids, "labels": ids}

    def run() -> dict[str, Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        output = model(**inputs)
        output.loss.backward()
        return {"logits": output.logits, **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}

    expected = run()
    monitor = AttentionMonitor(every=1)
    with monitor.step(model) as numbers:
        found = run()
    assert numbers
    assert {*found} == {*expected}
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_runs_again_does_not_count(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = llama().train(), tokens(2, 40)
    taken: list[int] = []
    take = watching.Sampler.take
    monkeypatch.setattr(watching.Sampler, "take", lambda self, call: (taken.append(call.layer), take(self, call))[1])
    monitor = AttentionMonitor(every=1)
    with monitor.step(model) as plain:
        model(input_ids=ids, labels=ids).loss.backward()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with monitor.step(model) as found:
        model(input_ids=ids, labels=ids).loss.backward()
    assert taken == [0, 1, 0, 1]
    assert found == plain


def test_of_several_forwards_the_first_with_gradients_counts() -> None:
    """Generation and evaluation inside a training step are not what is trained."""
    model, ids = llama().train(), tokens(2, 40)
    monitor = AttentionMonitor()
    expected = measured(model, monitor, input_ids=ids)
    with monitor.measuring(model, 2) as found:
        with torch.no_grad():
            model(input_ids=tokens(2, 20, seed=5))
            model.generate(tokens(1, 4), max_new_tokens=2, do_sample=False)
        model(input_ids=ids)
        model(input_ids=tokens(2, 30, seed=7))
    assert found == expected


def test_beside_a_frozen_teacher_the_model_that_learns_is_measured() -> None:
    ids = tokens(2, 32)
    student, teacher = tiny("gpt2").eval(), llama().requires_grad_(False)
    both = torch.nn.ModuleDict({"teacher": teacher, "student": student})
    monitor = AttentionMonitor()
    with monitor.measuring(both, 1) as numbers:
        with torch.no_grad():
            teacher(input_ids=ids)
        student(input_ids=ids)
    assert numbers == measured(student, AttentionMonitor(), input_ids=ids)


def test_many_bytes_are_measured_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = llama(), tokens(1, 40)
    expected = measured(model, AttentionMonitor(), input_ids=ids)
    monkeypatch.setattr(watching, "HELD_BYTES", 1)
    assert measured(model, AttentionMonitor(), input_ids=ids) == pytest.approx(expected, rel=1e-5)


def test_half_precision_and_autocast() -> None:
    model, ids = llama().to(torch.bfloat16), tokens(1, 40)
    assert all(np.isfinite(list(measured(model, AttentionMonitor(top_n=5), input_ids=ids).values())))
    model = llama()
    exact = measured(model, AttentionMonitor(top_n=5), input_ids=ids)
    with torch.autocast("cpu", torch.bfloat16):
        rough = measured(model, AttentionMonitor(top_n=5), input_ids=ids)
    assert rough["attn/layer_00/entropy_mean"] == pytest.approx(exact["attn/layer_00/entropy_mean"], rel=0.05)


def test_a_compiled_model_is_measured_and_compiled_again_for_nothing() -> None:
    model, ids = llama(), tokens(2, 40)
    expected = measured(model, AttentionMonitor(), input_ids=ids)
    graphs: list[int] = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(1)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    torch._dynamo.reset()
    compiled(input_ids=ids)
    before = len(graphs)
    assert before > 0
    monitor = AttentionMonitor(every=2)
    for step in range(1, 5):
        with monitor.step(compiled) as numbers:
            compiled(input_ids=ids)
        assert bool(numbers) == (step % 2 == 0)
    assert len(graphs) == before
    assert monitor.numbers == expected


@pytest.mark.parametrize("normalizer", ["ssmax", "sink", "entmax15"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_parameters_that_fsdp_takes_away_after_each_layer(family: str, normalizer: str, process_group: None) -> None:
    model, ids = tiny(family).train(), tokens(2, 32)
    patch(model, normalizer)
    plain = measured(model, AttentionMonitor(), input_ids=ids)
    layers = model.get_submodule("model.layers")
    for layer in layers.children():
        fully_shard(layer)
    fully_shard(model)
    assert measured(model, AttentionMonitor(), input_ids=ids) == plain
    assert all(isinstance(parameter, DTensor) for parameter in layers.parameters())


def test_a_constraint_that_somebody_put_on_a_parameter_holds() -> None:
    class Doubled(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    plain, constrained, ids = llama(), llama(), tokens(2, 32)
    patch(plain, "ssmax", s=0.4)
    for normalizer in patch(constrained, "ssmax", s=0.2).normalizers.values():
        register_parametrization(normalizer.get_submodule("scale.0"), "s", Doubled())
    expected = measured(plain, AttentionMonitor(), input_ids=ids)
    assert measured(constrained, AttentionMonitor(), input_ids=ids) == expected


def test_an_exception_gives_the_model_back() -> None:
    model, ids = llama(), tokens(2, 40)
    monitor = AttentionMonitor()
    with pytest.raises(ValueError, match="stop"), monitor.measuring(model, 1):
        raise ValueError("stop")
    with pytest.raises(IndexError), monitor.measuring(model, 1):
        model(input_ids=ids + 1000)
    with observe(model, lambda call: None):
        model(input_ids=ids)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert measured(model, monitor, input_ids=ids)


def test_a_step_without_a_training_forward_is_told() -> None:
    model = llama()
    warned = pytest.warns(UserWarning, match="forward")
    with warned, AttentionMonitor(every=1).step(model) as numbers, torch.no_grad():
        model(input_ids=tokens())
    assert numbers == {}


def test_a_step_that_is_called_and_not_entered_is_told() -> None:
    model, monitor = llama(), AttentionMonitor(every=1)
    monitor.step(model)
    model(input_ids=tokens(2, 32))
    with pytest.raises(RuntimeError, match=r"monitor\.step\(model\)"):
        monitor.step(model)


def test_mechanisms_are_left_out() -> None:
    model = llama()
    patch(model, "linear", layers=[0])
    numbers = measured(model, AttentionMonitor(), input_ids=tokens(1, 40))
    assert {key.split("/")[1] for key in numbers} == {"layer_01", "worst", "alert"}


@torch.no_grad()
def test_in_a_sliding_window_the_means_are_over_the_last_rows_too() -> None:
    """Where all rows are measured, as on a GPU: earlier rows see as many keys as the last ones."""
    model = tiny("gemma3")
    calls: list[AttentionCall] = []
    with observe(model, calls.append):
        model(input_ids=tokens(1, 40))
    rows = torch.arange(40)
    every, last = (measure._measure_call(calls[0], some, start, 5) for some, start in ((rows, 28), (rows[28:], 0)))
    compared = [number for number, name in enumerate(REPORTED) if name not in (LARGEST, *MEANS_OF_ALL)]
    torch.testing.assert_close(every[compared], last[compared], equal_nan=True)
