"""What each query sees, against a table of all pairs; and which engine takes a call."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import attnorm
from attnorm.engines import execution, fused, inputs, one_pass, sparse
from attnorm.engines.inputs import Inputs, row_factors, validate_inputs, with_rounded_queries
from attnorm.normalizers import Normalizer, compose, get

B, H, G = 2, 4, 2
MASKS = {"none": None, "keys": (1, 1, 1), "batch": (B, 1, 1), "pairs": (1, 1, 0), "all": (B, H, 0)}
SIZES = [(3, 5), (5, 5), (5, 3), (1, 4), (4, 1)]


def call(queries: int, keys: int, mask: Tensor | None = None, *, causal: bool = False, **more: Any) -> Inputs:
    generator = torch.Generator().manual_seed(queries)
    q, k, v = (
        torch.randn(B, h, n, w, generator=generator, dtype=torch.float64)
        for h, n, w in ((H, queries, 6), (G, keys, 6), (G, keys, 3))
    )
    return Inputs(q, k, v, mask, causal, 0.5, **more)


def calls() -> Iterator[tuple[Inputs, Tensor]]:
    """Every kind of call, with the table of what it sees, (B, H, Q, K)."""
    for queries, keys in SIZES:
        for shape in MASKS.values():
            for causal in (False, True):
                mask = None
                if shape is not None:
                    generator = torch.Generator().manual_seed(keys)
                    mask = torch.rand(*shape[:2], shape[2] or queries, keys, generator=generator) < 0.6
                one = call(queries, keys, mask, causal=causal)
                table = (
                    torch.ones(B, H, queries, keys, dtype=torch.bool)
                    if mask is None
                    else mask.expand(B, H, queries, keys)
                )
                if causal:
                    table = table & torch.tensor(
                        [[j <= keys - queries + i for j in range(keys)] for i in range(queries)]
                    )
                yield one, table


@pytest.mark.parametrize("elements", [1, 7, 2**24])
def test_masks_counts_and_reach_are_those_of_the_table_of_all_pairs(
    elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "MASK_ELEMENTS", elements)
    for one, table in calls():
        queries, keys = one.queries, one.keys
        assert one.weights_shape == table.shape
        assert (one.offset, one.groups) == (keys - queries, H // G)
        assert torch.equal(one.n().expand(B, H, queries, 1), table.sum(-1, keepdim=True).double())
        if one.mask is not None:
            masks = math.prod(one.mask.shape[:2])
            assert one.mask_rows() == max(1, elements // (masks * keys))
            seen = one.seen().expand(B, H, keys)
            assert (seen | ~table.any(-2)).all()  # no key that a query sees is missing
            if one.mask.shape[-2] > 1 or not one.causal:
                assert torch.equal(seen, table.any(-2))
        else:
            assert one.mask_rows() == max(1, elements // keys)
        for rows in (1, 2, 10):
            spans = list(one.steps(rows))
            assert [i for start, stop in spans for i in range(start, stop)] == list(range(queries))
            assert all(stop - start == rows for start, stop in spans[:-1])
            for start, stop in spans:
                reach = one.reach(stop)
                assert reach == (max(1, keys - queries + stop) if one.causal else keys)
                assert not table[..., start:stop, reach:].any()
                for width in {reach, keys}:
                    visible = one.visible(start, stop, width)
                    expected = table[..., start:stop, :width]
                    assert expected.all() if visible is None else torch.equal(visible.expand(expected.shape), expected)
                    if one.mask is None:
                        assert (visible is None) == bool(expected.all())
    assert list(call(0, 3).steps(2)) == [(0, 0)]


@pytest.mark.parametrize(("heads", "groups"), [(2, 1), (2, 2), (3, 1), (4, 2), (1, 1)])
def test_a_key_is_kept_if_any_head_of_its_group_sees_it(heads: int, groups: int) -> None:
    mask = torch.tensor([[j % heads == h or j == 4 for j in range(6)] for h in range(heads)])[None, :, None]
    mask[..., 5] = False
    q, k = torch.ones(1, heads, 1, 2), torch.ones(1, groups, 6, 2)
    found = validate_inputs(q, k, 3 * k, mask=mask, causal=False, scale=None, positions=None)
    size = heads // groups
    expected = [[float(any(mask[0, g * size : (g + 1) * size, 0, j])) for j in range(6)] for g in range(groups)]
    assert found.k_BGKD[0, ..., 0].tolist() == expected
    assert (found.v_BGKE / 3)[0, ..., 0].tolist() == expected


def test_what_no_query_sees_is_zero_and_the_rest_is_as_it_was() -> None:
    for one, table in calls():
        q, k, v = (t.clone() for t in (one.q_BHQD, one.k_BGKD, one.v_BGKE))
        found = validate_inputs(q, k, v, mask=one.mask, causal=one.causal, scale=None, positions=None)
        assert found.scale == pytest.approx(6**-0.5)
        blind = ~table.any(-1)
        assert (found.q_BHQD[blind] == 0).all()
        assert torch.equal(found.q_BHQD[~blind], q[~blind])
        if one.mask is not None:
            hidden = ~table.unflatten(1, (G, H // G)).any(2).any(-2)
            kept = found.k_BGKD[hidden]
            if not (one.mask.shape[-2] == 1 and one.causal):
                assert (kept == 0).all()
                assert (found.v_BGKE[hidden] == 0).all()
            assert torch.equal(found.k_BGKD[~hidden], k[~hidden])
            assert torch.equal(found.v_BGKE[~hidden], v[~hidden])


def test_fewer_dimensions_are_filled_up_from_the_left() -> None:
    q, k, v = torch.ones(3, 2), torch.ones(5, 2), torch.ones(5, 4)
    mask = torch.ones(3, 1, dtype=torch.bool)
    found = validate_inputs(q, k, v, mask=mask, causal=False, scale=2, positions=None)
    assert found.q_BHQD.shape == (1, 1, 3, 2)
    assert found.v_BGKE.shape == (1, 1, 5, 4)
    assert found.mask is not None
    assert found.mask.shape == (1, 1, 3, 5)
    assert found.scale == 2.0


@pytest.mark.parametrize(
    ("shapes", "named"),
    [
        (((2,), (2,), (2,)), "leading"),
        (((3, 2), (1, 3, 2), (1, 3, 2)), "leading"),
        (((1, 1, 1, 3, 2), (1, 1, 1, 3, 2), (1, 1, 1, 3, 2)), "leading"),
        (((3, 2), (5, 4), (5, 4)), "got 2 and 4"),
        (((3, 2), (5, 2), (4, 2)), "agree"),
        (((2, 3, 2), (2, 5, 2), (1, 5, 2)), "agree"),
        (((3, 2), (0, 2), (0, 2)), "at least one"),
        (((3, 0), (5, 0), (5, 2)), "at least one"),
        (((2, 1, 3, 2), (1, 1, 5, 2), (1, 1, 5, 2)), "batch"),
        (((3, 3, 2), (2, 5, 2), (2, 5, 2)), "multiple"),
        (((3, 3, 2), (0, 5, 2), (0, 5, 2)), "at least one head"),
    ],
)
def test_shapes_that_do_not_fit_are_named(shapes: tuple[tuple[int, ...], ...], named: str) -> None:
    q, k, v = (torch.ones(shape) for shape in shapes)
    with pytest.raises(ValueError, match=named):
        validate_inputs(q, k, v, mask=None, causal=False, scale=None, positions=None)


def test_dtypes_and_scales_that_do_not_fit_are_named() -> None:
    q = torch.ones(3, 2)
    for others in ((q.double(), q), (q, q.double()), (q.int(), q.int())):
        with pytest.raises(TypeError, match="dtype"):
            validate_inputs(q, *others, mask=None, causal=False, scale=None, positions=None)
    for scale in (math.nan, math.inf, "1"):
        with pytest.raises(ValueError, match="scale"):
            validate_inputs(q, q, q, mask=None, causal=False, scale=scale, positions=None)  # type: ignore[arg-type]


def test_gradients_are_needed_where_any_input_has_one_and_they_are_enabled() -> None:
    one = call(3, 5)
    assert not one.needs_grad
    for name in ("q_BHQD", "k_BGKD", "v_BGKE"):
        trained = replace(one, **{name: getattr(one, name).clone().requires_grad_()})
        assert trained.needs_grad
        with torch.no_grad():
            assert not trained.needs_grad
    for name in ("hidden_states", "bias"):
        assert replace(one, **{name: torch.ones(1, requires_grad=True)}).needs_grad


def test_a_power_of_two_moves_from_float16_queries_into_the_scale_and_nothing_else_changes() -> None:
    for dtype, room in ((torch.float16, 256.0), (torch.bfloat16, 1.0), (torch.float32, 1.0)):
        one = call(3, 5)
        half = replace(one, k_BGKD=one.k_BGKD.to(dtype))
        found = with_rounded_queries(one.q_BHQD * 1000, half)
        assert found.scale == 0.5 * room
        assert torch.equal(found.q_BHQD, (one.q_BHQD * 1000 / room).to(dtype))


def test_row_factors_are_the_products_of_the_scale_rules() -> None:
    one = call(3, 5, causal=True)
    assert row_factors(one, normalizer("softmax")) is None
    found = row_factors(one, normalizer("ssmax", s=0.5))
    assert found is not None
    expected = 0.5 * torch.log(torch.tensor([3.0, 4.0, 5.0]).double())[:, None]
    torch.testing.assert_close(found, expected.expand(B, H, 3, 1))
    single = replace(one, q_BHQD=one.q_BHQD.float())
    assert row_factors(single, normalizer("ssmax", s=0.5)).dtype == torch.float32  # type: ignore[union-attr]


def normalizer(name: str, **options: Any) -> Normalizer:
    found = get(name, **options)
    assert isinstance(found, Normalizer)
    return found


PLAIN = call(16, 16)
TRAINED = replace(PLAIN, q_BHQD=PLAIN.q_BHQD.clone().requires_grad_())
WITH_BIAS = replace(PLAIN, bias=torch.zeros(1, 1, 16, 16))
CAPPED = replace(PLAIN, softcap=5.0)


@pytest.mark.parametrize(
    ("one", "inputs_", "runs"),
    [
        (normalizer("softmax"), PLAIN, True),
        (normalizer("softmax"), WITH_BIAS, False),
        (normalizer("softmax"), CAPPED, False),
        (normalizer("entmax15"), PLAIN, False),
        (normalizer("softmax1"), PLAIN, True),
        (normalizer("ssmax"), PLAIN, True),
        (normalizer("ssmax"), replace(PLAIN, q_BHQD=PLAIN.q_BHQD.half()), True),
        (normalizer("softmax"), replace(PLAIN, q_BHQD=PLAIN.q_BHQD.half()), True),
        (normalizer("topk", k=2), PLAIN, False),
        (normalizer("adaptive_temperature"), PLAIN, True),
        (normalizer("adaptive_temperature"), TRAINED, False),
        (compose("softmax", scale=["adaptive_temperature", "ssmax"]), PLAIN, False),
        (compose("softmax", scale=["ssmax", "adaptive_temperature"]).requires_grad_(False), PLAIN, True),
        (compose("softmax", scale="adaptive_temperature", sink="softmax1"), PLAIN, False),
        (normalizer("scale_invariant"), PLAIN, False),
    ],
)
def test_sdpa_takes_rescaled_softmax(one: Normalizer, inputs_: Inputs, runs: bool) -> None:
    assert fused.applies(inputs_, one) is runs


def in_float32(queries: int, width: int = 16, **more: Any) -> Inputs:
    q, k, v = torch.ones(1, 2, queries, width), torch.ones(1, 2, 20, width), torch.ones(1, 2, 20, 16)
    return Inputs(q, k, v, None, True, 0.5, **more)


LARGE = in_float32(16)
interpreted = pytest.mark.skipif(
    not execution.runs_triton(torch.device("cpu")), reason="kernels run on a CPU in Triton's interpreter only"
)


@interpreted
@pytest.mark.parametrize(
    ("one", "inputs_", "on_sparse", "on_one_pass"),
    [
        (normalizer("softmax"), LARGE, False, True),
        (normalizer("softmax"), in_float32(15), False, False),
        (normalizer("entmax15"), LARGE, True, False),
        (normalizer("entmax15"), in_float32(15), False, False),
        (normalizer("entmax15"), in_float32(16, dropout=0.1), False, False),
        (normalizer("softmax"), in_float32(16, dropout=0.1), False, False),
        (normalizer("entmax15"), in_float32(16, softcap=3.0), False, False),
        (normalizer("softmax"), in_float32(16, softcap=3.0), False, True),
        (normalizer("softmax"), in_float32(16, bias=torch.zeros(1, 1, 16, 20)), False, False),
        (normalizer("entmax15"), in_float32(16, bias=torch.zeros(1, 1, 16, 20)), False, False),
        (normalizer("softmax"), in_float32(16, 128), False, True),
        (normalizer("softmax"), in_float32(16, 257), False, False),
        (normalizer("entmax15"), in_float32(16, 257), False, False),
        (compose("entmax15", scale="ssmax"), LARGE, True, False),
        (compose("entmax15", scale="adaptive_temperature"), LARGE, False, False),
        (compose("entmax15", sink="softmax1"), LARGE, False, False),
        (compose("entmax15", select=normalizer("topk", k=2)), LARGE, False, False),
        (normalizer("kneemax"), LARGE, True, False),
        (normalizer("entmax", alpha=1.01), LARGE, True, False),
        (normalizer("entmax", alpha=1.009), LARGE, False, False),
        (normalizer("relu"), LARGE, False, True),
        (compose("relu", select=normalizer("local", window=4)), LARGE, False, False),
        (compose("softmax", select=normalizer("local", window=4)), LARGE, False, True),
        (compose("softmax", select=normalizer("local", window=4)), replace(LARGE, causal=False), False, False),
        (
            compose("softmax", select=normalizer("local", window=4)),
            replace(LARGE, positions=torch.arange(16)),
            False,
            False,
        ),
        (compose("softmax", select=normalizer("topk", k=2)), LARGE, False, True),
        (compose("softmax", select=[normalizer("local", window=4), normalizer("topk", k=2)]), LARGE, False, True),
        (compose("softmax", select=[normalizer("topk", k=2), normalizer("local", window=4)]), LARGE, False, False),
        (compose("softmax", select=[normalizer("local", window=4), normalizer("topk", k="log")]), LARGE, False, False),
        (compose("sigmoid", select=normalizer("topk", k=2)), LARGE, False, False),
        (normalizer("softmax1"), LARGE, False, True),
        (compose("sigmoid", sink="softmax1"), LARGE, False, False),
        (normalizer("scale_invariant"), LARGE, False, True),
        (normalizer("scale_invariant"), replace(LARGE, positions=torch.arange(16)), False, False),
        (normalizer("adaptive_temperature"), LARGE, False, True),
        (normalizer("adaptive_temperature"), in_float32(16, softcap=3.0), False, False),
        (compose("softmax", scale="adaptive_temperature", sink="softmax1"), LARGE, False, False),
        (compose("softmax", scale=["adaptive_temperature", "ssmax"]), LARGE, False, False),
        (normalizer("norm_softmax"), LARGE, False, True),
        (normalizer("norm_softmax"), in_float32(16, softcap=3.0), False, False),
        (compose("softmax", scale="norm_softmax", sink="softmax1"), LARGE, False, False),
        (compose("softmax", scale=["norm_softmax", "ssmax"]), LARGE, False, False),
    ],
)
def test_kernels_take_what_they_have_a_form_for(
    one: Normalizer, inputs_: Inputs, on_sparse: bool, on_one_pass: bool
) -> None:
    assert (sparse.applies(inputs_, one), one_pass.applies(inputs_, one)) == (on_sparse, on_one_pass)


@interpreted
def test_a_kernel_needs_a_dtype_and_widths_that_fit_the_chip() -> None:
    for dtype, width in ((torch.float16, 256), (torch.float32, 256)):
        assert execution.runs_kernels(torch.ones(1, width, dtype=dtype), torch.ones(1, 3, dtype=dtype))
        assert not execution.runs_kernels(torch.ones(1, 3, dtype=dtype), torch.ones(1, width + 1, dtype=dtype))
    assert not execution.runs_kernels(torch.ones(1, 3, dtype=torch.float64))
    assert not execution.runs_kernels(torch.ones(1, 3, dtype=torch.bfloat16))  # in the interpreter


def test_only_a_cpu_runs_in_step_with_the_program() -> None:
    here, meta = torch.ones(2), torch.device("meta")
    assert not execution.runs_asynchronously(here)
    assert execution.runs_asynchronously(here.to(meta))
    assert torch.equal(execution.sent_to(torch.device("cpu"), here), here)
    assert execution.sent_to(meta, here).is_meta
    assert execution.sent_to(meta, here.to(meta)).is_meta
    assert execution.arrival(torch.device("cpu"))() is None  # type: ignore[func-returns-value]
    assert torch.equal(execution.sent_to_cpu(here), here)


def test_rows_of_a_mask_are_aligned_for_the_kernel_that_reads_them() -> None:
    for width in (1, 15, 16, 17, 40):
        mask = torch.arange(3.0 * width).reshape(3, width)
        found = fused._align_rows(mask)
        assert torch.equal(found, mask)
        assert found.stride(0) == math.ceil(width / 16) * 16


@pytest.mark.parametrize("queries", [1023, 1024, 1025])
def test_causal_calls_of_sdpa_step_over_the_keys_ahead(queries: int) -> None:
    one = call(queries, queries + 1, causal=True)
    spans = list(fused._query_spans(one))
    assert spans[0] == (0, min(queries, 1024))
    assert list(fused._query_spans(replace(one, causal=False))) == [(0, queries)]
    mask = torch.ones(1, 1, queries, queries + 1, dtype=torch.bool)
    assert list(fused._query_spans(replace(one, mask=mask))) == [(0, queries)]


def test_sdpa_scales_below_a_thousandth_are_multiplied_into_the_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    scales: list[float] = []
    plain = fused.scaled_dot_product_attention

    def watched(*tensors: Tensor, scale: float, **options: Any) -> Tensor:
        scales.append(scale)
        return plain(*tensors, scale=scale, **options)

    monkeypatch.setattr(fused, "scaled_dot_product_attention", watched)
    q, k, v = PLAIN.q_BHQD, PLAIN.k_BGKD, PLAIN.v_BGKE
    for scale in (1e-3, 0.999e-3, -0.5):
        found = attnorm.attention(q, k, v, "softmax", scale=scale, engine="fused")
        weights = (q @ k.repeat_interleave(2, 1).mT * scale).softmax(-1)
        torch.testing.assert_close(found, weights @ v.repeat_interleave(2, 1))
    assert scales == [1e-3, 1.0, 1.0]
