"""Weight, gap and rank of a known key, against a loop over the dense float64 weights."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnorm.metrics.call import AttentionCall
from attnorm.metrics.reads import measure_targets
from attnorm.normalizers import get
from attnorm.normalizers.contract import Normalizer
from tests.metrics import reference
from tests.metrics.calls import CALLS, HEADS, ROW_NORMALIZERS, make_call, window

SMALL = {
    **{f"{size} keys": make_call(size) for size in (1, 2, 3)},
    "one key of a cache": make_call(1, 3),
    "two queries, one key": make_call(2, 1),
    "empty rows": make_call(3, mask=torch.tensor([[0, 0, 0], [1, 0, 0], [0, 1, 1]]).bool()[None, None]),
    "window": make_call(40, batch=1, mask=window(40, 3)),
    "padding": make_call(20, mask=torch.arange(20).ge(torch.tensor([17, 0])[:, None])[:, None, None]),
    "ties": make_call(3, size=0.0),
    "whole groups of keys": make_call(2, 16, batch=1, causal=False),  # a block is not padded
    "the second group of keys": make_call(1, 40, batch=1, causal=False, mask=torch.arange(40) // 16 == 1),
}


def in_float64(call: AttentionCall) -> AttentionCall:
    wide = {name: getattr(call, name).double() for name in ("query_BHQD", "key_BGKD", "value_BGKE")}
    return replace(call, **wide)


def compare(call: AttentionCall, normalizer: Normalizer | None, targets: Tensor, rows: Tensor) -> None:
    (found,) = measure_targets(call, [normalizer], rows, targets).values()
    weights, visible = reference.dense_weights(call, normalizer).detach(), reference.dense_visible(call)
    for item, head, index in torch.cartesian_prod(*(torch.arange(size) for size in found.n.shape)).tolist():
        place, row = (item, head, index), int(rows[index])
        seen = visible[item, head, row]
        target = int(targets[item, index])
        keys = [key for key in range(len(seen)) if seen[key]]
        row_weights = weights[item, head, row]
        assert int(found.n[place]) == len(keys)
        if target not in keys:
            assert float(found.weight[place]) == 0
            assert not found.heaviest[place]
            if any(float(row_weights[key]) for key in keys):
                assert float(found.gap[place]) == -math.inf
            continue
        own, others = float(row_weights[target]), [float(row_weights[key]) for key in keys if key != target]
        mean = sum(others) / len(others) if others else 0.0
        gap = math.inf if mean == 0 else -math.inf if own == 0 else math.log(own / mean)
        assert float(found.weight[place]) == pytest.approx(own, rel=1e-9, abs=1e-300)
        if own or mean:
            assert float(found.gap[place]) == pytest.approx(gap, rel=1e-9, abs=1e-9)
        if all(abs(own - other) > 1e-12 for other in others) or call.query_BHQD.count_nonzero() == 0:
            assert bool(found.heaviest[place]) == (own >= max([*others, own]) - 1e-12)


def every_target(call: AttentionCall, normalizer: Normalizer | None = None) -> None:
    """Each key of the call is the target of each row once, in the second item one key later."""
    (batch, _, queries, _), keys = call.query_BHQD.shape, call.key_BGKD.shape[-2]
    for key in range(keys):
        targets = (key + torch.arange(batch)[:, None].expand(batch, queries)) % keys
        compare(call, normalizer, targets, torch.arange(queries))


@pytest.mark.parametrize(
    "name",
    [
        "1 keys",
        "2 keys",
        "3 keys",
        "one key of a cache",
        "empty rows",
        "ties",
        "whole groups of keys",
        "the second group of keys",
    ],
)
def test_every_key_of_a_small_call_as_the_target(name: str) -> None:
    every_target(in_float64(SMALL[name]))


@pytest.mark.parametrize("name", ["window", "padding", "two queries, one key"])
def test_targets_outside_of_the_keys_that_a_block_holds(name: str) -> None:
    call = in_float64(SMALL[name])
    (batch, _, queries, _), keys = call.query_BHQD.shape, call.key_BGKD.shape[-2]
    rows = torch.arange(queries)[-4:]
    for target in {0, keys // 2, keys - 3, keys - 1} & set(range(keys)):
        compare(call, None, torch.full((batch, len(rows)), target), rows)


@pytest.mark.parametrize("name", CALLS)
def test_targets_in_every_kind_of_call(name: str) -> None:
    call = in_float64(CALLS[name])
    (batch, _, queries, _), keys = call.query_BHQD.shape, call.key_BGKD.shape[-2]
    rows = torch.tensor(sorted({0, queries // 3, queries - 1}))
    targets = torch.randint(keys, (batch, len(rows)), generator=torch.Generator().manual_seed(1))
    compare(call, None, targets, rows)


@pytest.mark.parametrize("name", ROW_NORMALIZERS)
def test_every_normalizer_weighs_the_target_itself(name: str) -> None:
    normalizer = get(name)
    assert isinstance(normalizer, Normalizer)
    weights = reference.dense_weights(call := in_float64(make_call(3, batch=1)), normalizer.double())
    if bool((weights >= 0).all()):  # a negative weight has no gap
        every_target(call, normalizer)


def test_results_are_named_after_their_normalizers_and_stay_in_order() -> None:
    found = measure_targets(make_call(4), [None, "entmax15"], torch.tensor([3]), torch.tensor([[1], [2]]))
    assert list(found) == ["model", "entmax15"]
    assert found["model"].weight.shape == (2, HEADS, 1)
    assert not torch.equal(found["model"].weight, found["entmax15"].weight)


@pytest.mark.parametrize("targets", [[[1, 2]], [[1], [1]], [1]])
def test_one_target_is_expected_for_each_row_of_each_item(targets: list[object]) -> None:
    with pytest.raises(ValueError, match=r"\(1, 1\)"):
        measure_targets(make_call(batch=1), [None], torch.tensor([4]), torch.tensor(targets))


@pytest.mark.parametrize("target", [-1, 33, 999])
def test_targets_outside_of_the_call_are_rejected(target: int) -> None:
    with pytest.raises(ValueError, match=rf"0 to 32, got \[\[{target}\]\]"):
        measure_targets(make_call(33, batch=1), [None], torch.tensor([4]), torch.tensor([[target]]))
