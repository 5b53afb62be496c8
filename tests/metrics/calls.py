"""Attention calls of every kind that a model makes, small enough to be computed densely."""

import torch
from torch import Tensor

from attnorm.metrics.call import AttentionCall
from attnorm.normalizers import Mechanism, available, get

HEADS, KEY_HEADS, WIDTH = 4, 2, 8
ROW_NORMALIZERS = [name for name in available() if not isinstance(get(name), Mechanism)]


def make_call(
    queries: int = 33, keys: int | None = None, *, batch: int = 2, size: float = 2.0, seed: int = 0, width: int = WIDTH,
    **options: object,
) -> AttentionCall:  # fmt: skip
    """Logits of about the given size; `options` go to the call."""
    generator = torch.Generator().manual_seed(seed)
    keys = queries if keys is None else keys

    def draw(heads: int, length: int) -> Tensor:
        return torch.randn(batch, heads, length, width, generator=generator)

    query, key, value = size * draw(HEADS, queries), draw(KEY_HEADS, keys), draw(KEY_HEADS, keys)
    settings: dict[str, object] = {"causal": True, "kind": "decoder", "scale": width**-0.5} | options
    return AttentionCall(layer=0, query_BHQD=query, key_BGKD=key, value_BGKE=value, **settings)


def generators(count: int = 3) -> list[torch.Generator]:
    """A random generator per call."""
    return [torch.Generator().manual_seed(seed) for seed in range(count)]


def left_padding(keys: int, hidden: int) -> Tensor:
    """(2, 1, Q, K): causal; the first item has `hidden` padding tokens in front, so its first rows see nothing."""
    order = torch.arange(keys)
    causal = order <= order[:, None]
    padded = order >= torch.tensor([hidden, 0])[:, None]
    return causal & padded[:, None, None, :]


def window(keys: int, size: int) -> Tensor:
    order = torch.arange(keys)
    distance = order[:, None] - order
    return ((distance >= 0) & (distance < size))[None, None]


CALLS = {
    "causal": make_call(),
    "long": make_call(300, batch=1),
    "bidirectional": make_call(35, causal=False, kind="encoder"),
    "cross": make_call(9, 37, causal=False, kind="cross"),
    "cache": make_call(5, 40),
    "one query": make_call(1, 40),
    "more queries than keys": make_call(12, 7),
    "left padding": make_call(mask=left_padding(33, 6)),
    "padding of keys": make_call(mask=torch.arange(33).lt(torch.tensor([33, 20])[:, None])[:, None, None]),
    "window": make_call(90, batch=1, mask=window(90, 5)),
    "mask per head": make_call(mask=torch.rand(2, HEADS, 33, 33, generator=torch.Generator().manual_seed(1)) < 0.5),
    "mask per head, three dimensions": make_call(
        batch=1, mask=torch.rand(HEADS, 33, 33, generator=torch.Generator().manual_seed(3)) < 0.5
    ),
    "softcap": make_call(softcap=3.0),
    "bias": make_call(17, bias=torch.randn(1, HEADS, 17, 17, generator=torch.Generator().manual_seed(2))),
    "sinks": make_call(sinks_H=torch.tensor([0.0, 5.0, -30.0, 60.0])),
    "flat": make_call(size=0.0),
    "large logits": make_call(size=60.0),
}
