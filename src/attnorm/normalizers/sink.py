"""A sink: one more key with its own logit and no value, so that a head may attend to nothing.

softmax1 has the fixed logit 0 (the zero key of torch's `add_zero_attn`); gpt-oss and others learn one logit per head,
https://arxiv.org/abs/2508.10925. The output equals softmax's times sigmoid(logsumexp(z) - sink).
"""

from attnorm.normalizers.contract import Normalizer, Sink
from attnorm.normalizers.softmax import Softmax


def softmax1() -> Normalizer:
    """exp(z) / (1 + sum exp(z)): a head may leave part of its weight unused."""
    return Normalizer(Softmax(), sink=Sink(0.0, learned=False), name="softmax1")


def sink(logit: float = 0.0, *, learned: bool = True, heads: int | None = None) -> Normalizer:
    """softmax with one more logit per head, learned, whose weight is dropped."""
    return Normalizer(Softmax(), sink=Sink(logit, learned=learned, heads=heads), name="sink")
