"""Masks and shapes of torch's own attention functions, each against a loop over all pairs."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask

from attnorm.models import torch_functions
from attnorm.models.dispatch import UnsupportedModel
from attnorm.models.hf_call import VisibleKeys
from attnorm.models.torch_functions import (
    _combine,
    _four_dimensional,
    _with_extra_keys,
    kind_of,
    read_multi_head_attention,
    read_native_multi_head_attention,
    read_scaled_dot_product_attention,
)
from tests.metrics.reference import dense_weights

ROWS = torch.tensor([[1, 0, 1], [1, 1, 0]]).bool()[None, None]
PADDING = torch.tensor([[0, 1, 1], [1, 1, 1]]).bool()[:, None, None]
ONE, OTHER = torch.tensor([[0.5, -1.0, 2.0]] * 2)[None, None], torch.tensor([1.0, 3.0, -0.25])[None, None, None]


@pytest.mark.parametrize("masks", list(itertools.product((None, ROWS), (None, PADDING))))
@pytest.mark.parametrize("biases", list(itertools.product((None, ONE), (None, OTHER))))
def test_what_both_masks_allow_with_both_biases(
    masks: tuple[Tensor | None, Tensor | None], biases: tuple[Tensor | None, Tensor | None]
) -> None:
    found = _combine(VisibleKeys(True, masks[0], biases[0]), VisibleKeys(False, masks[1], biases[1]))
    assert found.causal
    given = [mask for mask in masks if mask is not None]
    assert (found.mask is None) == (not given)
    if found.mask is not None:
        whole = [mask.expand(2, 1, 2, 3) for mask in given]
        assert torch.equal(found.mask.expand(2, 1, 2, 3), whole[0] & whole[-1])
    added = [bias for bias in biases if bias is not None]
    assert (found.bias is None) == (not added)
    if found.bias is not None:
        torch.testing.assert_close(found.bias, added[0] + added[1] if len(added) == 2 else added[0])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mask", [None, ROWS, PADDING])
@pytest.mark.parametrize("extra", [0, 1, 2])
def test_keys_that_torch_appends_are_seen_by_every_query(causal: bool, mask: Tensor | None, extra: int) -> None:
    visible = VisibleKeys(causal, mask, ONE)
    found = _with_extra_keys(visible, extra, 2, 3)
    if extra == 0:
        assert found is visible
        return
    assert not found.causal
    assert found.bias is not None
    assert found.bias[0, 0, 0].tolist() == [0.5, -1.0, 2.0] + [0.0] * extra
    assert (found.mask is None) == (mask is None and not causal)
    if found.mask is not None:
        for item, query, key in itertools.product(range(2), range(2), range(3 + extra)):
            seen = key >= 3 or (mask is None or bool(mask.expand(2, 1, 2, 3)[item, 0, query, key]))
            seen = seen and (key >= 3 or not causal or key <= query + 1)
            assert bool(found.mask.expand(2, 1, 2, 3 + extra)[item, 0, query, key]) == seen
    assert _with_extra_keys(VisibleKeys(False), extra, 2, 3).bias is None


def test_kinds_of_attention() -> None:
    causal = torch.ones(2, 3, dtype=torch.bool).tril(1)[None, None]
    later = causal.clone()
    later[..., 0, 2] = True
    for itself, other in ((True, "encoder"), (False, "cross")):
        assert kind_of(VisibleKeys(True), 2, 3, itself=itself) == "decoder"
        assert kind_of(VisibleKeys(False, causal), 2, 3, itself=itself) == "decoder"
        assert kind_of(VisibleKeys(False, later), 2, 3, itself=itself) == other
        assert kind_of(VisibleKeys(False, PADDING), 2, 3, itself=itself) == other
        assert kind_of(VisibleKeys(False), 2, 3, itself=itself) == other
        assert kind_of(VisibleKeys(False, PADDING[:, :, :1]), 1, 3, itself=itself) == other  # no later key to be hidden


@pytest.mark.parametrize(
    ("query", "key", "value", "shape"),
    [
        ((2, 4), (3, 4), (3, 5), (1, 1, 1, 1)),
        ((6, 2, 4), (6, 3, 4), (6, 3, 5), (1, 6, 6, 6)),
        ((2, 6, 2, 4), (1, 6, 3, 4), (2, 6, 3, 5), (2, 6, 6, 6)),
        ((2, 6, 2, 4), (2, 2, 3, 4), (2, 3, 3, 5), (2, 6, 6, 6)),
        ((2, 1, 2, 4), (2, 3, 3, 4), (2, 3, 3, 5), (2, 3, 3, 3)),
        ((2, 3, 6, 2, 4), (1, 3, 6, 3, 4), (2, 1, 6, 3, 5), (6, 6, 6, 6)),
    ],
)
def test_leading_dimensions_become_the_batch(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    tensors = [torch.randn(size) for size in (query, key, value)]
    q, k, v, mask = _four_dimensional(*tensors, torch.ones(2, 3, dtype=torch.bool))
    assert (q.shape[0], q.shape[1], k.shape[1], v.shape[1]) == shape
    assert (q.shape[2:], k.shape[2:], v.shape[2:]) == ((2, 4), (3, 4), (3, 5))
    assert k.shape[0] == v.shape[0] == q.shape[0]
    assert mask is not None
    if len(query) <= 4 and query[:-2] == key[:-2] == value[:-2]:
        expected = F.scaled_dot_product_attention(*tensors)
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v).reshape(expected.shape), expected)


@pytest.mark.parametrize("floating", [True, False])
@pytest.mark.parametrize("separate", [True, False])
def test_multi_head_attention_with_both_masks_has_the_weights_of_torch(floating: bool, separate: bool) -> None:
    """A mask of numbers and a padding of numbers: both are added."""
    torch.manual_seed(0)
    widths = {"kdim": 6, "vdim": 7} if separate else {}
    module = torch.nn.MultiheadAttention(8, 2, **widths)
    query = torch.randn(3, 2, 8)
    key, value = (torch.randn(4, 2, widths.get(name, 8)) for name in ("kdim", "vdim"))
    mask, padding = torch.randn(4, 3, 4), torch.randn(2, 4)
    if not floating:
        mask, padding = mask > 1, padding > 1
        mask[..., 0] = padding[..., 0] = False
    options = {"attn_mask": mask, "key_padding_mask": padding}
    _, weights = module(query, key, value, **options, average_attn_weights=False)
    call = read_multi_head_attention(
        query, key, value, 8, 2, module.in_proj_weight, module.in_proj_bias, None, None, False, 0.0,
        module.out_proj.weight, module.out_proj.bias, use_separate_proj_weight=separate,
        q_proj_weight=module.q_proj_weight, k_proj_weight=module.k_proj_weight, v_proj_weight=module.v_proj_weight,
        **options,
    )  # fmt: skip
    torch.testing.assert_close(dense_weights(call).float(), weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_masks_of_the_fast_path_hide_where_they_are_true(kind: int) -> None:
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    shape = {0: (3, 3), 1: (2, 3), 2: (2, 2, 3, 3)}[kind]
    hidden = torch.rand(shape) < 0.4
    hidden[..., 0] = False
    call = read_native_multi_head_attention(
        x, x, x, 8, 2, module.in_proj_weight, module.in_proj_bias, module.out_proj.weight, module.out_proj.bias,
        hidden, mask_type=kind,
    )  # fmt: skip
    options = (
        {"key_padding_mask": hidden} if kind == 1 else {"attn_mask": hidden.reshape(-1, 3, 3) if kind == 2 else hidden}
    )
    _, weights = module(x, x, x, **options, average_attn_weights=False)
    torch.testing.assert_close(dense_weights(call).float(), weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 3), (2, 3), (3, 3), (3, 2), (3, 1)])
def test_a_causal_call_hides_keys_from_the_left_end(queries: int, keys: int) -> None:
    q, k, v = (torch.randn(1, 2, n, 4) for n in (queries, keys, keys))
    call = read_scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
    assert (call.kind, call.scale) == ("decoder", 0.3)
    seen = torch.ones(queries, keys, dtype=torch.bool).tril()
    expected = (0.3 * q @ k.mT).masked_fill(~seen, -torch.inf).softmax(-1)
    found = dense_weights(call).float()
    torch.testing.assert_close(found, expected[..., : found.shape[-1]])
    assert not expected[..., found.shape[-1] :].any()


def test_masks_and_scores_are_computed_up_to_a_number_of_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, 2, 3, 4, 5, device="cpu").as_tuple()
    q, k = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 5, 8)

    def masked() -> object:
        return torch_functions._masked(block_mask, 4, 5, torch.device("cpu"))

    def scored() -> object:
        return torch_functions._scored(q, k, lambda s, b, h, i, j: s + i, 0.5, VisibleKeys(causal=False))

    for call, name in ((masked, "mask_mod"), (scored, "score_mod")):
        monkeypatch.setattr(torch_functions, "LARGEST", 2 * 3 * 4 * 5)
        call()
        monkeypatch.setattr(torch_functions, "LARGEST", 2 * 3 * 4 * 5 - 1)
        with pytest.raises(UnsupportedModel, match=name):
            call()


@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_a_block_mask_is_read_for_every_item_and_head_over_several_blocks(batch: int, heads: int) -> None:
    def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i + b) % (h + 2) <= j

    blocks = create_block_mask(rule, batch, heads, 8, 10, device="cpu", BLOCK_SIZE=2)
    found = torch_functions._masked(blocks.as_tuple(), 8, 10, torch.device("cpu"))
    where = itertools.product(range(batch), range(heads), range(8), range(10))
    expected = torch.tensor([(i + b) % (h + 2) <= j for b, h, i, j in where]).reshape(batch, heads, 8, 10)
    assert found.mask is not None
    assert torch.equal(found.mask, expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rows", [None, 1, 4])
@pytest.mark.parametrize("hides", ["nothing", "later keys", "one key"])
def test_a_score_mod_hides_what_it_sets_to_minus_infinity_beside_the_mask(
    causal: bool, rows: int | None, hides: str
) -> None:
    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        hidden = {"nothing": j < 0, "later keys": j > i, "one key": j == 1}[hides]
        return torch.where(hidden, -torch.inf, s + 0.5 * h)

    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 3, 4, 8, generator=generator) for _ in range(2))
    mask = None if rows is None else torch.tensor([True, True, False, True]).expand(1, 1, rows, 4)
    found = torch_functions._scored(q, k, score, 0.5, VisibleKeys(causal=causal, mask=mask))
    ordered = torch.ones(4, 4, dtype=torch.bool).tril()
    other = {"nothing": torch.ones(4, 4).bool(), "later keys": ordered, "one key": torch.arange(4) != 1}[hides]
    expected = (ordered if causal else True) & other & (True if mask is None else mask)
    seen = (ordered if found.causal else True) & (torch.tensor(True) if found.mask is None else found.mask)
    assert torch.equal(seen.expand(2, 3, 4, 4), expected.expand(2, 3, 4, 4))
    assert found.bias is not None
    added = found.bias.expand(2, 3, 4, 4)[expected.expand(2, 3, 4, 4)]
    torch.testing.assert_close(
        added, (0.5 * torch.arange(3)[:, None, None]).expand(2, 3, 4, 4)[expected.expand(2, 3, 4, 4)]
    )
    if rows == 1 and hides in ("nothing", "later keys"):  # a padding mask stays one, so that rows keep their order
        assert found.causal == (causal or hides == "later keys")
        assert found.mask is not None
        assert found.mask.shape[-2] == 1


@pytest.mark.parametrize("given", ["neither", "keys", "values", "both"])
def test_biases_of_keys_and_values_are_appended_together(given: str) -> None:
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(8, 2)
    x, bias_k, bias_v = torch.randn(4, 2, 8), torch.randn(1, 1, 8), torch.randn(1, 1, 8)
    call = read_multi_head_attention(
        x, x, x, 8, 2, module.in_proj_weight, module.in_proj_bias, bias_k if given in ("keys", "both") else None,
        bias_v if given in ("values", "both") else None, False, 0.0, module.out_proj.weight, module.out_proj.bias,
    )  # fmt: skip
    assert call.key_BGKD.shape[2] == call.value_BGKE.shape[2] == (5 if given == "both" else 4)


@pytest.mark.parametrize("masked", [False, True])
def test_given_keys_and_values_replace_the_projected_ones(masked: bool) -> None:
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(8, 2)
    query, other = torch.randn(3, 2, 8), torch.randn(5, 2, 8)
    keys, values = torch.randn(4, 5, 4), torch.randn(4, 5, 4)  # (batch x heads, keys, width)
    arguments = (
        8, 2, module.in_proj_weight, module.in_proj_bias, None, None, False, 0.0, module.out_proj.weight,
        module.out_proj.bias,
    )  # fmt: skip
    mask = torch.tensor([[False, True, False, False, True]] * 3) if masked else None  # True hides
    options = {"static_k": keys, "static_v": values, "attn_mask": mask}
    _, weights = F.multi_head_attention_forward(query, other, other, *arguments, average_attn_weights=False, **options)
    call = read_multi_head_attention(query, other, other, *arguments, **options)
    torch.testing.assert_close(dense_weights(call).float(), weights, rtol=1e-4, atol=1e-5)
    assert torch.equal(call.key_BGKD, keys.reshape(2, 2, 5, 4))
    assert torch.equal(call.value_BGKE, values.reshape(2, 2, 5, 4))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_sequences_are_padded_with_zeros_that_no_query_sees() -> None:
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(8, 2)
    sequences = [torch.randn(3, 8), torch.randn(2, 8)]
    nested = torch.nested.nested_tensor(sequences)
    call = read_native_multi_head_attention(
        nested, nested, nested, 8, 2, module.in_proj_weight, module.in_proj_bias, module.out_proj.weight,
        module.out_proj.bias,
    )  # fmt: skip
    assert call.mask is not None
    assert call.mask.expand(2, 1, 1, 3).squeeze((1, 2)).tolist() == [[True] * 3, [True, True, False]]
    own = torch.nn.functional.linear(torch.zeros(8), module.in_proj_weight, module.in_proj_bias).reshape(3, 2, 4)
    for found, expected in zip((call.query_BHQD, call.key_BGKD, call.value_BGKE), own, strict=True):
        assert found.shape == (2, 2, 3, 4)
        torch.testing.assert_close(found[1, :, 2], expected)
