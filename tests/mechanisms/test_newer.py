"""laser, differential_v2, tda and forget against their formulas: outputs, gradients, masks, padding, half precision."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import attnorm
from attnorm.mechanisms.forget import Forget, KeyGates
from attnorm.mechanisms.laser import Laser
from attnorm.normalizers.softmax import softmax_row
from tests.attention.calls import Call, assert_all_close, mask_per_head, mask_with_an_empty_row, outputs_and_gradients
from tests.attention.reference import HEADS, seen

WIDTH = 3  # of hidden states
CALLS: dict[str, Call] = {
    "causal": Call(queries=7, keys=7, value_width=6, options={"causal": True}),
    "queries at the end": Call(queries=3, keys=7, options={"causal": True}),
    "more queries than keys": Call(queries=5, keys=3, options={"causal": True}),
    "shared key heads": Call(key_heads=2, keys=7, options={"mask": torch.tensor([True] * 5 + [False] * 2)}),
    "an empty row": Call(keys=7, options={"mask": mask_with_an_empty_row()}),
    "a mask per head": Call(keys=7, options={"mask": mask_per_head(), "causal": True}),
}
each_call = pytest.mark.parametrize("name", CALLS)


def repeated(t: Tensor, heads: int) -> Tensor:
    return t.repeat_interleave(heads // t.shape[1], dim=1)


def softmax_maps(z: Tensor, visible: Tensor) -> Tensor:
    """Row by row over the visible keys, zeros elsewhere."""
    rows = []
    for row, keep in zip(z.flatten(0, 2), visible.flatten(0, 2), strict=True):
        at = keep.nonzero()[:, 0]
        weights = torch.zeros_like(row)
        rows.append(weights.index_put((at,), softmax_row(row[at])) if len(at) else weights * row)
    return torch.stack(rows).reshape(z.shape)


def maps_of(q: Tensor, k: Tensor, options: dict[str, Any], added: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    visible = seen(q, k, options.get("mask"), options.get("causal", False))
    z = q @ repeated(k, q.shape[1]).transpose(-1, -2) / math.sqrt(q.shape[-1]) + added
    return softmax_maps(z, visible), visible


def assert_same(
    mechanism: attnorm.Mechanism, definition: Callable[..., Tensor], tensors: list[Tensor], **options: Any
) -> None:
    parameters = list(mechanism.parameters())

    def attend(q: Tensor, k: Tensor, v: Tensor, *hidden: Tensor) -> Tensor:
        states = {"hidden_states": hidden[0]} if hidden else {}
        return attnorm.attention(q, k, v, mechanism, **options, **states)

    assert_all_close(
        outputs_and_gradients(attend, tensors, parameters),
        outputs_and_gradients(definition, tensors, parameters),
        atol=1e-9,
    )


@each_call
def test_laser_is_the_logarithm_of_attention_over_exponentials(name: str) -> None:
    call = CALLS[name]

    def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights, visible = maps_of(q, k, call.options)
        mean = weights @ torch.exp(repeated(v, q.shape[1]))
        return torch.where(visible.any(-1, keepdim=True), torch.log(torch.where(mean > 0, mean, 1.0)), 0.0)

    assert_same(Laser(), definition, call.tensors()[:3], **call.options)


def test_laser_lies_between_the_mean_and_the_largest_value_and_far_values_stay_finite() -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 4).unbind()
    found = attnorm.attention(q, k, v, "laser", causal=True)
    assert (found >= attnorm.attention(q, k, v, causal=True) - 1e-5).all()
    assert (found <= v.cummax(-2).values + 1e-5).all()
    far = (1e4 * v).requires_grad_()
    output = attnorm.attention(q, k, far, "laser", causal=True)
    output.sum().backward()
    assert output.isfinite().all()
    assert far.grad.isfinite().all()


def test_laser_takes_any_normalizer_whose_rows_sum_to_1() -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 4, dtype=torch.float64).unbind()
    weights = attnorm.normalize(q @ k.transpose(-1, -2) / 2, "entmax15")
    expected = torch.log(weights @ torch.exp(v))
    torch.testing.assert_close(attnorm.attention(q, k, v, attnorm.get("laser", normalizer="entmax15")), expected)
    for other in ("sigmoid", "sink", "linear"):
        with pytest.raises(ValueError, match=other):
            Laser(other)


def test_laser_equals_x_transformers() -> None:
    peer = pytest.importorskip("x_transformers.x_transformers", reason="x-transformers is not installed")
    layer = peer.Attention(dim=WIDTH, heads=4, dim_head=8, causal=True, laser=True, laser_softclamp_value=1e9).double()
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    q, k, v = (part(x).unflatten(-1, (4, 8)).transpose(1, 2) for part in (layer.to_q, layer.to_k, layer.to_v))
    found = layer.to_out(attnorm.attention(q, k, v, "laser", causal=True).transpose(1, 2).flatten(2))
    torch.testing.assert_close(found, layer(x), rtol=0, atol=1e-6)


@each_call
@pytest.mark.parametrize("width", [None, WIDTH], ids=["learned", "from hidden states"])
def test_differential_v2_is_the_difference_of_neighboring_heads(name: str, width: int | None) -> None:
    call = CALLS[name]
    mechanism = attnorm.get("differential_v2", heads=HEADS // 2, width=width).double()
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter.normal_()
    q, k, v, hidden = call.tensors()
    k, v = k[:, : min(call.key_heads, HEADS // 2)], v[:, : min(call.key_heads, HEADS // 2)]

    def definition(q: Tensor, k: Tensor, v: Tensor, *hidden: Tensor) -> Tensor:
        heads = maps_of(q, k, call.options)[0] @ repeated(v, q.shape[1])
        parameter = next(mechanism.parameters())
        logit = (hidden[0] @ parameter.T).mT[..., None] if hidden else parameter[:, None, None]
        return heads[:, 0::2] - torch.sigmoid(logit) * heads[:, 1::2]

    states = [] if width is None else [hidden[..., :WIDTH]]
    assert_same(mechanism, definition, [q, k, v, *states], **call.options)


def test_differential_v2_starts_at_one_half_and_names_heads_that_are_no_pairs() -> None:
    q, k, v = torch.randn(3, 1, 4, 6, 4).unbind()
    found = attnorm.attention(q, k[:, :2], v[:, :2], "differential_v2")
    heads = attnorm.attention(q, k[:, :2], v[:, :2])
    torch.testing.assert_close(found, heads[:, ::2] - heads[:, 1::2] / 2)
    with pytest.raises(ValueError, match="4, 6, 4"):
        attnorm.attention(q, k, v, "differential_v2")
    with pytest.raises(ValueError, match="width=3"):
        attnorm.get("differential_v2", width=3)
    with pytest.raises(ValueError, match="hidden_states"):
        attnorm.attention(q, k[:, :2], v[:, :2], attnorm.get("differential_v2", heads=2, width=3))


@each_call
@pytest.mark.parametrize("head_norm", [True, False], ids=["norm", "no norm"])
def test_tda_is_the_difference_of_thresholded_cosines(name: str, head_norm: bool) -> None:
    call = CALLS[name]
    mechanism = attnorm.get("tda", beta=0.3, heads=HEADS // 2, head_norm=head_norm).double()
    with torch.no_grad():
        mechanism.logit.normal_()
    q, k, v, _ = call.tensors()

    def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        visible = seen(q, k, call.options.get("mask"), call.options.get("causal", False))
        k = k.unflatten(1, (-1, 2)).repeat_interleave(q.shape[1] // k.shape[1], dim=1).flatten(1, 2)
        cosines = (q / q.norm(dim=-1, keepdim=True)) @ (k / k.norm(dim=-1, keepdim=True)).transpose(-1, -2)
        n = visible.sum(-1, keepdim=True).clamp(min=1).double()
        weights = (cosines - 0.3 * torch.sqrt(2 * torch.log(n) / q.shape[-1])).relu() ** 2 * visible
        difference = weights[:, 0::2] - torch.sigmoid(mechanism.logit)[:, None, None] * weights[:, 1::2]
        output = difference @ repeated(v, q.shape[1] // 2)
        if head_norm:
            output = output / torch.sqrt(output.square().mean(-1, keepdim=True) + 1e-5)
        return output

    assert_same(mechanism, definition, [q, k, v[:, : call.key_heads // 2]], **call.options)


def test_tda_starts_at_one_half_and_names_what_does_not_fit() -> None:
    assert attnorm.get("tda").share(torch.float32).item() == 0.5
    q, k, v = torch.randn(3, 1, 4, 6, 4).unbind()
    with pytest.raises(ValueError, match=r"pairs.*4, 6, 4"):
        attnorm.attention(q, k, v, "tda")
    with pytest.raises(ValueError, match=r"0\.7"):
        attnorm.attention(q, k, v[:, :2], "tda", scale=0.7)


@each_call
@pytest.mark.parametrize("width", [None, WIDTH], ids=["learned", "from hidden states"])
def test_forget_adds_the_log_gates_between_key_and_query(name: str, width: int | None) -> None:
    call = CALLS[name]
    mechanism = Forget(heads=HEADS, width=width, bias=0.5).double()
    q, k, v, _ = call.tensors()
    hidden = [] if width is None else [torch.randn(call.batch, call.keys, WIDTH, dtype=torch.float64)]

    def definition(q: Tensor, k: Tensor, v: Tensor, *hidden: Tensor) -> Tensor:
        raw = mechanism.bias[None, :, None].expand(len(q), HEADS, call.keys)
        if hidden:
            assert mechanism.weight is not None
            raw = (hidden[0] @ mechanism.weight.T + mechanism.bias).mT
        gates, added = logsigmoid(raw), torch.zeros(len(q), HEADS, call.queries, call.keys, dtype=q.dtype)
        present = seen(q, k, call.options.get("mask"), call.options.get("causal", False)).any(2)
        gates = torch.where(present, gates, 0.0)  # keys that nobody sees are no tokens
        rows = []
        for i in range(call.queries):
            own = call.keys - call.queries + i
            sums = [
                gates[..., j + 1 : own + 1].sum(-1) if j <= own else -gates[..., own + 1 : j + 1].sum(-1)
                for j in range(call.keys)
            ]
            rows.append(torch.stack(sums, -1))
        added = torch.stack(rows, 2)
        weights, _ = maps_of(q, k, call.options, added)
        return weights @ repeated(v, HEADS)

    assert_same(mechanism, definition, [q, k, v, *hidden], **call.options)


def test_forget_equals_x_transformers() -> None:
    peer = pytest.importorskip("x_transformers.x_transformers", reason="x-transformers is not installed")
    theirs = peer.DataDependentAlibi(dim=WIDTH, heads=4).double()
    ours = Forget(heads=4, width=WIDTH).double()
    linear = theirs.to_forget_gates[0]
    with torch.no_grad():
        ours.weight.copy_(linear.weight)
        ours.bias.copy_(linear.bias)
    q, k, v = torch.randn(3, 2, 4, 9, 8, dtype=torch.float64).unbind()
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    z = q @ k.transpose(-1, -2) / 8**0.5 + theirs(x)
    expected = attnorm.normalize(z, "softmax", causal) @ v
    found = attnorm.attention(q, k, v, ours, causal=True, hidden_states=x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::UserWarning:fla")
def test_forget_equals_fla() -> None:
    peer = pytest.importorskip("fla.ops.forgetting_attn.naive", reason="fla-core is not installed")
    ours = Forget(heads=4, width=WIDTH, bias=1.0)
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    x = torch.randn(2, 9, WIDTH)
    with torch.no_grad():
        theirs = peer.naive_forgetting_attn(*(t.transpose(1, 2) for t in (q, k, v)), ours.log_gates(x).transpose(1, 2))
        found = attnorm.attention(q, k, v, ours, causal=True, hidden_states=x)
    torch.testing.assert_close(found, theirs.transpose(1, 2))


def test_forget_decodes_with_a_cache_of_log_gates() -> None:
    mechanism = Forget(heads=4, width=WIDTH, bias=1.0).double()
    q, k, v = torch.randn(3, 2, 4, 9, 8, dtype=torch.float64).unbind()
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    whole = attnorm.attention(q, k, v, mechanism, causal=True, hidden_states=x)
    gates = mechanism.log_gates(x[:, :6])
    for i in range(6, 9):
        gates = torch.cat([gates, mechanism.log_gates(x[:, i : i + 1])], -1)
        one = mechanism.attend(q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1], log_gates=gates)
        torch.testing.assert_close(one, whole[:, :, i : i + 1])
    with pytest.raises(ValueError, match=r"9 keys.*3"):
        attnorm.attention(q, k, v, mechanism, causal=True, hidden_states=x[:, :3])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gates_in_a_cache_keep_their_digits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gates = torch.randn(2, 6, 3)
    held = KeyGates(gates)
    columns = held.columns(torch.zeros(2, 2, 3, 5, dtype=dtype))
    assert columns.shape == (2, 2, 3, 6 if dtype in (torch.float16, torch.bfloat16) else 3)
    assert columns.dtype == dtype
    for head in range(6):
        assert torch.equal(columns[:, head // 3, :, head % 3], gates[:, head].to(dtype))
    held.read(columns.repeat(1, 1, 2, 1))  # as many earlier keys
    tolerance = {torch.float16: 2**-21, torch.bfloat16: 2**-16}.get(dtype, 0.0)
    torch.testing.assert_close(held.log_gates, gates.repeat(1, 1, 2), rtol=tolerance, atol=tolerance)


def test_gates_keep_their_digits_in_a_cache_of_half_precision() -> None:
    gates = logsigmoid(torch.randn(2, 4, 9, dtype=torch.float32) * 5).requires_grad_()
    held = KeyGates(gates)
    columns = held.columns(torch.zeros(2, 2, 9, 8, dtype=torch.bfloat16))
    assert columns.dtype == torch.bfloat16
    assert columns.shape == (2, 2, 9, 4)
    held.read(columns)
    torch.testing.assert_close(held.log_gates, gates, rtol=2e-5, atol=0)
    held.log_gates.sum().backward()
    assert gates.grad is not None
    torch.testing.assert_close(gates.grad, torch.ones_like(gates))


@pytest.mark.parametrize("name", ["laser", "forget"])
def test_a_mechanism_takes_options_of_its_normalizer(name: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 40, 8, dtype=torch.float64)
    plain, named, given = (
        attnorm.get(name, normalizer=normalizer)(q, k, v, causal=True)
        for normalizer in ("kneemax", "kneemax+share=1", attnorm.get("kneemax", share=1))
    )
    assert torch.equal(named, given)
    assert (named - plain).abs().max() > 0.001


def test_what_stands_in_padding_does_not_reach_forget_or_laser() -> None:
    q, k, v = torch.randn(3, 1, 4, 9, 8, dtype=torch.float64).unbind()
    x = torch.randn(1, 9, WIDTH, dtype=torch.float64)
    mechanism = Forget(heads=4, width=WIDTH).double()
    mask = torch.ones(1, 1, 1, 9, dtype=torch.bool)
    mask[..., :3] = False
    broken = [t.clone() for t in (k, v)]
    for t in broken:
        t[:, :, :3] = math.nan
    x_broken = x.clone()
    x_broken[:, :3] = math.nan
    for normalizer, states in ((mechanism, x_broken), (Laser(), None)):
        found = attnorm.attention(q, *broken, normalizer, causal=True, mask=mask, hidden_states=states)
        short = attnorm.attention(
            q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], normalizer, causal=True, hidden_states=x[:, 3:]
        )
        torch.testing.assert_close(found[:, :, 3:], short)
        assert (found[:, :, :3] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["laser", "forget", "tda", "differential_v2"])
def test_half_precision_is_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    mechanism = attnorm.get(name, **({"bias": 1.0} if name == "forget" else {}))
    q, k, v = (t.to(dtype) for t in torch.randn(3, 1, 4, 300, 16).unbind())
    k, v = (k, v[:, :2]) if name == "tda" else (k[:, :2], v[:, :2])
    found = attnorm.attention(q, k, v, mechanism, causal=True)
    assert found.dtype == dtype
    exact = attnorm.attention(*(t.double() for t in (q, k, v)), mechanism.double(), causal=True)
    torch.testing.assert_close(found.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)


def test_forget_needs_a_shift_invariant_normalizer_and_starts_near_softmax() -> None:
    with pytest.raises(ValueError, match="sigmoid"):
        Forget(normalizer="sigmoid")
    with pytest.raises(ValueError, match=r"width=3.*heads=.*attnorm\.patch"):
        Forget(width=3)
    q, k, v = torch.randn(3, 1, 4, 30, 8).unbind()
    found = attnorm.attention(q, k, v, Forget(bias=20.0), causal=True)
    torch.testing.assert_close(found, attnorm.attention(q, k, v, causal=True))
