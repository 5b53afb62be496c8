"""Arguments of a transformers attention call, and what its mask hides for every kernel, pair by pair."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnorm.metrics.call import AttentionCall
from attnorm.models.hf_call import MaskReader, VisibleKeys, _mask_of_indices, mask_as_given, read_call, read_mask

B, H = 2, 2


def table(visible: VisibleKeys, queries: int, keys: int) -> Tensor:
    """What is visible, (B, H, Q, K)."""
    seen = torch.ones(B, H, queries, keys, dtype=torch.bool)
    if visible.mask is not None:
        seen = seen & visible.mask
    if visible.causal:
        seen = seen & torch.tensor([[j <= i + keys - queries for j in range(keys)] for i in range(queries)])
    return seen


def pairs(queries: int, keys: int, *, window: int | None = None, causal: bool = True) -> Tensor:
    """A sliding window, (Q, K)."""
    distance = torch.tensor([[i + keys - queries - j for j in range(keys)] for i in range(queries)])
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if window is None else seen & (distance.abs() < window)


PADDING = torch.tensor([[True, True, True, True, True], [False, False, True, True, True]])


SIZES = [(5, 5), (3, 5), (1, 5)]


@pytest.mark.parametrize(("queries", "keys"), SIZES)
@pytest.mark.parametrize("reader", [read_mask, mask_as_given])
@pytest.mark.parametrize("form", ["bool", "-inf", "-10001", "-1e9"])
def test_masks_of_sdpa_and_eager_hide_what_is_false_or_far_below(
    queries: int, keys: int, reader: Any, form: str
) -> None:
    masks = {
        "all": torch.ones(1, 1, queries, keys, dtype=torch.bool),
        "padding": PADDING[:, None, None].expand(B, 1, queries, keys),
        "one row": PADDING[:, None, None],
        "causal": pairs(queries, keys).expand(B, 1, queries, keys),
        "both": pairs(queries, keys) & PADDING[:, None, None],
        "window": pairs(queries, keys, window=2).expand(B, 1, queries, keys),
        "any": torch.rand(B, H, queries, keys, generator=torch.Generator().manual_seed(0)) < 0.5,
    }
    for name, mask in masks.items():
        given = mask if form == "bool" else torch.zeros(mask.shape).masked_fill(~mask, float(form))
        found = reader("sdpa" if form == "bool" else "eager", given, queries, keys)
        assert torch.equal(table(found, queries, keys), mask.expand(B, H, queries, keys)), name
        assert found.bias is None
    causal = read_mask("sdpa", masks["causal"], queries, keys)
    assert causal.causal == (queries > 1)
    assert causal.mask is None
    assert read_mask("sdpa", masks["all"], queries, keys) == VisibleKeys(causal=False)
    padded = read_mask("sdpa", masks["both"], queries, keys)
    assert padded.mask is not None
    assert padded.mask.shape[-2] == 1  # no array of all pairs
    assert read_mask("sdpa", masks["padding"], queries, keys).mask.shape[-2] == 1  # type: ignore[union-attr]


def test_what_is_added_above_the_limit_is_a_bias_and_what_is_below_is_hidden() -> None:
    given = torch.tensor([[[[0.0, -9999.0, -10000.0, -10001.0, 2.5]]]])
    found = mask_as_given("eager", given, 1, 5)
    assert found.mask is not None
    assert found.bias is not None
    assert found.mask.tolist() == [[[[True, True, False, False, True]]]]
    assert found.bias.tolist() == [[[[0.0, -9999.0, 0.0, 0.0, 2.5]]]]
    eager = mask_as_given("eager", torch.tensor([[[[True, False]]]]), 1, 2)  # eager adds 1 and 0
    assert eager.bias is not None
    assert eager.bias.tolist() == [[[[1.0, 0.0]]]]
    assert eager.mask is not None
    assert eager.mask.all()


def test_a_mask_for_more_keys_than_there_are_is_cut() -> None:
    given = torch.tensor([[[[True, False, True, True]]]])
    assert mask_as_given("sdpa", given, 1, 2).mask.tolist() == [[[[True, False]]]]  # type: ignore[union-attr]
    assert mask_as_given("sdpa", given, 1, 4).mask is given


@pytest.mark.parametrize(("queries", "keys"), SIZES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 2, 4, 5, 6])
def test_flash_kernels_add_causality_and_the_window_to_the_padding(
    queries: int, keys: int, causal: bool, window: int | None
) -> None:
    expected = (pairs(queries, keys, window=window, causal=causal) & PADDING[:, None, None]).expand(B, H, queries, keys)
    wide = torch.cat([torch.zeros(B, 2), PADDING.float()], 1)  # the last columns are the keys'
    for given in (PADDING.float(), wide):
        found = read_mask("flash_attention_2", given, queries, keys, causal=causal, window=window)
        assert torch.equal(table(found, queries, keys), expected)
    module = nn.Module()
    module.config = SimpleNamespace(_attn_implementation="flash_attention_2")  # type: ignore[assignment]
    q, k = torch.ones(B, H, queries, 4), torch.ones(B, H, keys, 4)
    alone = read_call(
        "flash_attention_2", module, q, k, k, None, read_mask=read_mask, is_causal=causal, sliding_window=window
    )
    shown = table(VisibleKeys(causal=alone.causal, mask=alone.mask), queries, keys)
    assert torch.equal(shown, pairs(queries, keys, window=window, causal=causal).expand(B, H, queries, keys))


@pytest.mark.parametrize("keys", [2, 3, 64])
def test_one_wrong_pair_in_any_row_makes_a_mask_other_than_causal(keys: int) -> None:
    mask = pairs(keys, keys)[None, None]
    assert read_mask("sdpa", mask, keys, keys) == VisibleKeys(causal=True)
    for row in range(keys - 1):
        other = mask.clone()
        other[..., row, keys - 1] = True
        found = read_mask("sdpa", other, keys, keys)
        assert not found.causal
        assert torch.equal(table(found, keys, keys)[0, 0], other[0, 0])


WIDTH = 4


def tensors(queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, H, n, WIDTH, generator=generator) for n in (queries, keys, keys))
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
    bias = torch.randn(1, H, 3, 3)
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


def test_a_block_mask_is_read() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    block_mask = create_block_mask(lambda b, h, q, k: (q >= k) & (k > q - 4), 2, None, 16, 16, device="cpu")
    found = call("flex_attention", 16, 16, block_mask)
    assert table(VisibleKeys(found.causal, found.mask), 16, 16)[1, 0].sum(-1).tolist() == [1, 2, 3, *[4] * 13]


def test_a_mask_object_is_read_once_and_another_anew() -> None:
    reader = MaskReader()
    options = {"causal": True, "queries": 6, "keys": 6}
    mask = torch.eye(6, dtype=torch.bool)[None, None]
    first = reader("sdpa", mask, **options)
    assert reader("sdpa", mask, **options) is first
    for change in ({"causal": False}, {"window": 2}, {"keys": 4}):
        assert reader("sdpa", mask, **{**options, **change}) is not first
    for _ in range(20):  # a new object may get the address of an old one
        seen = torch.rand(1, 1, 6, 6) > 0.5
        additive = torch.zeros(1, 1, 6, 6).masked_fill(~seen, -torch.inf)
        assert torch.equal(table(reader("eager", additive, **options), 6, 6), seen.expand(B, H, 6, 6))
        del additive


def test_long_masks_are_compared_in_pieces() -> None:
    causal = torch.ones(1, 1, 3000, 3000, dtype=torch.bool).tril()
    options = {"causal": True, "queries": 3000, "keys": 3000}
    assert MaskReader()("sdpa", causal, **options) == VisibleKeys(causal=True)
    causal[0, 0, 2999, 7] = False  # now the last row says that key 7 is padding, and no other row does
    visible = MaskReader()("sdpa", causal, **options)
    assert not visible.causal
    assert visible.mask is causal


def test_masks_of_earlier_steps_are_let_go() -> None:
    reader = MaskReader()
    masks = [torch.rand(1, 1, 6, 6) > 0.5 for _ in range(20)]
    alive = [weakref.ref(mask) for mask in masks]
    for mask in masks:
        reader("sdpa", mask, causal=True, queries=6, keys=6)
    del mask, masks
    assert sum(one() is not None for one in alive) <= 4
