"""Normalizers are compositions - rules, selections, a map, a sink, mixtures - and their properties follow."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from attnorm.normalizers import (
    Block,
    LogitRule,
    Map,
    Normalizer,
    Positions,
    Properties,
    Selection,
    Sink,
    check_normalizer,
    compose,
    get,
    mixture,
)
from attnorm.normalizers.entmax import Entmax
from attnorm.normalizers.kneemax import Kneemax
from attnorm.normalizers.local import Local
from attnorm.normalizers.softmax import Softmax
from attnorm.normalizers.ssmax import LogLengthScale
from attnorm.normalizers.topk import TopK

RULES = ["ssmax", "log_scaled", "adaptive_temperature", "scale_invariant"]
MAPS = [
    "softmax",
    "sparsemax",
    "entmax15",
    "sigmoid",
    "relu",
    "softpick",
    "sa_softmax",
    "stick_breaking",
    "kernel",
    "hard",
]


@pytest.fixture
def z() -> Tensor:
    return 2 * torch.randn(2, 3, 4, 9, dtype=torch.float64)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MAPS)
def test_a_rule_in_front_of_a_map_is_the_map_of_the_ruled_logits(rule: str, name: str, z: Tensor) -> None:
    mask = torch.rand(2, 1, 4, 9) < 0.7
    composed, alone = compose(name, scale=rule), get(rule)
    ruled = alone.prepare(Block.of(z, mask)).logits
    torch.testing.assert_close(composed(z, mask), get(name)(ruled, mask))


def test_rules_apply_in_the_order_given(z: Tensor) -> None:
    class Plus(LogitRule):
        def forward(self, block: Block) -> Tensor:
            return block.logits + 1

    class Twice(LogitRule):
        def forward(self, block: Block) -> Tensor:
            return block.logits * 2

    torch.testing.assert_close(compose("sigmoid", scale=[Plus(), Twice()])(z), get("sigmoid")((z + 1) * 2))
    torch.testing.assert_close(compose("sigmoid", scale=[Twice(), Plus()])(z), get("sigmoid")(z * 2 + 1))


def test_scale_rules_count_the_keys_before_the_selection(z: Tensor) -> None:
    """ssmax before top-k scales by the row's length, not by k."""
    composed = compose(scale="ssmax", select=TopK(2))
    scaled = get("ssmax").prepare(Block.of(z)).logits
    torch.testing.assert_close(composed(z), get("topk", k=2)(scaled))


def test_selections_apply_one_after_the_other(z: Tensor) -> None:
    """The two largest within the window, not the part of the two largest that lies in it."""
    weights = compose(select=[Local(3), TopK(2)])(z)
    assert ((weights > 0).sum(-1) == torch.tensor([2, 2, 2, 2])).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 4, dtype=torch.float64))


def test_a_row_whose_keys_are_all_deselected_is_empty() -> None:
    far = torch.arange(9) < 3
    assert torch.equal(get("local", window=2)(torch.zeros(1, 9), far), torch.zeros(1, 9))


def test_a_sink_takes_its_share_of_any_map(z: Tensor) -> None:
    more = torch.cat([torch.full_like(z[..., :1], 0.5), z], -1)
    for name in ("softmax", "sparsemax", "entmax15"):
        torch.testing.assert_close(compose(name, sink=Sink(0.5))(z), get(name)(more)[..., 1:])
    assert (compose("sparsemax", sink=Sink(100.0))(z) == 0).all()


def test_a_map_that_reads_the_order_of_the_keys_takes_no_sink() -> None:
    """The sink has no position: it would fall out of a window, or shift everyone else's."""
    for ordered in ("stick_breaking", mixture("softmax", "local")):
        with pytest.raises(ValueError, match="sink"):
            compose(ordered, sink="sink")


def test_a_row_of_one_key_has_log_n_zero_also_beside_a_sink() -> None:
    z = torch.tensor([[[[3.0]]]])
    assert compose("softmax", scale=get("ssmax", s=2.0), sink="softmax1")(z).item() == 0.5
    assert get("ssmax", s=2.0)(z).item() == 1


def test_the_sink_is_not_rescaled(z: Tensor) -> None:
    composed = compose(scale=get("softmax", temperature=0.5), sink=Sink(1.0))
    torch.testing.assert_close(composed(z), get("sink", logit=1.0)(2 * z))


def test_asentmax_is_its_rule_before_entmax(z: Tensor) -> None:
    asentmax = get("asentmax", gamma=0.7)
    composed = compose(Entmax(1.5), scale=asentmax.rules)
    assert torch.equal(composed(z), asentmax(z))


def test_parts_come_as_names_objects_or_normalizers(z: Tensor) -> None:
    expected = compose("sparsemax", scale="ssmax", select="local", sink="softmax1")(z)
    ssmax, local, softmax1 = get("ssmax"), get("local"), get("softmax1")
    for composed in (
        compose(get("sparsemax"), scale=ssmax, select=local, sink=softmax1),
        compose(Entmax(2.0), scale=ssmax.rules, select=local.selections, sink=softmax1.sink),
        compose("sparsemax", scale=["ssmax"], select=["local"], sink=Sink(0.0)),
    ):
        assert torch.equal(composed(z), expected)


def test_a_part_taken_from_a_normalizer_keeps_its_parameters() -> None:
    ssmax = get("ssmax", heads=3)
    composed = compose("entmax15", scale=ssmax)
    assert composed.scale[0].s is ssmax.scale[0].s
    assert [name for name, _ in composed.named_parameters()] == ["scale.0.s"]


def test_a_mechanism_is_no_part() -> None:
    for build in (lambda: compose("gaussian"), lambda: mixture("softmax", "gaussian"), lambda: compose(scale="linear")):
        with pytest.raises(TypeError, match="mechanism"):
            build()


# Properties follow from the parts.


def test_properties_of_compositions() -> None:
    plain = get("softmax").properties
    assert (plain.row_sum, plain.shift_invariant) == ("one", True)
    with_sink = compose(sink="sink").properties
    assert (with_sink.row_sum, with_sink.shift_invariant) == ("at most one", False)
    assert compose(select="topk").properties.exact_zeros
    assert compose("sigmoid", sink="sink").properties.row_sum == "free"
    assert not compose("entmax15", scale="scale_invariant").properties.permutation_equivariant
    assert compose("relu", scale="ssmax").properties.length == "log n, 1/n"


def test_lipschitz_multiplies_gains_and_is_unknown_where_a_part_is() -> None:
    assert get("softmax", temperature=0.25).lipschitz(10) == pytest.approx(2.0)
    assert compose("entmax15", scale=get("ssmax", s=2.0)).lipschitz(100) == pytest.approx(
        2 * 4.60517 * get("entmax15").lipschitz(100)
    )
    assert get("softmax").lipschitz(1) == 0
    for unknown in ("adaptive_temperature", "topk", "softpick", "scale_invariant"):
        assert get(unknown).lipschitz(10) is None
    assert compose("entmax15", scale="adaptive_temperature").lipschitz(10) is None
    assert compose(select=Local(2)).lipschitz(10) == 0.5


def test_lipschitz_is_that_of_the_keys_a_selection_leaves() -> None:
    windowed = compose("relu", select=Local(2))
    assert get("relu").lipschitz(31) == 1 / 31
    assert windowed.lipschitz(31) == 1  # a query that sees one key of its window divides by 1, not by 31
    assert check_normalizer(windowed).passed


def test_a_users_own_parts_compose(z: Tensor) -> None:
    class EverySecond(Selection):
        permutation_equivariant = False

        def forward(self, block: Block) -> Tensor:
            return torch.arange(block.logits.shape[-1]) % 2 == 0

    class Uniform(Map):
        properties = Properties(row_sum="one")

        def forward(self, block: Block) -> Tensor:
            return block.hide(torch.ones_like(block.logits) / block.n.clamp(min=1))

    weights = compose(Uniform(), select=EverySecond())(z)
    assert torch.equal(weights[0, 0, 0], torch.tensor([0.2, 0.0] * 4 + [0.2], dtype=torch.float64))


# Mixtures.


def test_a_mixture_learns_its_share_per_head(z: Tensor) -> None:
    mixed = mixture("softmax", "sparsemax", share=0.5, heads=3).double()
    with torch.no_grad():
        mixed.map.theta.copy_(torch.tensor([-50.0, 0.0, 50.0]))
    weights = mixed(z)
    torch.testing.assert_close(weights[:, 0], get("sparsemax")(z[:, 0]))
    torch.testing.assert_close(weights[:, 2], get("softmax")(z[:, 2]))
    torch.testing.assert_close(weights[:, 1], (get("softmax")(z[:, 1]) + get("sparsemax")(z[:, 1])) / 2)
    weights.square().sum().backward()
    assert mixed.map.theta.grad[1] != 0


def test_a_mixture_holds_the_parameters_of_both_and_passes_masks_and_positions(z: Tensor) -> None:
    mixed = mixture(get("ssmax", heads=3), get("local", window=2))
    assert {name for name, _ in mixed.named_parameters()} == {"map.theta", "map.first.scale.0.s"}
    mask, positions = torch.rand(4, 9) < 0.7, torch.tensor([3, 4, 5, 8])
    expected = (get("ssmax")(z, mask) + get("local", window=2)(z, mask, positions=positions)) / 2
    torch.testing.assert_close(mixed(z, mask, positions=positions), expected)


def test_a_mixture_of_mixtures_and_a_rule_before_it(z: Tensor) -> None:
    nested = compose(mixture(mixture("softmax", "sigmoid"), "relu"), scale=get("softmax", temperature=2.0))
    h = z / 2
    expected = (get("softmax")(h) + get("sigmoid")(h)) / 4 + get("relu")(h) / 2
    torch.testing.assert_close(nested(z), expected)


def test_properties_of_mixtures() -> None:
    mixed = mixture("softmax", "softmax1").properties
    assert (mixed.row_sum, mixed.shift_invariant) == ("at most one", False)
    assert mixture("sparsemax", "softmax").properties.exact_zeros is False
    assert mixture("sparsemax", "entmax15").properties.exact_zeros is True
    assert mixture("softmax", get("sa_softmax", normalised=False)).properties.signed
    assert mixture("softmax", "sparsemax").lipschitz(5) == 1.0
    assert mixture("softmax", "softpick").lipschitz(5) is None


def test_a_normalizer_is_a_module_like_any_other(z: Tensor) -> None:
    model = nn.Sequential(nn.Linear(9, 9), compose("entmax15", scale="ssmax", sink="sink"))
    model(z.float()).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("given", ["queries", "queries and keys"])
def test_a_sink_hands_positions_on_to_the_rules_inside_its_map(given: str) -> None:
    """A sink so low that it takes nothing changes nothing."""
    logits = torch.randn(2, 2, 3, 6)
    stand = torch.tensor([[40000, 40001, 40002], [7, 8, 9]])
    positions = stand if given == "queries" else Positions(stand, stand[:, -1:] + torch.arange(-5, 1))
    mixed = mixture(get("log_scaled", rule="llama4"), "sparsemax")
    sunk = compose(mixed, sink=Sink(-1e4, learned=False))
    assert (mixed(logits, positions=positions) - mixed(logits)).abs().max() > 1e-3
    assert_close(sunk(logits, positions=positions), mixed(logits, positions=positions))


def test_a_sink_within_a_sink_is_no_key_either() -> None:
    logits, low = torch.randn(2, 3, 6), Sink(-1e4, learned=False)
    inner = compose("kneemax", sink=low)  # goes by the number of keys
    assert_close(compose(mixture(inner, inner), sink=low)(logits), inner(logits))
    assert_close(inner(logits), get("kneemax")(logits))


def test_a_composition_by_names_is_the_one_of_objects() -> None:
    z = 3 * torch.randn(1, 2, 5, 9)
    named = get("composed", scale="ssmax", map="entmax15", sink="sink", heads=2, train_length=64)
    expected = compose("entmax15", scale=get("ssmax", heads=2, train_length=64), sink=get("sink", heads=2))
    torch.testing.assert_close(named(z), expected(z))
    assert {name: tuple(p.shape) for name, p in named.named_parameters()} == {"scale.0.s": (2,), "sink.logit": (2,)}
    with_options = get("composed", scale="alibi", map="kneemax+knee=0.25", heads=2)
    assert isinstance(with_options.map, Kneemax)
    assert with_options.map.knee == 0.25
    for options in (
        {"map": "kneemax+knee"},
        {"map": "composed"},
        {"scale": "linear"},
        {"map": "ssmax"},
        {"sink": "entmax15"},
    ):
        with pytest.raises(ValueError, match=next(iter(options.values())).partition("+")[0]):
            get("composed", **options)


def test_methods_that_a_normalizer_overrides_are_not_lost_in_another() -> None:
    class Halved(Normalizer):
        def weights(self, block: Block) -> Tensor:
            return super().weights(block) / 2

    for build in (
        lambda: get("tempered", map=Halved(Softmax())),
        lambda: compose(map=Halved(Softmax())),
        lambda: compose(scale=Halved(Softmax(), scale=[LogLengthScale(0.2)])),
    ):
        with pytest.raises(ValueError, match="Halved"):
            build()
