"""How queries and keys are made: the projections of a module, and the states before the rotation."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from attnorm.metrics.call import AttentionCall
from attnorm.models.observe import observe
from attnorm.models.query_key_origin import (
    BeforeRotation,
    _matrices,
    _same_norms,
    before_rotation,
    projections,
    projects_to,
)
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


def test_matrices_are_found_only_where_their_place_is_known() -> None:
    """Three equal parts of one weight, or two plain projections; a module without a weight of its own is neither."""
    module = nn.Module()
    assert _matrices(module) is None
    module.qkv_proj = nn.Identity()
    assert _matrices(module) is None
    module.qkv_proj = nn.Linear(4, 14)
    assert _matrices(module) is None
    module.qkv_proj = nn.Linear(4, 15)
    found = _matrices(module)
    assert found is not None
    (query, query_bias), (rest, rest_bias) = found
    weight, bias = module.qkv_proj.weight, module.qkv_proj.bias
    assert torch.equal(query, weight[:5])
    assert torch.equal(rest, weight[5:])
    assert query_bias is not None
    assert rest_bias is not None
    assert torch.equal(torch.cat([query_bias, rest_bias]), bias)


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


@pytest.mark.parametrize(("size", "floor"), [(1.0, 1.0), (0.0, 1e-6), (1e3, 1e3)])
def test_a_rotation_may_change_norms_by_one_percent(size: float, floor: float) -> None:
    plain = torch.zeros(2, 3, 4)
    plain[..., 0] = size
    for share, same in ((0.995, True), (1.005, False)):
        moved = plain.clone()
        moved[1, 2, 0] += share * 0.01 * floor
        assert _same_norms(moved, plain) == same


@pytest.mark.parametrize(("size", "floor"), [(1.0, 1.0), (0.0, 1e-3), (1e3, 1e3)])
def test_a_projection_may_change_norms_by_two_percent(size: float, floor: float) -> None:
    weight, x = torch.eye(4)[None], torch.zeros(3, 4)
    x[:, 0] = size
    for share, same in ((0.995, True), (1.005, False)):
        moved = x.clone()
        moved[2, 0] += share * 0.02 * floor
        assert projects_to(weight, None, moved, x[None]) == same
        assert projects_to(weight, moved[2:], torch.zeros(1, 4), x[None, 2:]) == same
    assert not projects_to(weight, None, x, x[None, :2])


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


@pytest.mark.parametrize("changed", ["nothing", "query", "key", "query length", "key length"])
def test_states_before_a_rotation_are_those_of_the_call_if_norms_and_shapes_agree(changed: str) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(1, 2, 3, 4), torch.randn(1, 1, 5, 4)
    call = AttentionCall(0, "decoder", query.flip(-1), key.flip(-1), key, 1.0, causal=True)
    before = BeforeRotation()
    assert before.of(call) is None
    kept = {"query": query.clone(), "key": key.clone()}
    if changed in kept:
        kept[changed][0, 0, 1] *= 1.1
    elif changed != "nothing":
        kept[changed.split()[0]] = kept[changed.split()[0]][:, :, 1:]
    before.keep(kept["query"], kept["key"])
    found = before.of(call)
    if changed == "nothing":
        assert found is not None
        assert found.query_BHQD is kept["query"]
        assert found.key_BGKD is kept["key"]
    else:
        assert found is None
    assert before.of(call) is None  # used once
