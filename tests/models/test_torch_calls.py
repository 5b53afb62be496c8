"""Torch's own attention functions, watched: calls are what torch computes, and results stay bit for bit the same."""

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as imported_by_name
from torch.utils.checkpoint import checkpoint

from attnorm.metrics.call import AttentionCall
from attnorm.models import torch_calls
from attnorm.models.dispatch import UnsupportedModel
from attnorm.models.torch_calls import CallSite, watch_torch
from tests.metrics.reference import dense_visible, dense_weights

CLOSE = {"rtol": 1e-6, "atol": 1e-6}


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    assert torch.overrides.has_torch_function.__name__ == "_has_torch_function", "the watch left something behind"
    assert not torch.overrides._get_current_function_mode_stack()


def seen_in(run: Callable[[], Any]) -> tuple[Any, list[AttentionCall], list[CallSite]]:
    calls: list[AttentionCall] = []
    sites: list[CallSite] = []

    def note(call: AttentionCall, site: CallSite) -> None:
        calls.append(call)
        sites.append(site)

    with watch_torch(note):
        result = run()
    return result, calls, sites


def dense(query: Tensor, key: Tensor, hidden: Tensor | None = None, added: Tensor | None = None) -> Tensor:
    """Softmax weights in float64 from the textbook formula."""
    logits = query.double() @ key.double().mT / math.sqrt(query.shape[-1])
    logits = logits if added is None else logits + added.double()
    logits = logits if hidden is None else logits.masked_fill(hidden, -torch.inf)
    return torch.softmax(logits, -1).nan_to_num()


def heads_of(states_BLE: Tensor, heads: int) -> Tensor:
    return states_BLE.unflatten(-1, (heads, -1)).transpose(1, 2)


# Queries x keys; a batch of 2, 4 heads, width 8.
SHAPES = [(12, 12), (5, 12), (12, 5), (1, 9)]


@pytest.mark.parametrize(("queries", "keys"), SHAPES)
def test_is_causal_is_aligned_top_left(queries: int, keys: int) -> None:
    q, k = torch.randn(2, 4, queries, 8), torch.randn(2, 4, keys, 8)
    _, (call,), _ = seen_in(lambda: F.scaled_dot_product_attention(q, k, k, is_causal=True))
    hidden = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    weights = dense_weights(call)
    torch.testing.assert_close(weights, dense(q, k, hidden)[..., : weights.shape[-1]], **CLOSE)
    assert call.kind == "decoder"


@pytest.mark.parametrize(("queries", "keys"), SHAPES)
@pytest.mark.parametrize("shape", ["Q K", "1 1 Q K", "B 1 Q K", "B H Q K", "B 1 1 K", "1 H Q 1"])
def test_a_boolean_mask_says_what_is_visible(shape: str, queries: int, keys: int) -> None:
    q, k = torch.randn(2, 4, queries, 8), torch.randn(2, 4, keys, 8)
    sizes = {"B": 2, "H": 4, "Q": queries, "K": keys, "1": 1}
    mask = torch.rand([sizes[letter] for letter in shape.split()]) > 0.3
    _, (call,), _ = seen_in(lambda: F.scaled_dot_product_attention(q, k, k, attn_mask=mask))
    torch.testing.assert_close(dense_weights(call), dense(q, k, ~mask), **CLOSE)


@pytest.mark.parametrize("shape", [(12, 12), (4, 12, 12), (2, 1, 12, 12), (2, 1, 1, 12)])
def test_a_float_mask_is_added(shape: tuple[int, ...]) -> None:
    q, k = torch.randn(2, 4, 12, 8), torch.randn(2, 4, 12, 8)
    added = torch.randn(shape).masked_fill(torch.rand(shape) > 0.7, -torch.inf)
    _, (call,), _ = seen_in(lambda: F.scaled_dot_product_attention(q, k, k, added, 0.0, False))
    hidden = added == -torch.inf
    torch.testing.assert_close(dense_weights(call), dense(q, k, hidden, added.masked_fill(hidden, 0)), **CLOSE)


def test_grouped_heads_scale_and_wide_values() -> None:
    q, k, v = torch.randn(2, 6, 10, 8), torch.randn(2, 2, 10, 8), torch.randn(2, 2, 10, 5)
    result, (call,), _ = seen_in(lambda: F.scaled_dot_product_attention(q, k, v, scale=0.7, enable_gqa=True))
    repeated = k.repeat_interleave(3, 1)
    torch.testing.assert_close(dense_weights(call), dense(q * (0.7 * math.sqrt(8)), repeated), **CLOSE)
    assert call.key_BGKD.shape[1] == 2
    output = dense_weights(call) @ call.value_BGKE.double().repeat_interleave(3, 1)
    torch.testing.assert_close(output, result.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("leading", [(), (3,), (2, 2, 3)])
def test_fewer_and_more_dimensions_have_heads_before_the_length(leading: tuple[int, ...]) -> None:
    q = torch.randn(*leading, 9, 8)
    _, (call,), _ = seen_in(lambda: F.scaled_dot_product_attention(q, q, q))
    heads = leading[-1] if leading else 1
    assert call.query_BHQD.shape == (math.prod(leading[:-1]), heads, 9, 8)
    torch.testing.assert_close(dense_weights(call), dense(q, q).reshape(-1, heads, 9, 9), **CLOSE)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 9), st.sampled_from([(1, 1), (4, 2), (6, 1)]), st.booleans(), st.integers(0, 999)
)
def test_every_call_is_rebuilt(queries: int, keys: int, heads: tuple[int, int], masked: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(2, heads[0], queries, 4, generator=generator)
    k, v = torch.randn(2, 2, heads[1], keys, 4, generator=generator)
    mask = (torch.rand(2, 1, queries, keys, generator=generator) > 0.5) if masked else None
    options = {"attn_mask": mask, "is_causal": not masked, "enable_gqa": True}
    result, (call,), _ = seen_in(lambda: F.scaled_dot_product_attention(q, k, v, **options))
    rebuilt = dense_weights(call) @ call.value_BGKE.double().repeat_interleave(heads[0] // heads[1], 1)
    rows = dense_visible(call).any(-1)
    torch.testing.assert_close(rebuilt[rows], result.double()[rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"bias": False}])
@pytest.mark.parametrize("masks", ["none", "causal", "padding", "both", "float", "heads"])
def test_multihead_attention_is_read(options: dict[str, Any], masks: str, need_weights: bool) -> None:
    module = nn.MultiheadAttention(16, 4, batch_first=True, **options)
    x = torch.randn(2, 7, 16)
    causal = torch.ones(7, 7, dtype=torch.bool).triu(1)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 5:] = True
    given = {
        "none": {},
        "causal": {"attn_mask": causal},
        "padding": {"key_padding_mask": padding},
        "both": {"attn_mask": causal, "key_padding_mask": padding},
        "float": {"attn_mask": torch.randn(7, 7)},
        "heads": {"attn_mask": torch.rand(8, 7, 7) > 0.8},
    }[masks]

    def run() -> Any:
        return module(x, x, x, need_weights=need_weights, average_attn_weights=False, **given)

    expected = run()
    result, (call,), _ = seen_in(run)
    assert torch.equal(result[0], expected[0])
    _, weights = module(x, x, x, need_weights=True, average_attn_weights=False, **given)
    torch.testing.assert_close(dense_weights(call).float(), weights, rtol=1e-5, atol=1e-6)
    assert call.kind == ("decoder" if masks in ("causal", "both") else "encoder")


def test_multihead_attention_with_other_widths_and_other_keys_is_cross_attention() -> None:
    module = nn.MultiheadAttention(16, 2, kdim=12, vdim=10)
    query, key, value = torch.randn(5, 3, 16), torch.randn(8, 3, 12), torch.randn(8, 3, 10)
    (_, weights), (call,), (site,) = seen_in(lambda: module(query, key, value, average_attn_weights=False))
    torch.testing.assert_close(dense_weights(call).float(), weights, rtol=1e-5, atol=1e-6)
    assert (site.kind, site.function) == ("cross", "MultiheadAttention")


def test_multihead_attention_without_a_batch() -> None:
    module, x = nn.MultiheadAttention(16, 2), torch.randn(6, 16)
    padding = torch.tensor([False] * 5 + [True])
    run = lambda: module(x, x, x, key_padding_mask=padding, average_attn_weights=False)  # noqa: E731
    (_, weights), (call,), _ = seen_in(run)
    torch.testing.assert_close(dense_weights(call).float(), weights[None], rtol=1e-5, atol=1e-6)


def test_the_causal_hint_replaces_the_mask() -> None:
    module, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, 6, 16)
    causal = nn.Transformer.generate_square_subsequent_mask(6)
    narrower = ~torch.eye(6, dtype=torch.bool)
    (output, _), (call,), _ = seen_in(lambda: module(x, x, x, attn_mask=narrower, is_causal=True, need_weights=False))
    torch.testing.assert_close(output, module(x, x, x, attn_mask=causal)[0])  # what torch computes
    assert call.causal
    assert call.mask is None


def fast_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the fast functions that ran."""
    ran: list[str] = []
    for function in (torch._native_multi_head_attention, torch._transformer_encoder_layer_fwd):
        watched = torch_calls.WATCHED[function]

        def read(*args: Any, own: Any = watched.read, name: str = function.__name__, **kwargs: Any) -> AttentionCall:
            ran.append(name)
            return own(*args, **kwargs)

        monkeypatch.setitem(torch_calls.WATCHED, function, torch_calls.Watched(watched.name, read, watched.inside))
    return ran


@pytest.mark.parametrize("masks", ["none", "padding", "causal", "both"])
def test_the_fast_path_of_multihead_attention_still_runs(masks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = nn.MultiheadAttention(16, 4, batch_first=True).eval(), torch.randn(2, 7, 16)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 4:] = True
    given = {"key_padding_mask": padding} if masks in ("padding", "both") else {}
    given |= {"attn_mask": torch.ones(7, 7, dtype=torch.bool).triu(1)} if masks in ("causal", "both") else {}
    ran = fast_calls(monkeypatch)
    with torch.no_grad():
        expected = module(x, x, x, average_attn_weights=False, **given)
        result, (call,), (site,) = seen_in(lambda: module(x, x, x, average_attn_weights=False, **given))
    assert ran == ["_native_multi_head_attention"]
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    q, k, _ = (heads_of(part, 4) for part in F.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1))
    hidden = padding[:, None, None] if masks in ("padding", "both") else torch.zeros(1, dtype=torch.bool)
    hidden = hidden | given["attn_mask"] if "attn_mask" in given else hidden
    torch.testing.assert_close(dense_weights(call), dense(q, k, hidden), rtol=1e-5, atol=1e-6)
    assert site.kind == ("decoder" if masks in ("causal", "both") else "encoder")


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_the_fast_path_of_a_transformer_encoder_still_runs(
    norm_first: bool, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval()
    x, padding = torch.randn(2, 7, 16), torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 4:] = padded
    given = {"src_key_padding_mask": padding} if padded else {}
    ran = fast_calls(monkeypatch)
    with torch.no_grad():
        expected = model(x, **given)
        result, calls, sites = seen_in(lambda: model(x, **given))
    assert ran == ["_transformer_encoder_layer_fwd"] * 2
    assert torch.equal(result, expected)
    assert [site.path for site in sites] == ["layers.0.self_attn", "layers.1.self_attn"]
    first = model.layers[0]
    states = first.norm1(x) if norm_first else x
    attention = first.self_attn
    q, k, _ = (heads_of(p, 4) for p in F.linear(states, attention.in_proj_weight, attention.in_proj_bias).chunk(3, -1))
    tokens = ~padding[:, None, :, None].expand(-1, 4, -1, 7)
    expected_weights = dense(q, k, padding[:, None, None])
    torch.testing.assert_close(dense_weights(calls[0])[tokens], expected_weights[tokens], rtol=1e-5, atol=1e-6)


def test_training_with_dropout_draws_the_same_random_numbers() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, dropout=0.3), 2, enable_nested_tensor=False)
    x = torch.randn(5, 2, 16)

    def gradients() -> list[Tensor]:
        torch.manual_seed(7)
        model.zero_grad()
        model(x).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    expected = gradients()
    observed, calls, _ = seen_in(gradients)
    assert len(calls) == 2
    assert all(torch.equal(a, b) for a, b in zip(observed, expected, strict=True))


def test_an_output_with_dropout_is_not_compared() -> None:
    q = torch.randn(1, 2, 9, 8)
    for more, options in (((None, 0.5), {}), ((), {"dropout_p": 0.5})):
        _, calls, _ = seen_in(
            lambda more=more, options=options: F.scaled_dot_product_attention(q, q, q, *more, **options)
        )
        assert len(calls) == 1


def test_autocast_rounds_what_is_measured() -> None:
    q = torch.randn(1, 2, 9, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, (call,), _ = seen_in(lambda: F.scaled_dot_product_attention(q, q, q))
    assert call.query_BHQD.dtype == torch.bfloat16


def test_a_function_imported_by_name_is_seen() -> None:
    q = torch.randn(1, 2, 9, 8)
    _, calls, (site,) = seen_in(lambda: imported_by_name(q, q, q))
    assert len(calls) == 1
    assert site == CallSite("encoder", 0, "", "scaled_dot_product_attention")


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_with_both_of_its_functions() -> None:
    q, k = torch.randn(2, 4, 40, 8), torch.randn(2, 2, 40, 8)
    slopes = torch.tensor([0.1, 0.2, 0.3, 0.4])

    def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return 5.0 * torch.tanh(score / 5.0) - slopes[h] * (i - j)

    def window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i - j < 9 + 3 * b)

    mask = create_block_mask(window, 2, None, 40, 40, device="cpu")
    expected = flex_attention(q, k, k, score_mod=alibi, block_mask=mask, enable_gqa=True)
    run = lambda: flex_attention(q, k, k, score_mod=alibi, block_mask=mask, enable_gqa=True)  # noqa: E731
    result, (call,), (site,) = seen_in(run)
    assert torch.equal(result, expected)
    i, j = torch.arange(40)[:, None], torch.arange(40)
    logits = q.double() @ k.double().repeat_interleave(2, 1).mT / math.sqrt(8)
    logits = 5 * torch.tanh(logits / 5) - slopes.double()[:, None, None] * (i - j)
    near = torch.stack([(i >= j) & (i - j < 9 + 3 * b) for b in range(2)])[:, None]
    torch.testing.assert_close(dense_weights(call), logits.masked_fill(~near, -torch.inf).softmax(-1), **CLOSE)
    assert (site.kind, site.function) == ("decoder", "flex_attention")


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_without_functions_and_with_a_causal_mask_needs_no_array() -> None:
    q = torch.randn(1, 2, 33, 8)
    causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, 33, 33, device="cpu")
    calls = [
        seen_in(lambda options=options: flex_attention(q, q, q, **options))[1][0]
        for options in ({}, {"block_mask": causal})
    ]
    assert [(call.causal, call.mask, call.bias) for call in calls] == [(False, None, None), (True, None, None)]


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_a_score_mod_over_too_many_scores_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnorm.models.torch_functions.LARGEST", 100)
    q = torch.randn(1, 2, 33, 8)
    with pytest.raises(UnsupportedModel, match="score_mod"):
        seen_in(lambda: flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + i))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        for block in [*self.blocks, self.blocks[0]]:  # the first block runs twice
            x = block(x)
        if fails:
            raise ValueError("of the model itself")
        return x


def test_a_module_that_runs_twice_is_two_layers_in_every_pass() -> None:
    model, x = Model(), torch.randn(1, 5, 16)
    _, _, sites = seen_in(lambda: (model(x), model(x)))
    paths = ["blocks.0.attention", "blocks.1.attention", "blocks.0.attention"]
    assert [(site.layer, site.path) for site in sites] == [*enumerate(paths), *enumerate(paths)]


def test_blocks_called_one_by_one_are_one_pass() -> None:
    model, x = Model(), torch.randn(1, 5, 16)
    with watch_torch(lambda call, site: None, model) as sites:
        for _ in range(2):
            for block in model.blocks:
                block(x)
    assert sites.passes == 2
    assert [site.path for site in sites.sites.values()] == ["blocks.0.attention", "blocks.1.attention"]


def test_a_site_with_a_cache_stays_a_decoder_layer() -> None:
    class Cached(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, k, is_causal=len(q[0, 0]) > 1)

    model, k = Cached(), torch.randn(1, 2, 9, 8)
    _, calls, _ = seen_in(lambda: (model(k[:, :, :8], k[:, :, :8]), model(k[:, :, 8:], k)))
    assert [(call.kind, call.layer) for call in calls] == [("decoder", 0), ("decoder", 0)]
    torch.testing.assert_close(dense_weights(calls[1]), dense(k[:, :, 8:], k), **CLOSE)


def test_a_module_that_attends_to_itself_and_then_to_other_keys_is_two_layers() -> None:
    attention, x = nn.MultiheadAttention(16, 4, batch_first=True), torch.randn(1, 15, 16)
    itself, other = (x, x, x), (x, x[:, :5], x[:, :5])
    _, calls, _ = seen_in(lambda: [attention(*states) for states in (itself, other, itself, other)])
    assert [(call.kind, call.layer) for call in calls] == [("encoder", 0), ("cross", 0)] * 2


@pytest.mark.parametrize("queries", [1, 4])
def test_other_keys_that_do_not_continue_a_text_are_another_layer(queries: int) -> None:
    attention, x = nn.MultiheadAttention(16, 4, batch_first=True), torch.randn(1, 15, 16)
    _, calls, _ = seen_in(lambda: (attention(x, x, x), attention(x[:, :queries], x.clone(), x.clone())))
    assert [call.kind for call in calls] == ["encoder", "cross"]


def test_a_cache_that_starts_with_one_token_stays_one_layer() -> None:
    class Cached(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, k)

    model, k = Cached(), torch.randn(1, 2, 4, 8)
    _, calls, _ = seen_in(lambda: [model(k[:, :, n - 1 : n], k[:, :, :n]) for n in range(1, 5)])
    assert len({(call.kind, call.layer) for call in calls}) == 1


def test_an_exception_of_the_model_restores_everything_and_the_next_watch_works() -> None:
    model, x = Model(), torch.randn(1, 5, 16)
    with pytest.raises(ValueError, match="of the model"):
        seen_in(lambda: model(x, fails=True))
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not torch.nn.modules.module._global_forward_hooks
    assert len(seen_in(lambda: model(x))[1]) == 3


def test_an_exception_inside_a_pass_that_the_caller_catches_does_not_confuse_the_names() -> None:
    model, x = Model(), torch.randn(1, 5, 16)

    def run() -> None:
        with pytest.raises(ValueError, match="of the model"):
            model(x, fails=True)
        model(x)

    _, _, sites = seen_in(run)
    assert sites[3].path == "blocks.0.attention"
    assert sites[3].layer == 0


def test_a_second_watch_is_rejected_in_this_thread_and_in_others() -> None:
    found: list[BaseException] = []

    def enter() -> None:
        try:
            seen_in(lambda: None)
        except RuntimeError as error:
            found.append(error)

    def both() -> None:
        enter()
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()

    seen_in(both)
    assert [type(error) for error in found] == [RuntimeError, RuntimeError]
    assert "Leave the first" in str(found[0])


def test_other_threads_run_unseen_and_keep_their_results() -> None:
    model, x, results = Model().eval(), torch.randn(1, 5, 16), []
    expected = model(x)
    thread = threading.Thread(target=lambda: results.append(model(x)))

    def run() -> None:
        thread.start()
        thread.join()

    _, calls, _ = seen_in(run)
    assert calls == []
    assert torch.equal(results[0], expected)


def test_gradient_checkpointing_is_one_call() -> None:
    model, x = Block(), torch.randn(1, 5, 16, requires_grad=True)
    _, calls, _ = seen_in(lambda: checkpoint(model, x, use_reentrant=False).sum().backward())
    assert len(calls) == 1


def test_a_compiled_model_is_seen() -> None:
    model, x = Model(), torch.randn(1, 5, 16)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    _, _, sites = seen_in(lambda: compiled(x))
    assert [site.path for site in sites][:2] == ["blocks.0.attention", "blocks.1.attention"]


def test_another_mode_of_the_caller_keeps_its_effect() -> None:
    model, x = nn.MultiheadAttention(16, 4, batch_first=True).eval(), torch.randn(2, 7, 16)
    with torch.no_grad(), torch.device("cpu"):
        expected = model(x, x, x)[0]  # a device context is a mode: torch takes the slow path
        result, calls, _ = seen_in(lambda: model(x, x, x)[0])
    assert torch.equal(result, expected)
    assert len(calls) == 1


def test_nested_tensors_in_scaled_dot_product_attention_are_rejected() -> None:
    ragged = torch.nested.as_nested_tensor([torch.randn(3, 2, 8), torch.randn(5, 2, 8)], layout=torch.jagged)
    ragged = ragged.transpose(1, 2)
    with pytest.raises(UnsupportedModel, match="nested"), torch.no_grad():
        seen_in(lambda: F.scaled_dot_product_attention(ragged, ragged, ragged))
