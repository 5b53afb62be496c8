"""How queries and keys are made: the projections of a module, and the states before the rotation."""

import pytest
import torch
from torch import nn

from attnorm.metrics.call import AttentionCall
from attnorm.models.observe import observe
from attnorm.models.query_key_origin import _matrices, _same_norms, before_rotation, projections
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
    model = tiny("gemma3")  # normalises q and k after the projection
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
