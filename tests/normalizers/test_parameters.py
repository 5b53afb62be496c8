"""What is learned: one number or one per head, kept by a state dict, refused for another number of heads."""

import copy
import math

import pytest
import torch

from attnorm.normalizers import Normalizer, compose, get, mixture

LEARNED = {
    "softmax": lambda heads: get("softmax", learned=True, heads=heads),
    "entmax": lambda heads: get("entmax", learned=True, heads=heads),
    "ssmax": lambda heads: get("ssmax", heads=heads),
    "ssmax with bias": lambda heads: get("ssmax", bias=True, heads=heads),
    "asentmax": lambda heads: get("asentmax", heads=heads),
    "sink": lambda heads: get("sink", heads=heads),
    "mixture": lambda heads: mixture("softmax", "sparsemax", heads=heads),
}
each = pytest.mark.parametrize("make", LEARNED.values(), ids=LEARNED)


def spread_out(normalizer: Normalizer) -> Normalizer:
    with torch.no_grad():
        for parameter in normalizer.parameters():
            parameter += torch.randn_like(parameter) / 4
    return normalizer


@each
def test_one_number_for_all_heads_or_one_for_each(make) -> None:
    for parameter in make(None).parameters():
        assert parameter.shape == ()
        assert parameter.requires_grad
    for parameter in make(3).parameters():
        assert parameter.shape == (3,)


@each
def test_each_head_uses_its_own_parameter(make) -> None:
    z = torch.randn(2, 3, 4, 7, dtype=torch.float64)
    together = spread_out(make(3)).double()
    for head in range(3):
        alone = make(None).double()
        for one, all_heads in zip(alone.parameters(), together.parameters(), strict=True):
            one.data = all_heads.data[head].clone()
        torch.testing.assert_close(together(z)[:, head], alone(z[:, head]))


@each
def test_a_state_dict_round_trip_keeps_every_weight(make) -> None:
    z = torch.randn(2, 3, 4, 7)
    original, restored = spread_out(make(3)), make(3)
    assert not torch.equal(original(z), restored(z))
    restored.load_state_dict(copy.deepcopy(original.state_dict()))
    assert torch.equal(original(z), restored(z))


@each
def test_every_parameter_learns(make) -> None:
    normalizer = spread_out(make(3))
    normalizer(torch.randn(2, 3, 4, 7)).square().sum().backward()
    for parameter in normalizer.parameters():
        assert (parameter.grad != 0).all()


@each
@pytest.mark.parametrize("shape", [(4, 7), (2, 5, 4, 7), (5, 4, 7)])
def test_logits_with_another_number_of_heads_are_refused(make, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"heads|queries"):
        make(3)(torch.randn(shape))


@pytest.mark.parametrize("name", ["softmax", "entmax"])
def test_what_is_not_learned_has_nothing_to_train(name: str) -> None:
    assert [p for p in get(name).parameters() if p.requires_grad] == []
    fixed = get("ssmax", learned=False)
    assert [p for p in fixed.parameters() if p.requires_grad] == []


@pytest.mark.parametrize("heads", [0, -2])
@each
def test_heads_are_at_least_one(make, heads: int) -> None:
    with pytest.raises(ValueError, match=f"heads.*{heads}"):
        make(heads)


def test_parameters_start_where_the_papers_start_them() -> None:
    assert get("ssmax").scale[0].s.item() == pytest.approx(0.1685, abs=1e-4)
    assert torch.sigmoid(get("entmax", alpha=1.25, learned=True).map.theta).item() == pytest.approx(0.25)
    assert torch.exp(get("softmax", temperature=0.5, learned=True).scale[0].log_temperature).item() == pytest.approx(
        0.5
    )
    rule = get("asentmax", beta=0.55, gamma=0.4).scale[0]
    assert math.log1p(math.exp(rule.raw_beta.item())) == pytest.approx(0.55)
    assert 2 * math.tanh(rule.raw_gamma.item()) == pytest.approx(0.4)


def test_a_learned_temperature_stays_positive() -> None:
    normalizer = get("softmax", learned=True)
    with torch.no_grad():
        normalizer.scale[0].log_temperature.fill_(-3.0)
    z = torch.randn(2, 5)
    torch.testing.assert_close(normalizer(z), torch.softmax(z * math.exp(3.0), -1))


# asentmax reads the hidden state.


def test_asentmax_reads_beta_and_gamma_of_each_query_and_head_from_the_hidden_state() -> None:
    normalizer = get("asentmax", heads=3, width=5).double()
    z, hidden = torch.randn(2, 3, 4, 7, dtype=torch.float64), torch.randn(2, 4, 5, dtype=torch.float64)
    linear = normalizer.scale[0].from_hidden
    raw = hidden @ linear.weight.T + linear.bias  # (batch, queries, beta of each head then gamma of each head)
    together = normalizer(z, hidden_states=hidden)
    for b, head, query in ((0, 0, 0), (1, 2, 3), (1, 1, 0)):
        beta = math.log1p(math.exp(raw[b, query, head].item()))
        gamma = 2 * math.tanh(raw[b, query, 3 + head].item())
        scale = 1 + beta * math.log(8) ** gamma
        alone = get("entmax15")(scale * z[b, head, query : query + 1])
        torch.testing.assert_close(together[b, head, query : query + 1], alone)
    together.square().sum().backward()
    assert (linear.weight.grad != 0).any()


def test_asentmax_asks_for_the_hidden_state_it_was_built_for() -> None:
    normalizer = get("asentmax", heads=2, width=5)
    with pytest.raises(ValueError, match="Pass hidden_states"):
        normalizer(torch.randn(1, 2, 3, 4))
    with pytest.raises(ValueError, match=r"width=5.*heads"):
        get("asentmax", width=5)


def test_compositions_save_and_load_by_their_parts() -> None:
    make = lambda: compose("entmax15", scale=get("ssmax", heads=2), sink=get("sink", heads=2))  # noqa: E731
    original = spread_out(make())
    assert list(original.state_dict()) == ["scale.0.s", "sink.logit"]
    restored = make()
    restored.load_state_dict(original.state_dict())
    z = torch.randn(1, 2, 3, 5)
    assert torch.equal(original(z), restored(z))
