"""Where normalizers start in a trained model, which options they take at their limits, and what they print."""

import inspect
import itertools
import math
from typing import Any

import pytest
import torch

from attnorm.normalizers import get
from attnorm.normalizers.alibi import slopes
from attnorm.normalizers.asentmax import AdaptiveLengthScale
from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.declaration import LayerFacts, Row, bisect, declare, warm_start_of
from attnorm.normalizers.kernel import FUNCTIONS, Kernel, polynomial
from attnorm.normalizers.kneemax import _Kneemax, kneemax_rows
from attnorm.normalizers.registry import BUILT_IN
from attnorm.normalizers.spec import parse_spec
from attnorm.normalizers.ssmax import critical_s, neutral_s
from tests.normalizers.variants import ROW_NAMES

LAYER = LayerFacts(heads=3, length=100)
MEAN_LOG_N = sum(math.log(n) for n in range(1, 101)) / 100


def started(name: str, layer: LayerFacts = LAYER, **given: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options and values that a warm start sets."""
    start = BUILT_IN[name].declaration.warm_start
    assert start is not None
    options = start.options(layer, given)
    return options, start.values(layer, given, options | given)


@pytest.mark.parametrize(
    ("name", "given", "options"),
    [
        ("alibi", {}, {"heads": 3}),
        ("asentmax", {}, {"delta": 0.25, "beta": 0.25, "heads": 3}),
        ("asentmax", {"alpha": 2.0}, {"delta": 0.125, "beta": 0.125, "heads": 3}),
        ("asentmax", {"beta": 0.1}, {"delta": 0.4, "beta": 0.1, "heads": 3}),
        ("asentmax", {"beta": 0.1, "gamma": 2.0}, {"delta": 0.5 - 0.1 * math.log(101) ** 2, "beta": 0.1, "heads": 3}),
        ("composed", {}, {"heads": 3, "train_length": 100}),
        ("entmax", {}, {}),
        ("entmax", {"learned": True}, {"alpha": 1.05, "heads": 3}),
        ("kneemax", {}, {}),
        ("log_scaled", {}, {"train_length": 100}),
        ("sink", {}, {"logit": -10.0, "heads": 3}),
        ("ssa", {}, {"heads": 3}),
        ("ssmax", {}, {"s": 1 / MEAN_LOG_N, "heads": 3}),
        ("ssmax", {"bias": True}, {"s": 0.0, "heads": 3}),
        ("ssmax", {"rho": 0.5}, {"heads": 3}),
        ("tempered", {}, {}),
        ("tempered", {"learned": True}, {"heads": 3}),
        ("topk", {}, {}),
    ],
)
def test_options_of_warm_starts(name: str, given: dict[str, Any], options: dict[str, Any]) -> None:
    assert started(name, **given)[0] == pytest.approx(options)


def test_whatever_can_be_learned_per_head_is_in_a_model() -> None:
    options = {name: inspect.signature(entry.factory()).parameters.keys() for name, entry in BUILT_IN.items()}
    learned = [name for name, accepted in options.items() if {"learned", "heads"} <= accepted]
    assert {"entmax", "kneemax", "sigmoid", "softmax", "tempered"} <= set(learned)
    assert {name: started(name, learned=True)[0].get("heads") for name in learned} == dict.fromkeys(learned, 3)


def test_values_of_warm_starts() -> None:
    assert started("ssmax")[1] == {}
    assert started("ssmax", bias=True)[1] == {"scale.0.bias": 1.0}
    assert started("ssmax", bias=True, s=0.1)[1] == pytest.approx({"scale.0.bias": 1 - 0.1 * MEAN_LOG_N})
    critical = started("ssmax", bias=True, rho=0.5, size=2.0)[1]
    assert critical == pytest.approx({"scale.0.bias": 1 - MEAN_LOG_N})
    assert started("ssmax", bias=True, rho=0.5)[1] == pytest.approx({"scale.0.bias": 1 - 2 * MEAN_LOG_N})
    sinks = torch.tensor([1.0, 2.0, 3.0])
    own = LayerFacts(heads=3, length=100, sinks_H=sinks)
    assert started("sink", own)[1] == {"sink.logit": sinks}
    assert started("sink", own, logit=-1.0)[1] == {}
    assert started("sink")[1] == {}


def test_a_factory_without_a_declared_start_is_given_the_heads_if_it_takes_them() -> None:
    def with_heads(heads: int | None = None) -> None: ...
    def without(k: int = 1) -> None: ...

    assert warm_start_of(with_heads).options(LAYER, {}) == {"heads": 3}
    assert warm_start_of(without).options(LAYER, {}) == {}
    assert not warm_start_of(with_heads).safe
    start = warm_start_of(declare(warm_start=BUILT_IN["ssmax"].declaration.warm_start)(with_heads))
    assert start is BUILT_IN["ssmax"].declaration.warm_start


@pytest.mark.parametrize("length", [3, 4, 10])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 50])
def test_the_mean_of_log_n_is_that_of_all_rows_of_a_text(length: int, window: int | None) -> None:
    rows = [min(n, window or n) for n in range(1, length + 1)]
    mean = sum(math.log(n) for n in rows) / length
    assert LayerFacts(1, length, window=window).mean_log_n() == pytest.approx(mean, abs=1e-12)
    assert LayerFacts(1, length, causal=False, window=window).mean_log_n() == pytest.approx(math.log(length))


@pytest.mark.parametrize("heads", range(1, 13))
def test_the_slopes_of_alibi_are_those_of_the_paper(heads: int) -> None:
    """A geometric sequence from 2^(-8/H); with H between powers of two: every second one of the next power."""

    def of_power(count: int) -> list[float]:
        return [2 ** (-8 * (head + 1) / count) for head in range(count)]

    power = 2 ** math.floor(math.log2(heads))
    expected = of_power(power) + of_power(2 * power)[::2][: heads - power]
    assert slopes(heads) == pytest.approx(expected)
    rule = get("alibi", heads=heads)
    assert rule.rules[0].slopes.tolist() == pytest.approx(expected)
    assert get("alibi").rules[0].slopes.item() == 2**-8


def test_alibi_takes_the_distance_of_either_side() -> None:
    weights = get("alibi", heads=1)(torch.zeros(1, 3, 5, dtype=torch.float64))[0]  # queries at positions 2, 3, 4
    distance = (torch.arange(2, 5)[:, None] - torch.arange(5)).abs()
    torch.testing.assert_close(weights, torch.softmax(-(2**-8) * distance.double(), -1))


LIMITS: list[tuple[str, str, list[Any], list[Any]]] = [
    ("alibi", "heads", [1], [0, -1]),
    ("entmax", "alpha", [1, 1.0, 2.0], [0.999, 2.001]),
    ("kneemax", "knee", [1e-6, 0.5], [0.0, 0.501]),
    ("kneemax", "share", [1e-6], [0.0, -1.0]),
    ("local", "window", [1], [0]),
    ("log_scaled", "train_length", [2], [1]),
    ("norm_softmax", "temperature", [1e-6], [0.0, -1.0, math.inf, math.nan]),
    ("odd_polynomial", "power", [1, 3, 5], [0, -1, 2, 4]),
    ("relu", "power", [1.0], [0.999]),
    ("softcap", "cap", [1e-6], [0.0, -1.0, math.inf, math.nan]),
    ("softmax", "temperature", [1e-6], [0.0, -1.0]),
    ("softpick", "eps", [1e-12], [0.0, -1.0]),
    ("ssa", "beta", [-50.0, 50.0], [math.inf, -math.inf]),
    ("ssmax", "s", [-1.0, 0.0], [math.inf, -math.inf]),
    ("ssmax", "train_length", [2], [1]),
    ("threshold_relu", "beta", [0.0], [-1e-6, math.inf, math.nan]),
    ("threshold_relu", "power", [1.0], [0.999, math.nan]),
    ("threshold_relu", "width", [1], [0]),
    ("topk", "k", [1], [0]),
]


@pytest.mark.parametrize(
    ("name", "option", "good", "bad"), LIMITS, ids=[f"{name} {option}" for name, option, *_ in LIMITS]
)
def test_an_option_is_taken_at_its_limit_and_refused_beyond(
    name: str, option: str, good: list[Any], bad: list[Any]
) -> None:
    for value in good:
        normalizer = get(name, **{option: value})
        assert isinstance(normalizer, Normalizer)
        assert normalizer(torch.randn(1, value if option == "heads" else 1, 2, 3)).shape[-1] == 3
    for value in bad:
        with pytest.raises(ValueError, match=rf"{option}.*{value}"):
            get(name, **{option: value})


@pytest.mark.parametrize(
    ("options", "bad"),
    [
        ({"rule": "llama4", "floor_scale": 0}, "floor_scale.*0"),
        ({"rule": "yarn", "extension": 0.99}, "extension.*0.99"),
    ],
)
def test_length_rules_of_deployed_models_have_limits(options: dict[str, Any], bad: str) -> None:
    with pytest.raises(ValueError, match=bad):
        get("log_scaled", **options)
    at_limit = {key: round(value + 0.5) if key != "rule" else value for key, value in options.items()}
    z = torch.randn(1, 4)
    torch.testing.assert_close(get("log_scaled", rule="yarn", extension=1)(z), z.softmax(-1))
    assert get("log_scaled", **at_limit | {"floor_scale": 1})(z).sum().item() == pytest.approx(1)


def test_scales_of_ssmax() -> None:
    for length in (2, 3, 1024):
        assert neutral_s(length) == pytest.approx(length / sum(math.log(n) for n in range(1, length + 1)))
    assert critical_s(0.5) == pytest.approx(2.0)
    assert critical_s(-1.0, 4.0) == pytest.approx(0.125)
    for rho, size in ((1.0, 1.0), (0.0, 0.0), (-math.inf, 1.0), (0.0, math.inf), (math.nan, 1.0)):
        with pytest.raises(ValueError, match=rf"rho={rho} and size={size}"):
            critical_s(rho, size)
    with pytest.raises(ValueError, match=r"s=0.5 and rho=0.5"):
        get("ssmax", s=0.5, rho=0.5)
    assert get("ssmax", rho=0.5, size=2.0).rules[0].s.item() == pytest.approx(1.0)
    assert get("ssmax", train_length=2).rules[0].s.item() == pytest.approx(2 / math.log(2))


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("topk", {}),
        (" topk : k = 4 ", {"k": 4}),
        ("entmax:alpha=1.3:learned=true", {"alpha": 1.3, "learned": True}),
        ("log_scaled:rule=yarn", {"rule": "yarn"}),
    ],
)
def test_a_specification_is_a_name_and_options(spec: str, options: dict[str, Any]) -> None:
    name = spec.partition(":")[0].strip()
    assert parse_spec(spec) == (name, options)


def test_a_falling_sum_is_bisected_to_the_last_digits() -> None:
    assert bisect(lambda x: 3 - x, 0.0, 10.0) == pytest.approx(2.0, abs=1e-10)
    assert bisect(lambda x: 3 - x, 0.0, 2.0) <= 2.0
    row = Row(torch.zeros(3), torch.arange(3), head=1, learned={"a": torch.tensor(2.0), "b": torch.tensor([3.0, 4.0])})
    assert (row.n, row.value("a", 0.0).item(), row.value("b", 0.0).item(), row.value("c", 5.0).item()) == (3, 2, 4, 5)
    assert Row(torch.zeros(1), torch.zeros(1), learned={"b": torch.tensor([3.0, 4.0])}).value("b", 0.0).item() == 3


@pytest.mark.parametrize("name", ["kneemax", "entmax15", "sparsemax"])
def test_vmap_over_any_dimension_of_logits_and_masks_equals_a_loop(name: str) -> None:
    z, normalizer = torch.randn(4, 3, 2, 5, dtype=torch.float64), get(name)
    mask = torch.rand(4, 2, 5) < 0.7
    mask[..., 0] = True
    for dim, out in itertools.product(range(2), range(2)):
        mapped = torch.func.vmap(normalizer, in_dims=dim, out_dims=out)(z)
        looped = torch.stack([normalizer(one) for one in z.unbind(dim)], out)
        torch.testing.assert_close(mapped, looped)
    with_masks = torch.func.vmap(lambda one, seen: normalizer(one, mask=seen))(z, mask)
    torch.testing.assert_close(
        with_masks, torch.stack([normalizer(one, mask=seen) for one, seen in zip(z, mask, strict=True)])
    )
    other = torch.func.vmap(lambda seen: normalizer(z[0], mask=seen))(mask)
    torch.testing.assert_close(other, torch.stack([normalizer(z[0], mask=seen) for seen in mask]))
    moved = torch.func.vmap(lambda seen: normalizer(z[0], mask=seen), in_dims=1)(mask.transpose(0, 1))
    torch.testing.assert_close(moved, other)


@pytest.mark.parametrize(
    ("name", "options", "printed"),
    [
        ("kneemax", {}, "knee=0.25"),
        ("kneemax", {"share": 1.0}, "share=1.0"),
        ("sigmoid", {}, "bias=-log n)"),
        ("sigmoid", {"bias": -2.0, "learned": True}, "bias=-2.0 + learned)"),
        ("softcap", {"cap": 3.0}, "cap=3.0"),
        ("topk", {"k": 5}, "k=5"),
        ("norm_softmax", {"temperature": 0.5}, "temperature=0.5"),
        ("entmax", {"alpha": 1.25}, "alpha=1.25"),
        ("entmax", {"alpha": 1.25, "learned": True}, "alpha learned from 1.25"),
        ("soft", {}, "landmarks=49\n"),
        ("soft", {"stride": 2, "convolution": 16}, "stride=2, convolution=16\n"),
        ("soft", {"landmarks": 8, "learned": 16}, "landmarks=8, learned=16\n"),
        (
            "soft",
            {"landmarks": 8, "learned": 16, "heads": 2, "normalised": True},
            "landmarks=8, learned=16, heads=2, normalised=True\n",
        ),
    ],
)
def test_a_normalizer_prints_its_options(name: str, options: dict[str, Any], printed: str) -> None:
    assert printed in repr(get(name, **options))


@pytest.mark.parametrize("name", ROW_NAMES)
def test_a_row_of_one_key_cannot_change_where_the_sum_is_fixed(name: str) -> None:
    normalizer = get(name)
    assert isinstance(normalizer, Normalizer)
    z = torch.tensor([[0.7], [-3.0], [20.0]], dtype=torch.float64)
    weights = normalizer.double()(z)
    if normalizer.properties.row_sum == "one" and normalizer.sink is None:
        torch.testing.assert_close(weights, torch.ones_like(weights))
    bound = normalizer.lipschitz(1)
    if bound is not None:
        slopes_at = torch.autograd.functional.jacobian(lambda x: normalizer(x).sum(-1), z).diagonal(dim1=0, dim2=1)
        assert slopes_at.abs().max().item() <= bound + 1e-9
        assert bound == 0 or normalizer.properties.row_sum != "one" or normalizer.sink is not None


@pytest.mark.parametrize(
    ("name", "options", "constants"),
    [
        ("softmax", {}, [0.0, 0.5, 0.5]),
        ("relu", {}, [1.0, 1 / 2, 1 / 3]),
        ("relu", {"power": 2.0}, [None] * 3),
        ("sigmoid", {}, [0.25] * 3),
        ("kneemax", {}, [0.0, 0.5, 0.5]),
        ("entmax", {"learned": True}, [0.0, 1.0, 1.0]),
        ("sparsemax", {}, [0.0, 1.0, 1.0]),
        ("odd_polynomial", {"power": 1}, [1.0, 2**-0.5, 3**-0.5]),
        ("odd_polynomial", {}, [None] * 3),
        ("threshold_relu", {"power": 1.0, "width": 4}, [0.5] * 3),
        ("threshold_relu", {"power": 1.0}, [1.0] * 3),
        ("threshold_relu", {}, [None] * 3),
    ],
)
def test_lipschitz_constants_of_rows_of_one_two_and_three_keys(
    name: str, options: dict[str, Any], constants: list[float | None]
) -> None:
    normalizer = get(name, **options)
    assert isinstance(normalizer, Normalizer)
    found = [normalizer.map.lipschitz(n) for n in (1, 2, 3)]
    assert found == [None if one is None else pytest.approx(one) for one in constants]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("odd_polynomial", {}),
        ("odd_polynomial", {"power": 1}),
        ("relu", {}),
        ("relu", {"power": 2.0}),
        ("threshold_relu", {}),
        ("threshold_relu", {"beta": 0.3, "power": 1.0, "width": 9}),
    ],
)
def test_the_form_that_the_kernels_compute_is_the_map(name: str, options: dict[str, Any]) -> None:
    normalizer = get(name, **options)
    assert isinstance(normalizer, Normalizer)
    form = normalizer.map.kernel_form()
    assert form is not None
    z = 2 * torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mask = torch.arange(5) < torch.tensor([1, 2, 3, 4, 5, 5, 0])[:, None]
    n = mask.sum(-1, keepdim=True).double()
    scaled = z if form.row_factor is None else z * form.row_factor(n)
    scaled = scaled if form.row_shift is None else scaled + form.row_shift(n)
    weights = (scaled.relu() if form.map == "relu" else scaled) ** form.power
    torch.testing.assert_close(torch.where(mask, weights, 0.0), normalizer(z, mask=mask))


def test_numbers_that_are_learned_start_where_the_formula_is_neutral() -> None:
    biased = get("ssmax", bias=True).rules[0]
    assert biased.bias.item() == 0.0
    assert get("softmax1").sink.logit.item() == 0.0
    assert get("sink").sink.logit.item() == 0.0
    assert get("ssa").rules[0].beta.item() == 2.0
    assert get("softmax", learned=True).rules[0].log_temperature.item() == 0.0


@pytest.mark.parametrize("logit", [0.3, -40.0])
def test_a_row_of_one_key_has_no_variance(logit: float) -> None:
    rule = get("norm_softmax").rules[0]
    block = Block.of(torch.tensor([[logit, 1.0]]), torch.tensor([[True, False]]))
    assert rule(block)[0, 0].item() == 0.0


@pytest.mark.parametrize(("heads", "dim"), [(None, 0), (3, 0), (3, 1)])
def test_vmap_over_a_learned_alpha_equals_a_loop(heads: int | None, dim: int) -> None:
    """Several models at once, as torch.func.stack_module_state prepares them."""
    normalizer = get("entmax", learned=True, heads=heads).double()

    def run(logits: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(normalizer, {"map.theta": theta}, (logits,))

    z = torch.randn(4, 2, 3, 2, 5, dtype=torch.float64)
    thetas = torch.linspace(-1.0, 1.5, 4 * (heads or 1), dtype=torch.float64).reshape(4, *([heads] if heads else []))
    given = thetas if dim == 0 else thetas.transpose(0, 1)
    one_input = torch.func.vmap(run, in_dims=(None, dim))(z[0], given)
    torch.testing.assert_close(one_input, torch.stack([run(z[0], theta) for theta in thetas]))
    own_inputs = torch.func.vmap(run, in_dims=(0, dim))(z, given)
    torch.testing.assert_close(own_inputs, torch.stack([run(x, theta) for x, theta in zip(z, thetas, strict=True)]))


@pytest.mark.parametrize("name", ["softcap", "alibi"])
def test_a_rule_that_only_flattens_or_shifts_has_the_gain_1(name: str) -> None:
    assert [get(name).rules[0].gain(n) for n in (1, 2, 1000)] == [1.0] * 3


def test_a_narrowed_block_has_zeros_at_the_keys_it_hides() -> None:
    logits = torch.tensor([[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]])
    keep = torch.tensor([[True, False, True], [False, True, True]])
    for mask, expected in (
        (None, [[1.0, 0.0, 3.0], [0.0, 5.0, 6.0]]),
        ([True, True, False], [[1.0, 0, 0], [0, 5.0, 0]]),
    ):
        block = Block.of(logits, None if mask is None else torch.tensor(mask).expand(2, 3)).narrowed(keep)
        assert block.logits.tolist() == [expected]
        assert block.n.flatten().tolist() == ([2, 2] if mask is None else [1, 1])


@pytest.mark.parametrize(
    ("function", "form"),
    [
        ("exp", ("softmax", 1, None, True)),
        ("softplus", ("softplus", 1, None, True)),
        ("elu+1", ("elu+1", 1, None, True)),
        ("polynomial", ("polynomial", 2, None, False)),  # a power of a logit soon exceeds float16
        (polynomial(4, 1.5), ("polynomial", 4, 1.5, False)),
    ],
)
def test_the_kernel_of_a_positive_function(function: Any, form: tuple[str, int, float | None, bool]) -> None:
    found = Kernel(FUNCTIONS[function] if isinstance(function, str) else function).kernel_form()
    assert found is not None
    shift = None if found.row_shift is None else float(found.row_shift(torch.tensor([[7.0]])))
    assert (found.map, found.power, shift, found.float16) == form


def test_a_polynomial_is_a_square_by_default() -> None:
    z = torch.tensor([-3.0, 0.0, 0.5])
    assert polynomial().value(z).tolist() == [9.0, 0.0, 0.25]
    assert polynomial().derivative(z).tolist() == [-6.0, 0.0, 1.0]
    assert polynomial(4, 1.0).value(z).tolist() == [16.0, 1.0, 5.0625]
    assert polynomial(4, 1.0).derivative(z).tolist() == [-32.0, 4.0, 13.5]


@pytest.mark.parametrize(("z_dim", "knee_dim"), [(0, None), (1, None), (2, None), (None, 0), (0, 0), (1, 0), (2, 1)])
def test_vmap_over_rows_and_knees_equals_a_loop(z_dim: int | None, knee_dim: int | None) -> None:
    z = torch.randn(3, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    knee = torch.tensor([[0.1], [0.2], [0.4]], dtype=torch.float64)  # one of each row, or of each item
    given_knee = knee.transpose(0, 1) if knee_dim == 1 else knee
    found = torch.func.vmap(_Kneemax.apply, in_dims=(z_dim, knee_dim))(z, given_knee)
    for item in range(3):
        own_z = z if z_dim is None else z.select(z_dim, item)
        own_knee = knee if knee_dim is None else knee[item]
        torch.testing.assert_close(found[item], kneemax_rows(own_z.clone(), own_knee), rtol=0, atol=1e-14)


def test_the_gain_of_an_adaptive_scale_is_known_unless_the_hidden_state_sets_it() -> None:
    scale = AdaptiveLengthScale(1.0, 0.55, 0.3)
    assert scale.gain(20) == pytest.approx(1 + 0.55 * math.log(21) ** 0.3, rel=1e-6)
    assert AdaptiveLengthScale(heads=2, width=3).gain(20) is None
