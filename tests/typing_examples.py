"""How users call the package, for mypy alone, which reads this file in `make lint`.

Each call that must be refused has an ignore; mypy reports one that it does not need.
"""

from typing import assert_type

import torch

import attnorm

q = torch.zeros(1, 1, 4, 8)

assert_type(attnorm.get("ssmax", heads=8), attnorm.Normalizer)
assert_type(attnorm.get("linear"), attnorm.Mechanism)
assert_type(attnorm.get("softmax").lipschitz(10), float | None)


def unknown_until_it_runs(name: str) -> None:
    assert_type(attnorm.get(name), attnorm.Normalizer | attnorm.Mechanism)


attnorm.normalize(torch.zeros(1, 4), attnorm.get("entmax", alpha=1.3))
attnorm.check_normalizer(attnorm.get("topk", k=2))

attnorm.normalize(q, attnorm.get("linear"))  # type: ignore[arg-type]
attnorm.compose(attnorm.get("gaussian"))  # type: ignore[arg-type]
attnorm.attention(q, q, q, is_causal=True)  # type: ignore[call-overload]
