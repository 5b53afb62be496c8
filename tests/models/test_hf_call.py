"""Masks of every kernel, also of those that do not run on a CPU, against their definition."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from attnorm.models.hf_call import MaskReader, VisibleKeys, read_call


def dense(visible: VisibleKeys, batch: int, queries: int, keys: int) -> Tensor:
    seen = torch.ones(batch, 1, queries, keys, dtype=torch.bool)
    seen = seen.tril(keys - queries) if visible.causal else seen
    return seen if visible.mask is None else seen & visible.mask


def seen_by(kernel: str, mask: Any, *, causal: bool, queries: int, keys: int, window: int | None = None) -> VisibleKeys:
    query, key = torch.zeros(1, 1, queries, 4), torch.zeros(1, 1, keys, 4)
    call = read_call(
        kernel, nn.Module(), query, key, key, mask, read_mask=MaskReader(), is_causal=causal, sliding_window=window
    )
    return VisibleKeys(call.causal, call.mask, call.bias)


def flash(
    given: Tensor | None, *, window: int | None, causal: bool = True, queries: int = 6, keys: int = 6
) -> VisibleKeys:
    return seen_by("flash_attention_2", given, causal=causal, queries=queries, keys=keys, window=window)


def test_flash_attention_is_causal_without_a_mask() -> None:
    assert flash(None, window=None) == VisibleKeys(causal=True)
    assert flash(None, window=None, causal=False) == VisibleKeys(causal=False)


def test_the_window_of_flash_attention_is_its_own_business() -> None:
    seen = dense(flash(None, window=3), 1, 6, 6)
    assert seen[0, 0].sum(-1).tolist() == [1, 2, 3, 3, 3, 3]
    late = dense(flash(None, window=3, queries=2), 1, 2, 6)
    assert late[0, 0].tolist() == [[False, False, True, True, True, False], [False, False, False, True, True, True]]
    assert flash(None, window=6).mask is None


def test_both_sides_of_a_bidirectional_window() -> None:
    seen = dense(flash(None, window=2, causal=False), 1, 6, 6)
    assert seen[0, 0].sum(-1).tolist() == [2, 3, 3, 3, 3, 2]


def test_flash_attention_is_given_the_padding_alone() -> None:
    padding = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    visible = flash(padding, window=3)
    seen = dense(visible, 2, 6, 6)
    assert seen[0, 0].sum(-1).tolist() == [0, 0, 1, 2, 3, 3]
    assert seen[1, 0].sum(-1).tolist() == [1, 2, 3, 3, 3, 3]
    assert flash(padding, window=None).mask.shape == (2, 1, 1, 6)


def test_a_block_mask_is_read() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    block_mask = create_block_mask(lambda b, h, q, k: (q >= k) & (k > q - 4), 2, None, 16, 16, device="cpu")
    visible = seen_by("flex_attention", block_mask, causal=True, queries=16, keys=16)
    assert dense(visible, 2, 16, 16)[1, 0].sum(-1).tolist() == [1, 2, 3, *[4] * 13]


def test_eager_attention_sees_everything_without_a_mask() -> None:
    assert seen_by("eager", None, causal=True, queries=6, keys=6) == VisibleKeys(causal=False)


def test_a_mask_object_is_read_once_and_another_anew() -> None:
    reader = MaskReader()
    options = {"causal": True, "queries": 6, "keys": 6}
    mask = torch.eye(6, dtype=torch.bool)[None, None]
    first = reader("sdpa", mask, **options)
    assert reader("sdpa", mask, **options) is first
    for _ in range(20):  # a new object may get the address of an old one
        seen = torch.rand(1, 1, 6, 6) > 0.5
        additive = torch.zeros(1, 1, 6, 6).masked_fill(~seen, -torch.inf)
        assert torch.equal(dense(reader("eager", additive, **options), 1, 6, 6), seen)
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
