"""Tensors without numbers: paths that only a GPU takes, and the shapes of outputs and gradients."""

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from attnorm import attention
from attnorm.engines import decoding, fused, one_pass_operators, sparse, stick_breaking
from attnorm.engines.inputs import validate_inputs
from attnorm.normalizers.registry import BUILT_IN, get

CALLS = [
    (torch.float32, None, True),
    (torch.float32, (1, 1, 5, 7), False),
    (torch.float32, (2, 3, 5, 7), False),
    (torch.float16, (2, 1, 1, 7), False),
    (torch.float16, None, True),
    (torch.bfloat16, None, False),
]


@pytest.mark.parametrize(("dtype", "mask", "causal"), CALLS, ids=str)
def test_attention_with_its_logsumexp(
    dtype: torch.dtype, mask: tuple[int, ...] | None, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k = (torch.empty(2, 3, n, 16, dtype=dtype, device="meta") for n in (5, 7))
    additive = None if mask is None else torch.empty(mask, dtype=dtype, device="meta")
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def operator(name: str, rows: int) -> Any:
        def run(*arguments: Any, **options: Any) -> tuple[torch.Tensor, ...]:
            calls.append((name, arguments, options))
            query, _, value = arguments[:3]
            log_sum = torch.empty(*query.shape[:2], rows, device="meta")
            return torch.empty(*query.shape[:3], value.shape[-1], device="meta"), log_sum, log_sum

        return run

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention", operator("flash", 5), raising=False)
    monkeypatch.setattr(
        torch.ops.aten, "_scaled_dot_product_efficient_attention", operator("efficient", 32), raising=False
    )
    out, log_sum = fused.attention_and_logsumexp(q, k, k, additive, causal, 0.25)
    assert out.shape == (2, 3, 5, 16)
    assert log_sum.shape == (2, 3, 5)
    ((name, arguments, options),) = calls
    half = dtype in (torch.float16, torch.bfloat16)
    assert name == ("flash" if half and mask is None else "efficient")
    assert options == {"scale": 0.25}
    if name == "flash":
        assert arguments[3:] == (0.0, causal)
    else:
        bias = arguments[3]
        assert arguments[4:] == (True, 0.0, causal)
        assert (bias is None) == (mask is None)
        if bias is not None:
            assert bias.shape == (2, 3, 5, 7)
            assert bias.stride(-2) % 16 == 0


@pytest.mark.parametrize(
    ("width", "values", "padded"), [(16, 16, 16), (5, 9, 16), (8, 17, 24), (9, 5, 16), (24, 8, 24)]
)
def test_widths_on_cuda_are_padded_to_a_multiple_of_8(
    width: int, values: int, padded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        seen.append((q.shape[-1], k.shape[-1], v.shape[-1]))
        return torch.empty(*q.shape[:-1], v.shape[-1], device="cpu")

    monkeypatch.setattr(fused, "scaled_dot_product_attention", attend)
    for device, expected in (("cuda", padded), ("cpu", max(width, values))):
        with FakeTensorMode(allow_non_fake_inputs=True):
            shapes = ((2, 4, 3, width), (2, 2, 7, width), (2, 2, 7, values))
            q, k, v = (torch.empty(shape, device=device) for shape in shapes)
            inputs = validate_inputs(q, k, v, mask=None, causal=False, scale=None, positions=None)
            output = fused._sdpa(inputs, None)
        assert seen.pop() == (expected, expected, expected)
        assert output.shape == (2, 4, 3, values)


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name not in ("differential", "differential_v2", "tda")])
@pytest.mark.parametrize("length", [7, 300])  # threshold maps put the keys of long rows in groups
def test_every_normalizer_has_an_output_and_a_gradient_without_numbers(name: str, length: int) -> None:
    normalizer = get(name, **({"learned": 4} if name == "soft" else {})).to("meta")
    q, k, v = (torch.empty(2, heads, length, 4, device="meta", requires_grad=True) for heads in (6, 3, 3))
    mask = torch.empty(2, 1, 1, length, dtype=torch.bool, device="meta")
    output = attention(q, k, v, normalizer, mask=mask, causal=True)
    assert (output.shape, output.device.type) == (q.shape, "meta")
    for tensor, gradient in zip((q, k, v), torch.autograd.grad(output.sum(), (q, k, v)), strict=True):
        assert (gradient.shape, gradient.device.type) == (tensor.shape, "meta")


@pytest.mark.parametrize("name", ["entmax15", "kneemax"])
@pytest.mark.parametrize("length", [7, 300])
def test_threshold_maps_take_fake_tensors_as_meta_tensors(name: str, length: int) -> None:
    with FakeTensorMode():
        q = torch.empty(2, 3, length, 4, requires_grad=True)
        output = attention(q, q, q, name, causal=True)
        (gradient,) = torch.autograd.grad(output.sum(), q)
    assert output.shape == gradient.shape == q.shape


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


Q, K, V = empty(2, 6, 5, 4), empty(2, 3, 7, 4), empty(2, 3, 7, 8)
ROWS, SINK, OUTPUT = empty(2, 6, 5, dtype=torch.float32), empty(6, dtype=torch.float32), empty(2, 6, 5, 8)
NOTHING = empty(0, dtype=torch.float32)


def shapes(found: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(one.shape), one.dtype) for one in (found if isinstance(found, tuple) else (found,))]


def like(*tensors: torch.Tensor) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return shapes(tensors)


def options(map_: str) -> tuple[Any, ...]:
    """map, power, floor, rule, softcap, causal, window, scale"""
    return (map_, 1, 0.0, "none", None, True, None, 0.5)


def test_shapes_of_logits_that_are_compared() -> None:
    found = one_pass_operators.extreme_logits.operator(Q, K, None, None, None, True, None, 0.5)
    assert shapes(found) == [((2, 6, 5), dtype) for dtype in (torch.float32,) * 2 + (torch.int32,) * 2]
    count = ROWS.to(torch.int32)
    assert shapes(one_pass_operators.top_k_cutoff.operator(Q, K, None, None, count, 3, None, True, None, 0.5)) == like(
        ROWS
    )
    index = ROWS.to(torch.int64)
    assert shapes(one_pass_operators._sum_by_key.operator(Q.float(), index, 7, 2)) == [((2, 3, 7, 4), torch.float32)]


@pytest.mark.parametrize(
    ("map_", "scaled", "normalised"), [("softmax", True, False), ("sigmoid", False, False), ("relu", False, False)]
)
@pytest.mark.parametrize("precise", [False, True])
def test_shapes_of_one_pass(map_: str, scaled: bool, normalised: bool, precise: bool) -> None:
    output = OUTPUT.float() if precise else OUTPUT
    found = one_pass_operators.forward.operator(Q, K, V, *[None] * 6, *options(map_), precise)
    assert shapes(found) == like(output, ROWS if scaled else NOTHING, ROWS if normalised else NOTHING)


def test_shapes_of_decoding() -> None:
    assert shapes(one_pass_operators.decode.operator(Q, K, V, *[None] * 8, *options("softmax"), 0.0, 0.0)) == like(
        OUTPUT
    )
    numbers = (0.5, 0.0, 0.0)
    found = decoding._decode.operator(
        Q, K, V, *[None] * 9, "none", None, True, None, *numbers, "entmax15", [], [], None
    )
    assert shapes(found) == like(OUTPUT)


@pytest.mark.parametrize("factor", [None, ROWS])
@pytest.mark.parametrize("shift", [None, ROWS])
@pytest.mark.parametrize("sink", [None, SINK])
def test_shapes_of_the_gradients_of_one_pass(
    factor: torch.Tensor | None, shift: torch.Tensor | None, sink: torch.Tensor | None
) -> None:
    given = (OUTPUT, Q, K, V, None, factor, shift, sink, None, None, OUTPUT, ROWS, NOTHING)
    rows = [NOTHING if one is None else one for one in (factor, shift, sink)]
    found = one_pass_operators.backward.operator(*given, factor is not None, *options("softmax"))
    assert shapes(found) == like(Q, K, V, *rows)
    found = one_pass_operators.backward.operator(*given, False, *options("softmax"))
    assert shapes(found) == like(Q, K, V, NOTHING, *rows[1:])


@pytest.mark.parametrize("soft_factor", [None, ROWS])
def test_shapes_of_sharpened_attention(soft_factor: torch.Tensor | None) -> None:
    assert shapes(one_pass_operators.row_entropy.operator(Q, K, None, soft_factor, True, 0.5)) == like(ROWS, ROWS)
    given = (Q, K, V, None, ROWS, None, soft_factor, ROWS, ROWS, ROWS)
    assert shapes(one_pass_operators.sharpened_attention.operator(*given, True, None, 0.5)) == like(OUTPUT, ROWS)
    grads = one_pass_operators._sharpened_backward.operator(OUTPUT, *given, OUTPUT, ROWS, True, None, 0.5)
    assert shapes(grads) == like(Q, K, V, ROWS, NOTHING if soft_factor is None else ROWS)


def test_shapes_of_the_variance_of_rows() -> None:
    assert shapes(one_pass_operators.row_variance.operator(Q, K, None, True, 0.5)) == like(ROWS, ROWS, ROWS)
    assert shapes(one_pass_operators._variance_backward.operator(ROWS, Q, K, None, ROWS, True, 0.5)) == like(Q, K)


@pytest.mark.parametrize("rest", [False, True])
@pytest.mark.parametrize("factor", [None, ROWS])
def test_shapes_of_stick_breaking(rest: bool, factor: torch.Tensor | None) -> None:
    found = stick_breaking._forward.operator(Q, K, V, None, factor, rest, True, None, 0.5, False)
    assert shapes(found)[:3] == like(OUTPUT, ROWS if rest else NOTHING, NOTHING)
    assert shapes(found)[3] == ((0,), torch.int32)
    grads = stick_breaking._backward.operator(OUTPUT, Q, K, V, None, factor, ROWS, *found[2:], rest, True, None, 0.5)
    assert shapes(grads) == like(Q, K, V, NOTHING if factor is None else ROWS)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("factor", [None, ROWS])
def test_shapes_of_the_gradients_of_sparse_attention(learned: bool, factor: torch.Tensor | None) -> None:
    live = empty(3, dtype=torch.uint8)
    grads = sparse._backward.operator(
        OUTPUT, Q, K, V, None, factor, ROWS, None, OUTPUT, ROWS, live, True, 0.5, "entmax", learned
    )
    assert shapes(grads) == like(Q, K, V, NOTHING if factor is None else ROWS, ROWS if learned else NOTHING)
