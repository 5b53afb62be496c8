"""Every statistic of every row equals the dense float64 reference, whatever the call, the normalizer and the block."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnorm.metrics import call as calls
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.catalogue import PER_ROW
from attnorm.metrics.rows import POWER_ROWS, RowStatistics, measure_rows
from attnorm.metrics.sensitivity import has_closed_form
from attnorm.normalizers import compose, get
from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import Map, Normalizer, Properties, Sink
from tests.metrics import reference
from tests.metrics.calls import CALLS, HEADS, KEY_HEADS, ROW_NORMALIZERS, WIDTH, make_call

TOP_N = (1, 2, 10, 1000)
NAMES = (*PER_ROW, "min_logit", "logsumexp")


def measured(call: AttentionCall, normalizer: str | Normalizer | None = None, **options: object) -> RowStatistics:
    rows = torch.arange(call.query_BHQD.shape[-2])
    (result,) = measure_rows(call, [normalizer], rows, TOP_N, names=NAMES, **options).values()
    return result


def in_float64(call: AttentionCall) -> AttentionCall:
    tensors = {name: value.double() for name, value in vars(call).items() if _is_floating(value)}
    return dataclasses.replace(call, **tensors)


def _is_floating(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def same(found: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    """NaN and infinity at the same indices, else equal up to tolerance * max(1, |expected|)."""
    found, expected = found.double(), expected.double()
    assert torch.equal(found.isnan(), expected.isnan()), f"{name}: undefined elsewhere"
    error = torch.where(found == expected, 0.0, (found - expected).abs() / expected.abs().clamp(min=1)).nan_to_num(0.0)
    assert float(error.max()) <= tolerance, f"{name}: {float(error.max()):.2e}"


def check(call: AttentionCall, result: RowStatistics, normalizer: Normalizer | None, tolerance: float) -> None:
    queries = call.query_BHQD.shape[-2]
    some = torch.tensor(sorted({*range(min(3, queries)), queries // 2, queries - 1}))
    expected = reference.dense_statistics(call, normalizer, some, TOP_N)
    assert torch.equal(result.n[..., some].double(), expected.pop("n"))
    assert set(result.values) == set(NAMES)
    nothing = torch.full((*result.n.shape[:2], len(some)), torch.nan, dtype=torch.float64)
    for name, every in result.values.items():
        value = every[..., some]
        if name in ("horizon", "horizon_without_sink"):  # e^spread magnifies what the spread is off by
            value, expected[name] = value.log(), expected.get(name, nothing).log()
        if name != "jacobian_norm":
            same(value, expected.get(name, nothing), tolerance, name)
    for index, N in enumerate(TOP_N):
        same(result.top_mass[..., some, index], expected.get(f"top_mass_{N}", nothing), tolerance, f"top_mass_{N}")


def check_jacobian(call: AttentionCall, result: RowStatistics, normalizer: Normalizer | None, tolerance: float) -> None:
    norms = result.values["jacobian_norm"].double()
    for at in [(0, 0, -1), (0, 1, -2), (-1, 2, -1), (-1, 3, 0), (0, 3, norms.shape[-1] // 2)]:
        item, head, row = (index % size for index, size in zip(at, norms.shape, strict=True))
        found = float(norms[item, head, row])
        expected = reference.jacobian_norm(call, normalizer, item, head, row)
        if math.isnan(found):
            assert math.isnan(expected) or (normalizer is not None and not has_closed_form(normalizer))
        else:
            assert found == pytest.approx(expected, rel=tolerance, abs=1e-30)


@pytest.mark.parametrize("kind", CALLS)
def test_softmax_of_every_kind_of_call(kind: str) -> None:
    call = CALLS[kind]
    result = measured(call)
    check(call, result, None, 1e-5)
    check_jacobian(call, result, None, 1e-5)
    assert not result.broken.any()


@pytest.mark.parametrize("kind", ["causal", "sinks", "large logits", "left padding", "window"])
def test_float64_stays_float64(kind: str) -> None:
    call = in_float64(CALLS[kind])
    result = measured(call)
    check(call, result, None, 1e-12)
    check_jacobian(call, result, None, 1e-11)
    assert result.values["entropy_nats"].dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    call = make_call()
    halves = {name: getattr(call, name).to(dtype) for name in ("query_BHQD", "key_BGKD", "value_BGKE")}
    call = dataclasses.replace(call, **halves)
    check(call, measured(call), None, 1e-5)


KINDS = ["causal", "left padding", "cross"]


@pytest.mark.parametrize(("name", "kind"), [(name, KINDS[i % 3]) for i, name in enumerate(ROW_NORMALIZERS)])
@pytest.mark.every_second("name", first=1)
def test_every_normalizer(name: str, kind: str) -> None:
    check_every_statistic(name, kind)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ROW_NORMALIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_normalizer_in_every_call(name: str, kind: str) -> None:
    check_every_statistic(name, kind)


def test_maps_with_a_known_constant_have_a_closed_form_behind_scale_rules() -> None:
    names = [name for name in ROW_NORMALIZERS if get(name).map.lipschitz(8) is not None]
    assert {"softmax", "entmax15", "kneemax", "sigmoid", "relu"} <= set(names)
    assert all(has_closed_form(Normalizer(get(name).map)) for name in [*names, "odd_polynomial"])


class Squares(Map):
    properties = Properties(row_sum="free", shift_invariant=False)
    jacobian = "diagonal"

    def forward(self, block: Block) -> Tensor:
        return block.hide(block.logits.square() / block.n)


class Warm(Map):
    properties = Properties(row_sum="one")
    jacobian = "threshold"

    def forward(self, block: Block) -> Tensor:
        return block.hide(torch.softmax(block.filled_low() / 2, -1))

    def slopes(self, block: Block, weights: Tensor) -> Tensor:
        return weights / 2


class Taylor(Map):
    properties = Properties(row_sum="one", shift_invariant=False)
    jacobian = "quotient"

    def forward(self, block: Block) -> Tensor:
        return self._twice(block) / self._twice(block).sum(-1, keepdim=True).clamp(min=1)

    def slopes(self, block: Block, weights: Tensor) -> Tensor:
        return 2 * (block.logits + 1) / self._twice(block).sum(-1, keepdim=True).clamp(min=1)

    @staticmethod
    def _twice(block: Block) -> Tensor:
        return block.hide((block.logits + 1) ** 2 + 1)


@pytest.mark.parametrize("kind", ["causal", "padding of keys"])
@pytest.mark.parametrize("map_", [Squares, Warm, Taylor])
def test_a_map_of_another_package_has_exact_norms_if_it_declares_its_jacobian(map_: type[Map], kind: str) -> None:
    for sink in (None, Sink(0.3, learned=False)):
        call, normalizer = in_float64(CALLS[kind]), Normalizer(map_(), sink=sink)
        exact = has_closed_form(normalizer)
        assert exact == (map_ is not Taylor or sink is None)  # with a sink F / sum F has another form
        result = measured(call, normalizer)
        check_jacobian(call, result, normalizer, 1e-6)
        assert not exact or result.values["jacobian_norm"][result.n > 0].isfinite().all()


def test_a_subclass_with_weights_of_its_own_does_not_inherit_the_jacobian() -> None:
    class Doubled(Warm):
        def forward(self, block: Block) -> Tensor:
            return 2 * super().forward(block)

    class Renamed(Warm):
        pass

    class Incomplete(Map):
        properties = Properties(row_sum="one")
        jacobian = "threshold"

    assert not has_closed_form(Normalizer(Doubled()))
    assert has_closed_form(Normalizer(Renamed()))
    block = Block.of(torch.zeros(1, 3))
    with pytest.raises(NotImplementedError, match=r"Incomplete.slopes for jacobian='threshold'"):
        Incomplete().slopes(block, block.logits)


def check_every_statistic(name: str, kind: str) -> None:
    call, normalizer = in_float64(CALLS[kind]), get(name)
    assert isinstance(normalizer, Normalizer)
    result = measured(call, name)
    check(call, result, normalizer.double(), 1e-6)  # some keep float32 parameters
    check_jacobian(call, result, normalizer, 1e-5)


@pytest.mark.parametrize("name", ["entmax15", "ssmax", "sigmoid", "kneemax", "topk"])
def test_normalizers_in_float32(name: str) -> None:
    call, normalizer = CALLS["causal"], get(name)
    assert isinstance(normalizer, Normalizer)
    check(call, measured(call, name), normalizer, 1e-4)


@pytest.mark.parametrize(
    "normalizer",
    [
        compose("entmax15", sink=Sink(0.5)),
        compose("entmax15", scale=get("ssmax", s=0.4, heads=HEADS)),
        compose("softmax", scale="ssmax", sink=Sink(1.0, heads=HEADS)),
        compose("kneemax", sink=Sink(0.1)),
        get("kneemax", knee=0.2, temperature=0.7),
        get("softmax", temperature=0.3),
        get("entmax", alpha=1.3, learned=True, heads=HEADS),
        get("kernel", function="polynomial", offset=3.0),
        get("relu", power=2.0),
        get("sigmoid", bias=-1.0),
        get("log_scaled", rule="yarn"),
        Normalizer(get("entmax15").map, scale=[*get("ssmax", s=0.4).rules, *get("softmax", temperature=0.6).rules]),
    ],
    ids=lambda normalizer: f"{normalizer.name} {type(normalizer.map).__name__}",
)
@pytest.mark.every_second("normalizer", first=1)
def test_compositions(normalizer: Normalizer) -> None:
    call = in_float64(make_call(20))
    result = measured(call, normalizer)
    check(call, result, normalizer, 1e-6)
    check_jacobian(call, result, normalizer, 1e-5)


@pytest.mark.parametrize("logit", [0.0, -2.0, 0.7])
def test_the_norm_of_softpick_with_a_sink(logit: float) -> None:
    call, normalizer = in_float64(make_call(9, batch=1)), compose("softpick", sink=Sink(logit, heads=HEADS))
    result = measured(call, normalizer)
    assert result.values["jacobian_norm"].isfinite().all()
    check_jacobian(call, result, normalizer, 1e-6)


def test_one_walk_measures_several_normalizers_alike() -> None:
    call = CALLS["sinks"]
    rows = torch.arange(33)
    together = measure_rows(call, ["entmax15", None, "ssmax", "softmax", "sigmoid"], rows, TOP_N)
    for name, choice in [("model", None), *((name, name) for name in ("entmax15", "ssmax", "softmax", "sigmoid"))]:
        alone = measure_rows(call, [choice], rows, TOP_N)[name]
        for metric in PER_ROW:
            same(together[name].values[metric], alone.values[metric], 1e-5, f"{name} {metric}")


@pytest.mark.parametrize("kind", ["causal", "window", "mask per head", "more queries than keys", "sinks"])
@pytest.mark.parametrize("elements", [1, 1000])
def test_the_size_of_the_blocks_does_not_matter(kind: str, elements: int) -> None:
    call = CALLS[kind]
    whole, cut = (measured(call, block_elements=size) for size in (10**7, elements))
    assert torch.equal(whole.n, cut.n)
    for name in PER_ROW:
        same(cut.values[name], whole.values[name], 2e-6, name)


@pytest.mark.parametrize(
    ("all_heads", "options", "rows", "heads"),
    [
        (False, {}, 3, 1),  # 3 * 64 logits of 32 keys, of two heads that share a key head
        (True, {}, 6, 2),  # four times as many, of four heads
        (False, {"copies": 2}, 1, 1),
        (False, {"block_elements": 128}, 2, 1),
    ],
)  # fmt: skip
def test_how_many_logits_a_block_has(
    all_heads: bool, options: dict[str, int], rows: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fixed number for each thread, of which at most three count here."""
    monkeypatch.setattr(calls, "BLOCK_ELEMENTS", 64)
    monkeypatch.setattr(calls, "MAX_THREADS", 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    query, key = torch.zeros(1, 4, 24, 8), torch.zeros(1, 2, 32, 8)
    call = AttentionCall(0, "decoder", query, key, key, 1.0, causal=False)
    blocks = list(calls.logit_blocks(call, torch.arange(24), all_heads=all_heads, **options))
    assert [block.logits.shape for block in blocks] == [(2 * heads, rows, 32)] * len(blocks)
    assert len(blocks) * heads * rows == 2 * 24


@pytest.mark.parametrize(
    ("rows", "blocks"),
    [([0, 127, 128], [[0, 127], [128]]), ([99, 199, 200], [[99, 199], [200]]), ([63, 126, 127], [[63, 126, 127]])],
)
def test_rows_of_a_block_see_at_most_128_keys_or_twice_as_many_as_the_first(
    rows: list[int], blocks: list[list[int]]
) -> None:
    call = make_call(210, batch=1)
    found = list(calls.logit_blocks(call, torch.tensor(rows), all_heads=True, block_elements=10**7))
    assert [block.queries.tolist() for block in found] == blocks


def test_some_rows_are_the_rows_among_all() -> None:
    call = CALLS["long"]
    some = torch.tensor([0, 3, 64, 65, 250, 299])
    every, few = measured(call), measure_rows(call, [None], some, TOP_N)["model"]
    for name in PER_ROW:
        same(few.values[name], every.values[name][..., some], 2e-6, name)


@pytest.mark.parametrize("name", [name for name in ROW_NORMALIZERS if not has_closed_form(get(name))])
def test_a_norm_without_closed_form_is_measured_on_a_few_rows_and_unknown_on_others(name: str) -> None:
    norms = measured(make_call(40, batch=1), name).values["jacobian_norm"]
    assert (~norms.isnan()).sum(-1).eq(POWER_ROWS).all()
    assert not norms[..., -1].isnan().any()


@pytest.mark.parametrize("name", ["alibi", "nearmax"])
def test_numbers_added_to_the_logits_leave_the_norm_of_the_map(name: str) -> None:
    call, normalizer = in_float64(make_call(40, batch=1)), get(name, heads=HEADS)
    norms = measured(call, normalizer)
    assert not norms.values["jacobian_norm"].isnan().any()
    check_jacobian(call, norms, normalizer, 1e-9)


def test_the_norm_of_hard_attention_with_a_sink_is_that_of_softmax_with_it() -> None:
    call, softmax = in_float64(make_call(9, batch=1)), compose("softmax", sink=Sink(1.5, heads=HEADS))
    found = measured(call, compose("hard", sink=Sink(1.5, heads=HEADS))).values["jacobian_norm"]
    torch.testing.assert_close(found, measured(call, softmax).values["jacobian_norm"], rtol=1e-9, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("first", "others", "sink"),
    [(-5.0, [-200.0], 0.0), (-1.0, [-400.0], 0.0), (1.0, [-305.0, -306.0], 0.0), (400.0, [0.0], 401.0)],
)
def test_the_norm_where_both_sinks_are_far_above_the_others(
    first: float, others: list[float], sink: float, dtype: torch.dtype
) -> None:
    found = measured(one_row([first, *others], dtype), get("sink", logit=sink)).values["jacobian_norm"].item()
    share = 1 / (1 + math.exp(sink - first))  # the other keys have no weight
    assert found == pytest.approx(share * (1 - share), rel=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("logits", [[-1e30] * 3, [-2e30, -3e30, -2e30]])
def test_logits_as_low_as_those_of_hidden_keys_make_no_numbers(logits: list[float]) -> None:
    found = measured(one_row(logits))
    assert found.broken.all()
    assert found.values["effective_keys"].isnan().all()


@pytest.mark.parametrize("size", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("function", ["polynomial", "softplus", "elu+1", "exp"])
def test_norms_of_kernels_whose_values_are_small_or_large(function: str, size: float) -> None:
    call, normalizer = in_float64(make_call(6, batch=1, size=size)), get("kernel", function=function)
    check_jacobian(call, measured(call, normalizer), normalizer, 1e-9)


def test_a_map_without_a_gradient_has_no_norm() -> None:
    class Steps(type(get("softmax").map)):  # a map of its own type: nothing is known about its Jacobian
        def forward(self, block):  # type: ignore[no-untyped-def]
            return super().forward(block).detach()

    assert measured(make_call(8), Normalizer(Steps())).values["jacobian_norm"].isnan().all()


def one_row(logits: list[float], dtype: torch.dtype = torch.float32) -> AttentionCall:
    """A call whose only row has these logits."""
    key = torch.tensor(logits, dtype=dtype)[None, None, :, None]
    return AttentionCall(0, "cross", torch.ones(1, 1, 1, 1, dtype=dtype), key, torch.ones_like(key), 1.0, False)


ADVERSARIAL = {
    "one key": [3.0],
    "two equal keys": [1.0, 1.0],
    "two keys": [0.0, 4.0],
    "all equal": [2.0] * 50,
    "one huge logit": [0.0] * 20 + [1e4] + [0.0] * 20,
    "a huge sink": [1e4] + [0.0] * 20,
    "a huge sink and a second winner": [1e4, 1e3] + [0.0] * 20,
    "ties at the top": [5.0, 5.0, 5.0, 0.0, 0.0],
    "the sink ties with the largest": [5.0, 0.0, 5.0, 1.0],
    "nearly a tie": [1.0, 1.0 + 2e-7, 0.0, -1.0],
    "far below": [-1e4, -1e4 + 1, -1e4 + 2],
    "an outlier below": [0.0, 1.0, -1e5],
    "many at the second place": [0.0] * 100 + [1e-6],
}


@pytest.mark.parametrize("case", ADVERSARIAL)
def test_adversarial_rows(case: str) -> None:
    call = one_row(ADVERSARIAL[case], torch.float64)
    result = measured(call)
    expected = reference.dense_statistics(call, None, torch.tensor([0]), TOP_N)
    if "huge" in case:  # the dense reference underflows there
        for name in ("effective_gap", "effective_gap_without_sink", "entropy_nats"):
            assert result.values[name].isfinite().all(), name
            expected.pop(name, None)
    for name, value in expected.items():
        if name in result.values:
            same(result.values[name], value, 1e-9, name)
    single = measured(one_row(ADVERSARIAL[case])).values
    for name, value in result.values.items():
        if not name.startswith("horizon"):
            same(single[name], value, 2e-5, name)
    norm = reference.jacobian_norm(call, None, 0, 0, 0)
    assert float(result.values["jacobian_norm"]) == pytest.approx(norm, rel=1e-9, abs=1e-15)


def test_the_gap_of_a_decided_row_keeps_its_digits() -> None:
    """Where the largest weight rounds to 1, the log-odds still follow from the logits."""
    logits = [0.0, 40.0, *([0.0] * 30)]
    values = measured(one_row(logits)).values
    assert float(values["max_weight"]) == 1
    assert float(values["effective_gap"]) == pytest.approx(40.0, rel=1e-6)
    assert float(values["effective_gap_without_sink"]) == pytest.approx(40.0, rel=1e-6)
    assert float(values["entropy_nats"]) == pytest.approx(31 * 41 * math.exp(-40), rel=1e-4)
    assert float(values["jacobian_norm"]) == pytest.approx(2 * 31 * math.exp(-40), rel=0.5)


def test_what_is_left_beside_an_overwhelming_sink() -> None:
    values = measured(one_row([50.0, 1.0, 1.0, 1.0, 1.0])).values
    assert float(values["sink_mass"]) == 1
    assert float(values["entropy_ratio_without_sink"]) == pytest.approx(1.0, abs=1e-6)
    assert float(values["effective_keys_without_sink"]) == pytest.approx(4.0, rel=1e-6)
    assert float(values["effective_gap_without_sink"]) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("normalizer", [None, "entmax15", "sigmoid"])
def test_a_row_that_is_not_finite_is_broken_and_nothing_else(bad: float, normalizer: str | None) -> None:
    call = make_call(20, batch=1)
    call.key_BGKD[:, 0, 7] = bad  # seen by the first two heads from row 7 on
    call.query_BHQD.abs_()
    result = measured(call, normalizer)
    expected = torch.zeros(1, HEADS, 20, dtype=torch.bool)
    expected[:, :2, 7:] = True
    assert torch.equal(result.broken, expected)
    for name, value in result.values.items():
        assert value[expected].isnan().all(), name
    assert result.values["entropy_nats"][~expected].isfinite().all()
    assert result.top_mass[~expected].isfinite().all()


def test_hidden_garbage_reaches_nothing() -> None:
    mask = CALLS["padding of keys"].mask
    assert mask is not None
    clean = make_call(mask=mask)
    dirty = make_call(mask=mask)
    dirty.key_BGKD[1, :, 20:] = math.nan
    for name, value in measured(clean).values.items():
        assert torch.equal(value.nan_to_num(), measured(dirty).values[name].nan_to_num()), name


def test_rows_that_see_nothing_are_undefined_and_not_broken() -> None:
    result = measured(CALLS["left padding"])
    assert result.n[0, :, :6].eq(0).all()
    assert not result.broken.any()
    assert all(value[0, :, :6].isnan().all() for value in result.values.values())


def test_a_patched_layer_is_measured_as_it_runs() -> None:
    call = dataclasses.replace(CALLS["causal"], normalizer=get("entmax15"))
    own = measure_rows(call, [None], torch.arange(33), TOP_N)["model"]
    named = measure_rows(call, ["entmax15"], torch.arange(33), TOP_N)["entmax15"]
    assert torch.equal(own.values["entropy_nats"], named.values["entropy_nats"])


def test_rules_that_read_the_layer_input_get_it() -> None:
    states = torch.randn(2, 12, 5, generator=torch.Generator().manual_seed(3)).double()
    call = in_float64(make_call(12, inputs_BKC=states))
    normalizer = get("asentmax", heads=HEADS, width=5)
    assert isinstance(normalizer, Normalizer)
    check(call, measured(call, normalizer), normalizer, 1e-6)


@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40),
    sink=st.none() | st.floats(-40, 40, width=32),
)
def test_any_row(logits: list[float], sink: float | None) -> None:
    call = one_row(logits, torch.float64)
    if sink is not None:
        call = dataclasses.replace(call, sinks_H=torch.tensor([sink], dtype=torch.float64))
    result = measured(call)
    check(call, result, None, 1e-9)
    expected = reference.jacobian_norm(call, None, 0, 0, 0)
    assert float(result.values["jacobian_norm"]) == pytest.approx(expected, rel=1e-9, abs=1e-14)
    values = {name: float(value) for name, value in result.values.items()}
    assert values["max_weight"] <= values["weight_ceiling"] * (1 + 1e-9)
    assert values["entropy_nats"] >= values["entropy_floor"] - 1e-9
    assert values["jacobian_norm"] <= 0.5 + 1e-12


def test_bad_requests_are_refused() -> None:
    call = CALLS["causal"]
    rows = torch.arange(3)
    with pytest.raises(ValueError, match="top_n"):
        measure_rows(call, [None], rows, (0, 4))
    with pytest.raises(ValueError, match="'softmax'"):
        measure_rows(call, ["softmax", "softmax"], rows, (1,))
    with pytest.raises(TypeError, match="'linear'"):
        measure_rows(call, ["linear"], rows, (1,))
    with pytest.raises(ValueError, match="normalizer"):
        measure_rows(call, [], rows, (1,))


def test_keys_are_not_repeated_for_the_heads_that_share_them() -> None:
    """Grouped heads give what separate copies of their keys would."""
    call = CALLS["causal"]
    copies = {name: getattr(call, name).repeat_interleave(HEADS // KEY_HEADS, 1) for name in ("key_BGKD", "value_BGKE")}
    apart = dataclasses.replace(call, **copies)
    assert apart.key_BGKD.shape[-1] == WIDTH
    for name, value in measured(apart).values.items():
        same(value, measured(call).values[name], 2e-6, name)


def test_the_largest_weight_beside_a_learned_sink_is_not_rescaled() -> None:
    call = dataclasses.replace(in_float64(CALLS["causal"]), sinks_H=torch.full((HEADS,), 2.0, dtype=torch.float64))
    rows = torch.tensor([12, 32])
    found = measure_rows(call, [None], rows, (4,))["model"].values["max_weight"]
    expected = reference.dense_weights(call)[:, :, rows].amax(-1)
    torch.testing.assert_close(found, expected)
    alone = measure_rows(dataclasses.replace(call, sinks_H=None), [None], rows, (4,))["model"].values["max_weight"]
    assert (found < alone).all()
