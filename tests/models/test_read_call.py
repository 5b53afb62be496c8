"""Arguments of a transformers attention call, each with and without a value."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnorm.metrics.call import AttentionCall
from attnorm.models.hf_call import MaskReader, _mask_of_indices, _window_mask, mask_as_given, read_call, read_mask

HEADS, WIDTH = 2, 4


def tensors(queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, HEADS, n, WIDTH, generator=generator) for n in (queries, keys, keys))
    return query, key, value


def call(kernel: str = "sdpa", queries: int = 3, keys: int = 3, mask: Any = None, **options: Any) -> AttentionCall:
    module = options.pop("module", nn.Module())
    return read_call(kernel, module, *tensors(queries, keys), mask, read_mask=MaskReader(), **options)


@pytest.mark.parametrize(
    ("scaling", "scale", "factor"),
    [
        (None, 0.5, 1.0),
        (0.3, 0.3, 1.0),
        (torch.tensor(0.3), 0.3, 1.0),
        (torch.tensor([0.3]), 0.3, 1.0),
        (torch.tensor([0.3, 2.0])[:, None, None], 1.0, torch.tensor([0.3, 2.0])[:, None, None]),
        (torch.tensor([0.3, 2.0, 1.0, 5.0]), 1.0, torch.tensor([0.3, 2.0, 1.0, 5.0])),
    ],
    ids=str,
)
def test_a_scale_of_one_number_is_kept_and_several_are_multiplied_into_the_queries(
    scaling: Any, scale: float, factor: Any
) -> None:
    found = call(scaling=scaling)
    assert found.scale == pytest.approx(scale)
    torch.testing.assert_close(found.query_BHQD, tensors(3, 3)[0] * factor)


@pytest.mark.parametrize("kernel", ["sdpa", "eager", "flash_attention_2", "flex_attention"])
@pytest.mark.parametrize("queries", [1, 2, 3])
@pytest.mark.parametrize("declared", [None, True, False])
@pytest.mark.parametrize("own", [None, True, False])
def test_causality_without_a_mask(kernel: str, queries: int, declared: bool | None, own: bool | None) -> None:
    module = nn.Module()
    if own is not None:
        module.is_causal = own  # type: ignore[assignment]
    causal = declared if declared is not None else own if own is not None else True
    found = call(kernel, queries, module=module, is_causal=declared)
    applied = causal and queries > 1 and kernel in ("sdpa", "flash_attention_2")
    assert found.causal == applied
    assert found.mask is None
    stated = declared is not None or own is not None
    assert found.kind == ("decoder" if applied or (causal and stated) else "encoder")
    cache = kernel == "sdpa" and causal and queries == 2  # the rest of a cache of fixed size is still empty
    assert found.key_BGKD.shape[2] == found.value_BGKE.shape[2] == (2 if cache else 3)


def test_what_is_added_to_the_logits() -> None:
    bias = torch.randn(1, HEADS, 3, 3)
    assert torch.equal(call(position_bias=bias).bias, bias)  # type: ignore[arg-type]
    added = torch.randn(1, 1, 3, 3)
    both = call("eager", mask=added, position_bias=bias).bias
    torch.testing.assert_close(both, added + bias)
    alone = call("eager", mask=added)
    assert torch.equal(alone.bias, added)  # type: ignore[arg-type]
    assert call().bias is None
    short = call(queries=2, keys=3, position_bias=bias[:, :, :2])
    assert torch.equal(short.bias, bias[:, :, :2, :2])  # type: ignore[arg-type]


def test_options_of_kernels() -> None:
    sinks = torch.tensor([1.0, 2.0])
    found = call("eager", softcap=30.0, s_aux=sinks, dropout=0.25)
    assert (found.softcap, found.dropout) == (30.0, 0.25)
    assert found.sinks_H is sinks
    ignored = call("sdpa", softcap=30.0, s_aux=sinks)
    assert (ignored.softcap, ignored.sinks_H, ignored.dropout, ignored.layer) == (None, None, 0.0, 0)


def test_keys_that_a_model_chose_are_the_visible_ones() -> None:
    indices = torch.tensor([[[0, 2], [1, 1], [2, 0]]] * 2)
    chosen = [[1, 0, 1], [0, 1, 0], [1, 0, 1]]
    assert _mask_of_indices(indices, 3)[0, 0].int().tolist() == chosen
    found = call("eager", indices=indices)
    assert found.mask is not None
    assert found.mask[1, 0].int().tolist() == chosen
    mask = torch.tensor([[True, True, False]] * 3).reshape(1, 1, 3, 3)
    both = call("sdpa", mask=mask, indices=indices).mask
    assert both is not None
    assert both.expand(2, 1, 3, 3)[0, 0].int().tolist() == [[1, 0, 0], [0, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize("value", [-1e4, -9_999.0, -1e9, -torch.inf])
def test_numbers_up_to_minus_ten_thousand_hide(value: float) -> None:
    given = torch.tensor([[0.0, value, 0.0]]).expand(1, 1, 3, 3)
    found = mask_as_given("eager", given, 3, 3)
    hides = value <= -1e4
    assert found.mask is not None
    assert found.mask[0, 0, 0].tolist() == [True, not hides, True]
    assert (found.bias is None) == hides
    if found.bias is not None:
        assert found.bias[0, 0, 0].tolist() == [0.0, value, 0.0]


def test_masks_longer_than_the_keys_are_cut_and_booleans_are_added_in_eager_attention() -> None:
    given = torch.tensor([True, False, True, True]).expand(1, 1, 2, 4)
    assert mask_as_given("sdpa", given, 2, 3).mask[..., 0, :].tolist() == [[[True, False, True]]]  # type: ignore[index]
    added = mask_as_given("eager", given, 2, 3)
    assert added.bias is not None
    assert added.bias[0, 0, 0].tolist() == [1.0, 0.0, 1.0]
    assert added.mask is not None
    assert added.mask.all()
    numbers = mask_as_given("eager", torch.tensor([[[[0, 1, 0]]]]), 1, 3)
    assert numbers.bias is not None
    assert numbers.bias.dtype == torch.float32


@pytest.mark.parametrize("padding", [None, [1, 1, 0, 1], [0, 1, 1, 1]])
@pytest.mark.parametrize("queries", [1, 2, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_masks_of_causality_and_padding_need_no_array_of_queries_and_keys(
    padding: list[int] | None, queries: int, causal: bool
) -> None:
    seen = torch.ones(queries, 4, dtype=torch.bool)
    seen = seen.tril(4 - queries) if causal else seen
    row = torch.ones(4, dtype=torch.bool) if padding is None else torch.tensor(padding).bool()
    found = read_mask("sdpa", (seen & row)[None, None], queries, 4)
    assert found.causal == (causal and queries > 1)
    if padding is None:
        assert found.mask is None
    else:
        assert found.mask is not None
        assert found.mask.tolist() == [[[row.tolist()]]]


def test_any_other_mask_is_kept_as_it_is() -> None:
    mask = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 1, 1]]).bool()[None, None]
    found = read_mask("sdpa", mask, 3, 3)
    assert not found.causal
    assert found.mask is mask


@pytest.mark.parametrize("window", [None, 0, 1, 2, 3, 4])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_sliding_windows_are_those_of_all_pairs(window: int | None, queries: int, causal: bool) -> None:
    found = _window_mask(queries, 3, window, causal, torch.device("cpu"))
    if not window or window >= 3:
        assert found is None
        return
    pairs = [[i + 3 - queries - j for j in range(3)] for i in range(queries)]
    seen = [[(0 if causal else 1 - window) <= d < window for d in row] for row in pairs]
    assert found is not None
    assert found[0, 0].tolist() == seen


def test_four_masks_are_remembered() -> None:
    reader = MaskReader()
    masks = [torch.rand(1, 1, 3, 3) > 0.5 for _ in range(5)]
    found = [reader("sdpa", mask, 3, 3) for mask in masks]
    assert len(reader._read) == 4
    assert reader("sdpa", masks[1], 3, 3) is found[1]
    assert reader("sdpa", masks[4], 3, 3) is found[4]
    assert reader("sdpa", masks[0], 3, 3) is not found[0]
    for change in ({"causal": True}, {"window": 2}):
        assert reader("sdpa", masks[4], 3, 3, **change) is not found[4]
