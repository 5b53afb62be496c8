"""One sequence gives one answer: decoded from a cache, padded on either side, packed with others, or all at once."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import attnorm
from attnorm.normalizers.entmax import Entmax
from attnorm.normalizers.kneemax import Kneemax
from tests.attention.calls import Call, Tensors, assert_all_close, calling, learned, outputs_and_gradients
from tests.attention.reference import Case, typical

LENGTH = 7
SEQUENCE = Call(batch=1, key_heads=2, queries=LENGTH, keys=LENGTH, options={"causal": True})


def tokens(tensors: Tensors, start: int, stop: int) -> Tensors:
    return [t[..., start:stop, :] for t in tensors]


def joined(*parts: Tensors) -> Tensors:
    return [torch.cat(pieces, dim=-2) for pieces in zip(*parts, strict=True)]


@typical(0)
def test_token_by_token_with_a_cache_equals_the_full_sequence(case: Case) -> None:
    normalizer, tensors = case.make(), SEQUENCE.tensors()
    attend = calling(case, normalizer, {"causal": True})
    full = attend(*tensors)
    for t in range(LENGTH):
        q, _, _, hidden = tokens(tensors, t, t + 1)
        _, k, v, _ = tokens(tensors, 0, t + 1)
        torch.testing.assert_close(attend(q, k, v, hidden), full[..., t : t + 1, :], atol=1e-12, rtol=0)


@typical(1)
def test_a_few_tokens_with_a_cache_equal_the_full_sequence(case: Case) -> None:
    normalizer, tensors = case.make(), SEQUENCE.tensors()
    attend = calling(case, normalizer, {"causal": True})
    q, _, _, hidden = tokens(tensors, 4, LENGTH)
    torch.testing.assert_close(attend(q, *tensors[1:3], hidden), attend(*tensors)[..., 4:, :], atol=1e-12, rtol=0)


@typical(0)
@pytest.mark.parametrize("left", [3, 0], ids=["left", "right"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_padding_changes_neither_outputs_nor_gradients(case: Case, left: int, causal: bool) -> None:
    normalizer, tensors = case.make(), SEQUENCE.tensors()
    before, after = (Call(1, 2, n, n).tensors() for n in (left, 3 - left))
    mask = torch.zeros(1, 1, 1, LENGTH + 3, dtype=torch.bool)
    mask[..., left : left + LENGTH] = True
    attend = calling(case, normalizer, {"causal": causal})
    padded = calling(case, normalizer, {"causal": causal, "mask": mask})

    def in_the_middle(*sequence: Tensor) -> Tensor:
        return padded(*joined(before, list(sequence), after))[..., left : left + LENGTH, :]

    assert_all_close(
        outputs_and_gradients(in_the_middle, tensors, learned(normalizer)),
        outputs_and_gradients(attend, tensors, learned(normalizer)),
    )


@typical(1)
def test_packed_sequences_equal_separate_ones(case: Case) -> None:
    normalizer = case.make()
    first, second = Call(1, 2, 3, 3).tensors(), Call(1, 2, 5, 5).tensors()
    owner = torch.tensor([0] * 3 + [1] * 5)
    same = owner[:, None] == owner
    apart = calling(case, normalizer, {"causal": True})
    packed = calling(case, normalizer, {"causal": True, "mask": same})
    expected = torch.cat([apart(*first), apart(*second)], dim=-2)
    torch.testing.assert_close(packed(*joined(first, second)), expected, atol=1e-12, rtol=0)


@typical(0)
def test_the_last_token_changes_no_earlier_output(case: Case) -> None:
    """Not a bit, except that rows solved together for a threshold take as many steps as the slowest of them."""
    for dtype in (torch.float64, torch.bfloat16):
        normalizer, tensors = case.make(), SEQUENCE.tensors(dtype)
        attend = calling(case, normalizer.to(dtype), {"causal": True})
        changed = [t.clone() for t in tensors]
        for t in changed:
            t[..., -1, :] += 3
        before, after = attend(*tensors), attend(*changed)
        solved = any(isinstance(module, Entmax | Kneemax) for module in normalizer.modules())
        rounding = 8 * torch.finfo(dtype).eps if solved else 0.0
        torch.testing.assert_close(after[..., :-1, :], before[..., :-1, :], atol=rounding, rtol=0)
        assert (after - before)[..., -1, :].abs().max() > 0.1


def _left_padded_positions(count: int) -> Tensor:
    return torch.tensor([[0] * count + list(range(LENGTH))])


POSITIONAL: dict[str, Callable[[], attnorm.Normalizer | attnorm.Mechanism]] = {
    "llama4": lambda: attnorm.get("log_scaled", rule="llama4", floor_scale=2),
    "qwen": lambda: attnorm.get("log_scaled", rule="qwen", train_length=2),
    "scale_invariant": lambda: attnorm.get("scale_invariant"),
    "local": lambda: attnorm.get("local", window=3),
    "entmax behind llama4": lambda: attnorm.compose(
        "entmax15", scale=attnorm.get("log_scaled", rule="llama4", floor_scale=2)
    ),
}


@pytest.mark.parametrize("name", POSITIONAL)
@pytest.mark.parametrize("given", ["batch", "one dimension", "queries and keys"])
def test_given_positions_equal_counted_ones(name: str, given: str) -> None:
    normalizer = POSITIONAL[name]()
    q, k, v, _ = Call(queries=3, keys=LENGTH, key_heads=2).tensors()
    counted = torch.arange(LENGTH)
    positions = {
        "batch": counted[-3:].expand(2, 3),
        "one dimension": counted[-3:],
        "queries and keys": attnorm.Positions(counted[-3:].expand(2, 3), counted),
    }[given]
    expected = attnorm.attention(q, k, v, normalizer, causal=True)
    actual = attnorm.attention(q, k, v, normalizer, causal=True, positions=positions)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", POSITIONAL)
def test_padding_with_its_positions_equals_no_padding(name: str) -> None:
    normalizer = POSITIONAL[name]()
    tensors = SEQUENCE.tensors()
    padded = joined(Call(1, 2, 3, 3).tensors(), tensors)
    mask = torch.arange(LENGTH + 3) >= 3
    actual = attnorm.attention(
        *padded[:3], normalizer, causal=True, mask=mask[None, None, None], positions=_left_padded_positions(3)
    )
    expected = attnorm.attention(*tensors[:3], normalizer, causal=True)
    torch.testing.assert_close(actual[..., 3:, :], expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", POSITIONAL)
def test_positions_reach_every_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    normalizer = POSITIONAL[name]()
    q, k, v, _ = Call(queries=LENGTH, keys=LENGTH).tensors()
    positions = torch.arange(LENGTH).expand(2, -1) + torch.tensor([[0], [40]])
    whole = attnorm.attention(q, k, v, normalizer, positions=positions, engine="blocked")
    monkeypatch.setattr("attnorm.engines.blocked.BLOCK_ELEMENTS", 1)
    by_rows = attnorm.attention(q, k, v, normalizer, positions=positions, engine="blocked")
    torch.testing.assert_close(by_rows, whole, atol=1e-12, rtol=0)
