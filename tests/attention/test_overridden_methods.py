"""Classes derived from those of this package that override what they compute: their own methods give every result."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnorm import attention, attention_statistics, normalize
from attnorm.attention import _computation, attend
from attnorm.engines import blocked, decoding, stick_breaking
from attnorm.engines.execution import MIN_QUERIES
from attnorm.engines.inputs import Inputs, validate_inputs
from attnorm.metrics.fused_maps import kernel_form
from attnorm.metrics.sensitivity import has_closed_form
from attnorm.normalizers.adaptive_temperature import EntropyRule
from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import LogitRule, Map, Normalizer, ScaleRule, Sink
from attnorm.normalizers.entmax import Entmax
from attnorm.normalizers.sigmoid import Sigmoid
from attnorm.normalizers.softmax import Softmax
from attnorm.normalizers.ssmax import LogLengthScale
from attnorm.normalizers.stick_breaking import StickBreaking
from attnorm.normalizers.topk import TopK


class HalfOfEachWeight(Normalizer):
    def weights(self, block: Block) -> Tensor:
        return super().weights(block) / 2


class TwiceTheLogits(Normalizer):
    def prepare(self, block: Block) -> Block:
        prepared = super().prepare(block)
        return prepared.with_logits(prepared.logits * 2)


class HalfBesideTheSink(Sink):
    def forward(self, block: Block, map_: Map) -> Tensor:
        return super().forward(block, map_) / 2


class SquareAdded(LogLengthScale):
    def forward(self, block: Block) -> Tensor:
        return super().forward(block) + block.logits**2


class ThreeTimesTheFactor(LogLengthScale):
    def factor(self, n: Tensor, positions: Tensor | None, hidden_states: Tensor | None) -> Tensor:
        return 3 * super().factor(n, positions, hidden_states)


class NoEntropy(EntropyRule):
    def forward(self, block: Block) -> Tensor:
        return block.logits * 2


class Squaring:
    def forward(self, block: Block) -> Tensor:
        return block.logits**2


class SquaredByMixin(Squaring, LogLengthScale):
    pass


class NoPart(nn.Module):
    shift_invariant, permutation_equivariant, length = False, True, ""
    forward = Squaring.forward


class WeightsOfSquares:
    def forward(self, block: Block) -> Tensor:
        return torch.sigmoid(block.logits**2)


class SigmoidByMixin(WeightsOfSquares, Sigmoid):
    pass


class TheOtherKeys(TopK):
    def forward(self, block: Block) -> Tensor:
        return ~super().forward(block)


OVERRIDING = {
    "weights": HalfOfEachWeight(Softmax()),
    "prepare": TwiceTheLogits(Sigmoid()),
    "sink": Normalizer(Softmax(), sink=HalfBesideTheSink()),
    "logit rule": Normalizer(Softmax(), scale=[NoEntropy()]),
    "scale rule": Normalizer(Softmax(), scale=[SquareAdded(0.43)]),
    "mixin": Normalizer(Softmax(), scale=[SquaredByMixin(0.43)]),  # type: ignore[arg-type]
    "no part": Normalizer(Softmax(), scale=[NoPart()]),  # type: ignore[list-item]
    "map by mixin": Normalizer(SigmoidByMixin()),  # type: ignore[arg-type]
    "factor": Normalizer(Softmax(), scale=[ThreeTimesTheFactor(0.43)]),
    "selection": Normalizer(Softmax(), select=[TheOtherKeys(4)]),
}


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, 1, 2, MIN_QUERIES + 4, 16, generator=torch.Generator().manual_seed(0))
    return q, k, v


@pytest.mark.parametrize("normalizer", OVERRIDING.values(), ids=OVERRIDING)
def test_methods_that_a_subclass_overrides_give_outputs_and_statistics(normalizer: Normalizer) -> None:
    q, k, v = drawn()
    causal = torch.ones(len(q[0, 0]), len(k[0, 0]), dtype=torch.bool).tril()
    weights = normalizer(q @ k.mT / 4, causal)
    torch.testing.assert_close(attention(q, k, v, normalizer, causal=True), weights @ v)
    statistics = attention_statistics(q, k, normalizer, causal=True)
    torch.testing.assert_close(statistics.row_sum, weights.sum(-1))


@pytest.mark.parametrize("normalizer", OVERRIDING.values(), ids=OVERRIDING)
def test_no_engine_and_no_closed_form_is_taken_from_the_base_class(normalizer: Normalizer) -> None:
    q, k, v = drawn()
    inputs = validate_inputs(q, k, v, mask=None, causal=True, scale=None, positions=None)
    for engine in ("fused", "triton", "sparse"):
        assert _computation(engine, inputs, normalizer) is None  # type: ignore[arg-type]
    assert kernel_form(normalizer) is None
    assert not has_closed_form(normalizer)


def test_a_class_that_writes_what_a_base_class_leaves_open_is_known() -> None:
    class Doubled(ScaleRule):
        def factor(self, n: Tensor, positions: Tensor | None, hidden_states: Tensor | None) -> Tensor:
            return torch.full_like(n, 2.0)

    class Squared(LogitRule):
        def forward(self, block: Block) -> Tensor:
            return block.logits**2

    class Warmer(LogLengthScale):
        def __init__(self) -> None:
            super().__init__(0.2)

    class Declared(LogLengthScale):
        known_to_engines = True

        def forward(self, block: Block) -> Tensor:
            return super().forward(block)

    for rule in (Doubled(), Squared(), Warmer(), Declared(0.2)):
        assert Normalizer(Softmax(), scale=[rule]).has_known_parts()


def test_a_forward_of_its_own_is_refused_since_attention_does_not_call_it() -> None:
    class Halved(Normalizer):
        def forward(self, logits: Tensor, *args: Any, **options: Any) -> Tensor:
            weights: Tensor = super().forward(logits, *args, **options)
            return weights / 2

    q, k, v = drawn()
    for ask in (partial(attention, v=v), attention_statistics):
        with pytest.raises(TypeError, match=r"Halved.*weights"):
            ask(q=q, k=k, normalizer=Halved(Softmax()))
    assert normalize(q, Halved(Softmax())).sum() == pytest.approx(normalize(q).sum() / 2)


def small_call(queries: int) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, queries, 16, generator=generator)
    k, v = (torch.randn(1, 2, 6, 16, generator=generator) for _ in range(2))
    return validate_inputs(q, k, v, mask=None, causal=False, scale=0.3, positions=None)


@pytest.mark.parametrize("base", [Softmax, Sigmoid, Entmax, StickBreaking])
def test_a_map_derived_from_one_of_ours_has_its_own_weights(base: type[Map]) -> None:
    class Halved(base):  # type: ignore[misc, valid-type]
        def forward(self, block: Block) -> Tensor:
            return super().forward(block) / 2  # type: ignore[no-any-return]

    inputs, derived = small_call(MIN_QUERIES), Normalizer(Halved())
    expected = blocked.blocked(inputs, Normalizer(base())) / 2
    torch.testing.assert_close(attend(inputs, derived), expected)
    assert derived.map.kernel_form() is derived.map.threshold_form() is None
    assert not stick_breaking.applies(inputs, derived)
    assert decoding.plan(inputs, derived) is None
