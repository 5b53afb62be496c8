"""Masks and shapes of torch's own attention functions, each against a loop over all pairs."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from attnorm.models import torch_functions
from attnorm.models.hf_call import VisibleKeys
from attnorm.models.torch_functions import (
    kind_of,
    read_multi_head_attention,
    read_native_multi_head_attention,
    read_scaled_dot_product_attention,
)
from tests.metrics.reference import dense_weights

ROWS = torch.tensor([[1, 0, 1], [1, 1, 0]]).bool()[None, None]
PADDING = torch.tensor([[0, 1, 1], [1, 1, 1]]).bool()[:, None, None]
ONE, OTHER = torch.tensor([[0.5, -1.0, 2.0]] * 2)[None, None], torch.tensor([1.0, 3.0, -0.25])[None, None, None]


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
