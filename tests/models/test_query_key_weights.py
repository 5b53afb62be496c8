"""The weights behind queries and keys: found in every layout, and scaled so that the logits of a head scale."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from attnorm.metrics.call import AttentionCall
from attnorm.models.query_key_origin import HeadRows, query_key_weights

HEADS, GROUPS, WIDTH, VALUE, INPUTS, LENGTH = 4, 2, 3, 5, 7, 6
Make = Callable[[Tensor], tuple[Tensor, Tensor]]


def projection(kind: type, outputs: int, *, bias: bool = True) -> nn.Module:
    torch.manual_seed(outputs)
    if kind is Conv1D:
        made = Conv1D(outputs, INPUTS)
        nn.init.normal_(made.bias)
        return made
    return nn.Linear(INPUTS, outputs, bias=bias)


def heads_of(states: Tensor, heads: int) -> Tensor:
    """(1, heads, L, WIDTH)."""
    return states.unflatten(-1, (heads, WIDTH)).transpose(0, 1)[None]


def apart(kind: type, names: tuple[str, str], *, bias: bool = True) -> tuple[nn.Module, Make]:
    module = nn.Module()
    for name, count in zip(names, (HEADS, GROUPS), strict=True):
        setattr(module, name, projection(kind, count * WIDTH, bias=bias))
    return module, lambda x: (
        heads_of(getattr(module, names[0])(x), HEADS), heads_of(getattr(module, names[1])(x), GROUPS)
    )  # fmt: skip


def in_blocks(kind: type, name: str) -> tuple[nn.Module, Make]:
    module = nn.Module()
    setattr(module, name, projection(kind, (HEADS + GROUPS) * WIDTH + GROUPS * VALUE))

    def make(x: Tensor) -> tuple[Tensor, Tensor]:
        made = getattr(module, name)(x)
        query, key, _ = made.split([HEADS * WIDTH, GROUPS * WIDTH, GROUPS * VALUE], -1)
        return heads_of(query, HEADS), heads_of(key, GROUPS)

    return module, make


def group_by_group(name: str) -> tuple[nn.Module, Make]:
    module, per_group = nn.Module(), HEADS // GROUPS
    setattr(module, name, projection(nn.Linear, GROUPS * ((per_group + 1) * WIDTH + VALUE)))

    def make(x: Tensor) -> tuple[Tensor, Tensor]:
        made = getattr(module, name)(x).unflatten(-1, (GROUPS, -1))
        query = made[..., : per_group * WIDTH].flatten(-2)
        key = made[..., per_group * WIDTH : (per_group + 1) * WIDTH].flatten(-2)
        return heads_of(query, HEADS), heads_of(key, GROUPS)

    return module, make


LAYOUTS: dict[str, Callable[[], tuple[nn.Module, Make]]] = {
    "llama": lambda: apart(nn.Linear, ("q_proj", "k_proj"), bias=False),
    "bert": lambda: apart(nn.Linear, ("query", "key")),
    "distilbert": lambda: apart(nn.Linear, ("q_lin", "k_lin")),
    "two transposed matrices": lambda: apart(Conv1D, ("q_proj", "k_proj")),
    "phi3": lambda: in_blocks(nn.Linear, "qkv_proj"),
    "gpt2": lambda: in_blocks(Conv1D, "c_attn"),
    "gpt_neox": lambda: group_by_group("query_key_value"),
    "qkv": lambda: group_by_group("qkv"),
}


def call_of(make: Make, x: Tensor, *, queries: int = LENGTH, kind: str = "decoder") -> AttentionCall:
    query, key = make(x)
    value = torch.zeros(1, GROUPS, LENGTH, VALUE)
    query = query[:, :, -queries:].detach()
    return AttentionCall(0, kind, query, key.detach(), value, 1.0, True, inputs_BKC=x[None])  # type: ignore[arg-type]


def logits(make: Make, x: Tensor) -> Tensor:
    query, key = make(x)
    return query @ key.repeat_interleave(HEADS // GROUPS, 1).mT


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_of_each_head_are_multiplied_by_the_smallest_gamma_of_its_group(layout: str) -> None:
    module, make = LAYOUTS[layout]()
    x = torch.randn(LENGTH, INPUTS, generator=torch.Generator().manual_seed(1))
    before = logits(make, x).detach()
    values = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    found = query_key_weights(module, call_of(make, x, queries=LENGTH - 1))
    assert found is not None
    used = found.scale_(torch.tensor([0.5, 1.0, 0.9, 0.25]))
    assert used.tolist() == [0.5, 0.5, 0.25, 0.25]
    expected = before * used[:, None, None]
    torch.testing.assert_close(logits(make, x), expected, rtol=1e-5, atol=1e-5)
    for name, parameter in module.named_parameters():
        if layout in ("phi3", "gpt2"):  # values come last
            start = (HEADS + GROUPS) * WIDTH
            rows = parameter[..., start:] if layout == "gpt2" else parameter[start:]
            assert torch.equal(rows, values[name][..., start:] if layout == "gpt2" else values[name][start:])
        if layout in ("gpt_neox", "qkv"):
            rows, old = (t.unflatten(0, (GROUPS, -1))[:, -VALUE:] for t in (parameter, values[name]))
            assert torch.equal(rows, old)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_factors_are_rounded_once(dtype: torch.dtype) -> None:
    linear = nn.Linear(2, 4).to(dtype)
    weight, bias = linear.weight.detach().clone(), linear.bias.detach().clone()
    with torch.no_grad():
        HeadRows(linear, torch.tensor([[0, 1], [3, 2]]), power=2.0).scale_(torch.tensor([0.3, 3.0]))
    factors = torch.tensor([0.3, 0.3, 3.0, 3.0]).square().to(torch.promote_types(dtype, torch.float32))
    assert torch.equal(linear.weight, (weight * factors[:, None]).to(dtype))
    assert torch.equal(linear.bias, (bias * factors).to(dtype))


def test_the_power_is_a_half_by_default() -> None:
    linear = nn.Linear(2, 2, bias=False)
    before = linear.weight.detach().clone()
    with torch.no_grad():
        HeadRows(linear, torch.tensor([[0], [1]])).scale_(torch.tensor([4.0, 9.0]))
    torch.testing.assert_close(linear.weight, before * torch.tensor([[2.0], [3.0]]))


def test_nothing_is_found_where_weights_do_not_make_the_queries_and_keys() -> None:
    module, make = LAYOUTS["llama"]()
    x = torch.randn(LENGTH, INPUTS)
    call = call_of(make, x)
    assert query_key_weights(module, call) is not None
    assert query_key_weights(module, replace(call, inputs_BKC=None)) is None
    assert query_key_weights(module, replace(call, key_BGKD=nn.functional.normalize(call.key_BGKD, dim=-1))) is None
    other = replace(call, query_BHQD=2 * call.query_BHQD)
    assert query_key_weights(module, other) is None
    assert query_key_weights(module, replace(other, kind="cross")) is not None  # its queries come from elsewhere
    assert query_key_weights(nn.Module(), call) is None
    module.k_proj = nn.Identity()
    assert query_key_weights(module, call) is None


@pytest.mark.parametrize("outputs", [GROUPS * WIDTH - 1, GROUPS * WIDTH])
def test_a_matrix_without_rows_for_all_heads_is_left_alone(outputs: int) -> None:
    module, make = LAYOUTS["llama"]()
    x = torch.randn(LENGTH, INPUTS)
    call = call_of(make, x)
    weight = module.k_proj.weight
    module.k_proj = nn.Linear(INPUTS, outputs, bias=False)
    with torch.no_grad():
        module.k_proj.weight.copy_(weight[:outputs])
    assert (query_key_weights(module, call) is None) == (outputs < GROUPS * WIDTH)


@pytest.mark.parametrize("low_rank", [True, False])
def test_latent_attention_scales_the_rotated_part_in_the_queries_alone(low_rank: bool) -> None:
    nope, rope = 3, 2
    module = nn.Module()
    module.qk_nope_head_dim, module.qk_rope_head_dim = nope, rope
    query = nn.Linear(INPUTS, HEADS * (nope + rope))
    setattr(module, "q_b_proj" if low_rank else "q_proj", query)
    module.kv_b_proj = nn.Linear(INPUTS, HEADS * (nope + VALUE))
    q, k = query.weight.detach().clone(), module.kv_b_proj.weight.detach().clone()
    call = AttentionCall(0, "decoder", *(torch.zeros(1, HEADS, 1, 1) for _ in range(3)), 1.0, True)
    found = query_key_weights(module, call)
    assert found is not None
    gamma = torch.tensor([0.04, 0.25, 1.0, 0.81])
    assert found.scale_(gamma).tolist() == gamma.tolist()
    parts = query.weight.unflatten(0, (HEADS, -1)), q.unflatten(0, (HEADS, -1))
    torch.testing.assert_close(parts[0][:, :nope], parts[1][:, :nope] * gamma.sqrt()[:, None, None])
    torch.testing.assert_close(parts[0][:, nope:], parts[1][:, nope:] * gamma[:, None, None])
    keys = module.kv_b_proj.weight.unflatten(0, (HEADS, -1)), k.unflatten(0, (HEADS, -1))
    torch.testing.assert_close(keys[0][:, :nope], keys[1][:, :nope] * gamma.sqrt()[:, None, None])
    assert torch.equal(keys[0][:, nope:], keys[1][:, nope:])
    module.qk_rope_head_dim = 0
    assert query_key_weights(module, call) is None
    module.qk_rope_head_dim, module.kv_b_proj = rope, nn.Identity()
    assert query_key_weights(module, call) is None


@pytest.mark.parametrize("length", [1, 10 * INPUTS])
def test_any_length_of_the_text_shows_the_projections(length: int) -> None:
    module, make = LAYOUTS["llama"]()
    assert query_key_weights(module, call_of(make, torch.randn(length, INPUTS))) is not None
