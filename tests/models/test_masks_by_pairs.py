"""What a mask of transformers hides, pair by pair, for every kernel it may be built for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnorm.models import hf_call
from attnorm.models.hf_call import MaskReader, VisibleKeys, mask_as_given, read_call, read_mask

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


def test_keys_that_a_model_chose_are_visible_and_no_others() -> None:
    chosen = hf_call._mask_of_indices(torch.tensor([[[0, 3], [1, 1]], [[2, 4], [4, 0]]]), 5)
    assert chosen.shape == (2, 1, 2, 5)
    assert [row.nonzero().flatten().tolist() for row in chosen.flatten(0, 2)] == [[0, 3], [1], [2, 4], [0, 4]]


def test_a_reader_remembers_a_mask_for_one_use_and_reads_it_again_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, int]] = []
    plain = hf_call.read_mask

    def watched(kernel: str, given: Tensor, queries: int, keys: int, **options: Any) -> VisibleKeys:
        read.append((queries, keys))
        return plain(kernel, given, queries, keys, **options)

    monkeypatch.setattr(hf_call, "read_mask", watched)
    reader, mask = MaskReader(), torch.ones(1, 1, 3, 5, dtype=torch.bool)
    first = reader("sdpa", mask, 3, 5)
    assert reader("sdpa", mask, 3, 5) is first
    assert len(read) == 1
    for use in ({"causal": True}, {"window": 2}, {"kernel": "eager"}, {"keys": 4}):
        reader(**{"kernel": "sdpa", "given": mask, "queries": 3, "keys": 5, **use})
    assert len(read) == 5
    reader("sdpa", mask.clone(), 3, 5)
    assert len(read) == 6


@pytest.mark.parametrize(("queries", "declared", "kind", "causal"), [
    (3, True, "decoder", True), (3, False, "encoder", False), (3, None, "decoder", True),
    (1, True, "decoder", False), (1, None, "encoder", False),
])  # fmt: skip
def test_a_call_of_sdpa_without_a_mask_is_causal_where_the_module_is(
    queries: int, declared: bool | None, kind: str, causal: bool
) -> None:
    module = nn.Module()
    module.config = SimpleNamespace(_attn_implementation="sdpa")  # type: ignore[assignment]
    q, k = torch.ones(B, H, queries, 4), torch.ones(B, H, 5, 4)
    options = {} if declared is None else {"is_causal": declared}
    found = read_call("sdpa", module, q, k, k, None, read_mask=read_mask, **options)
    assert (found.kind, found.causal) == (kind, causal)
    # A causal call with more keys than queries starts a cache of fixed size, of which the rest is empty.
    assert found.key_BGKD.shape[2] == (queries if causal else 5)
    assert found.scale == 0.5
    module.is_causal = False  # type: ignore[assignment]
    assert not read_call("sdpa", module, q, k, k, None, read_mask=read_mask).causal
