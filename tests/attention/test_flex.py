"""Every FlexAttention recipe against the blocked engine in float64, under every kind of mask."""

import math
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnorm.engines import flex
from attnorm.engines.blocked import blocked
from attnorm.engines.inputs import Inputs, row_factors, validate_inputs
from attnorm.normalizers import compose, get
from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.sigmoid import Sigmoid

WIDTH = 16  # the least that FlexAttention's kernels take


def sigmoid_of_heads() -> Normalizer:
    normalizer = get("sigmoid", learned=True, heads=4)
    assert isinstance(normalizer, Normalizer)
    normalizer.load_state_dict({"map.offset": torch.tensor([-1.0, 0.0, 0.5, 2.0])})
    return normalizer


RECIPES = {
    "kernel": get("kernel"),
    "sigmoid": get("sigmoid"),
    "sigmoid with a bias": get("sigmoid", bias=-0.5),
    "sigmoid with a bias of each head": sigmoid_of_heads(),
    "relu": get("relu"),
    "relu squared": get("relu", power=2.0),
    "softpick": get("softpick"),
    "softpick with a large eps": get("softpick", eps=0.3),
    "sa_softmax": get("sa_softmax"),
    "scale_invariant": get("scale_invariant", tau=3.0),
    "ssmax before sigmoid": compose("sigmoid", scale=get("ssmax", s=0.7)),
    "ssmax before sa_softmax": compose("sa_softmax", scale=get("ssmax", s=0.7)),
    "ssmax before distances": compose(scale=[get("ssmax", s=0.7), get("scale_invariant", tau=3.0)]),
}
SEEN = torch.rand(2, 4, 5, 7, generator=torch.Generator().manual_seed(2)) < 0.6
SEEN[0, 1, 2] = SEEN[1, :, 4] = False  # rows that see nothing
CALLS: dict[str, tuple[tuple[int, int], bool, Tensor | None]] = {
    "all": ((5, 7), False, None),
    "causal": ((5, 7), True, None),
    "one query": ((1, 7), True, None),
    "two queries": ((2, 4), True, None),
    "one key": ((3, 1), False, None),
    "more queries than keys": ((7, 4), True, None),
    "padding of keys": ((5, 7), False, SEEN[:, :1, :1]),
    "padding of keys, causal": ((5, 7), True, SEEN[:, :1, :1]),
    "a mask per query": ((5, 7), False, SEEN[:1, :1]),
    "a mask per head": ((5, 7), True, SEEN[:1]),
    "a mask per item, head and query": ((5, 7), False, SEEN),
    "rows hidden": ((5, 7), False, SEEN[:, :1, :, :1]),
}


@pytest.fixture(autouse=True)
def _without_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing every score with torch.compile takes a second each, and changes no number."""
    module = import_module("torch.nn.attention.flex_attention")
    monkeypatch.setattr(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)


def inputs_of(name: str, dtype: torch.dtype = torch.float64) -> Inputs:
    (queries, keys), causal, mask = CALLS[name]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, length, width, generator=generator, dtype=torch.float64).to(dtype)
        for heads, length, width in ((4, queries, WIDTH), (2, keys, WIDTH), (2, keys, WIDTH + 1))
    )
    return validate_inputs(q, k, v, mask=mask, causal=causal, scale=0.3, positions=None)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("recipe", RECIPES)
@torch.no_grad()
def test_recipes_equal_the_blocks(recipe: str, call: str) -> None:
    normalizer, inputs = RECIPES[recipe], inputs_of(call)
    assert isinstance(normalizer, Normalizer)
    assert flex.applies(inputs, normalizer)
    found = flex.flex(inputs, normalizer)
    assert found.dtype == torch.float64
    # softpick and sa_softmax keep numbers of float32 inside
    torch.testing.assert_close(found, blocked(inputs, normalizer), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("recipe", ["ssmax before sigmoid", "ssmax before sa_softmax"])
@torch.no_grad()
def test_half_precision_multiplies_the_logits_and_not_the_queries(recipe: str) -> None:
    normalizer, inputs = RECIPES[recipe], inputs_of("padding of keys, causal", torch.bfloat16)
    assert isinstance(normalizer, Normalizer)
    found = flex.flex(inputs, normalizer)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, blocked(inputs, normalizer), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("elements", [1, 60, 2**24])
@pytest.mark.parametrize("call", ["causal", "a mask per item, head and query"])
def test_the_keys_of_the_smallest_and_largest_logit_in_blocks_of_any_size(call: str, elements: int) -> None:
    normalizer, inputs = RECIPES["ssmax before sa_softmax"], inputs_of(call)
    assert isinstance(normalizer, Normalizer)
    factor = row_factors(inputs, normalizer)
    one = flex._FlexCall(inputs, inputs.q_BHQD, inputs.n(), factor)
    found = torch.stack(flex._extreme_keys(one, elements))
    assert factor is not None
    z = inputs.scale * inputs.q_BHQD @ inputs.k_BGKD.repeat_interleave(2, 1).mT * factor
    visible = inputs.visible(0, inputs.queries, inputs.keys)
    assert visible is not None
    some = visible.expand(z.shape).any(-1)
    low, high = z.masked_fill(~visible, math.inf).argmin(-1), z.masked_fill(~visible, -math.inf).argmax(-1)
    assert torch.equal(found[:, some], torch.stack([low, high])[:, some])
    logit = flex._logits_at(one, high)[..., 0]
    expected = z.gather(-1, high[..., None])[..., 0]
    torch.testing.assert_close(logit[some].double(), expected[some], rtol=1e-5, atol=1e-6)


def test_a_block_mask_is_made_only_where_keys_are_hidden() -> None:
    assert flex._block_mask(inputs_of("all")) is None
    assert flex._block_mask(inputs_of("one query")) is None
    for name, (_, _, mask) in CALLS.items():
        inputs = inputs_of(name)
        made = flex._block_mask(inputs)
        if name in ("all", "one query", "one key"):
            assert made is None
            continue
        assert made is not None
        batches, heads = (1, 1) if mask is None else inputs.mask.shape[:2]  # type: ignore[union-attr]
        assert made.shape == (batches, heads, inputs.queries, inputs.keys)


def test_narrow_heads_are_left_to_other_engines() -> None:
    normalizer = RECIPES["sigmoid"]
    assert isinstance(normalizer, Normalizer)
    for widths, taken in (((16, 16), True), ((15, 16), False), ((16, 15), False)):
        q, v = (torch.zeros(1, 1, 2, width) for width in widths)
        inputs = validate_inputs(q, q, v, mask=None, causal=False, scale=None, positions=None)
        assert flex.applies(inputs, normalizer) == taken


def test_a_bias_inside_the_score_is_not_trained_there() -> None:
    inputs, normalizer = inputs_of("causal"), sigmoid_of_heads()
    assert not flex.applies(inputs, normalizer)
    assert flex.applies(inputs, normalizer.requires_grad_(False))


def test_a_map_derived_from_one_of_ours_is_left_to_the_blocks() -> None:
    class Halved(Sigmoid):
        def forward(self, block: Block) -> Tensor:
            return super().forward(block) / 2

    assert flex.applies(inputs_of("all"), Normalizer(Sigmoid()))
    assert not flex.applies(inputs_of("all"), Normalizer(Halved()))


def test_sums_of_no_keys_are_zero() -> None:
    output = torch.tensor([[math.nan, 1.0], [2.0, 3.0]])
    log_sum = torch.tensor([[-math.inf], [math.log(4.0)]])
    torch.testing.assert_close(flex._multiply_by_sum(output, log_sum), torch.tensor([[0.0, 0.0], [8.0, 12.0]]))


@pytest.mark.parametrize("name", ["relu", "softpick"])
@torch.no_grad()
def test_logits_of_exactly_0_get_no_weight(name: str) -> None:
    """Of relu none, of softpick e^0 - 1 = 0."""
    inputs = inputs_of("all")
    q = inputs.q_BHQD.clone()
    q[:, :, 1] = 0
    found = flex.flex(replace(inputs, q_BHQD=q), get(name))
    assert not found[:, :, 1].any()
    assert found[:, :, 0].any()


@pytest.mark.parametrize("recipe", ["kernel", "sigmoid with a bias", "relu squared", "scale_invariant"])
@torch.no_grad()
def test_float64_keeps_its_digits(recipe: str) -> None:
    normalizer, inputs = RECIPES[recipe], inputs_of("causal")
    assert isinstance(normalizer, Normalizer)
    torch.testing.assert_close(flex.flex(inputs, normalizer), blocked(inputs, normalizer), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("on_gpu", "queries", "options"),
    [
        (False, 5, None),
        (True, 127, {"FORCE_USE_FLEX_ATTENTION": True}),
        (True, 128, None),
        (True, 200, None),
    ],
)
def test_few_queries_on_a_gpu_run_the_general_kernel(
    on_gpu: bool, queries: int, options: dict[str, bool] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def run(*_: Tensor, **given: Any) -> tuple[Tensor, Any]:
        asked.append(given)
        config = torch._dynamo.config
        assert config.recompile_limit == config.accumulated_recompile_limit == 1024
        return torch.ones(2, dtype=torch.bfloat16), SimpleNamespace(lse=torch.zeros(3))

    monkeypatch.setattr(
        flex, "_compiled_flex_attention" if on_gpu else "flex_attention", (lambda: run) if on_gpu else run
    )
    q: Any = SimpleNamespace(is_cuda=on_gpu)
    inputs: Any = SimpleNamespace(queries=queries, k_BGKD=q, v_BGKE=q, scale=0.5, groups=2)
    monkeypatch.setattr(flex, "_block_mask", lambda _: None)
    output, log_sum = flex._FlexCall(inputs, q, q, None).attend(None)
    assert asked[0]["kernel_options"] == options
    assert asked[0]["enable_gqa"]
    assert output.dtype == torch.float32
    assert log_sum.shape == (3, 1)


@pytest.mark.parametrize("shape", [(2, 2, 2, 2), (1, 2, 2, 2), (2, 1, 2, 2), (2, 2, 1, 2), (2, 2, 2, 1)])
@torch.no_grad()
def test_masks_of_two_items_heads_queries_and_keys(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, heads, 2, WIDTH, generator=generator, dtype=torch.float64) for heads in (2, 1, 1))
    for _ in range(4):
        mask = torch.rand(shape, generator=generator) < 0.5
        inputs = validate_inputs(q, k, v, mask=mask, causal=False, scale=0.3, positions=None)
        found, expected = (engine(inputs, get("sigmoid")) for engine in (flex.flex, blocked))
        torch.testing.assert_close(found, expected)
