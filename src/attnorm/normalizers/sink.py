"""A sink: one more key with its own logit and no value, so that a head may attend to nothing.

softmax1 has the fixed logit 0 (the zero key of torch's `add_zero_attn`); gpt-oss and others learn one logit per head,
https://arxiv.org/abs/2508.10925. The output equals softmax's times sigmoid(logsumexp(z) - sink).
"""

from typing import Any

import torch
from torch import Tensor

from attnorm.normalizers.contract import Normalizer, Sink
from attnorm.normalizers.declaration import HEADS, LayerFacts, Options, Row, WarmStart, declare
from attnorm.normalizers.softmax import Softmax, softmax_row

# A sink this far below a row's logsumexp takes 5e-5 of its weight, and still learns. A head whose logits are all far
# below 0 would feel it (SmolLM2 does not: perplexity 18.48 after 18.50); a much lower start would learn nothing.
LOW_SINK = -10.0


def _reference(row: Row, logit: float = 0.0, **_: Any) -> Tensor:
    sink_logit = row.value("sink.logit", logit).to(row.z.dtype)
    return softmax_row(torch.cat([sink_logit[None], row.z]))[1:]


def _model_sinks(layer: LayerFacts, given_options: Options, options: Options) -> dict[str, float | Tensor]:
    return {} if layer.sinks_H is None or "logit" in given_options else {"sink.logit": layer.sinks_H}


@declare(
    reference=_reference,
    warm_start=WarmStart("nothing to set: its sink is fixed at 0; `sink` learns it from far below"),
)
def softmax1() -> Normalizer:
    """exp(z) / (1 + sum exp(z)): a head may leave part of its weight unused.

    A sink with the fixed logit 0. It is not shift invariant.
    """
    return Normalizer(Softmax(), sink=Sink(0.0, learned=False), name="softmax1")


@declare(
    reference=_reference,
    examples=[{}, {"logit": 1.5}, {"logit": -1.0, "heads": HEADS}],
    warm_start=WarmStart(
        f"logit {LOW_SINK:g}: the sink takes next to nothing, and can still learn, unless all logits of a row are as "
        "low; a model with sinks of its own starts from those, exactly",
        options=lambda layer, given_options: {"logit": LOW_SINK, "heads": layer.heads},
        values=_model_sinks,
        safe=True,
    ),
)
def sink(logit: float = 0.0, *, learned: bool = True, heads: int | None = None) -> Normalizer:
    """exp(z) / (e^s + sum exp(z)): one more logit s per head, which is learned and whose weight is dropped.

    As in gpt-oss. Some models report weights before the sink's share is subtracted; here rows sum to less than 1.
    """
    return Normalizer(Softmax(), sink=Sink(logit, learned=learned, heads=heads), name="sink")
