"""How queries and keys are made: projections in every layout, states before the rotation, weights to scale."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from attnorm.metrics.call import AttentionCall
from attnorm.models.observe import observe
from attnorm.models.query_key_origin import HeadRows, before_rotation, projections, query_key_weights
from tests.models.tiny import tiny


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_projections_make_the_queries_and_keys(family: str) -> None:
    model = tiny(family)
    calls: list[AttentionCall] = []
    with torch.no_grad(), observe(model, calls.append, inputs=True):
        model(torch.arange(3, 23)[None])
    layer = model.model.layers[0].self_attn if family == "llama" else model.transformer.h[0].attn
    made = projections(layer, calls[0])
    assert made is not None
    x = calls[0].inputs_BKC[0, 0]  # the first token is not rotated
    q = torch.einsum("hed,d->he", made.query_weight, x)
    k = torch.einsum("hed,d->he", made.key_weight, x)
    q, k = (q, k) if made.query_bias is None else (q + made.query_bias, k + made.key_bias)
    torch.testing.assert_close(q, calls[0].query_BHQD[0, :, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(k, calls[0].key_BGKD[0, :, 0], rtol=1e-4, atol=1e-5)


def test_normalised_queries_are_not_taken_for_plain_ones() -> None:
    model = tiny("gemma3")  # normalizes q and k after the projection
    calls: list[AttentionCall] = []
    with torch.no_grad(), observe(model, calls.append, inputs=True):
        model(torch.arange(3, 23)[None])
    assert projections(model.model.layers[0].self_attn, calls[0]) is None


@pytest.mark.parametrize("name", ["q_proj", "k_proj"])
def test_a_projection_with_too_few_rows_for_the_heads_is_not_taken(name: str) -> None:
    model = tiny("llama")
    calls: list[AttentionCall] = []
    with torch.no_grad(), observe(model, calls.append, inputs=True):
        model(torch.arange(3, 23)[None])
    layer = model.model.layers[0].self_attn
    setattr(layer, name, nn.Linear(model.config.hidden_size, 1, bias=False))
    assert projections(layer, calls[0]) is None


def test_before_rotation_the_queries_are_the_plain_projections_and_nothing_else_changes() -> None:
    model = tiny("llama")
    ids = torch.arange(3, 23)[None]
    plain = model(ids).logits
    seen: list[tuple[AttentionCall, AttentionCall | None]] = []
    states: list[torch.Tensor] = []
    module = model.model.layers[0].self_attn
    handle = module.register_forward_pre_hook(
        lambda _, args, kwargs: states.append(kwargs["hidden_states"]), with_kwargs=True
    )
    with (
        torch.no_grad(),
        before_rotation(model) as before,
        observe(model, lambda call: seen.append((call, before.of(call)))),
    ):
        watched = model(ids).logits
    handle.remove()
    assert torch.equal(plain, watched)
    call, unrotated = seen[0]
    assert unrotated is not None
    expected = module.q_proj(states[0]).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
    torch.testing.assert_close(unrotated.query_BHQD, expected)
    assert not torch.allclose(unrotated.query_BHQD[:, :, 1:], call.query_BHQD[:, :, 1:])
    torch.testing.assert_close(
        unrotated.query_BHQD[:, :, 0], call.query_BHQD[:, :, 0]
    )  # the first stands at position 0
    assert unrotated.value_BGKE is call.value_BGKE


def test_after_an_error_the_rotation_is_the_models_own_again() -> None:
    import transformers.models.llama.modeling_llama as file

    model, original = tiny("llama"), file.apply_rotary_pos_emb
    with before_rotation(model):
        assert file.apply_rotary_pos_emb is not original
    assert file.apply_rotary_pos_emb is original
    with pytest.raises(RuntimeError, match="stop"), before_rotation(model):
        raise RuntimeError("stop")
    assert file.apply_rotary_pos_emb is original


def test_a_model_that_does_not_rotate_gives_none() -> None:
    model = tiny("gpt2")
    found: list[AttentionCall | None] = []
    with torch.no_grad(), before_rotation(model) as before, observe(model, lambda call: found.append(before.of(call))):
        model(torch.arange(3, 23)[None])
    assert found == [None, None]


@pytest.mark.parametrize("changed", ["nothing", "queries", "keys", "last key"])
@pytest.mark.parametrize("bias", [True, False])
def test_projections_may_have_more_rows_than_the_heads(changed: str, bias: bool) -> None:
    """The first rows are those of the heads; a cache has more keys than queries."""
    torch.manual_seed(0)
    module = nn.Module()
    module.q_proj, module.k_proj = nn.Linear(5, 2 * 3 + 4, bias=bias), nn.Linear(5, 3 + 2, bias=bias)
    x = torch.randn(2, 7, 5)
    query = module.q_proj(x[:, -4:])[..., :6].unflatten(-1, (2, 3)).transpose(1, 2).detach()
    key = module.k_proj(x)[..., :3].unflatten(-1, (1, 3)).transpose(1, 2).detach()
    if changed != "nothing":
        (query if changed == "queries" else key)[0, 0, -1 if changed == "last key" else 0] *= 1.1
    call = AttentionCall(0, "decoder", query, key, key, 1.0, causal=True, inputs_BKC=x)
    made = projections(module, call)
    if changed != "nothing":
        assert made is None
        return
    assert made is not None
    assert torch.equal(made.query_weight, module.q_proj.weight[:6].reshape(2, 3, 5))
    assert torch.equal(made.key_weight, module.k_proj.weight[:3].reshape(1, 3, 5))
    if bias:
        assert made.query_bias is not None
        assert made.key_bias is not None
        assert torch.equal(made.query_bias, module.q_proj.bias[:6].reshape(2, 3))
        assert torch.equal(made.key_bias, module.k_proj.bias[:3].reshape(1, 3))
    else:
        assert made.query_bias is made.key_bias is None
    assert projections(module, replace(call, inputs_BKC=None)) is None


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
