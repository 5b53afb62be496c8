"""The n of a row is the number of keys it sees: not the width of the tensor, not a position counted over padding."""

import math

import pytest
import torch
from torch import Tensor

from attnorm.normalizers import Positions, get
from attnorm.normalizers.declaration import HEADS
from tests.normalizers.variants import TYPICAL, Variant

LENGTH = 8
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
no_hidden_states = [v for v in TYPICAL if v.width is None]


def logits() -> Tensor:
    return 2 * torch.randn(1, HEADS, LENGTH, LENGTH, dtype=torch.float64)


@pytest.mark.parametrize("variant", no_hidden_states, ids=str)
def test_the_future_does_not_matter(variant: Variant) -> None:
    """Changing the last token - its whole column - changes no earlier row."""
    normalizer, z = variant.make(), logits()
    changed = z.clone()
    changed[..., -1] += 100
    before, after = normalizer(z, CAUSAL), normalizer(changed, CAUSAL)
    assert torch.equal(before[..., :-1, :], after[..., :-1, :])


@pytest.mark.parametrize("variant", no_hidden_states, ids=str)
def test_decoding_one_token_at_a_time_equals_the_full_sequence(variant: Variant) -> None:
    normalizer, z = variant.make().double(), logits()
    full = normalizer(z, CAUSAL)
    for i in range(LENGTH):
        step = normalizer(z[..., i : i + 1, : i + 1])
        torch.testing.assert_close(step, full[..., i : i + 1, : i + 1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("variant", no_hidden_states, ids=str)
def test_sequences_packed_into_one_equal_the_sequences_alone(variant: Variant) -> None:
    """Two sequences side by side, each seeing itself only, positions starting anew."""
    normalizer, z = variant.make().double(), logits()
    first, second = slice(0, 5), slice(5, LENGTH)
    packed = torch.block_diag(CAUSAL[first, first], CAUSAL[second, second]).bool()
    positions = torch.cat([torch.arange(5), torch.arange(3)])
    together = normalizer(z, packed, positions=positions)
    for part, count in ((first, 5), (second, 3)):
        alone = normalizer(z[..., part, part], CAUSAL[:count, :count], positions=torch.arange(count))
        torch.testing.assert_close(together[..., part, part], alone, rtol=0, atol=1e-12)


def test_every_row_of_a_causal_sequence_has_its_own_length() -> None:
    """One n for all rows would be a constant temperature, which the weights of the model absorb."""
    z = logits()
    weights = get("ssmax", s=0.5)(z, CAUSAL)
    for i in range(LENGTH):
        scale = 0.5 * math.log(i + 1)
        torch.testing.assert_close(weights[..., i, : i + 1], torch.softmax(scale * z[..., i, : i + 1], -1))


@pytest.mark.parametrize("name", ["ssmax", "asentmax", "sigmoid", "relu"])
def test_n_counts_visible_keys_wherever_they_stand(name: str) -> None:
    z = torch.randn(1, 1, 1, 20, dtype=torch.float64)
    mask = torch.zeros(20, dtype=torch.bool)
    mask[[2, 3, 11, 19]] = True
    torch.testing.assert_close(get(name)(z, mask)[..., mask], get(name)(z[..., mask]))


def test_the_position_rules_take_positions_where_they_are_given() -> None:
    z = torch.randn(1, 1, 3, 6, dtype=torch.float64)
    normalizer = get("log_scaled", rule="llama4", floor_scale=10)
    positions = torch.tensor([8, 9, 25])
    factors = 1 + 0.1 * torch.log1p(torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64))[:, None]
    torch.testing.assert_close(normalizer(z, positions=positions), torch.softmax(factors * z, -1))
    torch.testing.assert_close(normalizer(z), torch.softmax(z, -1))


def test_positions_per_batch_entry_reach_every_head() -> None:
    z = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 3], [0, 0, 0, 1]])
    for normalizer in (get("local", window=2), get("scale_invariant"), get("log_scaled", train_length=2)):
        together = normalizer(z, positions=positions)
        for b in range(2):
            alone = normalizer(z[b], positions=positions[b])
            torch.testing.assert_close(together[b], alone)


def test_keys_may_have_positions_of_their_own() -> None:
    z = torch.zeros(1, 3, dtype=torch.float64)
    positions = Positions(torch.tensor([10]), torch.tensor([10, 2, 9]))
    assert (get("local", window=2)(z, positions=positions) > 0).tolist() == [[True, False, True]]


def test_a_row_of_one_key_is_one_key_for_every_length_rule() -> None:
    """log 1 = 0 must not make it vanish or divide."""
    for name in ("ssmax", "asentmax", "log_scaled", "softmax", "entmax15", "adaptive_temperature"):
        assert get(name)(torch.tensor([[5.0]])).item() == 1.0


def test_positions_of_each_item_without_heads() -> None:
    generator = torch.Generator().manual_seed(0)
    z, positions = torch.randn(2, 4, 4, generator=generator), torch.tensor([[0, 1, 2, 3], [0, 5, 6, 20]])
    normalizer = get("scale_invariant")
    found = normalizer(z, positions=positions)
    for item in range(2):
        torch.testing.assert_close(found[item], normalizer(z[item], positions=positions[item]))
