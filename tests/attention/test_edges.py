"""Conditions of engines one by one, what is passed on to a GPU, and factors of several rules."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnorm import attention, kernels
from attnorm.attention import attend
from attnorm.engines import blocked, decoding, execution, fused, one_pass, stick_breaking
from attnorm.engines import inputs as inputs_module
from attnorm.engines.execution import MIN_QUERIES
from attnorm.engines.inputs import Inputs, validate_inputs
from attnorm.normalizers import compose, get
from attnorm.normalizers.adaptive_temperature import EntropyRule
from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import Map, Normalizer
from attnorm.normalizers.entmax import Entmax
from attnorm.normalizers.sigmoid import Sigmoid
from attnorm.normalizers.softcap import Softcap
from attnorm.normalizers.softmax import Softmax
from attnorm.normalizers.stick_breaking import StickBreaking
from attnorm.normalizers.topk import TopK


def call(queries: int = 4, keys: int = 6, **options: Any) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, queries, 16, generator=generator)
    k, v = (torch.randn(1, 2, keys, 16, generator=generator) for _ in range(2))
    return replace(validate_inputs(q, k, v, mask=None, causal=False, scale=0.3, positions=None), **options)


class Elsewhere:
    """A tensor on some device that keeps how it is sent."""

    def __init__(self, device: str) -> None:
        self.device, self.is_cuda, self.sent = SimpleNamespace(type=device), device == "cuda", list[Any]()

    def pin_memory(self) -> "Elsewhere":
        self.sent.append("pinned")
        return self

    def to(self, device: Any, **options: Any) -> "Elsewhere":
        self.sent.append((getattr(device, "type", device), options))
        return self


@pytest.mark.parametrize(
    ("device", "own", "sent"),
    [
        ("cuda", "cpu", ["pinned", ("cuda", {"non_blocking": True})]),
        ("cuda", "cuda", [("cuda", {})]),
        ("cpu", "cpu", [("cpu", {})]),
        ("cpu", "cuda", [("cpu", {})]),
    ],
)
def test_only_what_a_gpu_takes_from_the_cpu_is_pinned(device: str, own: str, sent: list[Any]) -> None:
    tensor: Any = Elsewhere(own)
    target: Any = SimpleNamespace(type=device)
    assert execution.sent_to(target, tensor) is tensor
    assert tensor.sent == sent


@pytest.mark.parametrize(("own", "waits"), [("cuda", False), ("cpu", True)])
def test_a_gpu_does_not_wait_for_what_it_sends(own: str, waits: bool) -> None:
    tensor: Any = Elsewhere(own)
    execution.sent_to_cpu(tensor)
    assert tensor.sent == [("cpu", {"non_blocking": not waits})]


@pytest.mark.parametrize("own", [None, 3.0])
def test_the_sharpening_by_entropy_multiplies_the_factors_before_it(
    own: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = EntropyRule()
    entropy = torch.linspace(0.7, 2.5, MIN_QUERIES).view(1, 1, -1)
    factor = None if own is None else torch.full_like(entropy, own)
    given: list[Any] = []

    monkeypatch.setattr(one_pass.one_pass_operators, "row_entropy", lambda *_: (entropy, entropy))
    monkeypatch.setattr(one_pass, "row_factor_and_shift", lambda *_: (factor, None))
    monkeypatch.setattr(one_pass, "_launch", lambda _, factor, *__: given.append(factor))
    monkeypatch.setattr(one_pass, "lower", lambda *_: SimpleNamespace(map=SimpleNamespace(ranged=False), top=None))
    normalizer = Normalizer(get("softmax").map, scale=[rule])
    one_pass.one_pass(call(MIN_QUERIES), normalizer)
    torch.testing.assert_close(given[0], (own or 1.0) * rule.beta(entropy))


def test_a_sink_has_one_logit_or_one_for_each_head(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Tensor] = []
    form = SimpleNamespace(map=SimpleNamespace(ranged=False), top=None)
    monkeypatch.setattr(one_pass, "lower", lambda *_: form)
    monkeypatch.setattr(one_pass, "row_factor_and_shift", lambda *_: (None, None))
    monkeypatch.setattr(one_pass, "_launch", lambda _, factor, shift, sink, *__: given.append(sink))
    for heads in (None, 4):
        one_pass.one_pass(call(MIN_QUERIES), get("sink", logit=1.5, heads=heads))
        assert given.pop().tolist() == [1.5] * 4
    with pytest.raises(ValueError, match="the sink has logits for 3 heads, but q has 4 heads"):
        one_pass.one_pass(call(MIN_QUERIES), get("sink", heads=3))


@pytest.mark.parametrize("queries", [1, 2, 3, 5])
@pytest.mark.parametrize("keys", [1, 2, 3, 5])
@pytest.mark.parametrize("sink", [None, "softmax1"])
def test_causal_attention_of_few_queries_ends_at_the_last_key(queries: int, keys: int, sink: str | None) -> None:
    inputs, normalizer = call(queries, keys, causal=True), compose("softmax", sink=sink)
    seen = torch.arange(keys) <= torch.arange(queries)[:, None] + keys - queries
    z = 0.3 * inputs.q_BHQD.double() @ inputs.k_BGKD.double().repeat_interleave(2, 1).mT
    e = torch.exp(z).masked_fill(~seen, 0.0)
    weights = e / (e.sum(-1, keepdim=True) + (sink is not None)).clamp(min=1e-300)
    expected = weights @ inputs.v_BGKE.double().repeat_interleave(2, 1)
    found = attention(inputs.q_BHQD, inputs.k_BGKD, inputs.v_BGKE, normalizer, causal=True, scale=0.3, engine="fused")
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def wide(batch: int, keys: int, mask: Tensor | None = None) -> Inputs:
    q, k = torch.zeros(batch, 6, 5, 4), torch.zeros(batch, 3, keys, 4)
    return replace(validate_inputs(q, k, k, mask=None, causal=False, scale=0.5, positions=None), mask=mask)


@pytest.mark.parametrize(
    ("batch", "keys", "elements", "rows"),
    [
        (2, 7, 3 * 84, 3),
        (2, 7, 4 * 84 - 1, 3),
        (2, 7, 4 * 84, 4),
        (2, 7, 1, 1),
        (1, 7, 84, 2),
        (1, 1, 6, 1),
    ],
)
def test_queries_of_a_block_are_as_many_as_its_logits_allow(batch: int, keys: int, elements: int, rows: int) -> None:
    run = blocked._BlockedCall(wide(batch, keys), get("softmax"), None, elements)  # type: ignore[arg-type]
    assert (run.rows_per_block, type(run.rows_per_block)) == (rows, int)


@pytest.mark.parametrize(
    ("mask", "keys", "rows"),
    [
        (None, 7, 100 // 7),
        ((2, 1, 1, 7), 7, 100 // 14),
        ((2, 6, 1, 7), 7, 100 // 84),
        ((2, 6, 1, 40), 40, 1),
        (None, 1, 100),
    ],
)
def test_queries_whose_mask_is_built_at_a_time(
    mask: tuple[int, ...] | None, keys: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs_module, "MASK_ELEMENTS", 100)
    given = None if mask is None else torch.ones(mask, dtype=torch.bool)
    found = wide(2, keys, given).mask_rows()
    assert (found, type(found)) == (rows, int)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    ("enabled", "keys_learn", "queries_learn", "runs"),
    [(True, False, False, 0), (True, True, False, 2), (True, False, True, 2), (False, True, True, 0)],
)
def test_steps_are_run_again_in_the_backward_pass_where_something_learns(
    enabled: bool, keys_learn: bool, queries_learn: bool, runs: int, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = call(4, dropout=dropout)
    inputs.k_BGKD.requires_grad_(keys_learn)
    q = torch.arange(4.0).reshape(1, 1, 4, 1).requires_grad_(queries_learn)
    kept: list[bool] = []

    def checkpoint(step: Any, *arguments: Any, use_reentrant: bool, preserve_rng_state: bool) -> Tensor:
        kept.append(preserve_rng_state)
        return step(*arguments)  # type: ignore[no-any-return]

    monkeypatch.setattr(fused, "checkpoint", checkpoint)
    monkeypatch.setattr(fused, "_query_spans", lambda _: iter([(0, 3), (3, 4)]))
    with torch.set_grad_enabled(enabled):
        found = fused._run_in_steps(inputs, q, lambda start, stop, part: 10 * part + start)
    assert found.flatten().tolist() == [0.0, 10.0, 20.0, 33.0]
    assert kept == [dropout > 0] * runs


def test_a_scale_of_a_thousandth_is_left_to_sdpa() -> None:
    for scale, factors in ((1e-3, False), (0.999e-3, True), (0.5, False), (1e-6, True)):
        assert fused._has_factors(call(scale=scale), get("softmax")) is factors
    assert fused._has_factors(call(scale=0.5), get("ssmax"))


def test_blocks_with_dropout_have_a_seed_of_62_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    plain = torch.randint

    def randint(high: int, size: tuple[int, ...]) -> Tensor:
        asked.append((high, size))
        return plain(high, size)

    monkeypatch.setattr(torch, "randint", randint)
    for dropout, seeds in ((0.0, []), (0.5, [(2**62, ())])):
        blocked.blocked(call(5, dropout=dropout), get("softmax"), block_elements=1)
        assert asked == seeds


def test_no_kernel_takes_float64_however_narrow() -> None:
    for width in (1, 16):
        assert not execution.runs_kernels(torch.ones(1, width, dtype=torch.float64))


@pytest.mark.parametrize("k", [3, "sqrt"])
def test_what_a_logit_of_the_top_k_must_exceed_is_asked_for_each_row(
    k: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(one_pass.one_pass_operators, "top_k_cutoff", lambda *given: asked.append(given))
    inputs = call(4, 6, causal=True)
    factor = torch.ones(1, 4, 4, requires_grad=True)
    form: Any = SimpleNamespace(softcap=2.0, window=5, top=TopK(k))
    one_pass._top_k_cutoff(inputs, factor, form)
    ((q, key, mask, fixed, count, *rest),) = asked
    assert q is not inputs.q_BHQD or not q.requires_grad
    assert key.shape == inputs.k_BGKD.shape
    assert mask is None
    assert not fixed.requires_grad
    assert (count.shape, count.dtype) == ((1, 4, 4), torch.int32)
    assert count[0, 0].tolist() == ([3] * 4 if k == 3 else [2, 2, 3, 3])  # of 3, 4, 5 and 6 keys
    assert rest == [3 if k == 3 else 64, 2.0, True, 5, 0.3]


@pytest.mark.parametrize("base", [Softmax, Sigmoid, Entmax, StickBreaking])
def test_a_map_derived_from_one_of_ours_has_its_own_weights(base: type[Map]) -> None:
    class Halved(base):  # type: ignore[misc, valid-type]
        def forward(self, block: Block) -> Tensor:
            return super().forward(block) / 2  # type: ignore[no-any-return]

    inputs, derived = call(MIN_QUERIES), Normalizer(Halved())
    expected = blocked.blocked(inputs, Normalizer(base())) / 2
    torch.testing.assert_close(attend(inputs, derived), expected)
    assert derived.map.kernel_form() is derived.map.threshold_form() is None
    assert not stick_breaking.applies(inputs, derived)
    assert decoding.plan(inputs, derived) is None


@torch.no_grad()
def test_sdpa_takes_factors_and_at_the_end_the_sharpening_by_entropy() -> None:
    for scale, runs in [
        ([], True),
        (["ssmax"], True),
        (["ssmax", "log_scaled"], True),
        (["adaptive_temperature"], True),
        (["ssmax", "adaptive_temperature"], True),
        (["adaptive_temperature", "ssmax"], False),
        ([Softcap(3.0)], False),
        ([Softcap(3.0), "ssmax"], False),
        ([Softcap(3.0), "adaptive_temperature"], False),
        (["scale_invariant"], False),
    ]:
        assert fused.applies(call(), compose(scale=scale)) is runs, scale


def test_stick_breaking_takes_plain_logits_of_enough_queries_without_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stick_breaking, "runs_kernels", lambda *_: True)
    few = execution.MIN_QUERIES
    one = get("stick_breaking")
    for inputs, runs in [
        (call(few), True),
        (call(few, softcap=3.0), False),
        (call(few, dropout=0.1), False),
        (call(few - 1), False),
        (call(few, softcap=3.0, dropout=0.1), False),
    ]:
        assert stick_breaking.applies(inputs, one) is runs
    assert not stick_breaking.applies(call(few), get("softmax"))
    assert not stick_breaking.applies(call(few), compose("stick_breaking", scale=Softcap(3.0)))


def test_no_kernel_adds_in_the_order_in_which_programs_finish() -> None:
    """Atomic sums of floats would differ from call to call; tests/cuda compares the bits."""
    assert [file.name for file in Path(kernels.__file__).parent.glob("*.py") if "tl.atomic" in file.read_text()] == []
