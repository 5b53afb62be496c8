"""Queries and keys as they were before a model rotated them to their positions (RoPE, https://arxiv.org/abs/2104.09864).

Attention modules of transformers call the function `apply_rotary_pos_emb` of their own file. While a model is watched
that function also keeps what it was given. Nothing is undone, so every way of pairing coordinates is right; a rotation
changes no length, and where lengths differ nothing is claimed.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from attnorm.metrics.call import AttentionCall
from attnorm.models.dispatch import attention_sites

FUNCTION = "apply_rotary_pos_emb"
SAME_LENGTH = 1e-2  # relative; half precision rounds by less

_lock = threading.RLock()


class BeforeRotation:
    """What the last rotation was given."""

    def __init__(self) -> None:
        self._kept: tuple[Tensor, Tensor] | None = None

    def keep(self, query: Tensor, key: Tensor) -> None:
        self._kept = query, key

    def of(self, call: AttentionCall) -> AttentionCall | None:
        """The call with its queries and keys as they were before; None where they were not rotated, or more was done.

        To be asked while the call is looked at: the next layer's rotation takes the place of this one's.
        """
        kept, self._kept = self._kept, None
        if kept is None or kept[0].shape != call.query_BHQD.shape or kept[1].shape != call.key_BGKD.shape:
            return None
        if not (_as_long(kept[0], call.query_BHQD) and _as_long(kept[1], call.key_BGKD)):
            return None
        return replace(call, query_BHQD=kept[0], key_BGKD=kept[1])


@contextmanager
def before_rotation(model: nn.Module) -> Iterator[BeforeRotation]:
    """Inside, what the model's attention modules rotate is kept, one layer at a time."""
    before = BeforeRotation()
    files = {sys.modules[type(module).__module__] for module in attention_sites(model)}
    with _lock:
        originals = {file: getattr(file, FUNCTION) for file in files if hasattr(file, FUNCTION)}
        for file, original in originals.items():
            setattr(file, FUNCTION, _keeping(original, before))
        try:
            yield before
        finally:
            for file, original in originals.items():
                setattr(file, FUNCTION, original)


def _keeping(original: Any, before: BeforeRotation) -> Any:
    @wraps(original)
    def rotate(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
        before.keep(q, k)
        return original(q, k, *args, **kwargs)

    return rotate


def _as_long(one: Tensor, other: Tensor) -> bool:
    a, b = (torch.linalg.vector_norm(t.float(), dim=-1) for t in (one, other))
    return bool(((a - b).abs() <= SAME_LENGTH * b.clamp(min=1e-6)).all())
